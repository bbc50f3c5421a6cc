"""`parity`: whether two runs computed the same thing, from their losses, gradient norms and checksums.

The rule. Two runs are compared at the whole steps that both have (`runs.steps`: without those abandoned by a restart), if
they train the same: model, data, seed, optimizer and its arguments (but for the choice of its kernels), and the same
samples per step. Steps are compared by what all ranks agree on: the mean loss, the global gradient norm and, where both
have it, a checksum of the parameters after it.

- *equal*: losses and checksums are equal bit for bit in every one of these steps; gradient norms to `NORM_ROUNDING`, since
  the order in which squares are summed depends on the shards.
- *within*: they differ by no more than rounding explains in the coarser of the two precisions. Runs with a fused optimizer
  are, unless they shard alike: the bits of its updates depend on where an element lies.
- *different*: they differ by more; or replicas that should hold the same parameters do not. The first such step is named.
- *unknown*: there is nothing to compare; the sentence says why.

Note: what rounding explains. Rounding acts from the first step that is not equal. In the next `ALIKE` steps the parameters
are still practically equal, and each loss and gradient norm has a bound (`BOUNDS`, `early_bound`). After that, training has
amplified the difference: a norm may jump in one run and not in the other, and a loss with it. So only losses are compared,
as a mean over `ALIKE` steps, and the bound doubles every `ALIKE` steps up to `MOST` (`late_bound`). An error that begins
that late, in runs that were not equal before, is detected only if it changes losses by as much."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from fsdp_lab.runs.steps import Step
from fsdp_lab.runs.view import RunView
from fsdp_lab.spec.fields import rows_of
from fsdp_lab.spec.spec import Spec
from fsdp_lab.spec.workload import Workload

# All of a workload determines the result, but for how a global batch is split, and the optimizer's kernels.
TRAINED = tuple(name for name, row in rows_of(Workload).items() if not row.same_work)

NORM_ROUNDING = 1e-5  # relative, of a sum of fp32 squares in any order
ALIKE = 8  # steps
MOST = 0.03  # of a loss: how far two precisions that train alike may differ


@dataclass(frozen=True, kw_only=True)
class RoundingBound:
    """Relative differences that rounding may cause in the first step.

    In units of roundoff (2^-24, 2^-11, 2^-8): 4 and 256 in fp32, whose norm is summed over the whole model (more than
    `NORM_ROUNDING`, or no norm could be *within*); 1 and 4 in the half precisions, whose matrix products add in fp32.
    """

    loss: float
    norm: float


BOUNDS: Mapping[str, RoundingBound] = {
    "fp32": RoundingBound(loss=4 * 2.0**-24, norm=256 * 2.0**-24),
    "fp16": RoundingBound(loss=2.0**-11, norm=4 * 2.0**-11),
    "bf16": RoundingBound(loss=2.0**-8, norm=4 * 2.0**-8),
}


class Verdict(StrEnum):
    EQUAL = "equal bit for bit"
    WITHIN = "equal within rounding"
    DIFFERENT = "different"
    UNKNOWN = "not comparable"


@dataclass(frozen=True, kw_only=True)
class Parity:
    """The verdict on two runs: over `steps` common steps, `checksums` of which have a checksum of the parameters in both."""

    verdict: Verdict
    steps: int = 0
    checksums: int = 0
    first_step: int | None = None  # the first that is not equal bit for bit; for DIFFERENT, the one that shows it
    what: str = ""  # what differs there: "loss", "gradient norm", "parameters" or "replicas"
    sentence: str = ""


@dataclass(frozen=True, kw_only=True)
class StepDigest:
    """The facts that all ranks agree on after one step."""

    loss: float
    norm: float
    checksum: int | None
    diverged: bool  # replicas hold different parameters


def parity(baseline: RunView, other: RunView) -> Parity:
    """Compares `other` with `baseline`, by the rule in the module's docstring."""
    if not (isinstance(baseline.spec, Spec) and isinstance(other.spec, Spec)):
        return Parity(verdict=Verdict.UNKNOWN, sentence="a watched loop does not tell what it trains")
    for spec in (s.after for s in other.switches):
        if reason := _incomparable(baseline.spec, spec):
            return Parity(verdict=Verdict.UNKNOWN, sentence=reason)
    of_baseline, of_other = digests(baseline.events.steps()), digests(other.events.steps())
    diverged = next((n for n, digest in of_other.items() if digest.diverged), None)
    if diverged is not None:
        sentence = f"different: from step {diverged} on its replicas hold different parameters"
        return Parity(verdict=Verdict.DIFFERENT, first_step=diverged, what="replicas", sentence=sentence)
    common = sorted(of_baseline.keys() & of_other.keys())
    if not common:
        return Parity(verdict=Verdict.UNKNOWN, sentence="no step in common yet")
    specs = [*_specs(baseline), *_specs(other)]
    dtypes = {dtype for spec in specs for dtype in (spec.strategy.dtypes.param, spec.strategy.dtypes.reduce)}
    widest = max((BOUNDS[dtype] for dtype in dtypes), key=lambda bound: bound.loss)
    return _compare([(n, of_baseline[n], of_other[n]) for n in common], widest)


def digests(steps: Iterable[Step]) -> dict[int, StepDigest]:
    """Step number -> digest, of the whole steps."""
    return {s.number: _digest(s) for s in steps if s.is_whole}


def _digest(step: Step) -> StepDigest:
    by_replica: dict[int, int] = {}
    for e in step.events:
        if e.checksum is not None:
            by_replica[e.replica] = (by_replica.get(e.replica, 0) + e.checksum) % (1 << 64)
    sums, first = list(by_replica.values()), step.events[0]
    checksum, diverged = sums[0] if sums else None, len(set(sums)) > 1
    return StepDigest(loss=first.mean_loss, norm=first.grad_norm, checksum=checksum, diverged=diverged)


def _incomparable(one: Spec, other: Spec) -> str:
    """Says why two runs are not the same training; empty where they are."""
    differing = [name for name in TRAINED if getattr(one.workload, name) != getattr(other.workload, name)]
    if one.workload.torch_optimizer.hyperparameters != other.workload.torch_optimizer.hyperparameters:
        differing.append("optimizer_args")
    draws = any(s.workload.is_own or s.workload.dropout != "off" for s in (one, other))
    if draws and one.workload.micro_batch != other.workload.micro_batch:
        differing.append("micro_batch (each draws its own random numbers)")
    if one.global_batch != other.global_batch:
        differing.append(f"samples a step ({one.global_batch} and {other.global_batch})")
    return f"another training: {', '.join(differing)} differ{'s' if len(differing) == 1 else ''}" if differing else ""


def _specs(run: RunView) -> list[Spec]:
    return [spec for spec in (run.spec, *(s.after for s in run.switches)) if isinstance(spec, Spec)]


def early_bound(bound: float, since: int) -> float:
    """Bound on a relative difference `since` steps after the first: every step adds an independent one."""
    return bound * math.sqrt(1 + since)


def late_bound(bound: float, since: int) -> float:
    """Bound on the mean relative difference over the last `ALIKE` steps, once parameters have drifted apart."""
    doublings = min(since / ALIKE - 1, 64.0)
    return max(bound, min(MOST, early_bound(bound, ALIKE) * math.exp2(doublings)))


def _compare(common: list[tuple[int, StepDigest, StepDigest]], bound: RoundingBound) -> Parity:
    """The verdict. `common`: (step, digest of the baseline, digest of the other)."""
    checksums = sum(a.checksum is not None and b.checksum is not None for _, a, b in common)
    result = partial(Parity, steps=len(common), checksums=checksums)
    over = f"over {len(common)} step{'s' if len(common) != 1 else ''}"
    first, what = next(((n, w) for n, a, b in common if (w := _unequal(a, b))), (None, ""))
    if first is None:
        parts = f"losses{f' and {checksums} checksums of the parameters' if checksums else ''}"
        return result(verdict=Verdict.EQUAL, sentence=f"equal bit for bit {over}: {parts}")
    unequal = [(n, a, b) for n, a, b in common if n >= first]
    for i, (n, a, b) in enumerate(unequal):
        late, newest = n - first >= ALIKE, unequal[max(0, i + 1 - ALIKE) : i + 1]
        if reason := _late(newest, bound, n - first) if late else _early(a, b, bound, n - first):
            what, how = reason
            sentence = f"different from step {n} on: {how}"
            return result(verdict=Verdict.DIFFERENT, first_step=n, what=what, sentence=sentence)
    sentence = f"equal within rounding {over}; not bit for bit from step {first} on: {what}"
    return result(verdict=Verdict.WITHIN, first_step=first, what=what, sentence=sentence)


def _early(a: StepDigest, b: StepDigest, bound: RoundingBound, since: int) -> tuple[str, str] | None:
    """The part that is beyond its bound in a step while parameters are practically equal, and how; None: nothing."""
    for what, x, y, first in (("gradient norm", a.norm, b.norm, bound.norm), ("loss", a.loss, b.loss, bound.loss)):
        if _beyond(x, y, limit := early_bound(first, since)):
            finite = math.isfinite(x) and math.isfinite(y)
            more = f", more than rounding explains ({limit:.1e})" if finite else ""
            return what, f"{what} {y:.9g} instead of {x:.9g}{more}"
    return None


def _late(newest: list[tuple[int, StepDigest, StepDigest]], bound: RoundingBound, since: int) -> tuple[str, str] | None:
    """The same for the mean over the newest steps, once training has amplified the first difference."""
    pairs = [(a.loss, b.loss) for _, a, b in newest]
    x, y = pairs[-1]
    if _beyond(x, y, math.inf):  # one of them is not finite
        return "loss", f"loss {y:.9g} instead of {x:.9g}"
    difference = sum(abs(x - y) / max(abs(x), abs(y), 1e-12) for x, y in pairs if math.isfinite(x - y)) / len(pairs)
    limit = late_bound(bound.loss, since)
    if difference <= limit:
        return None
    mean = f"losses are {difference:.1e} apart in the mean of {len(pairs)} steps"
    return "loss", f"{mean}, more than rounding explains ({limit:.1e})"


def _unequal(a: StepDigest, b: StepDigest) -> str:
    """The part of a step that is not equal; empty: all are."""
    if a.loss != b.loss and not (math.isnan(a.loss) and math.isnan(b.loss)):
        return "loss"
    if _beyond(a.norm, b.norm, NORM_ROUNDING):
        return "gradient norm"
    if a.checksum is not None and b.checksum is not None and a.checksum != b.checksum:
        return "parameters"
    return ""


def _beyond(x: float, y: float, limit: float) -> bool:
    """Tells whether the relative difference is above the limit. Infinities and NaN are equal to themselves only."""
    if not (math.isfinite(x) and math.isfinite(y)):
        return not (x == y or (math.isnan(x) and math.isnan(y)))
    return abs(x - y) > limit * max(abs(x), abs(y), 1e-12)
