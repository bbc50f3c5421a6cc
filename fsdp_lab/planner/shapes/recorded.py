"""`shape_of`: the `ModelShape` of a config: units, matrix products, and the tapes of a step. `own_shape`: of a user's.

The model is built on meta.

`python -m fsdp_lab.planner.shapes.recorded` writes the file of presets and of the models that a calibration trains, in some
minutes."""

import dataclasses
import gzip
import json
from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from fsdp_lab.base.errors import FieldError, SpecError
from fsdp_lab.engine.policy import ModuleKind, kind_of
from fsdp_lab.engine.schedule import Direction, PointSide
from fsdp_lab.models.build import freeze
from fsdp_lab.models.configs import first_line, resolve
from fsdp_lab.models.lora import adapted
from fsdp_lab.models.own import OwnModel
from fsdp_lab.models.presets import PRESETS, TIMED, facts_of, key_of, timed_config
from fsdp_lab.models.wrapping import blocks, units
from fsdp_lab.planner.model_shape import Kernels, ModelShape, SizeFormula, TapeChange, TapeSegment, UnitShape
from fsdp_lab.planner.shapes.rewrapping import net_bytes, rewrapped
from fsdp_lab.planner.shapes.tape import SAMPLES, ConfigInputs, Inputs, OwnInputs, TapeRecording, owners, record
from fsdp_lab.spec.spec import Strategy
from fsdp_lab.spec.user_code import code_name
from fsdp_lab.spec.workload import Lora, Workload

PRECISIONS = ("fp32", "half", "autocast")
_TAPES = {"fp32": "fp32", "bf16": "half", "fp16": "half"}


def shape_of(
    model: str | Mapping[str, Any] | PreTrainedConfig,
    wrap: str = "block",
    frozen: Sequence[str] | None = None,
    lora: Lora | None = None,
    dropout: str = "off",
) -> ModelShape:
    """The model, as for `resolve`, in the units of a `Strategy.wrap`, with `freeze`, `lora` and `dropout` of a Workload.
    Takes some seconds, and a third of one for each block; `fsdp_lab.planner.shapes.shape_for` is faster for presets. Masks
    of attention are those of a CPU; a fused kernel of a GPU has none, and takes less. Raises SpecError: no such model,
    patterns that freeze nothing or all of it, or its forward cannot be recorded."""
    Strategy(wrap=wrap)  # validates it
    config = resolve(model, dropout=dropout)
    name = model if isinstance(model, str) else f"a {config.model_type}"
    if wrap.startswith(("block", "whole", "every:")):
        return rewrapped(_recorded(config, name, "block", frozen, lora), wrap)
    return _recorded(config, name, wrap, frozen, lora)


def _recorded(
    config: PreTrainedConfig, name: str, wrap: str, frozen: Sequence[str] | None, lora: Lora | None
) -> ModelShape:
    inputs, what = ConfigInputs(facts_of(config)), f"a {config.model_type} of this config"
    built = adapted(config, lora)
    freeze(built, frozen)
    return recorded_shape(built, unit_modules(built, wrap), inputs, name, what)


def recorded_shape(
    built: nn.Module, inside: Sequence[Sequence[nn.Module]], inputs: Inputs, name: str, what: str
) -> ModelShape:
    """The shape of a model that is built. Raises SpecError if it cannot be recorded."""
    try:
        return _Model(built, inside, inputs).shape(name)
    except FieldError:
        raise
    except Exception as e:  # a model may fail with any error
        reason = f"{what} cannot be recorded: {first_line(e)}"
        raise SpecError("workload.model", reason, "correct its sizes, or choose a preset") from e


def unit_modules(model: nn.Module, wrap: str) -> list[list[nn.Module]]:
    """The modules of each unit; none if the wrap is "block" and nothing repeats."""
    try:
        return units(model, wrap)
    except FieldError:
        if wrap == "block":
            return []
        raise


def _names(model: nn.Module, inside: Sequence[Sequence[nn.Module]]) -> list[str]:
    named = {id(m): n for n, m in model.named_modules()}
    return [named[id(unit[0])] for unit in inside]


class _Model:
    def __init__(self, model: nn.Module, inside: Sequence[Sequence[nn.Module]], inputs: Inputs) -> None:
        self._model, self._inputs = model, inputs
        self._blocks = blocks(model)
        self._inside = [list(unit) for unit in inside]
        order = list(dict.fromkeys(unit for unit, _ in self._record("fp32", []).calls if unit))
        order += [i for i in range(1, len(inside) + 1) if i not in order]
        self._inside = [self._inside[i - 1] for i in order]  # in the order of the recorded forward
        self._owned = owners(model, self._inside)

    def _record(self, precision: str, recomputed: Sequence[nn.Module]) -> TapeRecording:
        return record(self._model, self._inputs, self._inside, precision=precision, recomputed=recomputed)

    def shape(self, name: str) -> ModelShape:
        runs = {p: self._record(p, []) for p in PRECISIONS}
        if self._blocks:
            runs |= {f"{p}, recompute": self._record(p, self._blocks) for p in PRECISIONS}
        first = runs["fp32"]
        shared: dict[tuple[TapeChange, ...], tuple[TapeChange, ...]] = {}
        tapes = {key: _tape(run, first.calls, shared) for key, run in runs.items()}
        image = self._inputs.image_tokens
        distinct: dict[str, UnitShape] = {}
        units = [self._unit(i, runs, tapes, image) for i in range(len(self._inside) + 1)]
        return ModelShape(
            name=name,
            units=tuple(distinct.setdefault(repr(unit), unit) for unit in units),
            image_tokens=image,
            calls=first.calls,
            unit_names=("root", *_names(self._model, self._inside)),
            tapes=tapes,
            buffers_bytes=sum(b.nbytes for b in self._model.buffers()),
            batch=self._inputs.batch_size,
        )

    def _unit(
        self, i: int, runs: Mapping[str, TapeRecording], tapes: Mapping[str, Sequence[TapeSegment]], image: int | None
    ) -> UnitShape:
        run = runs["fp32"]
        tokens = run.seq_len if image is None else image
        calls = [k for k, (unit, _) in enumerate(run.calls) if unit == i]
        records, owned = [run.records[k] for k in calls], self._owned[i]

        def kernels(of: TapeRecording) -> tuple[Kernels, Kernels]:
            return of.kernels(calls, Direction.FORWARD), of.kernels(calls, Direction.BACKWARD)

        return UnitShape(
            name=type(self._inside[i - 1][0]).__name__ if i else "root",
            parameters=tuple(p.numel() for _, p, _ in owned),
            shapes=tuple(tuple(p.shape) for _, p, _ in owned),
            full_precision=tuple(j for j, (_, _, m) in enumerate(owned) if kind_of(m) is ModuleKind.BATCH_NORM),
            frozen=tuple(j for j, (_, p, _) in enumerate(owned) if not p.requires_grad),
            has_backward=any(s.point.direction is Direction.BACKWARD and s.point.call in calls for s in run.segments),
            products=tuple(p for r in records for p in r.matmuls(tokens)),
            pair_flops=sum(r.pair_flops for r in records) / (SAMPLES * tokens**2),
            heads=max((r.heads for r in records), default=0),
            causal=any(r.causal for r in records),
            boundary_elements=max((r.boundary for r in records), default=0) / (SAMPLES * tokens),
            saved={dtype: _saved(tapes[key], set(calls)) for dtype, key in _TAPES.items()},
            kernels={name: kernels(runs[name]) for name in PRECISIONS},
        )


def _tape(
    run: TapeRecording, calls: Sequence[Any], shared: dict[tuple[TapeChange, ...], tuple[TapeChange, ...]]
) -> tuple[TapeSegment, ...]:
    """The run's tape, equal changes as one object. Raises SpecError if its calls differ from those of the first run."""
    if run.calls != tuple(calls):
        raise SpecError("workload.model", "its forward depends on the precision", "choose a preset")
    segments = []
    for segment in run.segments:
        own = run.calls[segment.point.call][0]
        changes = tuple(dataclasses.replace(c, unit=None) if c.unit == own else c for c in segment.changes)
        segments.append(TapeSegment(segment.point, shared.setdefault(changes, changes)))
    return tuple(segments)


def _saved(tape: Sequence[TapeSegment], calls: set[int]) -> SizeFormula:
    """Returns what a unit's forward leaves allocated, outside of the calls inside it."""
    changes: list[TapeChange] = []
    open_calls: list[int] = []
    for segment in tape:
        p = segment.point
        if p.direction is not Direction.FORWARD:
            break
        open_calls = [*open_calls, p.call] if p.side is PointSide.BEFORE else open_calls[:-1]
        if (open_calls[-1] if open_calls else 0) in calls:
            changes += segment.changes
    net = net_bytes(changes)
    return SizeFormula(tuple((1, power, size) for power in range(3) if (size := net.get((1, power), 0.0)) > 0))


def write_shapes(path: Path) -> None:
    """Writes the shape of every preset and of the models of a calibration, in units of wrap "block"."""
    models = {name: name for name in PRESETS} | {key_of(config): config for config in starmap(timed_config, TIMED)}
    jsons = {key: json.dumps(shape_of(model).to_dict(), separators=(",", ":")) for key, model in models.items()}
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(jsons).encode(), mtime=0))


# -- `own_shape`: of a module of the user's own ----------------------------------------------------------------------
#
# A sample counts as one token, as an image does in a convolutional network. What grows with samples is told by a prime
# number of them; a model whose sizes it divides is refused, as is what the planner cannot repeat.


def own_shape(workload: Workload, wrap: str) -> ModelShape:
    """The model in the units of a `Strategy.wrap`. Takes seconds. Raises SpecError if it cannot be planned, or its code is
    not here."""
    Strategy(wrap=wrap)  # validates it
    joined = wrap.startswith(("block", "whole", "every:"))
    skeleton, name = OwnModel(workload).skeleton(), code_name(workload.model)
    if other := next((n for n, p in skeleton.named_parameters() if p.numel() % SAMPLES == 0), ""):
        raise _unknown(f"the planner tells samples by the number {SAMPLES}, which divides the size of {other}")
    freeze(skeleton, workload.freeze)
    units = unit_modules(skeleton, "block" if joined else wrap)
    shape = recorded_shape(skeleton, units, OwnInputs(workload), name, f"a step of {name}")
    if (calls := sum(unit == 0 for unit, _ in shape.calls)) != 1:
        raise _unknown(f"its loss calls the model {calls} times")
    sizes = (c.size for tape in shape.tapes.values() for segment in tape for c in segment.changes)
    if any(b and c % SAMPLES == 0 for size in sizes for b, _, c in size.terms if c):
        raise _unknown("its memory may grow with the square of the number of samples")
    return rewrapped(shape, wrap) if joined else shape


def _unknown(reason: str) -> SpecError:
    return SpecError("workload.model", f"it cannot be planned: {reason}", "measure it: a run needs no plan")


if __name__ == "__main__":
    write_shapes(Path(__file__).parents[1] / "data" / "shapes.json.gz")
