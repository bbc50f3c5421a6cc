"""`fsdp-lab watch -- COMMAND`: scripts that know nothing of it, with their own process groups and launchers. Steps and
losses are those of the script's own account, its exit code is its own, and nothing is left when it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from fsdp_lab.runs.history import History
from fsdp_lab.runs.history.history import StoredRun
from tests.covering import tiered
from tests.waiting import until

STRANGERS = Path(__file__).with_name("strangers.py")
ALONE = ("plain", "sft", "closure", "compiled")
SEVERAL = ("nanogpt", "titan", "fsdp1", "trainer", "accelerated", "fabric", "course")
NEEDS = {"sft": "trl", "trainer": "transformers", "accelerated": "accelerate", "fabric": "lightning_fabric"}


def watched(command: Sequence[str], history: Path, *options: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "fsdp_lab", "watch", "--history", str(history), *options, "--", *command]
    return subprocess.run(whole, capture_output=True, text=True, timeout=300)


def stored(history: Path) -> StoredRun:
    (run,) = History(history).runs()
    return run


def launched(name: str, file: Path) -> list[str]:
    script = [str(STRANGERS), name, str(file)]
    if name in ALONE:
        return [sys.executable, *script]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *script]


@pytest.mark.parametrize("name", tiered((*ALONE, *SEVERAL), lambda name: name == "nanogpt"))
def test_a_script_as_it_is(name: str, tmp_path: Path) -> None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    ended = watched(launched(name, tmp_path / "account"), tmp_path / "history")
    assert ended.returncode == 0, ended.stderr[-3000:]
    by_rank = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("account-*"))]
    losses = [sum(of_step) / len(by_rank) for of_step in zip(*by_rank, strict=True)]
    run = stored(tmp_path / "history")
    steps = run.events.steps()
    assert [step.mean_loss for step in steps] == pytest.approx(losses, rel=1e-3)
    assert run.state.value == "finished" and f"fsdp-lab report {run.id}" in ended.stderr
    assert run.name == f"strangers.py {name} {tmp_path / 'account'}" and "exit code" not in ended.stderr
    assert f"watched {len(losses)} steps of" in ended.stderr and f"found in {len(losses)} steps\n" in ended.stderr
    assert run.audit().done and not run.audit(), run.audit()
    events = [event for step in steps for event in step.events]
    assert len(events) == len(by_rank) * len(losses)
    assert name == "closure" or all(e.tokens > 0 for e in events)
    assert name == "nanogpt" or all(e.input_s is None or e.input_s > 0 for e in events[len(by_rank) :])
    if name in SEVERAL:
        assert all(sum(t.calls for t in e.comm.values()) > 0 for e in events)
    if name == "nanogpt":  # evaluates and saves after its third step
        spent = [(e.step, bool(e.evaluation_s), bool(e.checkpoint_s)) for e in events]
        assert [one for one in spent if any(one[1:])] == [(3, True, True), (3, True, False)]


@pytest.mark.slow
def test_of_several_models_the_largest_is_watched(tmp_path: Path) -> None:
    ended = watched(launched("gan", tmp_path / "account"), tmp_path / "history")
    account = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("account-*"))]
    losses = [sum(of_step) / 2 for of_step in zip(*account, strict=True)]
    assert [s.mean_loss for s in stored(tmp_path / "history").events.steps()] == pytest.approx(losses[3::2], rel=1e-3)
    assert ended.returncode == 0 and "Of several models the largest is watched" in ended.stderr


@pytest.mark.slow
def test_an_error_of_the_watch_is_no_rank_s(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(
        f"import os, runpy, sys\nif os.environ['RANK'] == '1':\n    from fsdp_lab.runs.attach import Attachment\n"
        "    Attachment._note_loss = lambda *_: 1 / 0\n"
        f"sys.argv = ['', 'titan', {str(tmp_path / 'account')!r}]\nrunpy.run_path({str(STRANGERS)!r}, run_name='__main__')"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(file)]
    ended = watched(command, tmp_path / "history")
    accounts = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("account-*"))]
    assert ended.returncode == 0 and [len(one) for one in accounts] == [6, 6], ended.stderr[-3000:]
    assert "It was not watched further: ZeroDivisionError: division by zero" in ended.stderr


TRAINS = """
    import os, sys, threading, torch
    model = torch.nn.Linear(4, 4)
    def train(model=model, steps=4):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
# What follows; the exit code; the steps that are stored, None for no run; the run's state; a part of a sentence.
ODD: dict[str, tuple[str, int, int | None, str, str]] = {
    "own_code": ("train(); sys.exit(7)", 7, 4, "finished", "ended with exit code 7 after 4 steps\n"),
    "raises": ("train(); raise LookupError('lost')", 1, 4, "failed", "exit code 1 after 4 steps: LookupError: lost"),
    "os_exit": ("train(); os._exit(3)", 3, 4, "finished", "watched 4 steps of Linear under module on 1 rank"),
    "killed": ("train(); os.kill(os.getpid(), 9)", 137, 0, "lost with its kernel", "a rank ended without Python's own end"),
    "no_training": ("print('nothing')", 0, None, "", "no Python process of the command made an optimizer"),
    "never_steps": ("torch.optim.SGD(model.parameters()); model(torch.ones(4))", 0, None, "", "none stepped a model"),
    "forks": ("train(steps=1); pid = os.fork(); pid or os._exit(0); os.waitpid(pid, 0); train()", 0, 5, "finished",
              "watched 5 steps"),
    "workers": ("data = torch.utils.data.DataLoader(range(8), num_workers=2); train(steps=1); print(sum(map(int, data)));"
                "train()", 0, 5, "finished", "watched 5 steps"),
    "threads": ("t = threading.Thread(target=train, args=(torch.nn.Linear(4, 4), 9)); train(steps=1); t.start(); train();"
                "t.join()", 0, 5, "finished", "watched 5 steps"),
    "found_twice": ("twice = torch.nn.Sequential(model); model.forward = model.forward; train(twice)", 0, 4, "finished",
                    "watched 4 steps of Sequential"),
    "copies": ("optimizer = torch.optim.SGD([p.detach().clone().requires_grad_() for p in model.parameters()], lr=0.1)\n"
               "for _ in range(4): model(torch.ones(2, 4)).sum().backward(); optimizer.step()", 0, 3, "finished",
               "The optimizer steps tensors that are none of the model's"),
    "own_hook": ("sys.excepthook = lambda *_: print('mine'); train(); raise OSError", 1, 4, "failed", "watched 4 steps"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_an_odd_script_runs_on(name: str, tmp_path: Path) -> None:
    code, exit_code, steps, state, sentence = ODD[name]
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(TRAINS) + code)
    ended = watched([sys.executable, str(file)], tmp_path / "history")
    plain = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=300)
    expected = plain.returncode if plain.returncode >= 0 else 128 - plain.returncode
    assert (ended.returncode, ended.stdout) == (expected, plain.stdout) and expected == exit_code
    runs = History(tmp_path / "history").runs() if (tmp_path / "history").exists() else []
    expected_runs = [] if steps is None else [(state, steps)]
    assert [(run.state.value, run.step if steps else 0) for run in runs] == expected_runs
    assert sentence in ended.stderr + " ".join(run.reason for run in runs)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["watch", "prove"])
def test_nothing_is_left_of_an_interrupted_command(name: str, number: signal.Signals, tmp_path: Path) -> None:
    file, there = tmp_path / "script.py", tmp_path / "there"
    file.write_text(textwrap.dedent(TRAINS) + f"train(); open({str(there)!r}, 'w').close(); train(steps=10**9)")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(file)]
    options = ["--history", str(tmp_path / "history"), "--", *command] if name == "watch" else ["--steps", "999999"]
    whole = [sys.executable, "-m", "fsdp_lab", name, *options, *([str(file)] * 2 if name == "prove" else [])]
    process = subprocess.Popen(whole, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    until(there.exists)
    inside = psutil.Process(process.pid).children(recursive=True)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    assert process.wait(60) != 0
    until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in inside))


@pytest.mark.slow
def test_one_line_in_a_trainer(tmp_path: Path) -> None:
    """`callbacks=[fsdp_lab.trainer_callback()]`, without the command."""
    command = [sys.executable, str(STRANGERS), "called_back", str(tmp_path / "account")]
    environment = {**os.environ, "FSDP_LAB_HISTORY": str(tmp_path / "history")}
    assert subprocess.run(command, env=environment, capture_output=True, timeout=300).returncode == 0
    run, losses = stored(tmp_path / "history"), json.loads((tmp_path / "account-0").read_text())
    assert run.state.value == "finished"
    assert [s.mean_loss for s in run.events.steps()] == pytest.approx(losses, rel=1e-3)
