"""Drills over hosts: something befalls a host, a cable or a kernel while real ranks train on two hosts.

`python -m tests.hosts.drills --count 40` runs them in turn and prints one line each: what was done, and what became of it.
A drill ends well if the run goes on from where it was, with the losses of an undisturbed run, or ends with a sentence that
names the host or the job; and if afterwards nothing is left on any host.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_lab.lab import Lab
from fsdp_lab.runs import Run, RunState
from fsdp_lab.runs.recovery import RecoveryPolicy
from tests.hosts.machines import Machine, Site, Slurm, SshServers, end, eventually, kept_folders, site

WORK = {"model": "gpt2-1m", "seq_len": 32, "micro_batch": 2, "sharding": "no_shard"}  # each rank holds all of the state
STEPS, BEGUN = 60, 4
CUT_S = 5.0  # after which a host out of reach is given up
HEALED_S = 2.5
LEFT_S = 30.0
KERNEL = """
import sys
from fsdp_lab.lab import Lab
lab = Lab.ssh("alpha,beta", ranks_per_host=1, ssh_args=["-F", sys.argv[1]], history=False, progress=False, cut_s=5,
              persist=sys.argv[2] == "persist")
run = lab.run(model="gpt2-1m", seq_len=32, sharding="no_shard")
while run.step < 3:
    pass
print("trains", flush=True)
run.wait()
"""


@dataclass
class Stage:
    """Two hosts with SSH and Slurm."""

    made: Site
    ssh: SshServers
    slurm: Slurm
    undisturbed: dict[int, float] = field(default_factory=dict)  # step -> loss

    @property
    def beta(self) -> Machine:
        return self.made.machines[1]

    def left(self) -> list[int]:
        """Processes on the hosts that are neither sshd nor Slurm's."""
        found = []
        for machine in self.made.machines:
            for pid in machine.pids:
                words = _words(pid)
                if words and not any(name in words for name in ("sshd", "slurmd", "slurmstepd")):
                    found.append(pid)
        return found


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@contextmanager
def stage(folder: Path, number: int = 9) -> Iterator[Stage]:
    with site(["alpha", "beta"], number) as made:
        for name in ("ssh", "slurm"):
            (folder / name).mkdir()
        ssh = SshServers(made, folder / "ssh", pinned=True)
        slurm = Slurm(made, folder / "slurm")
        before = os.environ.get("SLURM_CONF")
        os.environ |= slurm.environment
        try:
            yield Stage(made, ssh, slurm)
        finally:
            os.environ.pop("SLURM_CONF")
            if before is not None:
                os.environ["SLURM_CONF"] = before
            slurm.close()
            ssh.close()


def losses(run: Run) -> dict[int, float]:
    return {step.number: step.mean_loss for step in run.events.steps()}


# -- the drills --------------------------------------------------------------------------------------------------------


def recovered(stage: Stage, befall: Callable[[Lab], None], restore: Callable[[], None]) -> str:
    """A run with recovery on fewer ranks, to which something happens."""
    with lab_on(stage) as lab:
        run = lab.run(**WORK, steps=STEPS, recover=RecoveryPolicy(how="auto", ranks="fewer"))
        try:
            eventually(lambda: run.step >= BEGUN or run.done, 90, "it trains")
            befall(lab)
            run.wait(120)
        finally:
            restore()
        assert run.state is RunState.FINISHED, run
        told = losses(run)
        assert told.keys() == stage.undisturbed.keys()
        wrong = [s for s, loss in stage.undisturbed.items() if abs(told[s] - loss) > 1e-4 * loss]
        assert not wrong, f"other losses at {wrong}"
        if run.incidents:
            assert any(name in run.incidents[0].sentence for name in ("alpha", "beta")), run.incidents[0].sentence
            return run.incidents[0].words
        return f"went on, {lab.ranks} ranks"


def lab_on(stage: Stage, *, persist: bool = False) -> Lab:
    return Lab.ssh("alpha,beta", ranks_per_host=1, ssh_args=["-F", str(stage.ssh.config)], history=False, progress=False,
                   cut_s=CUT_S, persist=persist)  # fmt: skip


def host_killed(stage: Stage) -> str:
    """The host loses its power: its cable is dead, and so is all that ran there."""
    beta = stage.beta

    def befall(lab: Lab) -> None:
        beta.cable("down")
        end([pid for pid in beta.pids if "slurm" not in _words(pid)])

    def restore() -> None:
        beta.cable("up")
        stage.ssh.servers["beta"].wait(10)
        stage.ssh.servers["beta"] = stage.ssh.start(beta)
        eventually(lambda: stage.ssh.answers(beta), 10, "sshd")

    return recovered(stage, befall, restore)


def cable_cut(stage: Stage) -> str:
    return recovered(stage, lambda lab: stage.beta.cable("down"), lambda: stage.beta.cable("up"))


def cable_heals(stage: Stage) -> str:
    def befall(lab: Lab) -> None:
        stage.beta.cable("down")
        time.sleep(HEALED_S)
        stage.beta.cable("up")

    said = recovered(stage, befall, lambda: None)
    assert said.startswith("went on, 2 ranks"), said
    return said


def sshd_killed(stage: Stage) -> str:
    beta = stage.beta

    def restore() -> None:
        stage.ssh.servers["beta"] = stage.ssh.start(beta)
        eventually(lambda: stage.ssh.answers(beta), 10, "sshd")

    def befall(lab: Lab) -> None:
        stage.ssh.servers["beta"].kill()
        stage.ssh.servers["beta"].wait(10)

    said = recovered(stage, befall, restore)
    assert said.startswith("went on, 2 ranks"), said
    return said


def job_cancelled(stage: Stage) -> str:
    with Lab.slurm(2, ranks_per_host=1, history=False, progress=False, cut_s=CUT_S) as lab:
        run = lab.run(**WORK)
        eventually(lambda: run.step >= BEGUN or run.done, 90, "it trains")
        (job,) = stage.slurm.jobs()
        subprocess.run(["scancel", job], check=True, timeout=20)
        eventually(lambda: run.done, 60, "the run is over")
        assert run.state is RunState.FAILED and f"job {job} (cancelled)" in run.reason, run.reason
        return run.reason


def kill_kernel(stage: Stage, how: str) -> None:
    """Kills a kernel whose ranks train."""
    words = [sys.executable, "-c", KERNEL, str(stage.ssh.config), how]
    kernel = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert kernel.stdout is not None and kernel.stdout.readline() == "trains\n"
    assert stage.left()
    kernel.kill()
    kernel.wait(10)


def kernel_killed(stage: Stage) -> str:
    kill_kernel(stage, "end")
    return "the kernel was killed."


def kernel_returns(stage: Stage) -> str:
    """Its ranks were to stay, and the next one goes on with them."""
    kill_kernel(stage, "persist")
    with lab_on(stage, persist=True) as lab:
        assert lab.attached
        run = lab.run(lab.spec, steps=5, fresh=False).wait(60)
        assert run.state is RunState.FINISHED and run.switches[0].carried and run.switches[0].step >= 3, run
        return f"the next kernel went on at step {run.switches[0].step}."


DRILLS: Mapping[str, Callable[[Stage], str]] = {
    d.__name__: d
    for d in (host_killed, cable_heals, cable_cut, sshd_killed, job_cancelled, kernel_killed, kernel_returns)
}


def prepare(stage: Stage) -> None:
    with lab_on(stage) as lab:
        stage.undisturbed = losses(lab.run(**WORK, steps=STEPS).wait(120))


def drill(stage: Stage, name: str) -> str:
    """Runs a drill, and waits until the hosts are clean. A host that lost its power keeps its temporary folder."""
    before = kept_folders()
    said = DRILLS[name](stage)
    begin_s = time.monotonic()
    eventually(lambda: not stage.left() and not stage.slurm.jobs(), LEFT_S, "the hosts are clean")
    left = kept_folders() - before
    assert not left or name == "host_killed", left
    for file in left:
        shutil.rmtree(Path(file).parent)
    return f"{said} Clean after {time.monotonic() - begin_s:.1f} s."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40)
    count, failed = parser.parse_args().count, 0
    with tempfile.TemporaryDirectory() as folder, stage(Path(folder)) as made:
        prepare(made)
        for i in range(count):
            name, begin_s = list(DRILLS)[i % len(DRILLS)], time.monotonic()
            try:
                said = drill(made, name)
            except AssertionError as e:
                failed, said = failed + 1, f"FAILED: {e}"
            print(f"{i + 1:2} {name:14} {time.monotonic() - begin_s:5.1f} s  {said}", flush=True)
    print(f"{count - failed} of {count} drills ended well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
