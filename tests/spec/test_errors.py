"""The errors for refused values: `SpecError` for fields of a Spec, `ArgumentError` for all other arguments."""

from __future__ import annotations

import pickle
import re

import pytest
from IPython.core.interactiveshell import InteractiveShell

from fsdp_lab.base.errors import ArgumentError, FieldError, SpecError
from fsdp_lab.cluster.calls import Outcome, verdict
from fsdp_lab.cluster.remote import described


@pytest.mark.parametrize("kind", [ArgumentError, SpecError])
def test_an_error_keeps_its_parts_across_processes_and_is_the_same_in_the_kernel(kind: type[FieldError]):
    error = kind("a", "is wrong", "mend it", {"b": 1})
    for again in (pickle.loads(pickle.dumps(error)), verdict("it", {0: Outcome(error=described(error))})):
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
        assert (
            "dataclasses.py" in shown(shell, capsys, "%tb verbose")
            and len(shown(shell, capsys, "%tb").splitlines()) == 5
        )
        lines = shown(shell, capsys, f"from fsdp_lab import RankLost\nraise {LOST}").splitlines()
        assert lines[1] == f"----> raise {LOST}" and lines[2].startswith("RankLost: rank 1 is gone") and len(lines) == 3
    finally:
        InteractiveShell.clear_instance()
