"""`dense_tape`: the tape of a transformer from its sizes alone (`fsdp_lab.planner.named_models`), operator by operator.

A unit is written down as the operators of its forward, each with its output and what it saves for its backward; playing
them forwards and backwards, as autograd would, gives what is allocated and freed when. So the highest moment inside a block
is found the same way as where a model was recorded.

Assumed: norms of a GPT are one kernel; those of a Llama or a T5 are written in operators, with copies in fp32, unless the
model is compiled. Fused attention saves its inputs, its output and one number a head. Plain attention saves the softmax of
its scores, of a Llama or a T5 in fp32; a GPT and a T5 are trained with dropout, whose mask and result are saved. A T5's
biases by position stay for all of its blocks, and so do their gradients. Logits are copied to fp32 for the loss, and so is
their gradient; compiled, they are not.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

from fsdp_lab.core.model_shape import (
    ALLOCATED,
    ARRIVED,
    FREED,
    MADE,
    ModelShape,
    SizeFormula,
    TapeChange,
    TapeSegment,
    UnitShape,
)
from fsdp_lab.core.schedule import Direction, Point, PointSide
from fsdp_lab.planner.costs import BYTES, Attention, Software

X = "x"  # the unit's input
_GRAD_COPIES = 4.0  # bytes of an element of attention's fp32 gradient of queries, while its backward runs


NOTHING = SizeFormula(())


@dataclass(frozen=True, kw_only=True)
class Operator:
    """`output` is made of `inputs`; a weight is the number of the unit's parameter. `through`: its gradient is that of its
    output, the same block."""

    output: str
    size: SizeFormula
    inputs: tuple[str, ...]
    saves: tuple[str, ...] = ()
    extra: SizeFormula = NOTHING  # what it saves beside: masks, statistics
    scratch: SizeFormula = NOTHING  # of its backward
    weights: tuple[int, ...] = ()
    through: bool = False
    kept: bool = False  # by a checkpoint that keeps some operators' outputs


def tokens(each: float) -> SizeFormula:
    """Bytes of a token."""
    return SizeFormula(((1, 1, each),))


def pairs(each: float) -> SizeFormula:
    """Bytes of two tokens of one sample."""
    return SizeFormula(((1, 2, each),)) if each else NOTHING


@dataclass(kw_only=True)
class _Run:
    """Plays operators; what happens is written as changes."""

    operators: Sequence[Operator]
    input: SizeFormula
    item: int
    numel: Sequence[int]
    changes: list[TapeChange] = field(default_factory=list)
    alive: dict[str, SizeFormula] = field(default_factory=dict)
    holds: dict[str, int] = field(default_factory=dict)  # how many operators' backwards still need it

    def forward(
        self, *, saving: bool, there: frozenset[str] = frozenset(), keeping: frozenset[str] = frozenset()
    ) -> None:
        """Args:
        saving: for a backward; else only the input and what `keeping` names stay.
        there: what need not be made again.
        """
        last = {name: i for i, op in enumerate(self.operators) for name in op.inputs}
        for i, op in enumerate(self.operators):
            if op.output not in there:
                self._take(op.output, op.size)
            if saving:
                self._take(_beside(op), op.extra)
                for name in (*op.saves, _beside(op)):
                    self.holds[name] = self.holds.get(name, 0) + 1
            for name in dict.fromkeys(op.inputs):
                stays = self.holds.get(name) or name in keeping or (not saving and name == X)
                if last[name] == i and not stays:
                    self._drop(name)

    def backward(self) -> None:
        """From the gradient of the output, which is there, to that of the input, which stays."""
        blocks = {self.operators[-1].output: 0}  # whose gradient is which block
        sizes, users = [self.operators[-1].size], [1]

        def make(name: str) -> None:
            sizes.append(self._size(name))
            users.append(1)
            self._write(ALLOCATED, sizes[-1])
            if name in blocks:  # a second use of it: the sum of both
                release(blocks[name])
            blocks[name] = len(sizes) - 1

        def release(block: int) -> None:
            users[block] -= 1
            if not users[block]:
                self._write(FREED, sizes[block])

        for op in reversed(self.operators):
            own = blocks.pop(op.output)
            self._write(ALLOCATED, op.scratch)
            for name in op.inputs:
                if op.through and name not in blocks:
                    blocks[name] = own
                    users[own] += 1
                else:
                    make(name)
            for weight in op.weights:
                self.gradient(weight)
            self._write(FREED, op.scratch)
            for name in (*op.saves, _beside(op)):
                self.holds[name] -= 1
                if not self.holds[name]:
                    self._drop(name)
            release(own)

    def gradient(self, weight: int) -> None:
        size = SizeFormula(((0, 0, self.item * self.numel[weight]),))
        self.changes.append(TapeChange(MADE, size, None, weight))
        self.changes.append(TapeChange(ARRIVED, size, None, weight))

    def _size(self, name: str) -> SizeFormula:
        return next((op.size for op in self.operators if op.output == name), self.input)

    def _take(self, name: str, size: SizeFormula) -> None:
        self.alive[name] = size
        self._write(ALLOCATED, size)

    def _drop(self, name: str) -> None:
        self._write(FREED, self.alive.pop(name))

    def _write(self, kind: str, size: SizeFormula) -> None:
        if size.terms:
            self.changes.append(TapeChange(kind, size))


def dense_tape(shape: ModelShape, dtype: str, software: Software, *, compiled: bool,
               recomputed: frozenset[int]) -> tuple[TapeSegment, ...]:  # fmt: skip
    """One forward and one backward. recomputed: numbers of the units that are computed again."""
    forward, backward = Direction.FORWARD, Direction.BACKWARD
    root = _root(shape, dtype, compiled)
    made = {}
    for i, unit in enumerate(shape.units):
        key = (id(unit), i in recomputed)
        if i and key not in made:
            made[key] = _block(unit, dtype, software, compiled, i in recomputed)
    blocks = [made[id(unit), i in recomputed] for i, unit in enumerate(shape.units) if i]
    found = [TapeSegment(Point(forward, 0, PointSide.BEFORE), root[0])]
    for i, (there, _) in enumerate(blocks, 1):
        found += [
            TapeSegment(Point(forward, i, PointSide.BEFORE), there),
            TapeSegment(Point(forward, i, PointSide.AFTER), ()),
        ]
    if blocks:
        found[-1] = TapeSegment(found[-1].point, root[1])
    found += [
        TapeSegment(Point(forward, 0, PointSide.AFTER), ()),
        TapeSegment(Point(backward, 0, PointSide.BEFORE), root[2]),
    ]
    for i in range(len(blocks), 0, -1):
        found += [
            TapeSegment(Point(backward, i, PointSide.BEFORE), blocks[i - 1][1]),
            TapeSegment(Point(backward, i, PointSide.AFTER), ()),
        ]
    if blocks:
        found[-1] = TapeSegment(found[-1].point, root[3])
    found.append(TapeSegment(Point(backward, 0, PointSide.AFTER), ()))
    return tuple(found)


Half = tuple[tuple[TapeChange, ...], tuple[TapeChange, ...]]


def _beside(op: Operator) -> str:
    return f"beside {op.output}"


def _block(unit: UnitShape, dtype: str, software: Software, compiled: bool, again: bool) -> Half:
    """What its forward and its backward do."""
    item = BYTES[dtype]
    operators = list(block_operators(unit, item, software, compiled))
    h = tokens(item * unit.boundary_elements)

    def run() -> _Run:
        return _Run(operators=operators, input=h, item=item, numel=unit.parameters, alive={X: h})

    if not again:
        there = run()
        there.forward(saving=True)
        back = _Run(
            operators=operators, input=h, item=item, numel=unit.parameters, alive=there.alive, holds=there.holds
        )
        back.backward()
        return tuple(there.changes), tuple(back.changes)
    there = run()
    kept = frozenset(op.output for op in operators if op.kept and software.operators)
    there.forward(saving=False, keeping=kept)
    back = run()
    back.alive |= {op.output: op.size for op in operators if op.output in kept}
    back.forward(saving=True, there=kept)
    back.changes.append(TapeChange(FREED, operators[-1].size))  # nobody uses the output again
    back.backward()
    return tuple(there.changes), tuple(back.changes)


# -- operators -------------------------------------------------------------------------------------------------------


def block_operators(unit: UnitShape, item: int, software: Software, compiled: bool) -> Iterator[Operator]:
    """Of a block as `fsdp_lab.planner.named_models` makes it: gated where it has two products into its inner width, with two
    attentions where it has two products out of its heads."""
    h = unit.boundary_elements
    numbers = {(p.inputs, p.outputs): p.count for p in unit.products}
    inner = unit.products[-1].inputs
    gated = numbers.get((int(h), inner), 1) > 1 and inner != h
    is_t5 = any(s.per_pair_bytes for s in unit.saved.values())
    family = "t5" if is_t5 else "llama" if gated else "gpt"
    attends = 2 if is_t5 and unit.products[1].count == 2 else 1
    width = unit.pair_flops / 4 / attends
    heads = unit.heads / attends
    kv = width if is_t5 else _kv(unit, width)
    plain = is_t5 or software.holds_scores or software.attention is Attention.PLAIN
    one_kernel = compiled or not (gated or is_t5)
    weight = iter(range(len(unit.parameters)))
    x = X
    for n in range(attends):
        x = yield from _attention(x, f"attention {n}", h, width, kv, heads, item, plain, family, one_kernel, weight)
    yield from _mlp(x, h, inner, item, gated, is_t5, plain, one_kernel, compiled, weight)


def _kv(unit: UnitShape, width: float) -> float:
    """Width of keys or values: of the product that occurs twice outside the MLP."""
    twice = [p for p in unit.products[:-1] if p.count == 2]
    return float(twice[0].outputs) if twice else width


def _norm(x: str, name: str, h: float, item: int, one_kernel: bool, weight: Iterator[int]) -> Iterator[Operator]:
    """Saves its input; in operators instead of it the input in fp32, and the normalised one."""
    if one_kernel or item == 4:
        extra = tokens(8.0 if one_kernel else 4 * h + 8)
        yield Operator(output=name, size=tokens(item * h), inputs=(x,), saves=(x,), extra=extra, weights=_next(weight))
        return
    extra = tokens(4 * h + item * h + 4)
    yield Operator(output=name, size=tokens(item * h), inputs=(x,), extra=extra, scratch=tokens(8 * h),
                   weights=_next(weight))  # fmt: skip


def _next(weight: Iterator[int], count: int = 1) -> tuple[int, ...]:
    found = (next(weight, None) for _ in range(count))
    return tuple(i for i in found if i is not None)


def _attention(x: str, name: str, h: float, width: float, kv: float, heads: float, item: int, plain: bool, family: str,
               one_kernel: bool, weight: Iterator[int]) -> Generator[Operator, None, str]:  # fmt: skip
    """Returns the name of its result."""
    n, q, v, a, o, y = (f"{name}: {part}" for part in ("norm", "queries", "keys", "mixed", "out", "sum"))
    yield from _norm(x, n, h, item, one_kernel, iter(()))
    repeated = kv if plain else width  # keys and values are given to all heads before a fused kernel
    yield Operator(output=q, size=tokens(item * width), inputs=(n,), saves=(n,), weights=_next(weight), kept=True)
    yield Operator(output=v, size=tokens(item * 2 * repeated), inputs=(n,), saves=(n,), weights=_next(weight, 2))
    if plain:
        s, p, d = (f"{name}: {part}" for part in ("scores", "softmax", "weights"))
        soft, dropout = (item, True) if family == "gpt" else (4.0, family == "t5")
        yield Operator(output=s, size=pairs(heads * item), inputs=(q, v), saves=(q, v))
        yield Operator(output=p, size=pairs(heads * soft), inputs=(s,), saves=(p,))
        if dropout or soft != item:
            yield Operator(output=d, size=pairs(heads * item), inputs=(p,), extra=pairs(heads if dropout else 0.0))
        else:
            d = p
        yield Operator(output=a, size=tokens(item * width), inputs=(d, v), saves=(d, v))
    else:
        yield Operator(output=a, size=tokens(item * width), inputs=(q, v), saves=(q, v, a), extra=tokens(4 * heads),
                       scratch=tokens(_GRAD_COPIES * width), kept=True)  # fmt: skip
    mask = tokens(h if plain and family != "llama" else 0.0)  # dropout's
    yield Operator(output=o, size=tokens(item * h), inputs=(a,), saves=(a,), extra=mask, weights=_next(weight))
    yield Operator(output=y, size=tokens(item * h), inputs=(x, o), through=True)
    return y


def _mlp(x: str, h: float, inner: float, item: int, gated: bool, is_t5: bool, dropout: bool, one_kernel: bool,
         compiled: bool, weight: Iterator[int]) -> Iterator[Operator]:  # fmt: skip
    yield from _norm(x, "mlp: norm", h, item, one_kernel, iter(()))
    first, act = "mlp: first", "mlp: active"
    wide, norm = tokens(item * inner), ("mlp: norm",)
    yield Operator(output=first, size=wide, inputs=norm, saves=norm, weights=_next(weight), kept=True)
    if gated:
        yield Operator(output="mlp: up", size=wide, inputs=norm, saves=norm, weights=_next(weight))
    mask = tokens(inner * (1 + item) if is_t5 and dropout else 0.0)  # of dropout: the mask and what went in
    between = tokens(item * inner if gated and not compiled else 0.0)  # the activation before it is multiplied
    made_of = (first, "mlp: up") if gated else (first,)
    saves = (act,) if is_t5 else made_of  # ReLU needs its result, others their input
    yield Operator(output=act, size=wide, inputs=made_of, saves=saves, extra=mask if is_t5 else between)
    yield Operator(output="mlp: out", size=tokens(item * h), inputs=(act,), saves=(act,),
                   extra=tokens(h if dropout else 0.0), weights=_next(weight))  # fmt: skip
    rest = tuple(weight)  # norms' own
    yield Operator(output="sum", size=tokens(item * h), inputs=(x, "mlp: out"), through=True, weights=rest)


def _root(shape: ModelShape, dtype: str, compiled: bool) -> tuple[tuple[TapeChange, ...], ...]:
    """Before the blocks and after them, in the forward and in the backward."""
    unit = shape.units[0]
    item, vocabulary, h = BYTES[dtype], unit.products[-1].outputs, unit.boundary_elements
    x, logits, logits32 = tokens(item * h), tokens(item * vocabulary), tokens(4.0 * vocabulary)
    copied = item != 4
    kernels = not compiled
    biases = pairs(item * _bias_heads(shape))
    tied = sum(n == vocabulary * h for n in unit.parameters) == 1
    table = SizeFormula(((0, 0, item * float(unit.parameters[0])),))
    head = 0 if tied else 1

    def when(is_so: bool, *changes: TapeChange) -> tuple[TapeChange, ...]:
        return changes if is_so else ()

    forward = (
        TapeChange(ALLOCATED, x), TapeChange(ALLOCATED, logits), *when(copied and kernels, TapeChange(ALLOCATED, logits32)),
        TapeChange(ALLOCATED, logits32), *when(copied and kernels, TapeChange(FREED, logits32)), TapeChange(FREED, logits),
    )  # fmt: skip
    first = TapeChange(ALLOCATED, table) if tied else TapeChange(MADE, table, 0, head)
    arrived = when(not tied, TapeChange(ARRIVED, table, 0, head))
    backward = (
        *when(
            kernels,
            TapeChange(ALLOCATED, logits32),
            TapeChange(ALLOCATED, logits32),
            TapeChange(FREED, logits32),
            TapeChange(FREED, logits32),
        ),
        *when(kernels and copied, TapeChange(ALLOCATED, logits), TapeChange(FREED, logits32)),
        *when(compiled, TapeChange(ALLOCATED, logits), TapeChange(FREED, logits32)),
        TapeChange(ALLOCATED, x),
        first,
        *arrived,
        TapeChange(FREED, logits if copied or compiled else logits32),
        TapeChange(ALLOCATED, x),
        TapeChange(FREED, x),
        TapeChange(FREED, x),
        *when(bool(biases.terms), TapeChange(ALLOCATED, biases)),
    )
    others = [i for i in range(len(unit.parameters)) if i not in (0, head)]
    rest: list[TapeChange] = []
    for i in (*others, 0):
        size = SizeFormula(((0, 0, item * float(unit.parameters[i])),))
        rest.append(TapeChange(MADE, size, 0, i))
        if i == 0 and tied:
            rest.append(TapeChange(FREED, table))  # both of its gradients become one
        rest.append(TapeChange(ARRIVED, size, 0, i))
    there, gone = (when(bool(biases.terms), TapeChange(kind, biases)) for kind in (ALLOCATED, FREED))
    return (TapeChange(ALLOCATED, x), *there), forward, backward, (*gone, *gone, *rest, TapeChange(FREED, x))


def _bias_heads(shape: ModelShape) -> float:
    """Heads that have a bias for every pair of tokens: of a T5's encoder, its decoder, and between them."""
    blocks = {id(unit): unit for unit in shape.units[1:] if any(s.per_pair_bytes for s in unit.saved.values())}
    return float(sum(unit.heads for unit in blocks.values()))
