"""`ModelShape`: the sizes of a model's units, from which the planner computes memory and time. No torch.

`fsdp_lab.planner.shapes.recorded` records it from any transformers config, with tapes: the allocations and frees of a step
of the plain model, ordered by time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fsdp_lab.engine.schedule import Direction, Point, PointSide, UnitCall


@dataclass(frozen=True, kw_only=True)
class MatMul:
    """`count` matrix products with a weight: [tokens, inputs] x [inputs, outputs]. `share`: rows, as a fraction of the
    unit's tokens; an image's classifier has one row, a convolution as many as its output has pixels."""

    inputs: int
    outputs: int
    count: int = 1
    share: float = 1.0

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * self.count


@dataclass(frozen=True, slots=True)
class SizeFormula:
    """Bytes as a polynomial in B samples of T tokens. Terms: (power of B, power of T, coefficient)."""

    terms: tuple[tuple[int, int, float], ...]

    def __add__(self, other: "SizeFormula") -> "SizeFormula":
        terms: dict[tuple[int, int], float] = {}
        for b, t, c in (*self.terms, *other.terms):
            terms[b, t] = terms.get((b, t), 0) + c
        return SizeFormula(tuple((b, t, c) for (b, t), c in sorted(terms.items())))

    def bytes_of(self, samples: int, tokens: int) -> float:
        return sum(c * float(samples) ** b * float(tokens) ** t for b, t, c in self.terms)


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a pass launches on a GPU: the number of kernels, and the bytes that all but products and attention move."""

    count: float
    size: SizeFormula

    def __add__(self, other: "Kernels") -> "Kernels":
        return Kernels(self.count + other.count, self.size + other.size)


NO_KERNELS = Kernels(0, SizeFormula(()))


@dataclass(frozen=True, kw_only=True)
class UnitShape:
    """One unit: a block, or the root with the parameters that are in no block."""

    name: str  # such as "transformer.h.0"; "root"
    parameters: tuple[int, ...]  # elements of each tensor, in the module's order
    products: tuple[MatMul, ...] = ()
    pair_flops: float = 0.0  # of the attention's forward, per pair of tokens of a sample: 4 x heads x head width
    saved: Mapping[str, SizeFormula]  # by autograd in the forward; by compute dtype: "fp32", "bf16", "fp16"
    boundary_elements: float = 0.0  # of the unit's input, per token: all that recomputation saves
    heads: int = 0  # of the attention
    causal: bool = False  # a fused kernel skips half of the pairs
    share: float = 1.0  # fraction of a sample's tokens in this unit: one half in an encoder or a decoder
    shapes: tuple[tuple[int, ...], ...] = ()  # of each tensor; (): only the numbers of elements are known
    full_precision: tuple[int, ...] = ()  # indices of tensors that are fp32 in any precision: those of batch norms
    frozen: tuple[int, ...] = ()  # indices of tensors that are not trained
    has_backward: bool = True  # False: nothing in it or before it is trained
    # If recorded: of the forward and the backward, by arithmetic as a tape's. Else the planner derives them from the sizes.
    kernels: Mapping[str, tuple[Kernels, Kernels]] = field(default_factory=dict)

    @cached_property
    def numel(self) -> int:
        return sum(self.parameters)

    @cached_property
    def trained_numel(self) -> int:
        return sum(n for i, n in enumerate(self.parameters) if i not in self.frozen)

    @cached_property
    def trained_share(self) -> float:
        """The trained share of the elements of matrices, which alone have products for their gradients."""
        matrices = {i: n for i, n in enumerate(self.parameters) if not self.shapes or len(self.shapes[i]) >= 2}
        whole = sum(matrices.values())
        return sum(n for i, n in matrices.items() if i not in self.frozen) / whole if whole else 1.0

    def forward_flops(self, tokens: int) -> float:
        """FLOPs of the forward of one sample."""
        seen = self.share * tokens
        return 2 * sum(p.weights * p.share for p in self.products) * seen + self.pair_flops * seen * seen

    def step_flops(self, tokens: int) -> float:
        """FLOPs of the forward and the backward of one sample."""
        if not self.frozen:
            return 3 * self.forward_flops(tokens)
        pairs = self.pair_flops * (self.share * tokens) ** 2
        products = self.forward_flops(tokens) - pairs
        return products + pairs + ((1 + self.trained_share) * products + 2 * pairs if self.has_backward else 0.0)


ALLOCATED, FREED = "+", "-"  # memory that is no parameter's gradient
MADE, ARRIVED = "g", "!"  # a parameter's gradient is allocated; it is complete and can be reduced


@dataclass(frozen=True, slots=True)
class TapeChange:
    """One change of a tape. `unit`, `index`: the parameter whose gradient it is; unit None: that of the segment's call."""

    kind: str
    size: SizeFormula
    unit: int | None = None
    index: int = -1


def merged(changes: Sequence[TapeChange]) -> list[TapeChange]:
    """Combines neighbours that are both allocated or both freed, since no peak is between them."""
    fewer: list[TapeChange] = []
    for change in changes:
        if fewer and change.kind == fewer[-1].kind and change.kind in (ALLOCATED, FREED):
            fewer[-1] = TapeChange(change.kind, fewer[-1].size + change.size)
        else:
            fewer.append(change)
    return fewer


@dataclass(frozen=True, slots=True)
class TapeSegment:
    """The changes from a point of the step to the next one."""

    point: Point
    changes: tuple[TapeChange, ...]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """`units[0]` is the root, the others are in the order of the forward.

    `calls`, if recorded: the forward as a tree of calls, (unit, index of the enclosing call). `tapes`: of a forward and a
    backward of the plain model, by arithmetic: "fp32", "half", "autocast" (fp32 parameters, matrix products in half), each
    also with recomputation of every block: "fp32, recompute" and so on."""

    name: str
    units: tuple[UnitShape, ...]
    image_tokens: int | None = None  # per image; None: a sample has `seq_len` tokens
    calls: tuple[tuple[int, int | None], ...] = ()
    unit_names: tuple[str, ...] = ()  # of the first module of each unit; `UnitShape.name` is common to equal units
    tapes: Mapping[str, tuple[TapeSegment, ...]] = field(default_factory=dict, repr=False)
    buffers_bytes: int = 0
    batch: SizeFormula = SizeFormula(((1, 1, 16.0),))  # of a micro-batch: ids and labels

    @property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(unit.numel for unit in self.units)

    def tokens(self, seq_len: int) -> int:
        """Tokens of one sample."""
        return self.image_tokens if self.image_tokens is not None else seq_len

    def forward_flops(self, seq_len: int) -> float:
        """FLOPs of the forward of one sample."""
        return sum(unit.forward_flops(self.tokens(seq_len)) for unit in self.units)

    def step_flops(self, seq_len: int) -> float:
        """FLOPs of the forward and the backward of one sample."""
        return sum(unit.step_flops(self.tokens(seq_len)) for unit in self.units)

    @cached_property
    def call_tree(self) -> tuple[UnitCall, ...]:
        """For `Schedule`. If no calls were recorded, the root calls every other unit once."""
        if self.calls:
            return tuple(UnitCall(unit, parent) for unit, parent in self.calls)
        return (UnitCall(0), *(UnitCall(i, 0) for i in range(1, len(self.units))))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and scalars. Equal units, sizes and segments are written once."""
        units, sizes, changes = _Table(), _Table(), _Table()
        sequence = [units.number(_unit_to_dict(unit)) for unit in self.units]

        def to_row(segment: TapeSegment) -> list[int]:
            row, p = [], segment.point
            for c in segment.changes:
                whose = () if c.index < 0 else (c.index,) if c.unit is None else (c.index, c.unit)
                row.append([_KINDS.index(c.kind), sizes.number(_terms(c.size)), *whose])
            return [_DIRECTIONS.index(p.direction), p.call, _SIDES.index(p.side), changes.number(row)]

        tapes = {name: [to_row(segment) for segment in tape] for name, tape in self.tapes.items()}
        d: dict[str, Any] = {"name": self.name, "units": units.rows, "sequence": sequence}
        d["image_tokens"] = self.image_tokens
        d |= {"calls": [list(call) for call in self.calls], "unit_names": list(self.unit_names), "sizes": sizes.rows}
        d |= {"changes": changes.rows, "tapes": tapes, "buffers_bytes": self.buffers_bytes}
        return {**d, "batch": _terms(self.batch)}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> "ModelShape":
        units = [_unit_from_dict(row) for row in d["units"]]
        sizes = [_size(terms) for terms in d["sizes"]]
        changes = [tuple(_change_from_list(x, sizes) for x in row) for row in d["changes"]]

        def segment(direction: int, call: int, side: int, row: int) -> TapeSegment:
            return TapeSegment(Point(_DIRECTIONS[direction], call, _SIDES[side]), changes[row])

        return cls(
            name=d["name"],
            units=tuple(units[i] for i in d["sequence"]),
            image_tokens=d["image_tokens"],
            calls=tuple((unit, parent) for unit, parent in d["calls"]),
            unit_names=tuple(d["unit_names"]),
            tapes={name: tuple(segment(*row) for row in tape) for name, tape in d["tapes"].items()},
            buffers_bytes=d["buffers_bytes"],
            batch=_size(d["batch"]),
        )


class _Table:
    """Distinct rows, each with its number."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, row: Any) -> int:
        key = repr(row)
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            self.rows.append(row)
        return self._numbers[key]


_DIRECTIONS = (Direction.FORWARD, Direction.BACKWARD, Direction.UPDATE)
_SIDES = (PointSide.BEFORE, PointSide.AFTER)


_KINDS = (ALLOCATED, FREED, MADE, ARRIVED)


def _terms(size: SizeFormula) -> list[list[float]]:
    return [list(term) for term in size.terms]


def _size(terms: Any) -> SizeFormula:
    return SizeFormula(tuple((b, t, c) for b, t, c in terms))


def _change_from_list(row: Sequence[int], sizes: Sequence[SizeFormula]) -> TapeChange:
    kind, size, *whose = row
    return TapeChange(_KINDS[kind], sizes[size], whose[1] if len(whose) > 1 else None, whose[0] if whose else -1)


def _unit_to_dict(unit: UnitShape) -> dict[str, Any]:
    d: dict[str, Any] = {"name": unit.name, "parameters": list(unit.parameters)}
    d |= {"shapes": [list(s) for s in unit.shapes], "full_precision": list(unit.full_precision)}
    d |= {"pair_flops": unit.pair_flops}
    d["products"] = [[p.inputs, p.outputs, p.count, p.share] for p in unit.products]
    d["saved"] = {k: _terms(v) for k, v in unit.saved.items()}
    d["kernels"] = {k: [[one.count, _terms(one.size)] for one in v] for k, v in unit.kernels.items()}
    d |= {name: getattr(unit, name) for name in ("boundary_elements", "heads", "causal", "share")}
    return d | ({"frozen": list(unit.frozen), "has_backward": unit.has_backward} if unit.frozen else {})


def _unit_from_dict(d: Mapping[str, Any]) -> UnitShape:
    products = (MatMul(inputs=i, outputs=o, count=n, share=share) for i, o, n, share in d["products"])
    saved = {k: _size(terms) for k, terms in d["saved"].items()}
    kernels = {k: tuple(Kernels(count, _size(terms)) for count, terms in v) for k, v in d.get("kernels", {}).items()}
    read: dict[str, Any] = {name: tuple(d[name]) for name in ("parameters", "full_precision")}
    read |= {"frozen": tuple(d.get("frozen", ()))}
    read |= {"shapes": tuple(map(tuple, d["shapes"])), "products": tuple(products), "saved": saved, "kernels": kernels}
    return UnitShape(**{**d, **read})
