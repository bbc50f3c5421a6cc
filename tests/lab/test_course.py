"""Notebook 10, gap by gap, on two real ranks: its check refuses the empty gap and plausible wrong answers, says what is
wrong, and takes the solution and other right ones."""

from __future__ import annotations

import re
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.core.errors import ArgumentError
from fsdp_lab.lab import Lab
from fsdp_lab.runs.engine_check import EngineCheck
from tests.own import cell
from tests.your_engines import SOLUTION

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "10_write_your_own_fsdp.ipynb"
SMALL = {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 384, "n_positions": 128}
GAPS = ("DataParallel", "Zero1", "Zero2", "FullyShard", "Overlapped")
NUMBERS = count(100)  # of cells

# Gap -> answers: what the class has in the place of the gap, and what is said of it; "": it passes.
ANSWERS: dict[str, list[tuple[str, str]]] = {
    "DataParallel": [
        ("""
    def reduce(self, unit):
        for p in unit.params:
            dist.all_reduce(p.grad)
        return [p.grad for p in unit.params]
""", r"reduce\(transformer\.h\.2\) in the backward of step 0 .* the sum over ranks, not the mean"),
        ("""
    def reduce(self, unit):
        return [p.grad / unit.world_size for p in unit.params]
""", "this rank's own, divided and not summed"),
        ("""
    def reduce(self, unit):
        whole = flat([p.grad for p in unit.params], 1)
        dist.all_reduce(whole)
        return whole / unit.world_size
""", "and the shard is 12 tensors"),
        ("""
    def reduce(self, unit):
        for p in unit.params:
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        return [p.grad for p in unit.params]
""", ""),
    ],
    "Zero1": [
        ("""
    def shard(self, unit):
        return flat(unit.params, unit.world_size).chunk(unit.world_size)[unit.rank]

    def gather(self, unit):
        whole = torch.empty(len(unit.shard) * unit.world_size)
        dist.all_gather(list(whole.chunk(unit.world_size)), unit.shard)
        self.fill(unit, whole)
""", r"keeps parameters of 1\.\d+ model sizes, and at most 0\.60 were asked for: return a copy"),
        ("""
    def shard(self, unit):
        return flat(unit.params, unit.world_size).chunk(unit.world_size)[0].clone()

    def gather(self, unit): ...
""", r"shard\(.*\) keeps elements .* on rank 0 and on rank 1"),
        ("""
    def shard(self, unit):
        return flat(unit.params, unit.world_size).chunk(unit.world_size)[unit.rank].clone()

    def gather(self, unit): ...
""", r"gather\(root\) in the forward of step 0 makes transformer\.wte\.weight wrong"),
        ("""
    def shard(self, unit):
        return flat(unit.params, unit.world_size).chunk(unit.world_size)[unit.rank].clone()

    def gather(self, unit):
        whole = torch.empty(len(unit.shard) * unit.world_size)
        dist.all_gather(list(whole.chunk(unit.world_size))[::-1], unit.shard)
        self.fill(unit, whole)
""", "the part of rank . is where that of rank . belongs"),
        ("""
    def shard(self, unit):
        return flat(unit.params, unit.world_size).chunk(unit.world_size)[unit.rank].clone()

    def gather(self, unit):
        whole = torch.empty(len(unit.shard) * unit.world_size)
        dist.all_gather(list(whole.chunk(unit.world_size)), unit.shard, async_op=True)
        self.fill(unit, whole)
""", "was not waited for, so the values come too late"),
        ("""
    def shard(self, unit):
        whole = flat(unit.params, unit.world_size)
        n = len(whole) // unit.world_size
        return whole[unit.rank * n : (unit.rank + 1) * n].clone()

    def gather(self, unit):
        parts = [torch.empty_like(unit.shard) for _ in range(unit.world_size)]
        dist.all_gather(parts, unit.shard)
        self.fill(unit, torch.cat(parts))
""", ""),
    ],
    "Zero2": [
        ("""
    def reduce(self, unit):
        return super().reduce(unit)
""", r"sends 1\.50 model sizes, and at most 1\.05 .* holds gradients of 1\.5"),
        ("""
    def reduce(self, unit):
        whole = flat([p.grad for p in unit.params], unit.world_size)
        mine = torch.empty_like(unit.shard)
        dist.reduce_scatter(mine, list(whole.chunk(unit.world_size)))
        return mine / unit.world_size
""", r"holds gradients of 1\.\d+ model sizes, and at most 0\.70 were asked for: set p\.grad = None"),
        ("""
    def reduce(self, unit):
        whole = flat([p.grad for p in unit.params], unit.world_size)
        mine = torch.empty_like(unit.shard)
        dist.reduce_scatter(mine, list(whole.chunk(unit.world_size)))
        for p in unit.params:
            p.grad = None
        return mine
""", "the sum over ranks, not the mean"),
        ("""
    def reduce(self, unit):
        whole = flat([p.grad for p in unit.params], unit.world_size)
        mine = torch.empty_like(unit.shard)
        dist.reduce_scatter(mine, list(whole.chunk(unit.world_size))[::-1])
        for p in unit.params:
            p.grad = None
        return mine / unit.world_size
""", r"is that of rank .'s part"),
        ("""
    def reduce(self, unit):
        whole = flat([p.grad for p in unit.params], unit.world_size) / unit.world_size
        for p in unit.params:
            p.grad = None
        mine = torch.empty_like(unit.shard)
        dist.reduce_scatter(mine, list(whole.chunk(unit.world_size)))
        return mine
""", ""),
    ],
    "FullyShard": [
        ("""
    def free(self, unit):
        for p in unit.params:
            p.data = torch.empty(0)
""", r"free\(transformer\.h\.0\) leaves transformer\.h\.0\.ln_1\.weight with shape \[0\], .* do not replace p"),
        ("""
    def free(self, unit):
        for p in unit.params:
            p.grad = None
""", r"free\(transformer\.h\.0\) in the forward of step 0 never frees .* are still there"),
        ("""
    def free(self, unit):
        for p in unit.params:
            p.untyped_storage().resize_(0)
""", r"gather\(root\) in the forward .* uses transformer\.wte\.weight, whose storage has 0 bytes of .*in the line p\."),
        ("""
    def fill(self, unit, whole):
        for p in unit.params:
            p.untyped_storage().resize_(p.numel())
        super().fill(unit, whole)

    def free(self, unit):
        for p in unit.params:
            p.untyped_storage().resize_(0)
""", r"gather\(root\) in the forward of step 0 uses transformer\.wte\.weight, whose storage has 24,576 bytes of 98,304"),
        ("""
    def fill(self, unit, whole):
        for p in unit.params:
            p.untyped_storage().resize_(4 * p.numel())
            p.data.zero_()
        super().fill(unit, whole)

    def free(self, unit):
        for p in unit.params[::-1]:
            p.untyped_storage().resize_(0)
""", ""),
    ],
    "Overlapped": [
        ("""
    def prefetch(self, unit):
        self.gather(unit)
""", r"never|waits for \d+% of its communication"),
        ("""
    def prefetch(self, unit):
        unit.whole = torch.empty(len(unit.shard) * unit.world_size)
        unit.work = dist.all_gather(list(unit.whole.chunk(unit.world_size)), unit.shard, async_op=True)

    def gather(self, unit):
        if getattr(unit, "work", None) is None:
            self.prefetch(unit)
        self.fill(unit, unit.whole)
        unit.work = unit.whole = None
""", "was not waited for, so the values come too late"),
        ("""
    def prefetch(self, unit):
        unit.whole = torch.empty(len(unit.shard) * unit.world_size)
        unit.work = dist.all_gather(list(unit.whole.chunk(unit.world_size)), unit.shard, async_op=True)

    def gather(self, unit):
        if not hasattr(unit, "work"):
            self.prefetch(unit)
        unit.work.wait()
        self.fill(unit, unit.whole)
""", "is stale, as of before the last update"),
        ("""
    def prefetch(self, unit):
        unit.whole = torch.empty(unit.world_size, len(unit.shard))
        unit.work = dist.all_gather(list(unit.whole), unit.shard, async_op=True)

    def gather(self, unit):
        if unit.__dict__.get("work") is None:
            self.prefetch(unit)
        unit.work.wait()
        self.fill(unit, unit.whole.view(-1))
        unit.work = unit.whole = None
""", ""),
    ],
}  # fmt: skip


def cells(nbformat: Any) -> list[str]:
    return [c.source for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "code"]


def empty_gap(sources: list[str], gap: str) -> str:
    """The class as it is in the notebook."""
    (text,) = [s for s in sources if f"class {gap}" in s]
    return text[text.index(f"class {gap}") :]


def checked(lab: Lab, sources: list[str], gap: str, text: str, *, timed: bool = True) -> EngineCheck:
    """What the notebook's check says of a class with this text, where all other gaps are filled in."""
    names = cell(f"{SOLUTION.read_text()}\n\n{text}\n", next(NUMBERS))
    (call,) = [s for s in sources if f"lab.check_engine({gap}" in s]
    names |= {"lab": lab, "SMALL": SMALL}
    # Where times are compared, the model is the notebook's, so that there is as much to compute as to send.
    smaller = "" if timed and "exposed" in call else ", model=SMALL, seq_len=64"
    found = eval(f"{call.removesuffix(')')}, steps=5{smaller})", names)
    assert isinstance(found, EngineCheck)
    return found


@pytest.fixture(scope="module")
def sources() -> list[str]:
    import nbformat

    return cells(nbformat)


def solution_of(gap: str) -> str:
    text = SOLUTION.read_text()
    return re.split(r"\n\n\n(?=class )", text[text.index(f"class {gap}") :])[0]


@pytest.mark.nightly
@pytest.mark.parametrize("gap", GAPS)
def test_a_gap(real_lab: Lab, sources: list[str], gap: str) -> None:
    solved = checked(real_lab, sources, gap, solution_of(gap))
    assert solved.passed, solved
    empty = checked(real_lab, sources, gap, empty_gap(sources, gap))
    assert not empty.passed and "Not yet. " in empty.sentence, empty
    # Where it overrides nothing but the gap, an answer's other methods are the solution's.
    begin = re.match(r"class .*:\n", solution_of(gap))
    assert begin is not None
    for body, text in ANSWERS[gap]:
        given = "    def shard(self, unit):\n        return unit.params\n" if gap == "DataParallel" else ""
        base = {"Zero1": f"class Zero1({gap}):\n", "DataParallel": begin[0]}.get(gap, begin[0])
        found = checked(real_lab, sources, gap, base + given + body, timed=not text or "waits for" in text)
        if text:
            assert not found.passed and re.search(text, found.sentence), (body, found)
        else:
            assert found.passed, (body, found)


def test_a_check_passes_and_one_does_not(real_lab: Lab, sources: list[str]) -> None:
    right = checked(real_lab, sources, "Zero2", "")
    assert right and "equal bit for bit" in right.sentence and "gradients, at most" in repr(right)
    assert "<table" in right._repr_html_()
    wrong = checked(real_lab, sources, "Zero2", empty_gap(sources, "Zero2"))
    assert not wrong and "returned nothing" in repr(wrong) and wrong._repr_html_().startswith("<p>Not yet.")


STUCK = """
class Stuck(FullyShard):
    def gather(self, unit):
        while unit.rank:
            pass
        super().gather(unit)
"""


@pytest.mark.slow
def test_a_rank_that_never_comes_back_is_named_within_seconds(real_lab: Lab) -> None:
    names = cell(f"{SOLUTION.read_text()}\n\n{STUCK}", next(NUMBERS))
    real_lab.run(engine=names["FullyShard"], model=SMALL, steps=1).wait(60)
    begin_s = time.monotonic()
    found = real_lab.check_engine(names["Stuck"], model=SMALL, steps=5)
    assert re.search(r"rank 1 .* in Stuck\.gather\(root\) in the forward of step 0", found.mistake), found
    assert time.monotonic() - begin_s < 10, "3 s are the limit; the rest is a busy machine's"
    assert real_lab.check_engine(names["FullyShard"], model=SMALL, steps=5).passed, "the lab goes on"


def test_what_cannot_be_limited_is_refused(real_lab: Lab) -> None:
    engine = cell(SOLUTION.read_text(), next(NUMBERS))["FullyShard"]
    with pytest.raises(ArgumentError, match="give some of sent"):
        real_lab.check_engine(engine, most={"speed": 1})
    with pytest.raises(ArgumentError, match="5 or more"):
        real_lab.check_engine(engine, steps=3)
