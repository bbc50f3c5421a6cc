"""Searches within a memory limit: the fastest Strategy (`search`), the `fewest` GPUs.

`candidates` varies the Strategy and the micro-batch. The rest of the Spec is fixed, including the global batch, so larger
micro-batches are fewer. All candidates that fit are simulated; none is dropped by a heuristic."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from fsdp_lab.base.formatting import GIB, Table, duration, size
from fsdp_lab.planner.devices import Machine
from fsdp_lab.planner.memory import memory
from fsdp_lab.planner.model_shape import ModelShape
from fsdp_lab.planner.plan import LEFT_ALIGNED, Plan, band_text, bill_texts, billed, fit_sentence, likely_text, plan
from fsdp_lab.spec.describe import describe_field
from fsdp_lab.spec.spec import SHARDINGS, Spec, Strategy

RECOMPUTES = ("none", "every:2", "full")
# The fields that `candidates` varies, in the order in which a candidate is described.
SEARCHED = ("sharding", "shard_size", "recompute", "offload", "micro_batch", "accumulate", "forward_prefetch")
OFFLOADS = ("optimizer", "all")  # tried if nothing fits without offload
MOST_RANKS = 4096
SHOWN = 5  # candidates of a search


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that fits, and a sentence that compares it with the first one; `is_apart`: whether it can be told from it."""

    plan: Plan
    why: str
    is_apart: bool


@dataclass(frozen=True, kw_only=True, repr=False)
class Search:
    """`top`: the candidates, by expected speed: that of the plan, times the probability that it fits. If nothing fits it is
    empty, and `nearest` lacks least memory."""

    spec: Spec
    top: tuple[Candidate, ...]
    considered: int
    fitting: int
    nearest: Plan | None = None

    def __repr__(self) -> str:
        return f"{self.table()!r}\n{self.sentence}" if self.top else self.sentence

    def _repr_html_(self) -> str:
        return f"{self.table()._repr_html_() if self.top else ''}<p>{escape(self.sentence)}</p>"

    @property
    def shown(self) -> tuple[Candidate, ...]:
        """`top`, or `nearest` where nothing fits."""
        if self.top or self.nearest is None:
            return self.top
        return (Candidate(plan=self.nearest, why=fit_sentence(self.nearest), is_apart=True),)

    def table(self) -> Table:
        """A row for each that is shown."""
        rows = []
        for i, one in enumerate(self.shown, 1):
            p, label = one.plan, strategy_label(self.spec, one.plan.spec)
            step = f"{duration(p.step_time_s)} ({band_text(p)})"
            bill = tuple(bill_texts(p, ranges=False).values())
            rows.append((str(i), label, one.why, step, f"{p.mfu:.1%}", size(p.memory.reserved_bytes), *bill))
        columns = ("", "strategy", "why", "step", "MFU", "memory", *billed([one.plan for one in self.shown]))
        return Table(columns=columns, rows=tuple(rows), left=LEFT_ALIGNED)

    @property
    def sentence(self) -> str:
        """The number of candidates that fit, or the nearest one."""
        if self.top:
            like = sum(not one.is_apart for one in self.top) - 1
            unsure = f" The first {like + 1} cannot be told apart: try them." if like else ""
            return f"{self.fitting} of {self.considered} strategies fit.{unsure}"
        if self.nearest is None:
            return f"{self.spec.strategy.backend} has no valid strategy for this Spec."
        nearest = f"{strategy_label(self.spec, self.nearest.spec)}. It {fit_sentence(self.nearest)}."
        return f"None of {self.considered} strategies fits. Nearest: {nearest}"


def search(spec: Spec, shape: ModelShape, machine: Machine, *, limit_bytes: int | None = None) -> Search:
    """The fastest Strategies of `spec.strategy.backend` for its model, ranks and global batch, within a memory limit per
    device. Raises FieldError for ranks that differ from the machine's."""
    machine = machine.limited(limit_bytes)
    considered, lacking = 0, list[tuple[int, Spec]]()
    for offloads in (("none",), OFFLOADS):
        fitting = []
        for candidate in candidates(spec, machine.per_host, offloads):
            considered += 1
            margin = _margin(candidate, shape, machine)
            if margin >= 0:
                fitting.append(plan(candidate, shape, machine))
            else:
                lacking.append((-margin, candidate))
        if fitting:
            best = _distinct(sorted(fitting, key=lambda p: p.step_time_s / p.fits_probability))
            top = []
            for p in best:
                is_apart = p is not best[0] and p.is_apart(best[0])
                unsure = "" if is_apart or p is best[0] else "; the order is not certain"
                why = f"{_why(p, best[0], len(fitting))}{unsure}{likely_text(p)}"
                top.append(Candidate(plan=p, why=why, is_apart=is_apart))
            return Search(spec=spec, top=tuple(top), considered=considered, fitting=len(fitting))
    nearest = plan(min(lacking, key=lambda one: one[0])[1], shape, machine) if lacking else None
    return Search(spec=spec, top=(), considered=considered, fitting=0, nearest=nearest)


def candidates(spec: Spec, per_host: int, offloads: Sequence[str] = ("none",)) -> Iterator[Spec]:
    """All valid Strategies of the backend at the same global batch."""
    samples = spec.rank_samples
    micro_batches = [m for m in _powers(samples) if samples % m == 0]
    hybrids = [sharding for sharding in SHARDINGS if Strategy(sharding=sharding).is_hybrid]
    factors = [per_host * n for n in (1, 2, 4) if 1 < per_host * n < spec.world_size]
    shardings: list[tuple[str, int | None]] = [(sharding, None) for sharding in SHARDINGS if sharding not in hybrids]
    shardings += itertools.product(hybrids, factors)
    # No unit ahead in the forward, and one; None for what the backend does by itself.
    own = replace(spec.strategy, forward_prefetch=None).forward_depth
    prefetches = [None if depth == own else depth for depth in (0, 1)]
    for (sharding, factor), recompute, micro_batch, prefetch, offload in itertools.product(
        shardings, RECOMPUTES, micro_batches, prefetches, offloads
    ):
        values = (sharding, factor, recompute, offload, micro_batch, samples // micro_batch, prefetch)
        changes = dict(zip(SEARCHED, values, strict=True))
        if spec.validate(**changes) is None:
            yield spec.replace(**changes)


def fewest(spec: Spec, shape: ModelShape, machine: Machine, global_batch: int | None) -> Machine | None:
    """The smallest machine of these hosts, or part of a host, on which the model fits; None if `MOST_RANKS` are too few.
    `global_batch`: as for `on_ranks`."""
    for ranks in filter(machine.allows, _powers(MOST_RANKS)):
        wanted, part = on_ranks(spec, ranks, global_batch), machine.with_ranks(ranks)
        if wanted is not None and fits_somehow(wanted, shape, part):
            return part
    return None


def on_ranks(spec: Spec, ranks: int, global_batch: int | None) -> Spec | None:
    """The Spec on so many ranks, fully sharded, one sample at a time. `global_batch`: samples a step; None: each rank keeps
    its own. Returns None if the batch cannot be divided among them."""
    samples, rest = (spec.rank_samples, 0) if global_batch is None else divmod(global_batch, ranks)
    if rest or not samples:
        return None
    sharding = "full_shard" if spec.strategy.traits.has_units else "no_shard"
    changes = {"sharding": sharding, "shard_size": None, "world_size": ranks, "devices": None}
    return spec.replace(**changes, micro_batch=1, accumulate=samples)


def fits_somehow(spec: Spec, shape: ModelShape, machine: Machine) -> bool:
    """Returns whether the candidate with the least memory fits: fully sharded, recomputed, one sample at a time, the Spec's
    offload."""
    wanted = on_ranks(spec, spec.world_size, None)
    prefetch = 0 if replace(spec.strategy, forward_prefetch=None).forward_depth else None
    lean = wanted and wanted.replace(forward_prefetch=prefetch, recompute="full")
    return lean is not None and _margin(lean, shape, machine) >= 0


def _margin(spec: Spec, shape: ModelShape, machine: Machine) -> int:
    return memory(spec, shape, device=machine.device.type).margin_bytes(machine.device)


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most] + ([most] if most & (most - 1) else [])


def _distinct(plans: Sequence[Plan]) -> list[Plan]:
    """At most `SHOWN` plans, without those that differ from a faster one only in prefetching, or in no figure."""
    chosen: dict[tuple[object, ...], Plan] = {}
    seen: set[tuple[object, ...]] = set()
    for one in plans:
        s, w = one.spec.strategy, one.spec.workload
        figures = (f"{one.step_time_s:.4g}", one.memory.reserved_bytes)
        if figures not in seen:
            chosen.setdefault((s.sharding, s.shard_size, s.recompute, s.offload, w.micro_batch), one)
        seen.add(figures)
    return list(chosen.values())[:SHOWN]


def _why(one: Plan, best: Plan, fitting: int) -> str:
    """One sentence: the bottleneck of the best plan; time and memory of the others relative to it."""
    if one is best:
        return f"the best of {fitting} that fit; bound by {one.binding}"
    slower = one.step_time_s / best.step_time_s - 1
    causes = {
        "more exposed communication": one.step.exposed_comm_s - best.step.exposed_comm_s,
        "slowed more by sending": one.step.slowed_s - best.step.slowed_s,
        "more computing": one.step.computing_s - best.step.computing_s,
        "a longer optimizer step": one.step.optimizer_s - best.step.optimizer_s,
    }
    cause = max(causes, key=lambda name: causes[name])
    less = best.memory.reserved_bytes - one.memory.reserved_bytes
    memory = f"{abs(less) / GIB:.1f} GiB {'less' if less > 0 else 'more'} memory"
    return f"{slower:+.1%} step time ({cause}), {memory}" if abs(slower) >= 5e-4 else f"as fast, {memory}"


def cheapest_table(spec: Spec, plans: Sequence[Plan]) -> Table:
    """A row for each of the first plans on different machines, with the bill."""
    rows = []
    for p in plans[: 2 * SHOWN]:
        machine, label = p.machine, strategy_label(spec.replace(world_size=p.machine.ranks, devices=None), p.spec)
        likely = likely_text(p).removeprefix("; ")
        cells = (f"{machine.ranks:,} x {machine.device.name}", label, f"{p.spec.global_batch:,}", likely)
        rows.append((*cells, *bill_texts(p).values()))
    columns = ("GPUs", "strategy", "global batch", "memory", *billed(plans))
    order = "" if "cost" in plans[0].bill else "; without a price those of the fewest GPU hours come first"
    notes = ("the fastest strategy that fits on each; 8 times in 10 the figure is in its range" + order,)
    return Table(columns=columns, rows=tuple(rows), notes=notes, left=LEFT_ALIGNED | {"GPUs", "memory"})


def strategy_label(spec: Spec, candidate: Spec) -> str:
    """The sharding and the other searched fields that differ from the request or from the defaults."""
    changed = {**Spec(world_size=candidate.world_size).difference(candidate), **spec.difference(candidate)}
    changed["sharding"] = ("", candidate.strategy.sharding)
    shown = {name: changed[name][1] for name in SEARCHED if name in changed}
    return ", ".join(describe_field(name, value) for name, value in shown.items() if value is not None)
