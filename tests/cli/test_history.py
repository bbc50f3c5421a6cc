"""`fsdp-lab history` and `report`: kept runs are listed, shown, named, deleted and written as one file; what is refused."""

import json
import sqlite3
import time
from pathlib import Path

import pytest

from fsdp_lab.cli.main import main
from fsdp_lab.runs import Comparison
from fsdp_lab.runs.comparison import finite
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


def test_runs_are_named_pinned_and_deleted(runs: list[Telling], capsys: pytest.CaptureFixture[str]):
    assert said(capsys, "rename", runs[0].id, "base") == f"run {runs[0].id} is now called 'base'\n"
    assert said(capsys, "rename", "base", "baseline") == f"run {runs[0].id} is now called 'baseline', before 'base'\n"
    assert "note was stored" in said(capsys, "note", "baseline", "as in the paper")
    assert "note: as in the paper" in said(capsys, "show", "baseline") and "as in the paper" in said(capsys)
    said(capsys, "pin", "baseline")
    assert "baseline (pinned)" in said(capsys) and History().runs()["baseline"].id == runs[0].id
    said(capsys, "unpin", "baseline")
    assert "(pinned)" not in said(capsys)
    assert "name the runs to delete, or give --older-than DAYS" in said(capsys, "delete", code=2)
    assert "days: -2.0 is refused" in said(capsys, "delete", "--older-than", "-2", code=2)
    assert "1 run deleted; 2 left" in said(capsys, "delete", "--older-than", "30")
    assert "2 runs deleted; 0 left" in said(capsys, "delete", runs[1].id, runs[2].id)
    assert said(capsys).startswith("0 runs in ")


def test_a_file_that_cannot_be_used_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    with sqlite3.connect(tmp_path / "other") as db:
        db.execute("CREATE TABLE mine (x)")
    monkeypatch.setenv("FSDP_LAB_HISTORY", str(tmp_path / "other"))
    assert "is not a history of fsdp_lab; name another file" in said(capsys, code=2)


# -- `fsdp-lab report`
def test_kept_runs_are_written(runs: list[Telling], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / f"fsdp-lab-{runs[0].id}.html"
    ids = [run.id[:7] for run in runs]
    argv = ["report", *ids, ids[0], "--baseline", ids[1], "--title", "Both", "--memory", "80"]
    assert main(argv) == 0 and str(file) in capsys.readouterr().out
    kept = json.loads(file.read_text(encoding="utf-8").split('id="fsdp-lab-records">')[1].split("</script>")[0])
    assert kept["records"] == finite(Comparison.of(runs, baseline=1).records()), "those of the runs, once each"
    assert kept["title"] == "Both" and kept["baseline"] == "B"


@pytest.mark.parametrize(("argv", "says"), [
    (["nothing"], "run: none of these runs is called 'nothing'"),
    (["{0}", "--baseline", "{1}"], "--baseline {1} is not one of the runs of this report; name it among them, too"),
    (["{0}", "--output", "there.txt"], "--output: there.txt does not end in .html or .htm"),
    (["{0}", "--memory", "0"], "--memory 0 is refused; give the GiB of a device, such as 80"),
    (["{0}", "--memory", "nan"], "--memory nan is refused"),
])  # fmt: skip
def test_what_cannot_be_is_refused_and_nothing_written(
    runs: list[Telling], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    argv: list[str], says: str,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    ids = [run.id for run in runs]
    assert main(["report", *(word.format(*ids) for word in argv)]) == 2
    assert says.format(*ids) in capsys.readouterr().err and not list(tmp_path.glob("*.html"))
