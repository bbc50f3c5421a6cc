"""What the kernel runs on another host, as text on the standard input of a Python there: `look` before anything starts,
`end` at the end. It imports the standard library alone, since nothing else needs to be installed then.

`request` makes the text, and `answer` finds the reply in what a login shell may print besides."""

from __future__ import annotations

import base64
import glob
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

REPLY = "fsdp_lab-reply:"
MARK = "FSDP_LAB_CLUSTER"  # see base/process.py
PREFIX = "fsdp_lab-"  # of private folders: see detached.py
STATE_PREFIX = f"{PREFIX}state-"  # of folders with what ranks wrote for other ranks; then the token's beginning
TRY_S = 3.0
END_S = 1.0
LINE = 700


# -- in the kernel ---------------------------------------------------------------------------------------------------


def request(what: str, **arguments: Any) -> bytes:
    """The text that runs one of the functions below on a host."""
    with open(__file__, encoding="utf-8") as file:
        text = file.read()
    return f"{text}\nreply({what}(**json.loads({json.dumps(arguments)!r})))\n".encode()


def answer(output: str) -> Any:
    """The reply in a host's output. Raises ValueError if it is not there, or not all of it."""
    pieces: dict[int, str] = {}
    for line in output.splitlines():
        _, is_reply, rest = line.partition(REPLY)
        if is_reply:
            number, of, piece = rest.split(":", 2)
            pieces[int(number)] = piece
            if len(pieces) == int(of):
                return json.loads(base64.b64decode("".join(pieces[i] for i in range(len(pieces)))))
    raise ValueError("no reply")


# -- on the host -----------------------------------------------------------------------------------------------------


def reply(value: dict[str, Any], file: TextIO | None = None) -> None:
    """With the name that Slurm has for this host. In short lines: Slurm breaks those of more than 1,024 bytes."""
    whole = json.dumps({**value, "node": os.environ.get("SLURMD_NODENAME", "")}).encode()
    text = base64.b64encode(whole).decode()
    pieces = [text[i : i + LINE] for i in range(0, len(text), LINE)]
    for i, piece in enumerate(pieces):
        print(f"{REPLY}{i}:{len(pieces)}:{piece}", flush=True, file=file)


def host_mark(token: str) -> str:
    """The token that marks a cluster's engines on this host."""
    space = "/proc/self/ns/net"
    network = os.readlink(space).strip("net:[]") if os.path.exists(space) else ""
    return f"{token}.{network}"


def look(packages: Sequence[str], endpoints: Sequence[Sequence[Any]], token: str, code: str) -> dict[str, Any]:
    """What this host has, and why it does not reach each of the kernel's endpoints, (address, port).

    `code`: a folder from where fsdp_lab is imported, if it is there."""
    if code:
        sys.path.insert(0, os.path.expanduser(code))
    with ThreadPoolExecutor(16) as pool:
        unreached = list(pool.map(lambda endpoint: try_to_connect(endpoint[0], endpoint[1], token), endpoints))
    return {
        "name": socket.gethostname(),
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "packages": {name: version(name) for name in packages},
        "code": code_digest(),
        "gpus": gpus(),
        "unreached": unreached,
    }


def version(package: str) -> str:
    """Returns that of an installed package; "" for others."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def code_digest() -> str:
    """Returns the digest of fsdp_lab's source on this host, of names and content; "" if there is none."""
    for folder in sys.path:
        root = os.path.join(folder, "fsdp_lab")
        if os.path.isfile(os.path.join(root, "__init__.py")):
            return folder_digest(root)
    return ""


def folder_digest(root: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(glob.glob(os.path.join(root, "**", "*.py"), recursive=True)):
        with open(path, "rb") as file:
            digest.update(os.path.relpath(path, root).encode() + b"\0" + file.read())
    return digest.hexdigest()[:16]


def gpus() -> int:
    """How many NVIDIA GPUs the driver lists."""
    if not shutil.which("nvidia-smi"):
        return 0
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def try_to_connect(address: str, port: int, token: str) -> str:
    """Why this host does not reach who listens there for the token, and answers with its digest; "" if it does."""
    sent = bytes.fromhex(token)
    try:
        with socket.create_connection((address, port), timeout=TRY_S) as connection:
            connection.sendall(sent)
            return "" if exactly(connection, len(sent)) == digest_of(sent) else "another program answers there"
    except TimeoutError:
        return "no answer"
    except OSError as e:
        return e.strerror or str(e)


def digest_of(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()[: len(token)]


def exactly(connection: socket.socket, n: int) -> bytes:
    """Raises OSError if it ends before."""
    data = b""
    while len(data) < n:
        part = connection.recv(n - len(data))
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
    return data


def status(token: str) -> dict[str, Any]:
    """Which engines of a cluster run, and what is known of those that have ended: exit codes and last lines, by pid."""
    known: dict[str, Any] = {"running": list(marked(host_mark(token))), "exits": {}, "logs": {}}
    for _, kept in kept_files(host_mark(token)):
        known["exits"].update(kept["exits"])
        known["logs"].update({pid: last_lines(path) for pid, path in kept["logs"].items()})
    return known


def kept_files(token: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(folder, content) of the files that agents of this token have written (host_agent.py)."""
    for path in glob.glob(os.path.join(tempfile.gettempdir(), PREFIX + "*", "exits.json")):
        try:
            if os.stat(path).st_uid == os.geteuid():
                with open(path, encoding="utf-8") as file:
                    kept = json.load(file)
                if kept["token"] == token:
                    yield os.path.dirname(path), kept
        except OSError:
            continue


def last_lines(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 8192))
            return "\n".join(file.read().decode(errors="replace").strip().splitlines()[-12:])
    except OSError:
        return ""


def end(token: str) -> dict[str, Any]:
    """Ends a cluster's engines and their agents on this host, at once, and removes their private folders."""
    wanted, deadline = host_mark(token), time.monotonic() + END_S
    kept = list(kept_files(wanted))
    for agent in [k["agent"] for _, k in kept]:
        try:
            with open(f"/proc/{agent}/cmdline", "rb") as file:
                if b"host_agent" in file.read():
                    kill([agent])
        except OSError:
            continue
    while (left := list(marked(wanted))) and time.monotonic() < deadline:
        kill(left)
        time.sleep(0.02)
    for folder, _ in kept:
        shutil.rmtree(folder, ignore_errors=True)
    remove_states(token)
    return {"left": left}


def remove_states(token: str) -> None:
    """The folders with what ranks wrote for other ranks."""
    for folder in glob.glob(os.path.join(tempfile.gettempdir(), f"{STATE_PREFIX}{token[:8]}-*")):
        shutil.rmtree(folder, ignore_errors=True)


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue


def marked(token: str) -> Iterator[int]:
    """Processes with the token in their environment, except this one and zombies."""
    wanted = f"{MARK}={token}".encode()
    for path in glob.glob("/proc/[0-9]*/environ"):
        pid = int(path.split("/")[2])
        try:
            with open(path, "rb") as file:
                if pid != os.getpid() and wanted in file.read().split(b"\0"):
                    with open(f"/proc/{pid}/stat") as state:
                        if state.read().rpartition(")")[2].split()[0] != "Z":
                            yield pid
        except OSError:
            continue


def unpack(data: str, folder: str) -> dict[str, Any]:
    """Writes a package that was sent into a folder of this user's, which no other can read."""
    import io
    import tarfile

    target = os.path.expanduser(folder)
    os.makedirs(target, mode=0o700, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(data)), mode="r:gz") as archive:
        archive.extractall(target, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(target)
    return {"folder": target}


def install(requirements: Sequence[str]) -> dict[str, Any]:
    """Installs packages into this Python."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", *requirements]
    done = subprocess.run(command, capture_output=True, text=True)
    return {"code": done.returncode, "said": done.stderr.strip()[-500:]}
