"""`fsdp-lab report`: kept runs as one file, and what it refuses."""

from __future__ import annotations

import json
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
    monkeypatch.setenv("FSDP_LAB_HISTORY", str(tmp_path / "runs.sqlite3"))
    told = [ended(), ended(Spec().replace(sharding="shard_grad_op"))]
    history = History()
    for run in told:
        history.record(run)
    assert history.flush(20), history.problem
    return told


def test_kept_runs_are_written(runs: list[Telling], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "both.html"
    ids = [run.id[:7] for run in runs]
    argv = ["report", *ids, ids[0], "--output", str(file), "--baseline", ids[1], "--title", "Both", "--memory", "80"]
    assert main(argv) == 0 and str(file) in capsys.readouterr().out
    text = file.read_text(encoding="utf-8")
    kept = json.loads(text.split('id="fsdp-lab-records">')[1].split("</script>")[0])
    assert kept["records"] == finite(Comparison.of(runs, baseline=1).records()), "those of the runs, once each"
    assert kept["title"] == "Both" and kept["baseline"] == "B"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nothing"], "run: none of these runs is called 'nothing'"),
        (["{0}", "--baseline", "{1}"], "--baseline {1} is not one of the runs of this report; name it among them, too"),
        (["{0}", "--output", "there.txt"], "--output: there.txt does not end in .html or .htm"),
        (["{0}", "--memory", "0"], "--memory 0 is refused; give the GiB of a device, such as 80"),
        (["{0}", "--memory", "nan"], "--memory nan is refused"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_written(
    runs: list[Telling], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    argv: list[str], says: str,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    ids = [run.id for run in runs]
    assert main(["report", *(word.format(*ids) for word in argv)]) == 2
    assert says.format(*ids) in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html"))
