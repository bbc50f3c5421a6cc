"""The errors for refused values: `SpecError` for fields of a Spec, `ArgumentError` for other arguments, such as faults."""

import json
import pickle
import re
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from fsdp_lab.base.errors import ArgumentError, FieldError, SpecError
from fsdp_lab.cluster.calls import Outcome, verdict
from fsdp_lab.cluster.remote import described
from fsdp_lab.spec.faults import Fault, FaultKind, FaultPhase


@pytest.mark.parametrize("kind", [ArgumentError, SpecError])
def test_an_error_keeps_its_parts_across_processes_and_is_the_same_in_the_kernel(kind: type[FieldError]):
    error = kind("a", "is wrong", "mend it", {"b": 1})
    among_ranks = FieldError.from_dict(error.to_dict())
    for again in (pickle.loads(pickle.dumps(error)), verdict("it", {0: Outcome(error=described(error))}), among_ranks):
        assert type(again) is kind and str(again) == "a: is wrong; mend it" and isinstance(again, ValueError)
        assert (again.field, again.reason, again.hint, again.fix) == ("a", "is wrong", "mend it", {"b": 1})


LOST = "RankLost(rank=1, engine=1, pid=2, host='here', reason='was killed', unix_s=0.0)"
MISTAKE = "from fsdp_lab import Spec\n\ndef mine():\n    Spec().replace(sharding='fullshard')\n\nmine()"


def shown(shell: InteractiveShell, capsys: pytest.CaptureFixture[str], cell: str) -> str:
    shell.run_cell(cell, store_history=True)
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


def test_a_notebook_shows_the_user_s_lines_and_the_sentence(capsys: pytest.CaptureFixture[str]):
    shell = InteractiveShell.instance()
    try:
        lines = shown(shell, capsys, MISTAKE).splitlines()
        assert lines[:4] == ["Cell In[1], line 6", "----> mine()", "Cell In[1], line 4",
                             "----> Spec().replace(sharding='fullshard')"]  # fmt: skip
        assert lines[4].startswith("SpecError: strategy.sharding: ") and len(lines) == 5
        assert ("dataclasses.py" in shown(shell, capsys, "%tb verbose")
                and len(shown(shell, capsys, "%tb").splitlines()) == 5)  # fmt: skip
        lines = shown(shell, capsys, f"from fsdp_lab import RankLost\nraise {LOST}").splitlines()
        assert lines[1] == f"----> raise {LOST}" and lines[2].startswith("RankLost: rank 1 is gone") and len(lines) == 3
    finally:
        InteractiveShell.clear_instance()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "explode"}, "fault.kind: 'explode' is refused; give one of raise, nan, oom, stall, cut, slow, kill"),
    ({"kind": None}, "fault.kind"), ({"kind": "nan", "phase": "update"}, "fault.phase: when a step is applied"),
    ({"phase": "sideways"}, "fault.phase: 'sideways' is refused; give one of forward, backward, update"),
    *(({"ranks": ranks}, "fault.ranks") for ranks in ([], [-1], "1")), ({"at_step": -1}, "fault.at_step"),
    ({"for_s": 1.0}, "fault.for_s: it belongs to stall and this is raise"), ({"kind": "stall", "for_s": 0}, "fault.for_s"),
    ({"kind": "kill", "heals": True}, "fault.heals"), ({"kind": "cut", "heals": 1}, "fault.heals"),
    ({"kind": "slow"}, "fault.link: a slow link is one of a bandwidth, or slower by a factor"),
    ({"kind": "slow", "link": "1 MB/s", "factor": 2}, "fault.link"),
    ({"kind": "slow", "link": "fast"}, "fault.link: 'fast' is no link"),
    ({"kind": "slow", "link": "nvlink of h100"}, "fault.link: nvlink of h100 is scaled to a GPU"),
    ({"kind": "slow", "factor": 1}, "fault.factor"),
    ({"rank": 1}, "fault.rank: there is no such field; use kind, ranks, at_step"),
    ({"kind": "kill", "ranks": [0, 2]}, "fault.ranks: there is no rank 2; give ranks from 0 to 1"),  # of two
    ({"kind": "kill", "at_step": 4}, "fault.at_step: step 4 is over; give 5 or more"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_a_fault_that_cannot_be_is_refused_before_anything_is_sent(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError) as e:
        Fault.from_dict({"kind": "raise", "ranks": [1], **changes}).check(2, 5)
    assert str(e.value).startswith(said)


def test_a_field_that_a_fault_lacks_is_named_and_a_link_of_one_rank_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^fault\.kind: None is refused; give"):
        Fault.from_dict({"ranks": [1]})
    with pytest.raises(ArgumentError, match=r"fault\.kind: one rank sends nothing over a link"):
        Fault(kind=FaultKind.CUT, ranks=(0,)).check(1, 5)


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_goes_to_plain_values_and_back(kind: FaultKind) -> None:
    of_kind: dict[str, Any] = {"slow": {"factor": 3.0}, "stall": {"for_s": 2.0}, "cut": {"heals": False}}
    fault = Fault(kind=kind, ranks=(0, 2), at_step=7, phase=FaultPhase.BACKWARD, **of_kind.get(kind.value, {}))
    assert Fault.from_dict(json.loads(json.dumps(fault.to_dict()))) == fault
    assert fault.where == "in the backward of step 7"
