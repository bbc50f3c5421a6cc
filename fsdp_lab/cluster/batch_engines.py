"""`SlurmEngines`: engines on the hosts of a job of Slurm's, which is asked for here and given back at the end.

Note: a job of Slurm's. It is a bare allocation (salloc --no-shell). In it every command is a step (srun), whose input
reaches all hosts, so neither a shared folder nor a file with keys is needed. An agent is a step that stays as long as its
engines."""

import contextlib
import getpass
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_lab.base.process import MARK
from fsdp_lab.cluster import StartError, host_script
from fsdp_lab.cluster.detached import EndCommand, write_end_commands
from fsdp_lab.cluster.host_engines import END_S, START_S, Command, HostAnswer, HostEngines, Shell, started
from fsdp_lab.cluster.hosts import SlurmHosts

ASK_S = 20.0  # for Slurm to answer
LOOK_AGAIN_S = 1.0  # between two looks at the queue


class SlurmShell(Shell):
    """By srun in a job: one command for all hosts.

    srun does not carry the mark of what the guardian ends here: when srun is ended, its tasks are killed at once, and an
    agent could not remove its folder. It ends with its tasks, and these with the job or when the controller is gone."""

    def __init__(self, python: str, job: str) -> None:
        self.python, self.job = python, job

    def start(self, hosts: Sequence[str], command: Sequence[str], sent: bytes) -> dict[str, Command]:
        n, names = len(hosts), ",".join(hosts)
        srun = f"srun --jobid={self.job} --overlap --nodes={n} --ntasks={n} --ntasks-per-node=1 --nodelist={names} "
        srun += "--cpu-bind=none --mem=0 --label --input=all --unbuffered --quiet --kill-on-bad-exit=0"
        return {names: started([*srun.split(), *command], sent)}

    def _answers(self, host: str, command: Command, limit_s: float) -> dict[str, HostAnswer]:
        """The reply of each host, in lines that begin with the number of its task."""
        tasks: dict[str, list[str]] = {}
        for line in command.text.splitlines():
            task, _, rest = line.partition(": ")
            tasks.setdefault(task.strip(), []).append(rest)
        answers: dict[str, HostAnswer] = {}
        for lines in tasks.values():
            with contextlib.suppress(ValueError):
                value = host_script.answer("\n".join(lines))
                answers[value["node"]] = HostAnswer(value=value)
        hosts = host.split(",")
        late = command.process.poll() is None and len(answers) < len(hosts)
        failure = f"no answer within {limit_s:.0f} s" if late else self.why(host, command)
        return {name: answers.get(name) or HostAnswer(failure=f"{name}: {failure}") for name in hosts}

    def why(self, host: str, command: Command) -> str:
        lines = [line.strip() for line in command.error_text.splitlines() if line.strip()]
        if any("No such file" in line and self.python in line for line in lines):
            return f"there is no {self.python}: give python=, the path of Python on the hosts"
        return next((line for line in lines if "error" in line), lines[0] if lines else "srun ended without a reply")


class SlurmEngines(HostEngines):
    _asked: SlurmHosts
    shell: SlurmShell
    _job = ""

    def _allocate(self) -> list[str]:
        self._steps: list[Command] = []  # with agents
        write_end_commands(self._folder, self._end_commands())  # before there is a job
        self._report_stage("asking Slurm for hosts", 0, self._asked.hosts)
        command = ["salloc", "--no-shell", f"--job-name={self._job_name}", *self._asked.request]
        asked = started(command, b"", {MARK: self.token})
        try:
            self._wait_in_queue(asked)
        finally:
            asked.end()
        nodes = ask_slurm("squeue", "-h", "-j", self._job, "-o", "%N")
        names = ask_slurm("scontrol", "show", "hostnames", nodes).split()
        self._report_stage(f"granted: job {self._job}", len(names), len(names))
        self.shell = SlurmShell(self._asked.path, self._job)
        return names

    @property
    def _where(self) -> dict[str, Any]:
        return super()._where | {"job": self._job}

    def _take_over(self, where: Mapping[str, Any]) -> None:
        super()._take_over(where)
        self._job, self._steps = where["job"], []
        self.shell = SlurmShell(self._asked.path, self._job)

    @property
    def _job_name(self) -> str:
        return f"fsdp_lab-{self.token}"

    def _wait_in_queue(self, asked: Command) -> None:
        """Raises StartError: Slurm refuses the job."""
        looked_s = 0.0
        while asked.process.poll() is None:
            time.sleep(0.05)
            pending = re.search(r"job allocation (\d+)", asked.error_text)
            if pending is not None and time.monotonic() - looked_s > LOOK_AGAIN_S:
                self._job, looked_s = pending.group(1), time.monotonic()
                with contextlib.suppress(StartError):  # Slurm may be busy, and the job keeps its place
                    state, _, reason = ask_slurm("squeue", "-h", "-j", self._job, "-o", "%T|%r").partition("|")
                    stage = f"job {self._job} is {state.lower() or 'submitted'} ({reason})"
                    self._report_stage(stage, 0, self._asked.hosts)
        granted = re.search(r"Granted job allocation (\d+)", asked.error_text)
        if granted is None or asked.process.returncode:  # a granted job is revoked if its hosts do not become ready
            lines = [line.partition("error:")[2].strip() or line for line in asked.error_text.splitlines()]
            raise StartError(f"Slurm refuses the job: {lines[-1] if lines else 'salloc says nothing'}")
        self._job = granted.group(1)

    def _agents(self, counts: Mapping[str, int]) -> dict[str, HostAnswer]:
        running: dict[str, Command] = {}
        for name, n in counts.items():
            running |= self._start_agent(name, n, stay=True)
        said = self.shell.wait(running, START_S, stay=True)
        for name, step in running.items():
            if said[name].failure:
                step.end()
            else:
                self._steps.append(step)
        return said

    def _end_all(self) -> bool:
        super()._end_all()
        with contextlib.suppress(StartError):
            for command, _ in self._end_commands():
                ask_slurm(*command)
        deadline, left = time.monotonic() + END_S, "unknown"
        while self._job and left and time.monotonic() < deadline:
            with contextlib.suppress(StartError):
                left = ask_slurm("squeue", "-h", "-j", self._job, "-o", "%T")
            time.sleep(0.05 if left else 0)
        for step in self._steps:
            step.end()
        return not (self._job and left)

    def _end_commands(self) -> list[EndCommand]:
        return [(["scancel", f"--name={self._job_name}", f"--user={getpass.getuser()}"], "")]


def ask_slurm(*command: str) -> str:
    """What a command of Slurm's prints. Raises StartError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S)
    except FileNotFoundError:
        lacks = f"there is no {command[0]} on this machine"
        raise StartError(f"{lacks}: start the kernel on a login node of Slurm's") from None
    except subprocess.TimeoutExpired:
        raise StartError(f"Slurm did not answer {command[0]} within {ASK_S:.0f} s") from None
    if done.returncode and not ("Invalid job id" in done.stderr and command[0] == "squeue"):
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise StartError(f"{command[0]} failed: {said.splitlines()[-1]}")
    return done.stdout.strip()
