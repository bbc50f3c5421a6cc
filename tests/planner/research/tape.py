"""`dense_tape`: the tape of a transformer from its sizes alone (`models`), operator by operator.

A unit is a list of the operators of its forward, each with its output and what it saves for its backward. Running them
forwards and backwards, as autograd does, gives the allocations and frees, and so the peak inside a block.

Assumed: norms of a GPT are one kernel; those of a Llama or a T5 are written in operators, with copies in fp32, unless the
model is compiled. Fused attention saves its inputs, its output and one number per head. Plain attention saves the softmax of
its scores, of a Llama or a T5 in fp32, for which a T5 copies the scores; a GPT and a T5 are trained with dropout, whose mask
and result are saved. A T5's biases by position, and their gradients, stay allocated for all of its blocks, in fp32, as the
mask in them has the dtype of the shards. Logits and their gradient are copied to fp32 for the loss, unless the model is
compiled."""

import itertools
from collections.abc import Generator, Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum

from fsdp_lab.engine.schedule import Direction, Point, PointSide
from fsdp_lab.planner import model_shape
from fsdp_lab.planner.costs import BYTES
from fsdp_lab.planner.model_shape import ALLOCATED, ARRIVED, FREED, MADE, ModelShape, SizeFormula, TapeChange, UnitShape

X = "x"  # the unit's input
_GRAD_COPIES = 4.0  # bytes of an element of attention's fp32 gradient of queries, while its backward runs
_BIAS_ITEM = 4.0  # bytes of an element of a T5's biases by position

NOTHING = SizeFormula(())
# Of a block's forward, of the end of the model's forward, of the block's backward.
_Changes = tuple[tuple[TapeChange, ...], tuple[TapeChange, ...], tuple[TapeChange, ...]]


class Attention(StrEnum):
    """The attention kernel. Its rate is `Rates.attention` times `GAIN`."""

    PLAIN = "plain"  # writes the matrix of scores to memory
    FLASH1 = "flash1"  # FlashAttention, and Triton's of the same age
    CUDNN = "cudnn"  # torch's default on an H100 in 2.5.0, and where it is asked for
    FLASH2 = "flash2"


@dataclass(frozen=True, kw_only=True)
class Software:
    """Properties of the software that no Spec has.

    `operators`: recompute keeps every second matrix product and the attention of a unit (torchtitan's selective activation
    checkpoints). `stops_early`: recompute stops before the unit's last product (torch's checkpoints since 2.1).
    `keeps_gradients`: `zero_grad` fills gradients with zeros instead of freeing them (torch before 2.0).
    `drops`: dropout after attention's softmax, where its matrix is written, and before each residual.
    `fused_softmax`: plain attention's scale, mask and softmax are one kernel.
    `fused_norms`: a norm of a gated block is one kernel. `half_loss`: the loss is computed of logits in half precision.
    `half_state`: parameters and the optimizer's state are in half precision, which only the time of the update knows of.
    `holds_scores`: the peak includes the matrix of scores, although the step is as fast as with a fused kernel.
    `returns_cache`: a T5's decoder returns the keys and values of all its blocks (transformers' `use_cache`, on by default);
    they live until the forward ends.
    `first_step`: the peak is that of the first step, whose update is the first to allocate the optimizer's state."""

    attention: Attention = Attention.FLASH2
    operators: bool = False
    stops_early: bool = True
    keeps_gradients: bool = False
    drops: bool = False
    fused_softmax: bool = False
    fused_norms: bool = False
    half_loss: bool = False
    half_state: bool = False
    holds_scores: bool = False
    returns_cache: bool = False
    first_step: bool = False


@dataclass(frozen=True, kw_only=True)
class Operator:
    """`weights`: indices of the unit's parameters. `through`: an input's gradient is the output's, in the same memory."""

    output: str
    size: SizeFormula
    inputs: tuple[str, ...]
    saves: tuple[str, ...] = ()
    extra: SizeFormula = NOTHING  # saved in addition: masks, statistics
    scratch: SizeFormula = NOTHING  # in its backward
    weights: tuple[int, ...] = ()
    through: bool = False
    names: tuple[str, ...] = ()  # not used, but alive until then, since a variable of the forward names them
    kept: bool = False  # under selective recompute, which keeps some operators' outputs
    cached: bool = False  # returned with the block's output, where the software returns a cache


def tokens(each: float) -> SizeFormula:
    """So many bytes per token."""
    return SizeFormula(((1, 1, each),))


def pairs(each: float) -> SizeFormula:
    """So many bytes per pair of tokens of a sample."""
    return SizeFormula(((1, 2, each),)) if each else NOTHING


@dataclass(kw_only=True)
class _Run:
    """Runs operators and records their `changes` of memory."""

    operators: Sequence[Operator]
    input: SizeFormula
    item: int
    numel: Sequence[int]
    alive: dict[str, SizeFormula]
    holds: dict[str, int]  # how many operators' backwards still need a tensor
    changes: list[TapeChange] = field(default_factory=list)

    def forward(self, *, saving: bool, exists: Set[str] = frozenset(), keeping: Set[str] = frozenset()) -> None:
        """Runs the forward: `saving` for a backward; otherwise only the input and the tensors in `keeping` stay. `exists`:
        tensors that need not be recomputed."""
        last = {name: i for i, op in enumerate(self.operators) for name in (*op.inputs, *op.names)}
        for i, op in enumerate(self.operators):
            if op.output not in exists:
                self._take(op.output, op.size)
            if saving:
                self._take(_extra(op), op.extra)
                for name in (*op.saves, _extra(op)):
                    self.holds[name] = self.holds.get(name, 0) + 1
            for name in dict.fromkeys((*op.inputs, *op.names)):
                stays = self.holds.get(name) or name in keeping or (not saving and name == X)
                if last[name] == i and not stays:
                    self._drop(name)

    def backward(self) -> None:
        """Runs the backward. The gradient of the output exists before, and that of the input stays."""
        blocks = {self.operators[-1].output: 0}  # tensor -> memory block of its gradient
        sizes, users = [self.operators[-1].size], [1]

        def make(name: str) -> None:
            sizes.append(self._size(name))
            users.append(1)
            self._write(ALLOCATED, sizes[-1])
            if name in blocks:  # a second use: the sum of both gradients
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
            for name in (*op.saves, _extra(op)):
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
               recomputed: frozenset[int]) -> tuple[model_shape.TapeSegment, ...]:  # fmt: skip
    """One forward and one backward. recomputed: indices of the units that are recomputed."""
    cache: dict[tuple[int, bool], _Changes] = {}  # most units are equal
    blocks = []
    for i, unit in enumerate(shape.units[1:], 1):
        key = (id(unit), i in recomputed)
        if key not in cache:
            cache[key] = _block(unit, dtype, software, compiled, recomputed=key[1])
        blocks.append(cache[key])
    embedding, head, head_backward, embedding_backward = _root(shape, dtype, software, compiled)
    forward, backward, before, after = Direction.FORWARD, Direction.BACKWARD, PointSide.BEFORE, PointSide.AFTER
    tape: list[tuple[Direction, int, PointSide, tuple[TapeChange, ...]]] = [(forward, 0, before, embedding)]
    for i, changes in enumerate(blocks, 1):
        tape += [(forward, i, before, changes[0]), (forward, i, after, head if i == len(blocks) else ())]
    cached = tuple(change for _, ends, _ in blocks for change in ends)
    tape += [(forward, 0, after, cached), (backward, 0, before, head_backward)]
    for i, changes in reversed(list(enumerate(blocks, 1))):
        tape += [(backward, i, before, changes[2]), (backward, i, after, embedding_backward if i == 1 else ())]
    tape.append((backward, 0, after, ()))
    return tuple(model_shape.TapeSegment(Point(*point), changes) for *point, changes in tape)


def _block(unit: UnitShape, dtype: str, software: Software, compiled: bool, *, recomputed: bool) -> _Changes:
    """What a block's forward and its backward do, and what the end of the model's forward frees of it."""
    operators = tuple(BlockOperators(unit, BYTES[dtype], software, compiled))
    h = tokens(BYTES[dtype] * unit.boundary_elements)

    def run(alive: dict[str, SizeFormula], holds: dict[str, int]) -> _Run:
        return _Run(operators=operators, input=h, item=BYTES[dtype], numel=unit.parameters, alive=alive, holds=holds)

    forward = run({X: h}, {})
    cached: dict[str, SizeFormula] = {}
    if not recomputed:  # what is cached is also saved
        forward.forward(saving=True)
        backward = run(forward.alive, forward.holds)
    else:
        kept = {op.output: op.size for op in operators if op.kept and software.operators}
        cached = {op.output: op.size for op in operators if op.cached and software.returns_cache}
        forward.forward(saving=False, keeping=frozenset((*kept, *cached)))
        backward = run({X: h, **kept}, {})
        backward.forward(saving=True, exists=frozenset(kept))
        backward.changes.append(TapeChange(FREED, operators[-1].size))  # the output is not used again
    backward.backward()
    ends = tuple(TapeChange(FREED, size) for size in cached.values())
    return tuple(forward.changes), ends, tuple(backward.changes)


def _extra(op: Operator) -> str:
    """The name of what an operator saves in addition."""
    return f"extra of {op.output}"


# -- operators -------------------------------------------------------------------------------------------------------
class BlockOperators:
    """The operators of a block of `models`: gated if it has two products into its inner width,
    with two attentions if it has two products out of its heads. Iterable once."""

    def __init__(self, unit: UnitShape, item: int, software: Software, compiled: bool) -> None:
        """item: bytes of an element."""
        h, counts = unit.boundary_elements, {(p.inputs, p.outputs): p.count for p in unit.products}
        self._h, self._item, self._inner, self._compiled = h, item, unit.products[-1].inputs, compiled
        self._is_t5 = _keeps_pairs(unit)
        self._is_gated = counts.get((int(h), self._inner), 1) > 1 and self._inner != h
        self._is_llama = self._is_gated and not self._is_t5
        self._is_gpt = not (self._is_t5 or self._is_gated)
        self._attentions = 2 if self._is_t5 and unit.products[1].count == 2 else 1
        self._width, self._heads = unit.pair_flops / 4 / self._attentions, unit.heads / self._attentions
        twice = [p for p in unit.products[:-1] if p.count == 2]  # outside the MLP: keys and values
        self._kv_width = float(twice[0].outputs) if twice and not self._is_t5 else self._width
        self._is_plain = self._is_t5 or software.holds_scores or software.attention is Attention.PLAIN
        self._fused_norm = compiled or software.fused_norms or not (self._is_gated or self._is_t5)
        self._weights = iter(range(len(unit.parameters)))

    def __iter__(self) -> Iterator[Operator]:
        x = X
        for n in range(self._attentions):
            x = yield from self._attention(x, f"attention {n}")
        yield from self._mlp(x)

    def _tokens(self, width: float) -> SizeFormula:
        """A tensor of so many elements per token."""
        return tokens(self._item * width)

    def _next_weights(self, count: int = 1) -> tuple[int, ...]:
        return tuple(itertools.islice(self._weights, count))

    def _norm(self, x: str, name: str) -> Operator:
        """Saves its input; if written in operators, the input in fp32 and the normalised one instead."""
        h, item = self._h, self._item
        if self._fused_norm or item == 4:
            extra = tokens(8.0 if self._fused_norm else 4 * h + 8)
            return Operator(output=name, size=self._tokens(h), inputs=(x,), saves=(x,), extra=extra)
        extra = tokens(4 * h + item * h + 4)
        return Operator(output=name, size=self._tokens(h), inputs=(x,), extra=extra, scratch=tokens(8 * h))

    def _attention(self, x: str, name: str) -> Generator[Operator, None, str]:
        """Returns the name of its result."""
        n, q, v, a, o, y = (f"{name}: {part}" for part in ("norm", "queries", "keys", "mixed", "out", "sum"))
        width, heads, item = self._tokens(self._width), self._heads, self._item
        yield self._norm(x, n)
        # A fused kernel needs the keys and values of all heads.
        kv = self._tokens(2 * (self._kv_width if self._is_plain else self._width))
        yield Operator(output=q, size=width, inputs=(n,), saves=(n,), weights=self._next_weights(), kept=True)
        is_cached = self._is_t5 and self._attentions == 2
        yield Operator(output=v, size=kv, inputs=(n,), saves=(n,), weights=self._next_weights(2), cached=is_cached)
        if self._is_plain:
            s, c, p, d = (f"{name}: {part}" for part in ("scores", "copy", "softmax", "weights"))
            softmax_item, dropout = (item if self._is_gpt else 4.0), not self._is_llama
            yield Operator(output=s, size=pairs(heads * item), inputs=(q, v), saves=(q, v))
            if self._is_t5 and item != softmax_item:
                yield Operator(output=c, size=pairs(heads * softmax_item), inputs=(s,))
            else:
                c = s
            yield Operator(output=p, size=pairs(heads * softmax_item), inputs=(c,), saves=(p,), names=(s,))
            if dropout or softmax_item != item:
                yield Operator(output=d, size=pairs(heads * item), inputs=(p,), extra=pairs(heads if dropout else 0.0))
            else:
                d = p
            yield Operator(output=a, size=width, inputs=(d, v), saves=(d, v))
        else:
            yield Operator(output=a, size=width, inputs=(q, v), saves=(q, v, a), extra=tokens(4 * heads),
                           scratch=tokens(_GRAD_COPIES * self._width), kept=True)  # fmt: skip
        mask = tokens(self._h if self._is_plain and not self._is_llama else 0.0)  # dropout's
        yield Operator(output=o, size=self._tokens(self._h), inputs=(a,), saves=(a,), extra=mask,
                       weights=self._next_weights())  # fmt: skip
        yield Operator(output=y, size=self._tokens(self._h), inputs=(x, o), through=True)
        return y

    def _mlp(self, x: str) -> Iterator[Operator]:
        norm, first, up, active, out = (f"mlp: {part}" for part in ("norm", "first", "up", "active", "out"))
        h, inner, wide = self._tokens(self._h), self._inner, self._tokens(self._inner)
        yield self._norm(x, norm)
        yield Operator(output=first, size=wide, inputs=(norm,), saves=(norm,), weights=self._next_weights(), kept=True)
        if self._is_gated:
            yield Operator(output=up, size=wide, inputs=(norm,), saves=(norm,), weights=self._next_weights())
        if self._is_t5:
            extra = tokens(inner * (1 + self._item) if self._is_plain else 0.0)  # dropout's mask and its input
        else:  # the activation before it is multiplied
            extra = self._tokens(inner if self._is_gated and not self._compiled else 0.0)
        inputs = (first, up) if self._is_gated else (first,)
        saves = (active,) if self._is_t5 else inputs  # ReLU needs its result, others their input
        yield Operator(output=active, size=wide, inputs=inputs, saves=saves, extra=extra)
        yield Operator(output=out, size=h, inputs=(active,), saves=(active,),
                       extra=tokens(self._h if self._is_plain else 0.0), weights=self._next_weights())  # fmt: skip
        yield Operator(output="sum", size=h, inputs=(x, out), through=True, weights=tuple(self._weights))


# -- the root --------------------------------------------------------------------------------------------------------
def _root(shape: ModelShape, dtype: str, software: Software, compiled: bool) -> tuple[tuple[TapeChange, ...], ...]:
    """What the root does before the blocks and after them, in the forward and in the backward."""
    unit = shape.units[0]
    item, vocabulary, h = BYTES[dtype], unit.products[-1].outputs, unit.boundary_elements
    x, logits, logits32 = tokens(item * h), tokens(item * vocabulary), tokens(4.0 * vocabulary)
    # Heads with a bias for every pair of tokens: of a T5's encoder, its decoder, and between them.
    heads = sum({id(block): block.heads for block in shape.units[1:] if _keeps_pairs(block)}.values())
    biases, table = pairs(_BIAS_ITEM * heads), SizeFormula(((0, 0, item * float(unit.parameters[0])),))
    is_tied = sum(n == vocabulary * h for n in unit.parameters) == 1
    is_cast, head = item != 4, 0 if is_tied else 1  # head: index of the head's weight

    def alloc(*sizes: SizeFormula) -> list[TapeChange]:
        return [TapeChange(ALLOCATED, size) for size in sizes if size.terms]

    def free(*sizes: SizeFormula) -> list[TapeChange]:
        return [TapeChange(FREED, size) for size in sizes if size.terms]

    of_head = alloc(table) if is_tied else [TapeChange(MADE, table, 0, head), TapeChange(ARRIVED, table, 0, head)]
    if software.half_loss and is_cast and not compiled:  # the loop holds the logits
        forward = alloc(x, logits, logits)
        backward = [*alloc(logits, logits), *free(logits, logits), *alloc(x), *of_head, *free(logits, logits)]
    else:
        forward = alloc(x, logits, logits32)
        if is_cast and not compiled:
            forward += alloc(logits32) + free(logits32)
        forward += free(logits)
        backward = [] if compiled else alloc(logits32, logits32) + free(logits32, logits32)
        if is_cast or compiled:
            backward += alloc(logits) + free(logits32)
        backward += [*alloc(x), *of_head, *free(logits if is_cast or compiled else logits32)]
    backward += alloc(x) + free(x, x) + alloc(biases)
    end = free(biases, biases)
    for i in (*(i for i in range(len(unit.parameters)) if i not in (0, head)), 0):
        size = SizeFormula(((0, 0, item * float(unit.parameters[i])),))
        end.append(TapeChange(MADE, size, 0, i))
        end += free(table) if i == 0 and is_tied else []  # both of its gradients become one
        end.append(TapeChange(ARRIVED, size, 0, i))
    return tuple(alloc(x, biases)), tuple(forward), tuple(backward), tuple(end + free(x))


def _keeps_pairs(unit: UnitShape) -> bool:
    return any(t == 2 for _, t, _ in unit.saved["bf16"].terms)
