"""`fsdp-lab history`: listed, shown, named, deleted, and what it refuses."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from fsdp_lab.cli.main import main
from fsdp_lab.runs.history import History
from fsdp_lab.spec.spec import Spec
from tests.lab.telling import Telling, ended


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Telling]:
    """An old one, one with a switch, and the newest."""
    monkeypatch.setenv("FSDP_LAB_HISTORY", str(tmp_path / "runs.sqlite3"))
    now_s = time.time()
    old = ended(started_unix_s=now_s - 40 * 86_400)
    old.ended_unix_s = now_s - 40 * 86_400
    switched = Telling(started_unix_s=now_s - 100)
    switched.tell(4)
    switched.switch(sharding="shard_grad_op")
    switched.tell(4)
    switched.end()
    newest = ended(Spec().replace(backend="fsdp2"), started_unix_s=now_s - 50)
    history = History()
    for run in (old, switched, newest):
        history.record(run)
    assert history.flush(20), history.problem
    return [old, switched, newest]


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(["history", *argv]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_runs_are_listed(runs: list[Telling], capsys: pytest.CaptureFixture[str]):
    out = said(capsys)
    places = [out.index(run.id) for run in runs]
    assert out.startswith("3 runs in ") and places == sorted(places, reverse=True)
    few = said(capsys, "--limit", "2")
    assert few.startswith("2 of 3 runs in ") and runs[0].id not in few and runs[1].id in few
    listed = json.loads(said(capsys, "--json"))
    assert [entry["id"] for entry in listed] == [run.id for run in runs[::-1]]
    assert listed[0]["spec"] == runs[2].spec.to_dict() and listed[0]["environment"]["torch"]
    assert "--limit -1 is refused" in said(capsys, "--limit", "-1", code=2)


def test_a_run_is_shown(runs: list[Telling], capsys: pytest.CaptureFixture[str]):
    out = said(capsys, "show", runs[1].id[:6])
    assert f"run {runs[1].id}" in out and "from step 4: sharding full_shard -> shard_grad_op" in out
    assert "2 x CPU" in out and "tokens/s" in out and "finished" in out
    shown = json.loads(said(capsys, "show", runs[1].id, "--json"))
    assert shown["summary"] == json.loads(json.dumps(runs[1].summary()))
    assert "none of these runs is called 'nothing'" in said(capsys, "show", "nothing", code=2)


def test_a_run_is_named_and_pinned(runs: list[Telling], capsys: pytest.CaptureFixture[str]):
    said(capsys, "rename", runs[0].id, "baseline")
    said(capsys, "pin", "baseline")
    assert "baseline (pinned)" in said(capsys) and History().runs()["baseline"].id == runs[0].id
    said(capsys, "unpin", "baseline")
    assert "(pinned)" not in said(capsys)


def test_runs_are_deleted(runs: list[Telling], capsys: pytest.CaptureFixture[str]):
    assert "name the runs to delete, or give --older-than DAYS" in said(capsys, "delete", code=2)
    assert "--older-than -2.0 is refused" in said(capsys, "delete", "--older-than", "-2", code=2)
    assert "1 run deleted; 2 left" in said(capsys, "delete", "--older-than", "30")
    assert "2 runs deleted; 0 left" in said(capsys, "delete", runs[1].id, runs[2].id)
    assert said(capsys).startswith("0 runs in ")


def test_a_file_that_cannot_be_used_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    strange = tmp_path / "strange"
    strange.write_bytes(b"")
    strange.chmod(0o600)
    monkeypatch.setenv("FSDP_LAB_HISTORY", str(strange / "runs.sqlite3"))
    assert said(capsys).startswith("0 runs in "), "nothing is there"
    import sqlite3

    with sqlite3.connect(tmp_path / "other") as db:
        db.execute("CREATE TABLE mine (x)")
    monkeypatch.setenv("FSDP_LAB_HISTORY", str(tmp_path / "other"))
    assert "is not a history of fsdp_lab; name another file" in said(capsys, code=2)
