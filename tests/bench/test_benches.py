"""Benches for developers, small: that they run, and refuse what cannot be measured. On ranks of the pool."""

import json
from pathlib import Path

import pytest

from tests.bench import families, metering
from tests.bench.__main__ import main
from tests.bench.in_pool import launched_in
from tests.pool import Pool

TINY = ["--model", "gpt2-1m", "--seq-len", "8", "--device", "cpu"]


@pytest.fixture
def ranks(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "launch_here", launched_in(pool))


@pytest.mark.parametrize(("arguments", "said"), [
    (["metering", "--launches", "1", "--device", "cpu"], "--launches 1 is refused; give a whole number of 2 or more"),
    (["metering", "--backend", "lab,x", "--device", "cpu"], "--backend 'x' is refused"),
    (["memory", "--ranks", "1,2"], "--ranks 1,2 is refused; give numbers of 2 or more"),
    (["families", "gpt3"], "gpt3 is no family"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize(("arguments", "n"), [
    (["plan", "--rounds", "1", "--seq-len", "16"], 10), (["memory", "--model", "gpt2-1m", "--ranks", "2"], 4),
])  # fmt: skip
def test_a_bench_on_a_lab_writes_what_it_measured(arguments: list[str], n: int, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    assert main([*arguments, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert len(written["rows"]) == n and {"cores", "torch"} < written["environment"].keys()
    for row in written["rows"] if arguments[0] == "memory" else ():
        assert row["lab/fsdp2"] <= 1.0 and row["lab/plan"] <= 1.02 and row["lab/theory"] <= 1.02


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks")
def test_metering_measures_beside_nothing_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "metering.json"
    few = ["--launches", "2", "--steps", "4", "--backend", "ddp,lab"]
    assert main(["metering", *TINY, *few, "--json", str(file)]) == 0
    printed, written = capsys.readouterr().out, json.loads(file.read_text())
    assert list(written["backends"]) == ["ddp", "lab"] and "control bare/bare: mean of" in printed
    of_ddp = written["backends"]["ddp"]
    assert f"metered/bare: mean of launches {of_ddp['ratios']['metered/bare']['mean']:.4f}" in printed
    assert all(f"  {name}: {1e3 * seconds:.3f} ms" in printed for name, seconds in of_ddp["parts_s"].items())


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
def test_measuring_changes_no_bit_of_any_backend() -> None:
    """All of them in one launch: a form is compared with the two others of its backend."""
    names = {peer: [form.name for form in metering.forms_of(peer)] for peer in metering.PEERS}
    forms = tuple(name for of_peer in names.values() for name in of_peer)
    plan = metering.Plan(preset="gpt2-1m", seq_len=8, steps=4, forms=forms, devices=("cpu", "cpu"))
    result = metering.measure(plan, []).result
    for peer, of_peer in names.items():
        told = [(result.losses[form], result.gradient_norms[form]) for form in of_peer]
        assert told[0] == told[1] == told[2], peer


@pytest.mark.slow
def test_a_family_of_transformers_is_tried_under_every_backend(pool: Pool) -> None:
    outcome = families._outcome(pool, "gpt2")
    assert families.table({"gpt2": outcome}).startswith("\ntrains: 1 of 1\n  under every backend:\n      gpt2")
