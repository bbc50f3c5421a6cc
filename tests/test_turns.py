"""A test that runs alone waits for the others, and they for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.turns import turn

CODE = """
import sys
from pathlib import Path
from tests.turns import turn
print("asks", flush=True)
with turn(Path(sys.argv[1]), alone=sys.argv[2] == "True"):
    print("has it", flush=True)
"""


@pytest.mark.parametrize(("mine", "theirs"), [(True, False), (False, True), (True, True)])
def test_one_that_is_alone_excludes_the_others(tmp_path: Path, mine: bool, theirs: bool) -> None:
    with turn(tmp_path, alone=mine):
        other = subprocess.Popen([sys.executable, "-c", CODE, tmp_path, str(theirs)], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None and other.stdout.readline() == "asks\n"
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.3)
    assert other.stdout.readline() == "has it\n" and other.wait(10) == 0


def test_others_run_beside_each_other(tmp_path: Path) -> None:
    with turn(tmp_path, alone=False):
        subprocess.run([sys.executable, "-c", CODE, tmp_path, "False"], check=True, timeout=30)
