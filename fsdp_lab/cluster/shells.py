"""`Shell`: runs a command on each of several hosts at once. `SshShell`: by ssh.

Input goes by pipes, never on a command line, where others could read it. Nothing asks a question: no password, no host key.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from fsdp_lab.cluster import host_script
from fsdp_lab.cluster.errors import StartError

CONNECT_S = 8  # for ssh to reach a host
ALIVE_S, SILENT_S = 5, 15  # between two questions whether a host is there; how long it may not answer
POLL_S = 0.02


@dataclass
class Command:
    """A command on one host, or on all hosts of a job."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    error: IO[bytes]

    @property
    def text(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="replace")

    @property
    def error_text(self) -> str:
        self.error.seek(0)
        return self.error.read().decode(errors="replace").strip()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@dataclass(frozen=True, kw_only=True)
class HostAnswer:
    """What one host answered, or why it did not."""

    value: Any = None
    failure: str = ""


class Shell(ABC):
    """Runs `command` with `sent` on its standard input, on hosts that are known by name."""

    python: str

    @abstractmethod
    def start(self, hosts: Sequence[str], command: Sequence[str], sent: bytes) -> dict[str, Command]:
        """By host, or for several at once under the names joined by commas."""

    @abstractmethod
    def why(self, host: str, running: Command) -> str:
        """Why a command failed, as a sentence that names the host and the way out."""

    def wait(self, running: Mapping[str, Command], limit_s: float, *, stay: bool = False) -> dict[str, HostAnswer]:
        """Replies by host. Waits `limit_s` at most, and can be interrupted. What still runs then is ended, unless it is to
        `stay` after its reply."""
        kept = False
        try:
            end_s = time.monotonic() + limit_s
            while time.monotonic() < end_s and not all(
                c.process.poll() is not None or (stay and _replied(c.text)) for c in running.values()
            ):
                time.sleep(POLL_S)
            said = {name: s for names, c in running.items() for name, s in self._answers(names, c, limit_s).items()}
            kept = stay
            return said
        finally:
            for c in running.values() if not kept else ():
                c.end()

    def _answers(self, host: str, running: Command, limit_s: float) -> dict[str, HostAnswer]:
        if running.process.poll() is None:
            return {host: HostAnswer(failure=f"{host} did not answer within {limit_s:.0f} s")}
        try:
            return {host: HostAnswer(value=host_script.answer(running.text))}
        except ValueError:
            return {host: HostAnswer(failure=self.why(host, running))}

    def script(self, hosts: Sequence[str], what: str, limit_s: float, **arguments: Any) -> dict[str, HostAnswer]:
        """A function of host_script.py on each host."""
        return self.wait(self.start(hosts, [self.python, "-"], host_script.request(what, **arguments)), limit_s)


def started(command: Sequence[str], sent: bytes, environment: Mapping[str, str] | None = None) -> Command:
    """Raises StartError: there is no such program."""
    output, error = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (read when it has ended)
    with tempfile.TemporaryFile() as input_:
        input_.write(sent)
        input_.seek(0)
        pipes: dict[str, Any] = {"stdin": input_, "stdout": output, "stderr": error}
        try:
            own = {**os.environ, **(environment or {})}
            process = subprocess.Popen(command, **pipes, start_new_session=True, env=own)
        except FileNotFoundError:
            why = f"there is no {command[0]} on this machine: install it, or start the kernel where it is"
            raise StartError(why) from None
    return Command(process, output, error)


SSH_FAILURES = {  # what ssh says of the host {host} -> what it means and what to do
    r"Permission denied|Too many authentication failures": "{host} refuses the login ({line}): put your key there with "
    "ssh-copy-id {host}, and load it with ssh-add",
    r"Could not resolve hostname": "the name {host} does not resolve ({line}): give an address, or a Host entry in "
    "~/.ssh/config",
    r"Host key verification failed|REMOTE HOST IDENTIFICATION": "the host key of {host} is not known, or has changed "
    "({line}): log in once by hand, ssh {host}",
    r"Connection (timed out|refused|closed|reset)|No route to host|Network is unreachable|timed out": "{host} cannot be "
    "reached by SSH ({line}): is it up, and is its port right? Ports belong in ~/.ssh/config",
}


def _replied(output: str) -> bool:
    try:
        host_script.answer(output)
    except ValueError:
        return False
    return True


class SshShell(Shell):
    """By ssh, one connection for each command and host. `args`: for ssh, such as ["-F", "config"]."""

    def __init__(self, python: str, args: Sequence[str] = ()) -> None:
        self.python = python
        self._args = list(args)

    def _ssh(self, silent_s: float) -> list[str]:
        """`silent_s`: after which a connection is given up."""
        most = max(1, math.ceil(silent_s / ALIVE_S))
        options = f"-o BatchMode=yes -o ConnectTimeout={CONNECT_S} -o ServerAliveInterval={ALIVE_S}"
        return ["ssh", "-T", *self._args, *options.split(), "-o", f"ServerAliveCountMax={most}"]

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        return [*self._ssh(SILENT_S), host, "--", shlex.join(command)]

    def start(self, hosts: Sequence[str], command: Sequence[str], sent: bytes) -> dict[str, Command]:
        return {host: started(self.command(host, command), sent) for host in hosts}

    def tunnel(self, host: str, ports: Sequence[int], environment: Mapping[str, str], silent_s: float) -> Command:
        """Makes ports of this machine's loopback appear on a host's; runs until it is ended."""
        forwards = [word for port in ports for word in ("-R", f"127.0.0.1:{port}:127.0.0.1:{port}")]
        command = [*self._ssh(silent_s), "-N", "-o", "ExitOnForwardFailure=yes", *forwards, host]
        return started(command, b"", environment)

    def why(self, host: str, running: Command) -> str:
        code, lines = running.process.returncode, running.error_text.splitlines()
        line = next((text for text in reversed(lines) if text.strip()), f"exit code {code}").strip()
        if code == 255:
            for pattern, sentence in SSH_FAILURES.items():
                if matching := next((text.strip() for text in lines if re.search(pattern, text)), ""):
                    return sentence.format(host=host, line=matching)
            return f"ssh to {host} failed: {line}"
        if code in (126, 127):
            hint = "give python=, the path there of a Python in whose environment fsdp_lab or at least its requirements"
            return f"{host} has no {self.python} ({line}): {hint} are installed"
        return f"{host} failed: {line}"
