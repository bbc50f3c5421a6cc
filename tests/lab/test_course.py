"""Notebook 10, gap by gap, on two real ranks: its check refuses the empty gap, says what is wrong, and takes the solution.
Wrong engines and other right ones are in tests/backends/test_yours.py."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.lab import Lab
from fsdp_lab.runs.engine_check import EngineCheck
from tests.own import cell
from tests.your_engines import SOLUTION

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "10_write_your_own_fsdp.ipynb"
SMALL = {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 384, "n_positions": 128}
GAPS = ("DataParallel", "Zero1", "Zero2", "FullyShard", "Overlapped")
NUMBERS = count(100)  # of cells


def cells(nbformat: Any) -> list[str]:
    return [c.source for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "code"]


def empty_gap(sources: list[str], gap: str) -> str:
    """The class as it is in the notebook."""
    (text,) = [s for s in sources if f"class {gap}" in s]
    return text[text.index(f"class {gap}") :]


def checked(lab: Lab, sources: list[str], gap: str, text: str) -> EngineCheck:
    """What the notebook's check says of a class with this text, where all other gaps are filled in."""
    names = cell(f"{SOLUTION.read_text()}\n\n{text}\n", next(NUMBERS))
    (call,) = [s for s in sources if f"lab.check_engine({gap}" in s]
    names |= {"lab": lab, "SMALL": SMALL}
    # Where times are compared, the model is the notebook's, so that there is as much to compute as to send.
    smaller = "" if "exposed" in call else ", model=SMALL, seq_len=64"
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


# Gap -> a plausible wrong class, and the limit that it does not keep. Overlapped's is a share of the time that is sent.
WRONG = {
    "Zero1": (
        solution_of("Zero1").replace(".clone()", ""),
        r"keeps parameters of 1\.\d+ model sizes, and at most 0\.60",
    ),
    "Zero2": (
        "class Zero2(Zero1):\n    pass\n",
        r"sends 1\.50 model sizes, and at most 1\.05 .* holds gradients of 1\.5",
    ),
    "Overlapped": (
        "class Overlapped(FullyShard):\n    pass\n",
        r"waits for \d+% of its communication, and at most 70%",
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("gap", GAPS)
def test_a_gap(real_lab: Lab, sources: list[str], gap: str) -> None:
    solved = checked(real_lab, sources, gap, solution_of(gap))
    assert solved.passed, solved
    empty = checked(real_lab, sources, gap, empty_gap(sources, gap))
    assert not empty.passed and "Not yet. " in empty.sentence and "Not yet. " in empty._repr_html_(), empty


@pytest.mark.parametrize(
    "gap", [pytest.param(gap, marks=pytest.mark.nightly if gap == "Overlapped" else pytest.mark.slow) for gap in WRONG]
)
def test_a_limit_that_is_not_kept_is_said(real_lab: Lab, sources: list[str], gap: str) -> None:
    text, said = WRONG[gap]
    wrong = checked(real_lab, sources, gap, text)
    assert not wrong and re.search(said, wrong.sentence), wrong


STUCK = """
class Stuck(FullyShard):
    def gather(self, unit):
        while unit.rank:
            pass
        super().gather(unit)
"""


@pytest.mark.slow
def test_a_rank_that_never_comes_back_is_named_and_the_next_check_passes(real_lab: Lab, sources: list[str]) -> None:
    names = cell(f"{SOLUTION.read_text()}\n\n{STUCK}", next(NUMBERS))
    real_lab.run(engine=names["FullyShard"], model=SMALL, steps=1).wait(60)
    found = real_lab.check_engine(names["Stuck"], model=SMALL, steps=5)
    assert re.search(r"rank 1 .* in Stuck\.gather\(root\) in the forward of step 0", found.sentence), found
    right = checked(real_lab, sources, "Zero2", "")
    assert right and "equal bit for bit" in right.sentence and "gradients, at most" in repr(right)
    assert "<table" in right._repr_html_()
    with pytest.raises(ArgumentError, match="give some of sent"):
        real_lab.check_engine(names["FullyShard"], most={"speed": 1})
    with pytest.raises(ArgumentError, match="5 or more"):
        real_lab.check_engine(names["FullyShard"], steps=3)
