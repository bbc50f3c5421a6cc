"""Where an export goes, and what is refused before it is made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.cli.main import main
from fsdp_lab.export import export_accelerate, export_script, export_spec
from fsdp_lab.spec.spec import Spec
from tests.export.ranks import spec


def test_files_are_written_whole_and_not_twice(tmp_path: Path) -> None:
    for export, name in ((export_script, "train.py"), (export_accelerate, "fsdp.yaml"), (export_spec, "spec.json")):
        file = export(spec(), tmp_path / name)
        (plain := tmp_path / "plain").touch()
        assert file == tmp_path / name and file.stat().st_mode == plain.stat().st_mode
        plain.unlink()
        before = file.read_text()
        with pytest.raises(ArgumentError, match=f"path: .*{name} exists already; name another file, or give force"):
            export(spec(seed=9), file)
        assert file.read_text() == before
        assert export(spec(seed=9), file, force=True).read_text() != before
    assert sorted(os.listdir(tmp_path)) == ["fsdp.yaml", "spec.json", "train.files", "train.py"]  # no part is left


@pytest.mark.parametrize("path", ["no/such/folder/x.py", ".", "x" * 300, "~nobody_of_that_name/x.py", "a\0b"])
def test_a_path_that_cannot_be_is_refused_first(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError) as refused:
        export_script(spec(sharding="zero1"), path)  # which a script cannot express either: the path comes first
    assert refused.value.field == "path"


def test_a_folder_that_is_no_scripts_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "train.files").mkdir()
    with pytest.raises(ArgumentError, match=r"path: .*train\.files exists already"):
        export_script(spec(), tmp_path / "train.py", force=True)
    assert os.listdir(tmp_path) == ["train.files"]


def test_what_is_refused_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"strategy\.sharding"):
        export_script(spec(sharding="zero1"), tmp_path / "train.py")
    assert not os.listdir(tmp_path)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, script, again = tmp_path / "spec.json", tmp_path / "train.py", tmp_path / "again.json"
    given.write_text(spec().to_json())
    assert main(["export", str(given), "--to", "script", "--output", str(script)]) == 0
    assert capsys.readouterr().out == f"{script}\n"
    assert "fully_shard" in script.read_text()
    assert main(["export", str(given), "--to", "script", "--output", str(script)]) == 2
    assert "--output: " in capsys.readouterr().err
    assert main(["export", str(given), "--to", "script", "--output", str(script), "--force", "--ranks", "3"]) == 0
    assert "--nproc-per-node 3" in script.read_text()
    assert main(["export", str(given), "--to", "spec", "--output", str(again)]) == 0
    assert Spec.from_json(again.read_text()) == spec()  # which is what `fsdp-lab run` reads
    capsys.readouterr()
    assert main(["export", str(given), "--to", "script"]) == 2
    assert "--output: a script reads samples and a model" in capsys.readouterr().err
    assert main(["export", str(given), "--to", "accelerate"]) == 0
    assert "fsdp_version: 2" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "none.json"), "--to", "spec"]) == 2
    assert "none.json" in capsys.readouterr().err
    given.write_text(spec(sharding="zero1").to_json())
    assert main(["export", str(given), "--to", "script", "--output", str(script), "--force"]) == 2
    assert "strategy.sharding: zero1 is not available with fsdp2" in capsys.readouterr().err
