"""`fsdp-lab lab`: JupyterLab on the notebooks, until Ctrl-C; and `fsdp-lab kernel install`, for a JupyterLab that runs from
another environment than the kernel, as on most cloud machines.

That JupyterLab serves the browser part of the widgets, so two extensions have to be installed in its environment, which
`missing` and `running_servers` look at."""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import site
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_lab.cli.console import Refused, signals_ignored

FIRST_NOTEBOOK, COURSE = "01_live_dashboard.ipynb", "00_the_course.ipynb"
DEFAULT_PORT = 8888
LOOPBACK = "127.0.0.1"
SHIPPED = ("*.ipynb", "*.md", "*.png", "course/*.py", "solutions/*.py")
START_S = 90.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--port", type=int, help=f"the port to listen on (default: {DEFAULT_PORT}, or a free one above)")
    add("--ip", default=LOOPBACK, help="the address to listen on (default: %(default)s)")
    add("--no-browser", action="store_true", help="do not open a browser here")
    copies = (
        "the folder to open, into which missing notebooks are copied (default: fsdp-lab-notebooks here, or at home)"
    )
    add("--dir", type=Path, help=copies)
    add("--learner", action="store_true", help="begin at the course, and copy neither teacher.ipynb nor solutions")


def run(args: argparse.Namespace) -> int:
    folder, token = notebooks_folder(args.dir, learner=args.learner), secrets.token_hex(24)
    first = COURSE if args.learner else FIRST_NOTEBOOK
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform in ("darwin", "win32")
    with jupyterlab(folder, first, args.ip, args.port, token, browser=bool(display) and not args.no_browser) as server:
        url = url_of(server)
        refuse_without_token(url)
        print(announcement(folder, url, token, first), flush=True)
        code = server.wait()
    if code:
        print(f"fsdp-lab: JupyterLab ended with exit code {code}", file=sys.stderr)
    return 1 if code else 0


def notebooks_folder(wanted: Path | None, *, learner: bool = False) -> Path:
    """Copies of the notebooks: in `wanted`, or in fsdp-lab-notebooks here, or, in the repository, in the home folder: what
    notebooks write is no part of it. Raises Refused. `learner`: without the answers."""
    repository = Path(__file__).resolve().parents[2]
    installed = [Path(base, "share/fsdp_lab") for base in (sys.prefix, site.getuserbase())]
    known = [place / "notebooks" for place in (repository, *installed)]
    source = next((folder for folder in known if (folder / FIRST_NOTEBOOK).is_file()), None)
    if source is None:
        raise Refused("the notebooks are neither beside the package nor in its installation; install fsdp-lab again")
    shipped = [file for pattern in SHIPPED for file in source.glob(pattern)]
    if learner:
        shipped = [file for file in shipped if file.name != "teacher.ipynb" and file.parent.name != "solutions"]
    place = Path.home() if Path.cwd().is_relative_to(source.parent) else Path.cwd()
    folder = (wanted or place / "fsdp-lab-notebooks").expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in shipped:
            copy = folder / file.relative_to(source)
            if not copy.exists():  # never overwrite a changed notebook
                copy.parent.mkdir(exist_ok=True)
                shutil.copy(file, copy)
    except OSError as e:
        why = e.strerror or str(e)
        raise Refused(f"cannot write the notebooks to {folder} ({why}); name another folder: --dir DIR") from e
    return folder


@contextlib.contextmanager
def jupyterlab(
    folder: Path, first: str, ip: str, port: int | None, token: str, *, browser: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """JupyterLab as a child process in its own session: Ctrl-C reaches only this process, which ends the server."""
    import zmq

    command = [
        *(sys.executable, "-m", "jupyterlab", "--Application.log_level=ERROR", "--allow-root"),
        *(f"--ServerApp.ip={ip}", f"--ServerApp.port={port or DEFAULT_PORT}"),
        *(f"--ServerApp.root_dir={folder}", f"--LabApp.default_url=/lab/tree/{first}"),
        f"--ServerApp.open_browser={browser}",
        *("--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"),
        *([] if port is None else ["--ServerApp.port_retries=0"]),
        *(["--KernelManager.transport_encryption=auto"] if zmq.has("curve") else []),  # or each kernel warns
    ]
    # Every user of the machine can read a command line, so the token is in the environment; the notebooks' kernel is this
    # environment's, even if the user's folder has one of the same name; and `labconfig`, which the user's settings precede,
    # avoids a question about news in a corner of the first notebook.
    environment = {
        **os.environ,
        "JUPYTER_TOKEN": token,
        "JUPYTER_PREFER_ENV_PATH": "1",
        "JUPYTER_CONFIG_PATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("JUPYTER_CONFIG_PATH", "")]),
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
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(timeout_s)
    _, left = psutil.wait_procs(family, timeout=3)  # kernels end their ranks by themselves, a moment after the server
    staying = detached_pids() if left else set()
    for process in [p for p in left if p.pid not in staying]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    server.kill()
    server.wait()


def url_of(server: subprocess.Popen[bytes]) -> str:
    """Waits until the server listens, and returns its URL. Raises Refused if it ends or does not get so far."""
    from jupyter_core.paths import jupyter_runtime_dir

    told, deadline_s = Path(jupyter_runtime_dir(), f"jpserver-{server.pid}.json"), time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            why = "see its output above; another --port or --ip may help"
            raise Refused(f"JupyterLab did not start (exit code {server.returncode}); {why}")
        with contextlib.suppress(OSError, ValueError):  # not written yet, or not yet in full
            record = json.loads(told.read_text(encoding="utf-8"))
            host = LOOPBACK if record["hostname"] in ("0.0.0.0", "", "*", "::") else record["hostname"]
            return f"http://{f'[{host}]' if ':' in host else host}:{record['port']}"
        time.sleep(0.1)
    raise Refused(f"JupyterLab did not answer within {START_S:.0f} s; it has been ended")


def refuse_without_token(url: str) -> None:
    """Raises Refused if the server accepts requests without the token, because another configuration overrides ours."""
    try:
        urllib.request.urlopen(f"{url}/api/kernels", timeout=10).close()
    except OSError:  # 403, as it should be
        return
    raise Refused(
        "a Jupyter configuration on this machine turns the token off, and anybody who reaches the port could run code; "
        "`jupyter server --show-config` names the file: remove its token, password and authentication lines"
    )


def announcement(folder: Path, url: str, token: str, first: str = FIRST_NOTEBOOK) -> str:
    """With the ssh command that forwards the port to another computer, to the address of the current SSH session."""
    port, option, host = url.rpartition(":")[2], "", socket.gethostname()
    ssh = os.environ.get("SSH_CONNECTION", "").split()  # client address, client port, server address, server port
    if len(ssh) == 4:
        host, option = ssh[2], "" if ssh[3] == "22" else f"-p {ssh[3]} "
    return f"""
  JupyterLab     {url}/lab/tree/{first}?token={token}
  notebooks      {folder}
  from afar      ssh -N {option}-L {port}:{LOOPBACK}:{port} {os.environ.get("USER", "USER")}@{host}
                 (on your own computer, while this runs; then open the URL above there)

  Ctrl-C ends JupyterLab, its kernels and their ranks.
"""


# -- `fsdp-lab kernel install` ----------------------------------------------------------------------------------------


def add_kernel_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    add = actions.add_parser("install", help="register the kernel", allow_abbrev=False).add_argument
    add("--name", default="fsdp-lab", help="the kernel's name (default: %(default)s)")
    add("--prefix", type=Path, help="an environment to register it in (default: the user's own folder)")


def install_kernel(args: argparse.Namespace) -> int:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", args.name):  # Jupyter would replace the folder ".."
        hint = "use letters and digits, with '.', '_' and '-' between"
        raise Refused(f"--name {args.name!r} is not a kernel's name; {hint}")
    title = f"fsdp_lab (Python {platform.python_version()}, torch {importlib.metadata.version('torch')})"
    from ipykernel.kernelspec import install

    into: dict[str, Any] = {"user": True} if args.prefix is None else {"prefix": str(args.prefix)}
    try:
        where = install(**into, kernel_name=args.name, display_name=title)
    except OSError as e:
        where = e.filename or args.prefix or "the user's Jupyter folder"
        raise Refused(f"cannot write {where} ({e.strerror}); choose another place with --prefix DIR") from e
    print(f"Registered: the kernel {args.name!r} runs {sys.executable}\n  in {where}")
    print(f"Choose it in the notebook's menu: Kernel, Change Kernel, {title}.\n")
    print("The JupyterLab server that shows the notebooks needs two packages in ITS environment:")
    print(f"  pip install {shlex.join(NEEDED.values())}")
    print("`fsdp-lab doctor` says which of the running servers lack them.")
    return 0


# Folder of a prebuilt JupyterLab extension, below `labextensions` -> the pip requirement that brings it.
NEEDED = {"anywidget": "anywidget>=0.9.18", "@jupyter-widgets/jupyterlab-manager": "jupyterlab_widgets>=3"}


@dataclass(frozen=True, kw_only=True)
class Server:
    pid: int
    port: int
    python: str  # the interpreter that runs it
    prefix: Path  # its environment

    @property
    def ours(self) -> bool:
        """Tells whether it runs from this environment."""
        return self.prefix.resolve() == Path(sys.prefix).resolve()


def missing(prefix: Path) -> list[str]:
    """What has to be installed, so that JupyterLab of that environment finds the required extensions."""
    data = [prefix / "share/jupyter", Path.home() / ".local/share/jupyter", Path("/usr/local/share/jupyter")]
    data += [Path(p) for p in os.environ.get("JUPYTER_PATH", "").split(os.pathsep) if p]
    found = [folder for folder in NEEDED if any((d / "labextensions" / folder).is_dir() for d in data)]
    return [requirement for folder, requirement in NEEDED.items() if folder not in found]


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
