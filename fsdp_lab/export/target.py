"""The backend of torch that a Spec is exported to, and remarks on what differs there. The lab's own engine is replaced by
FSDP2, or by DDP if nothing is sharded (`peer`). What they cannot do is refused by the rules of `Spec` itself. A field
that has no effect under a backend, and a difference to the run, is a remark at the top of the file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from fsdp_lab.base.errors import SpecError
from fsdp_lab.spec.spec import BACKEND_TRAITS, Spec

WIDTH = 92
ROUNDING = "losses agree within rounding, not to the bit"
SPEC_INSTEAD = "or export the Spec itself, which contains it"


def peer(spec: Spec) -> tuple[Spec, tuple[str, ...]]:
    """The Spec to export, with one of torch's backends, and remarks, sentences without a full stop. Raises SpecError for a
    field that torch's backends cannot express."""
    if spec.strategy.is_yours:
        reason = "your own engine needs the lab, which calls it"
        raise refuse("backend", reason, "use backend fsdp2, or ddp for no_shard", backend="fsdp2")
    if not spec.strategy.is_lab:
        return spec, tuple(_without_effect(spec))
    backend = "ddp" if spec.strategy.is_replicated else "fsdp2"
    changes = {"backend": backend, "gather": "copy"}
    refused = spec.validate(**changes)
    if refused is not None:
        # The lab's engine supports the field. Another way out may be named, backend lab, which the Spec has already.
        reason = f"{refused.reason}, and outside the lab {BACKEND_TRAITS[backend].title} replaces the lab's engine"
        raise SpecError(refused.field, reason, f"{refused.first_hint}, {SPEC_INSTEAD}", refused.fix)
    exported = spec.replace(**changes)
    title = exported.strategy.traits.title
    remarks = [f"It was trained by the lab's own engine; {title} does the same work here", *_differs(spec, exported)]
    return exported, (*remarks, *_without_effect(exported))


def paragraph(text: str, indent: str = "") -> str:
    """Wrapped to the width of a file's comments; `indent` is that of all lines but the first."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def refuse(field: str, reason: str, hint: str, **fix: object) -> SpecError:
    """The error for a Strategy field that a target cannot express."""
    return SpecError(f"strategy.{field}", reason, f"{hint}, {SPEC_INSTEAD}", fix)


def gpus(spec: Spec) -> list[str]:
    """The GPUs that a Spec names, by rank; empty if it names none. Raises SpecError if two ranks share one."""
    named = [name for name in spec.devices or () if name != "cpu"]
    if len(set(named)) < len(named):
        reason = "two ranks share a GPU, and NCCL supports one rank per GPU"
        raise SpecError("devices", reason, f"give each rank a GPU of its own, {SPEC_INSTEAD}", {"devices": None})
    return named


def _differs(spec: Spec, exported: Spec) -> Iterator[str]:
    """Differences between the lab's engine and the backend that replaces it, under the same Spec."""
    s, traits = spec.strategy, exported.strategy.traits
    if s.dtypes.param != "fp32" and traits.autocasts:
        yield f"precision: DDP computes in {s.dtypes.param} by autocast, the lab's engine by casting the parameters"
    elif s.precision != "fp32":
        yield f"precision: below fp32 {ROUNDING}"
    if spec.workload.torch_optimizer.is_fused:
        how = "the rounding of a fused update depends on how parameters are sharded"
        yield f"optimizer_args: {how}, so that {ROUNDING}"
    if s.gather != "copy":
        yield f"gather: {traits.title} copies what it gathers, which takes memory and time that {s.gather} does not"
    replicas = spec.world_size // spec.shard_factor
    if replicas > 2:
        how = f"gradients of {replicas} replicas are summed in pieces of another size, in another order"
        yield f"sharding: {how}, so that {ROUNDING}"


def _without_effect(spec: Spec) -> Iterator[str]:
    """Fields that are set and have no effect."""
    s, w = spec.strategy, spec.workload
    if spec.link is not None:
        yield f"link: {spec.link!r} was emulated; it changes times, not results; here the real link is used"
    if s.sync != "every" and w.accumulate == 1:
        yield f"sync: {s.sync} has no effect with one micro-batch a step"
    if not s.traits.has_units:
        if s.wrap != "block":
            yield f"wrap: {s.wrap} has no effect under DDP, which has no units"
        if s.backward_prefetch != 1:
            yield f"backward_prefetch: {s.backward_prefetch} has no effect under DDP, which gathers no parameters"
    if not s.backward_prefetch and s.backward_prefetch_point != "before":
        yield f"backward_prefetch_point: {s.backward_prefetch_point} has no effect without prefetching"
