"""`fsdp-lab lab`: JupyterLab on the notebooks, until Ctrl-C; and `fsdp-lab kernel install`, for a JupyterLab that runs from
another environment than the kernel, as on most cloud machines.

That JupyterLab serves the browser part of the widgets, so two extensions have to be installed in its environment, which
`missing` and `running_servers` look at.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import getpass
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_lab.cli.console import Refused, signals_ignored

FIRST_NOTEBOOK = "01_live_dashboard.ipynb"
DEFAULT_PORT = 8888
LOOPBACK = "127.0.0.1"
SHIPPED = ("*.ipynb", "*.png", "course/*.py", "solutions/*.py")
DEFAULTS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--port", type=int, help=f"the port to listen on (default: {DEFAULT_PORT}, or the next free one)")
    add("--ip", default=LOOPBACK, help="the address to listen on (default: %(default)s)")
    add("--no-browser", action="store_true", help="do not open a browser here")
    add("--dir", type=Path, help="the folder to open; missing notebooks are copied into it")


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("jupyterlab") is None:
        raise Refused(f"JupyterLab is not installed for {sys.executable}; pip install jupyterlab")
    port = free_port(args.ip, args.port)
    folder = notebooks_folder(args.dir)
    token = secrets.token_hex(24)
    if is_root():
        print("Running as root, as is usual in a container: JupyterLab is started with --allow-root.")
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform in ("darwin", "win32")
    with jupyterlab(folder, args.ip, port, token, browser=bool(display) and not args.no_browser) as server:
        wait_until_up(server, args.ip, port)
        refuse_without_token(args.ip, port)
        print(announcement(folder, args.ip, port, token), flush=True)
        code = server.wait()
    if code:
        print(f"fsdp-lab: JupyterLab ended with exit code {code}", file=sys.stderr)
    return 1 if code else 0


def notebooks_folder(wanted: Path | None) -> Path:
    """The repository's notebooks, or copies of them in a writable folder. Raises Refused."""
    source = shipped_notebooks()
    if source is None:
        raise Refused("the notebooks are neither beside the package nor in its installation; install fsdp-lab again")
    if wanted is None and os.access(source, os.W_OK) and (source.parent / "pyproject.toml").is_file():
        return source
    folder = (wanted or Path.cwd() / "fsdp-lab-notebooks").expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in [f for pattern in SHIPPED for f in source.glob(pattern)]:
            copy = folder / file.relative_to(source)
            if not copy.exists():  # never overwrite a changed notebook
                copy.parent.mkdir(exist_ok=True)
                shutil.copy(file, copy)
    except OSError as e:
        why = e.strerror or str(e)
        raise Refused(f"cannot write the notebooks to {folder} ({why}); name another folder: --dir DIR") from e
    return folder


def shipped_notebooks() -> Path | None:
    """The notebooks of the package: in the repository, or where the installation has put them."""
    beside = Path(__file__).resolve().parents[2] / "notebooks"
    if (beside / FIRST_NOTEBOOK).is_file():
        return beside
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("fsdp-lab") or []:
            if file.name == FIRST_NOTEBOOK:
                return Path(os.path.normpath(Path(str(file.locate())))).parent
    return None


def free_port(ip: str, wanted: int | None) -> int:
    """The wanted port; by default the first free one from 8888 on. Raises Refused."""
    if wanted is not None and not 0 < wanted < 65536:
        raise Refused(f"--port {wanted} is not a port; give one between 1 and 65535")
    first = wanted or DEFAULT_PORT
    problem = port_problem(ip, first)
    if problem is None:
        return first
    others = range(max(first, 1024) + 1, min(first + 200, 65536))
    free = next((port for port in others if port_problem(ip, port) is None), None)
    offer = f"; {free} is free: --port {free}" if free else "; no port near it is free"
    if wanted is not None or free is None:
        raise Refused(f"port {first} {problem}{offer}")
    print(f"Port {first} {problem}: taking {free}.")
    return free


def port_problem(ip: str, port: int) -> str | None:
    """Says why no server can listen on the port, or None. Raises Refused for an address that is not of this machine."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror:
        hint = f"{LOOPBACK} is only this machine, 0.0.0.0 all its networks"
        raise Refused(f"--ip {ip} is not an address; {hint}") from None
    except OSError as e:
        if e.errno == errno.EADDRNOTAVAIL:
            raise Refused(f"--ip {ip} is not an address of this machine; try {LOOPBACK} or 0.0.0.0") from None
        known = {errno.EADDRINUSE: "is in use", errno.EACCES: "is reserved for root"}
        return known.get(e.errno or 0, f"fails: {e.strerror}")
    return None


def reachable(ip: str) -> str:
    """The address by which this machine reaches a server that listens on `ip`."""
    return {"0.0.0.0": LOOPBACK, "": LOOPBACK, "*": LOOPBACK, "::": "[::1]"}.get(ip, f"[{ip}]" if ":" in ip else ip)


def is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


@contextlib.contextmanager
def jupyterlab(folder: Path, ip: str, port: int, token: str, *, browser: bool) -> Iterator[subprocess.Popen[bytes]]:
    """JupyterLab as a child process in its own session: Ctrl-C reaches only this process, which ends the server."""
    command = [
        *(sys.executable, "-m", "jupyterlab", "--Application.log_level=ERROR"),
        *(f"--ServerApp.ip={ip}", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
        *(f"--ServerApp.root_dir={folder}", f"--LabApp.default_url=/lab/tree/{FIRST_NOTEBOOK}"),
        f"--ServerApp.open_browser={browser}",
        *("--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"),
        *(["--allow-root"] if is_root() else []),
    ]
    with tempfile.TemporaryDirectory(prefix="fsdp-lab-") as config:
        # Defaults, which the user's settings precede: else a question about news covers a corner of the first notebook.
        defaults = Path(config, "labconfig", "default_setting_overrides.json")
        defaults.parent.mkdir()
        defaults.write_text(json.dumps(DEFAULTS), encoding="utf-8")
        # Every user of the machine can read a command line, so the token is in the environment; and the notebooks' kernel is
        # this environment's, even if the user's folder has one of the same name.
        environment = {
            **os.environ,
            "JUPYTER_TOKEN": token,
            "JUPYTER_PREFER_ENV_PATH": "1",
            "JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, [config, os.environ.get("JUPYTER_CONFIG_PATH")])),
        }
        server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            yield server
        finally:
            with signals_ignored():
                end(server)


def end(server: subprocess.Popen[bytes], timeout_s: float = 10) -> None:
    """Terminates the server, which stops its kernels; then kills remaining descendants, except persistent ranks."""
    import psutil

    from fsdp_lab.cluster.detached import detached_pids

    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(server.pid).children(recursive=True)
    if server.poll() is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout_s)
    _, left = psutil.wait_procs(family, timeout=3)  # kernels end their ranks by themselves, a moment after the server
    staying = detached_pids() if left else set()
    for process in [p for p in left if p.pid not in staying]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if server.poll() is None:
        server.kill()
        server.wait()


def wait_until_up(server: subprocess.Popen[bytes], ip: str, port: int, timeout_s: float = 90) -> None:
    """Waits until the server answers, so that the printed URL works. Raises Refused if it ends or does not answer."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            raise Refused(f"JupyterLab did not start (exit code {server.returncode}); see its output above")
        with (
            contextlib.suppress(OSError, urllib.error.URLError),
            urllib.request.urlopen(f"http://{reachable(ip)}:{port}/api", timeout=2),
        ):
            return
        time.sleep(0.1)
    raise Refused(f"JupyterLab did not answer on port {port} within {timeout_s:.0f} s; it has been ended")


def refuse_without_token(ip: str, port: int) -> None:
    """Raises Refused if the server accepts requests without the token, because another configuration overrides ours."""
    try:
        urllib.request.urlopen(f"http://{reachable(ip)}:{port}/api/kernels", timeout=10).close()
    except OSError:  # 403, as it should be
        return
    raise Refused(
        "a Jupyter configuration on this machine turns the token off, and anybody who reaches the port could run code; "
        "`jupyter server --show-config` names the file: remove its token, password and authentication lines"
    )


def announcement(folder: Path, ip: str, port: int, token: str) -> str:
    lines = [
        f"  JupyterLab     http://{reachable(ip)}:{port}/lab/tree/{FIRST_NOTEBOOK}?token={token}",
        f"  notebooks      {folder}",
        f"  from afar      {tunnel(port, os.environ, user(), socket.gethostname())}",
        "                 (on your own computer, while this runs; then open the URL above there)",
    ]
    if reachable(ip) == LOOPBACK and ip != LOOPBACK:
        lines.append("  open to all    every network of this machine reaches it; only the token protects it")
    return "\n".join(["", *lines, "", "  Ctrl-C ends JupyterLab, its kernels and their ranks.", ""])


def tunnel(port: int, environment: Mapping[str, str], user: str, host: str) -> str:
    """The ssh command that forwards the port to another computer, with the address of the current SSH session."""
    option = ""
    ssh = environment.get("SSH_CONNECTION", "").split()  # client address, client port, server address, server port
    if len(ssh) == 4:
        host, option = ssh[2], "" if ssh[3] == "22" else f"-p {ssh[3]} "
    return f"ssh -N {option}-L {port}:{LOOPBACK}:{port} {user}@{host}"


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "user"


# -- `fsdp-lab kernel install` ----------------------------------------------------------------------------------------


def add_kernel_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    add = actions.add_parser("install", help="register the kernel", allow_abbrev=False).add_argument
    add("--name", default="fsdp-lab", help="the kernel's name (default: %(default)s)")
    add("--prefix", type=Path, help="an environment to register it in (default: the user's own folder)")


def install_kernel(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("ipykernel") is None:
        raise Refused(f"ipykernel is not installed for {sys.executable}; pip install ipykernel")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", args.name):  # Jupyter would replace the folder ".."
        hint = "use letters and digits, with '.', '_' and '-' between"
        raise Refused(f"--name {args.name!r} is not a kernel's name; {hint}")
    where = register(args.name, args.prefix)
    print(f"Registered: the kernel {args.name!r} runs {sys.executable}\n  in {where}")
    print(f"Choose it in the notebook's menu: Kernel, Change Kernel, {display_name()}.\n")
    print("\n".join(what_servers_need()))
    return 0


def display_name() -> str:
    torch = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        torch = f", torch {importlib.metadata.version('torch')}"
    return f"fsdp_lab (Python {platform.python_version()}{torch})"


def register(name: str, prefix: Path | None) -> str:
    """Writes the kernel spec and returns its folder. Raises Refused if it cannot be written."""
    from ipykernel.kernelspec import install

    into: dict[str, Any] = {"user": True} if prefix is None else {"prefix": str(prefix)}
    try:
        return str(install(**into, kernel_name=name, display_name=display_name()))
    except OSError as e:
        where = e.filename or prefix or "the user's Jupyter folder"
        raise Refused(f"cannot write {where} ({e.strerror}); choose another place with --prefix DIR") from e


def what_servers_need() -> list[str]:
    """Lines on what each running server of another environment lacks; if none runs, what any of them needs."""
    others = [server for server in running_servers() if not server.ours]
    if not others:
        lines = ["The JupyterLab server that shows the notebooks needs two packages in ITS environment:"]
        return [*lines, "  pip install " + " ".join(f"'{e.requirement}'" for e in NEEDED)]
    lines = []
    for server in others:
        lacking = missing(server.prefix)
        state = "lacks:" if lacking else "has what it needs."
        lines.append(f"The server on port {server.port} ({server.prefix}) {state}")
        if lacking:
            lines += [f"  {server.install_command(lacking)}", "  then reload its page in the browser"]
    return lines


@dataclass(frozen=True, kw_only=True)
class Extension:
    """A prebuilt JupyterLab extension: the pip requirement that brings it, and its folder below `labextensions`."""

    requirement: str
    folder: str


NEEDED = (
    Extension(requirement="anywidget>=0.9.18", folder="anywidget"),
    Extension(requirement="jupyterlab_widgets>=3", folder="@jupyter-widgets/jupyterlab-manager"),
)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running Jupyter server."""

    pid: int
    port: int
    python: str  # the interpreter that runs it
    prefix: Path  # its environment

    @property
    def ours(self) -> bool:
        """Tells whether it runs from this environment."""
        return self.prefix.resolve() == Path(sys.prefix).resolve()

    def install_command(self, missing: Sequence[Extension]) -> str:
        return " ".join([self.python, "-m pip install", *(f"'{extension.requirement}'" for extension in missing)])


def missing(prefix: Path) -> list[Extension]:
    """The required extensions that JupyterLab of that environment would not find."""
    data = [prefix / "share/jupyter", Path.home() / ".local/share/jupyter", Path("/usr/local/share/jupyter")]
    data += [Path(p) for p in os.environ.get("JUPYTER_PATH", "").split(os.pathsep) if p]
    return [e for e in NEEDED if not any((d / "labextensions" / e.folder).is_dir() for d in data)]


def running_servers() -> list[Server]:
    """The Jupyter servers of this user, from the files in Jupyter's runtime folder."""
    try:
        import psutil
        from jupyter_core.paths import jupyter_runtime_dir
    except ImportError:
        return []
    servers = []
    for file in sorted(Path(jupyter_runtime_dir()).glob("jpserver-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError, psutil.Error):
            record = json.loads(file.read_text(encoding="utf-8"))
            python = psutil.Process(record["pid"]).cmdline()[0]
            prefix = Path(python).parents[1]  # not resolved: a virtual environment's python is a link to its base
            servers.append(Server(pid=record["pid"], port=record["port"], python=python, prefix=prefix))
    return servers
