"""`shape_of`: what a planner needs of a model, from its config alone: units, products, and the tapes of a step.

The model is built on meta. Where its blocks are alike, as many as tell the first two, a middle one and the last two apart
are recorded, and the middle one is repeated; so a model of 126 layers takes as long as one of five.
"""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from fsdp_lab.core.errors import FieldError, SpecError
from fsdp_lab.core.model_shape import (
    ALLOCATED,
    FREED,
    ModelShape,
    SavedBytes,
    SizeFormula,
    TapeChange,
    TapeSegment,
    UnitShape,
)
from fsdp_lab.core.schedule import Direction, PointSide
from fsdp_lab.core.spec import Strategy
from fsdp_lab.engine.policy import ModuleKind, kind_of
from fsdp_lab.models.build import build_skeleton
from fsdp_lab.models.configs import first_line, resolve
from fsdp_lab.models.presets import PRESETS, Facts, facts_of
from fsdp_lab.models.wrapping import blocks, units
from fsdp_lab.planner.shapes.rewrapping import MIDDLE, repeated, rewrapped
from fsdp_lab.planner.shapes.tape import SAMPLES, TapeRecording, owners, products_of, record

ENOUGH = (
    5  # blocks of a stack: the first two (a T5's first makes biases, and sums of their gradients end in its second)
)
_DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
PRECISIONS = ("fp32", "half", "autocast")
_TAPES = {"fp32": "fp32", "bf16": "half", "fp16": "half"}


def shape_of(model: str | Mapping[str, Any] | PreTrainedConfig, wrap: str = "block") -> ModelShape:
    """As a wrap of `Strategy` splits it into units. Takes seconds; see `preset_shapes` for models by name.

    Args:
        model: as for `resolve`.

    Raises:
        SpecError: no such model, or one whose forward cannot be followed.
    """
    Strategy(wrap=wrap)
    config = resolve(model)
    name = model if isinstance(model, str) else f"a {config.model_type}"
    if wrap == "block" or wrap == "whole" or wrap.startswith("every:"):
        return rewrapped(_recorded(config, name, "block"), wrap)
    return _recorded(config, name, wrap)


def _recorded(config: PreTrainedConfig, name: str, wrap: str) -> ModelShape:
    facts = facts_of(config)
    whole = build_skeleton(config)
    inside = _units(whole, wrap)
    shallow = _shallow(config, whole, inside) if wrap == "block" else None
    built = whole if shallow is None else build_skeleton(shallow)
    model = _Model(built, (built is whole and inside) or _units(built, wrap), facts)
    try:
        shape = model.shape(name)
    except FieldError:
        raise
    except Exception as e:  # a model may fail with any error
        reason = f"a {facts.model_type} of this config cannot be followed: {first_line(e)}"
        raise SpecError("workload.model", reason, "mend its sizes, or choose a preset") from e
    return shape if shallow is None else _deepened(shape, whole, inside)


def _units(model: nn.Module, wrap: str) -> list[list[nn.Module]]:
    """In the order of the model, whatever the order of wrapping; none where nothing repeats."""
    try:
        found = units(model, wrap)
    except FieldError:
        if wrap == "block":
            return []
        raise
    return found


def _alike(module: nn.Module) -> tuple[Any, ...]:
    return tuple((n, tuple(p.shape)) for n, p in module.named_parameters())


def _stacks(names: Sequence[str]) -> dict[str, list[int]]:
    """Blocks by the list in which they are: name of the list -> their places in `names`."""
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        found.setdefault(name.rpartition(".")[0], []).append(i)
    return found


def _names(model: nn.Module, inside: Sequence[Sequence[nn.Module]]) -> list[str]:
    named = {id(m): n for n, m in model.named_modules()}
    return [named[id(unit[0])] for unit in inside]


def _shallow(
    config: PreTrainedConfig, model: nn.Module, inside: Sequence[Sequence[nn.Module]]
) -> PreTrainedConfig | None:
    """The same config with fewer layers; None where its blocks are few or not alike."""
    for places in _stacks(_names(model, inside)).values():
        middle = {_alike(inside[i][0]) for i in places[1:]}
        if len(places) <= ENOUGH or len(middle) != 1:
            return None
    if not inside or getattr(config, "layer_types", None):
        return None
    found = copy.deepcopy(config)
    for depth in _DEPTHS:
        if isinstance(getattr(found, depth, None), int):
            setattr(found, depth, ENOUGH)
    try:
        built = build_skeleton(found)
    except FieldError:
        return None
    stacks = _stacks(_names(built, _units(built, "block")))
    return found if all(len(places) == ENOUGH for places in stacks.values()) else None


class _Model:
    """One built model and its recordings."""

    def __init__(self, model: nn.Module, inside: Sequence[Sequence[nn.Module]], facts: Facts) -> None:
        self._model, self._facts = model, facts
        self._again = blocks(model)
        self._inside = self._in_order(inside)
        self._owned = owners(model, self._inside)

    def _in_order(self, inside: Sequence[Sequence[nn.Module]]) -> list[list[nn.Module]]:
        """The modules of each unit in the order of the recorded forward."""
        self._inside = [list(unit) for unit in inside]
        found = list(dict.fromkeys(unit for unit, _ in self._record("fp32", []).calls if unit))
        found += [i for i in range(1, len(inside) + 1) if i not in found]
        return [self._inside[i - 1] for i in found]

    def _record(self, precision: str, again: Sequence[nn.Module]) -> TapeRecording:
        return record(self._model, self._facts, self._inside, precision=precision, recomputed=again)

    def shape(self, name: str) -> ModelShape:
        runs = {p: self._record(p, []) for p in PRECISIONS}
        again = {f"{p}, recompute": self._record(p, self._again) for p in PRECISIONS} if self._again else {}
        first = runs["fp32"]
        shared: dict[tuple[TapeChange, ...], tuple[TapeChange, ...]] = {}
        tapes = {key: _tape(run, first.calls, shared) for key, run in {**runs, **again}.items()}
        image = None if self._facts.is_text else self._facts.tokens_per_sample(0)
        made: dict[Any, UnitShape] = {}
        found = [self._unit(i, first, tapes, image, made) for i in range(len(self._inside) + 1)]
        named = _names(self._model, self._inside)
        return ModelShape(
            name=name, units=tuple(found), image_tokens=image, calls=first.calls, tapes=tapes,
            unit_names=("root", *named), buffers_bytes=sum(b.nbytes for b in self._model.buffers()), batch=self._batch(),
        )  # fmt: skip

    def _batch(self) -> SizeFormula:
        if self._facts.image_pixels is None:
            return SizeFormula(((1, 1, 16.0 if self._facts.kind != "seq2seq" else 8.0),))
        height, width = self._facts.image_pixels
        return SizeFormula(((1, 0, 4.0 * self._facts.channels * height * width + 8),))

    def _unit(self, i: int, run: TapeRecording, tapes: Mapping[str, Sequence[TapeSegment]], image: int | None,
              made: dict[Any, UnitShape]) -> UnitShape:  # fmt: skip
        tokens = run.seq_len if image is None else image
        calls = [k for k, (unit, _) in enumerate(run.calls) if unit == i]
        owned = self._owned[i]
        unit = UnitShape(
            name=type(self._inside[i - 1][0]).__name__ if i else "root",
            parameters=tuple(p.numel() for _, p, _ in owned), shapes=tuple(tuple(p.shape) for _, p, _ in owned),
            full_precision=tuple(j for j, (_, _, m) in enumerate(owned) if kind_of(m) is ModuleKind.BATCH_NORM),
            products=tuple(p for k in calls for p in products_of(run.seen[k], tokens)),
            pair_flops=sum(run.seen[k].pair_flops for k in calls) / (SAMPLES * tokens**2),
            heads=max((run.seen[k].heads for k in calls), default=0), causal=any(run.seen[k].causal for k in calls),
            boundary_elements=max((run.seen[k].boundary for k in calls), default=0) / (SAMPLES * tokens),
            saved={dtype: _saved(tapes[key], set(calls)) for dtype, key in _TAPES.items()},
        )  # fmt: skip
        return made.setdefault(repr(unit), unit)


def _tape(
    run: TapeRecording, calls: Sequence[Any], shared: dict[tuple[TapeChange, ...], tuple[TapeChange, ...]]
) -> tuple[TapeSegment, ...]:
    """With what calls have in common as one object. Raises SpecError where the run took another way than the first one."""
    if run.calls != tuple(calls):
        raise SpecError("workload.model", "its forward depends on the precision", "choose a preset")
    found = []
    for stretch in run.stretches:
        own = run.calls[stretch.point.call][0]
        changes = tuple(dataclasses.replace(c, unit=None) if c.unit == own else c for c in stretch.changes)
        found.append(TapeSegment(stretch.point, shared.setdefault(changes, changes)))
    return tuple(found)


def _saved(tape: Sequence[TapeSegment], calls: set[int]) -> SavedBytes:
    """What the forward of a unit leaves allocated: between its own points. A root's is what is outside of all others."""
    sums: dict[tuple[int, int], float] = {}
    open_calls: list[int] = []
    for stretch in tape:
        p = stretch.point
        if p.direction is not Direction.FORWARD:
            break
        open_calls = [*open_calls, p.call] if p.moment is PointSide.BEFORE else open_calls[:-1]
        inside = open_calls[-1] if open_calls else 0
        if inside in calls:
            for change in stretch.changes:
                sign = {ALLOCATED: 1, FREED: -1}.get(change.kind, 0)
                for b, t, c in change.size.terms:
                    sums[b, t] = sums.get((b, t), 0.0) + sign * c
    return SavedBytes(
        per_token_bytes=max(0.0, sums.get((1, 1), 0.0)),
        per_pair_bytes=max(0.0, sums.get((1, 2), 0.0)),
        fixed_bytes=max(0.0, sums.get((1, 0), 0.0)),
    )


# -- the same model, deeper ------------------------------------------------------------------------


def _deepened(shape: ModelShape, model: nn.Module, inside: Sequence[Sequence[nn.Module]]) -> ModelShape:
    """With the middle block of each stack repeated as often as the whole model has it."""
    names = _names(model, inside)
    whole, few = _stacks(names), _stacks(shape.unit_names[1:])
    times = {few[stack][MIDDLE] + 1: len(places) - ENOUGH + 1 for stack, places in whole.items()}
    grown = repeated(shape, times)
    units = list(grown.units)
    saved = {dtype: _saved(grown.tapes[key], {0}) for dtype, key in _TAPES.items()}
    units[0] = dataclasses.replace(units[0], saved=saved)
    return dataclasses.replace(
        grown, units=tuple(units), unit_names=("root", *names),
        buffers_bytes=sum(b.nbytes for b in model.buffers()),
    )  # fmt: skip


# -- the file of presets ---------------------------------------------------------------------------------------------


def write_presets(path: Path) -> None:
    """Writes every preset's shape, in units of wrap "block"."""
    jsons = {name: json.dumps(shape_of(name).to_dict(), separators=(",", ":")) for name in PRESETS}
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(jsons).encode(), mtime=0))


if __name__ == "__main__":
    write_presets(Path(__file__).parents[1] / "data" / "shapes.json.gz")
