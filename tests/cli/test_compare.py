"""`fsdp-lab compare` and `run`: products, refusals and bad input without ranks; then both once on real ones."""

import argparse
import gzip
import io
import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from fsdp_lab.cli import compare, fields
from fsdp_lab.cli.console import add_hosts, hosts_of
from fsdp_lab.cli.main import main, parser
from fsdp_lab.cluster.hosts import SlurmHosts, SshHosts
from fsdp_lab.planner.questions import require_memory
from fsdp_lab.runs.history import History
from fsdp_lab.spec.spec import Spec
from tests.lab.telling import ended
from tests.lab.test_comparison import KEYS
from tests.waiting import until

TINY = ["--model", "gpt2-1m", "--seq-len", "16", "--micro-batch", "1"]


def dicts(*arguments: str):
    return list(fields.combinations(parser().parse_args(["compare", *arguments])))


def requested(*arguments: str):
    args = parser().parse_args(["compare", *arguments])
    return fields.requested(args, partial(compare.spec_of, args))


def test_the_product_of_the_lists_in_their_order_without_repeats():
    made = dicts("--backend", "fsdp2,ddp,fsdp2", "--precision", "fp32,bf16", "--ranks", "2,3", "--lr", "0.1")
    assert len(made) == 8
    shown = [(d["world_size"], d["strategy"]["backend"], d["strategy"]["precision"]) for d in made[:3]]
    assert shown == [(2, "fsdp2", "fp32"), (2, "fsdp2", "bf16"), (2, "ddp", "fp32")]
    assert {d["workload"]["lr"] for d in made} == {0.1}


@pytest.mark.parametrize(("arguments", "part", "values"), [
    ("--clip-norm none", "workload.clip_norm", [None]), ("--clip-norm off,1", "workload.clip_norm", [None, 1]),
    ("--compile true", "strategy.compile", [True]), ("--offload none", "strategy.offload", ["none"]),
    ("--forward-prefetch auto,0,2 --backend fsdp2", "strategy.forward_prefetch", [None, 0, 2]),
    ("--shard-size null", "strategy.shard_size", [None]), ("--lora off", "workload.lora", [None]),
    ("--sync every,2,last,4 --accumulate 4", "strategy.sync", ["every", 2, "last", 4]),
    ('--optimizer sgd --optimizer-args {},{"momentum":0.9}', "workload.optimizer_args", [{}, {"momentum": 0.9}]),
])  # fmt: skip
def test_values_are_read_as_their_fields_types(arguments: str, part: str, values: list[object]):
    section, name = part.split(".")
    assert [made[section][name] for made in dicts(*arguments.split())] == values


def test_links_are_a_list_whose_latencies_have_commas_too():
    made = dicts("--link", "none, 0.25GB/s, 50us,nvlink of h100", "--backend", "lab,fsdp2")
    links = [None, "0.25 GB/s, 50 us", "nvlink of h100"]
    assert [(d["strategy"]["backend"], d["link"]) for d in made] == [(b, x) for b in ("lab", "fsdp2") for x in links]


def test_combinations_that_cannot_be_are_listed_with_their_reason_and_one_device_serves_all_ranks():
    specs, refused = requested("--backend", "fsdp2,ddp,lab", "--sharding", "full_shard,no_shard", "--devices", "cpu")
    kept = [("fsdp2", "full_shard"), ("ddp", "no_shard"), ("lab", "full_shard"), ("lab", "no_shard")]
    assert [(s.strategy.backend, s.strategy.sharding) for s in specs] == kept and specs[0].devices == ("cpu", "cpu")
    assert requested("--devices", "cuda:0,cuda:2")[0][0].devices == ("cuda:0", "cuda:2")
    reasons = {(d["strategy"]["backend"], d["strategy"]["sharding"]): str(error) for d, error in refused}
    assert len(reasons) == 2 and "strategy.sharding" in reasons["ddp", "full_shard"]


def test_the_table_has_what_has_begun_and_fewer_figures_on_a_narrow_terminal():
    runs = [ended(Spec().replace(sharding=sharding)) for sharding in ("full_shard", "shard_grad_op")]
    progress = SimpleNamespace(done_steps=6, all_steps=60, left_s=None)
    sweep = SimpleNamespace(in_order=runs, done=False, progress=progress)

    def shown(width: int) -> str:
        console = Console(file=io.StringIO(), width=width)
        console.print(compare.view(sweep, console))
        return console.file.getvalue()

    wide = shown(150).splitlines()
    assert [row.split()[0] for row in wide[1:3]] == ["A", "B"] and wide[-1] == "6 of 60 steps"
    assert "equal bit for bit" in wide[2] and "time / A" in wide[0] and "tokens/s" in wide[0]
    narrow = shown(80)
    assert "peak/rank" in narrow and "tokens/s" not in narrow
    runs.clear()
    assert shown(80).split() == ["6", "of", "60", "steps"]


@pytest.mark.slow
def test_compare_on_real_ranks(tmp_path: Path):
    file = tmp_path / "out.json"
    lists = ["--backend", "fsdp2,ddp", "--sharding", "full_shard,no_shard", "--precision", "fp32", "--offload", "none"]
    command = [sys.executable, "-m", "fsdp_lab", "compare", "--ranks", "2", "--steps", "5", *TINY, *lists]
    command += ["--json", str(file), "--report", "report.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(file.read_text())
    assert "equal bit for bit" in done.stdout and "The fastest that fits is" in done.stdout
    assert "Refused, so not in the table: C fsdp2 no_shard (" in done.stdout
    assert "10 steps in" in done.stdout and "of it outside of steps" in done.stdout
    records = told["comparison"]["records"]
    assert [r["parity"] for r in records] == [None, "equal bit for bit"]
    assert records[1]["step_time_ratio"] > 0 and told["comparison"]["recommendation"]
    assert 'id="fsdp-lab-records"' in (tmp_path / "report.html").read_text()
    assert [r["spec"]["strategy"]["backend"] for r in told["runs"]] == ["fsdp2", "ddp"]
    assert all("is not available with" in one["reason"] and one["spec"]["strategy"] for one in told["refused"])
    assert len(told["refused"]) == 2 and {p.name for p in tmp_path.iterdir()} == {"out.json", "report.html"}
    for run in told["runs"]:
        assert set(run) == {*KEYS} and len(run["losses"]) == 5
        assert run["losses"] == pytest.approx(told["runs"][0]["losses"], rel=1e-4)
        assert 0 < sum(run["exposed_comm_s_per_step"].values()) < run["step_time_s"]["p90"]


def test_a_spec_that_cannot_fit_names_the_option(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        spec = Spec().replace(model="gpt2-1m", micro_batch=4096)
        require_memory(spec, [("here", "cpu", 1 << 20, 1 << 20)] * 2, "lab.run")

    monkeypatch.setattr("fsdp_lab.cli.run.train", refuse)
    assert main(["run", "--model", "gpt2-1m"]) == 2
    said = capsys.readouterr().err
    assert "a rank needs" in said and "; or --anyway" in said and "lab.run" not in said


def test_what_to_train_is_said_by_options_before_a_file_before_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    trained: list[Spec] = []
    monkeypatch.setattr("fsdp_lab.cli.run.train", lambda _, spec, *__: trained.append(spec))
    (tmp_path / "flat.json").write_text('{"model": "gpt2-1m", "sharding": "zero1", "world_size": 1}')
    options = ["--sharding", "shard_grad_op", "--link", "0.25 GB/s, 50 us", "--ranks", "3"]
    assert main(["run", str(tmp_path / "flat.json"), *options]) == 0
    changes = {"model": "gpt2-1m", "sharding": "shard_grad_op", "link": "0.25 GB/s, 50 us"}
    assert trained == [Spec(world_size=3).replace(**changes)]
    said = {"--optimiser": "; use --optimizer", "--batch_size=4": "; use --micro-batch", "--epochs": "; use --steps"}
    said |= {"rnu": "there is no command 'rnu'; did you mean run\n", "train": "invalid choice: 'train'"}
    for word, sentence in (said | {"--steps=a": "[ARGUMENT ...]\nfsdp-lab run: error"}).items():
        with pytest.raises(SystemExit):
            main(["run"] * word.startswith("-") + [word])
        assert sentence in capsys.readouterr().err
    assert main([]) == 0 and "COMMAND" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_ends_a_run_its_ranks_and_keeps_what_was_measured(tmp_path: Path):
    command = [sys.executable, "-m", "fsdp_lab", "run", *TINY, "--json", "out.json", "--trace", "trace.json.gz"]
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=tmp_path)
    family: list[psutil.Process] = []
    try:
        until(lambda: "step time" in log.read_text() or process.poll() is not None, 90)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130, log.read_text()
        assert not psutil.wait_procs(family, timeout=10)[1]
        assert json.loads((tmp_path / "out.json").read_text())["runs"][0]["losses"]
        assert f"fsdp-lab report {History().runs()[0].id}" in log.read_text()
        trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
        assert {e["pid"] for e in trace["traceEvents"] if e.get("cat") == "all_gather"} == {0, 1}
    finally:
        for p in [*filter(psutil.Process.is_running, family), process]:
            p.kill()
        process.wait()


# -- `--ssh` and `--slurm`: what they become, and what is refused before anything starts --------------------------
def hosts(*words: str):
    parser = argparse.ArgumentParser()
    add_hosts(parser)
    return hosts_of(parser.parse_args(words))


def test_hosts_by_ssh_and_of_slurm():
    assert hosts() is None
    found = hosts("--ssh", "gpu1, gpu2", "--gpus-per-host", "8", "--ssh-config", "config", "--sync-hosts")
    assert found == SshHosts(names=("gpu1", "gpu2"), gpus_per_host=8, ssh_args=("-F", "config"), sync=True)
    assert found.ranks == 16
    found = hosts("--slurm", "4", "--ranks-per-host", "2", "--time", "1:00:00", "--partition", "gpu")
    assert found == SlurmHosts(hosts=4, ranks_per_host=2, time="1:00:00", partition="gpu")
    assert found.request == ["--nodes=4", "--ntasks-per-node=2", "--time=1:00:00", "--partition=gpu"]
