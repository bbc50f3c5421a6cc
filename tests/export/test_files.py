"""Where an export goes, and what is refused before it is made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.cli.main import main
from fsdp_lab.export import export_script, export_spec
from fsdp_lab.spec.spec import Spec
from tests.export.ranks import spec


def test_files_are_written_whole_and_not_twice(tmp_path: Path) -> None:
    for export, name in ((export_script, "train.py"), (export_spec, "spec.json")):
        file = export(spec(), tmp_path / name)
        (plain := tmp_path / "plain").touch()
        assert file == tmp_path / name and file.stat().st_mode == plain.stat().st_mode
        plain.unlink()
        before = file.read_text()
        with pytest.raises(ArgumentError, match=f"path: .*{name} exists already; name another file, or give force"):
            export(spec(seed=9), file)
        assert file.read_text() == before
        assert export(spec(seed=9), file, force=True).read_text() != before
    assert sorted(os.listdir(tmp_path)) == ["spec.json", "train.files", "train.py"]  # no part is left


@pytest.mark.parametrize("path", ["no/such/folder/x.py", ".", "x" * 300, "a\0b"])
def test_a_path_that_cannot_be_is_refused_first(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError) as refused:
        export_script(spec(sharding="zero1"), path)  # which a script cannot express either: the path comes first
    assert refused.value.field == "path"


def test_a_folder_that_is_no_scripts_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "train.files").mkdir()
    with pytest.raises(ArgumentError, match=r"path: .*train\.files exists already"):
        export_script(spec(), tmp_path / "train.py", force=True)
    with pytest.raises(SpecError, match=r"strategy\.sharding"):  # what is refused leaves no file
        export_script(spec(sharding="zero1"), tmp_path / "other.py")
    assert os.listdir(tmp_path) == ["train.files"]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, script, again = tmp_path / "spec.json", tmp_path / "train.py", tmp_path / "again.json"
    given.write_text(spec().to_json())
    (refused := tmp_path / "refused.json").write_text(spec(sharding="zero1").to_json())
    to_script = ["--to", "script", "--output", str(script)]
    for file, arguments, code, said in (
        (given, to_script, 0, f"{script}\n"),
        (given, to_script, 2, "--output: "),
        (given, [*to_script, "--force", "--ranks", "3"], 0, f"{script}\n"),
        (given, ["--to", "spec", "--output", str(again)], 0, f"{again}\n"),
        (given, ["--to", "script"], 2, "--output: a script reads samples and a model"),
        (given, ["--to", "spec"], 0, '"workload": {'),
        (tmp_path / "none.json", ["--to", "spec"], 2, "none.json"),
        (refused, [*to_script, "--force"], 2, "strategy.sharding: zero1 is not available with fsdp2"),
    ):
        assert main(["export", str(file), *arguments]) == code
        printed = capsys.readouterr()
        assert said in (printed.err if code else printed.out)
    assert "fully_shard" in script.read_text() and "--nproc-per-node 3" in script.read_text()
    assert Spec.from_json(again.read_text()) == spec()  # which is what `fsdp-lab run` reads
