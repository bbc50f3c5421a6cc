"""The list of seeded faults fits the source, and a fault is found where a test can see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.seeded_faults import FAULTS, REPO, Fault, NotFound, caught_by, seed, sources


def package(folder: Path, code: str) -> Path:
    (folder / "fsdp_lab").mkdir(parents=True)
    (folder / "fsdp_lab" / "__init__.py").touch()
    file = folder / "fsdp_lab" / "module.py"
    file.write_text(code)
    return file


def test_every_snippet_is_in_the_source_once() -> None:
    texts = [p.read_text(encoding="utf-8") for p in sources(REPO)]
    wrong = [f.name for f in FAULTS if sum(text.count(f.old) for text in texts) != 1 or f.old == f.new]
    assert not wrong, f"write these faults anew in tests/seeded_faults.py: {wrong}"
    assert len({f.name for f in FAULTS}) == len(FAULTS) >= 20
    assert not [name for f in FAULTS for name in f.tests if not (REPO / name).exists()]


def test_a_fault_is_seeded_and_caught(tmp_path: Path) -> None:
    fault = Fault(name="f", what="", old="return 2", new="return 3", tests=("tests",))
    file = package(tmp_path, "def two():\n    return 2\n")
    (tmp_path / "tests").mkdir()
    test = "import sys, pytest\nsys.path.insert(0, '.')\nfrom fsdp_lab.module import two\n"
    (tmp_path / "tests" / "test_two.py").write_text(test + "def test_it():\n    assert two() == 2\n")
    assert caught_by(tmp_path, fault.tests, "") == ""
    assert seed(tmp_path, fault) == file
    assert caught_by(tmp_path, fault.tests, "") == "tests/test_two.py::test_it"
    assert caught_by(tmp_path, ("nothing",), "") == "(no such tests)"


@pytest.mark.parametrize("code", ["return 1", "return 2; return 2"])
def test_a_snippet_that_is_not_there_once_is_an_error(tmp_path: Path, code: str) -> None:
    package(tmp_path, code)
    with pytest.raises(NotFound, match="its snippet must occur once"):
        seed(tmp_path, Fault(name="f", what="", old="return 2", new="return 3", tests=()))
