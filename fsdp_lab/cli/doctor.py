"""`fsdp-lab doctor`: checks of the Python packages, torch, the GPUs, the host and Jupyter, with a fix for each problem.

Uses the standard library where it can, because it is run where something is missing, and bounds each check in time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from fsdp_lab.cli.kernel import missing, running_servers
from fsdp_lab.cli.machine import Finding, State, TorchFacts, ask_torch, cores, gpu_findings, host_findings, judged
from fsdp_lab.cluster import nvml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints each group as it is ready. The exit code is 1 where something fails."""
    findings: list[Finding] = []
    for title, group in examine():
        findings += group
        if not args.json:
            lines = [line for finding in group for line in finding.lines(sys.stdout.isatty())]
            print("\n".join([title, *lines]), flush=True)
    state = max((f.state for f in findings), key=list(State).index)
    if args.json:
        print(json.dumps({"state": state, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2))
    return 1 if state is State.FAIL else 0


def examine() -> Iterator[tuple[str, list[Finding]]]:
    """(title, findings) for each group of checks, one after the other."""
    yield "Software", [*python(), *map(package, requirements())]
    facts = ask_torch()
    yield "torch", torch(facts)
    devices = nvml.query()
    yield "GPUs", gpu_findings(devices, facts)
    yield "Machine", host_findings(gpus=len(devices.gpus))
    yield "Jupyter", jupyter_servers() + connection_security()
    yield "What works here", outlook(facts, len(devices.gpus))


def outlook(facts: TorchFacts, gpus_seen: int) -> list[Finding]:
    """The ranks that this machine can run."""
    if not facts.version:
        return [Finding("ranks", "none", State.FAIL, "torch cannot be imported; fix that first")]
    carrier = "over Gloo" if facts.not_shared else "through shared memory"
    on_cpu = f"CPU ranks {carrier}; {cores():g} cores, more ranks share them, which is slower but correct"
    findings = [Finding("CPU ranks", on_cpu, State.OK if facts.gloo else State.FAIL)]
    if facts.devices:
        over = "NCCL" if facts.nccl else "Gloo"
        value = f"{facts.devices}, one rank each, over {over}; more ranks share GPUs, through their memory"
        findings.append(Finding("GPU ranks", value))
    elif gpus_seen:
        findings.append(Finding("GPU ranks", "none: torch cannot use the GPUs", State.WARN, "see torch and GPUs above"))
    return findings


# Packages to check if fsdp-lab is not installed, so that no metadata lists the requirements.
PACKAGES = "torch transformers numpy ipyparallel ipykernel ipywidgets anywidget bokeh jupyterlab"


def python() -> list[Finding]:
    version, where = platform.python_version(), sys.executable
    if sys.version_info < (3, 11):  # noqa: UP036 (the doctor also runs where requirements are not met)
        return [Finding("Python", f"{version} at {where}", State.FAIL, "make an environment with Python 3.11 or newer")]
    isolated = sys.prefix != sys.base_prefix or "CONDA_PREFIX" in os.environ
    shared = "no virtual environment: the system's packages can get in the way; python3 -m venv .venv"
    return [Finding("Python", f"{version} at {where}", State.OK, "" if isolated else shared)]


def requirements() -> list[str]:
    """The installation's requirements, extras left out: "torch<2.15,>=2.11"."""
    try:
        listed = importlib.metadata.requires("fsdp-lab") or []
    except importlib.metadata.PackageNotFoundError:
        return PACKAGES.split()
    return [line.partition(";")[0].strip() for line in listed if "extra ==" not in line]


def package(requirement: str) -> Finding:
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    fix = f"{sys.executable} -m pip install '{requirement}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", State.FAIL, fix)
    if satisfies(version, requirement):
        return Finding(name, version)
    if name == "torch" and satisfies(version, re.sub(r"<[\d.]+,?", "", requirement)):  # whoever has it may need it
        way = "it may work, as nothing asks for its version; for a tested one without losing this one: python3 -m venv .venv"
        return Finding(name, f"{version}, newer than those tested: {requirement}", State.WARN, way)
    return Finding(name, f"{version}, but {requirement} is required", State.FAIL, fix)


def satisfies(version: str, requirement: str) -> bool:
    """Tells whether the version is in the required range; True if that cannot be determined."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return True
    return Requirement(requirement).specifier.contains(version, prereleases=True)


def torch(facts: TorchFacts) -> list[Finding]:
    if not facts.version:
        fix = f"{sys.executable} -m pip install --force-reinstall 'torch>=2.11,<2.15'"
        return [Finding("import torch", facts.error, State.FAIL, fix)]
    build = f"built for CUDA {facts.cuda_build}" if facts.cuda_build else "built for CPUs"
    advice = "" if facts.gloo else "CPU ranks and offload need it: take another build of torch"
    return [
        Finding("import torch", f"{facts.version}, {build}, {facts.threads} threads a process"),
        judged(
            "shared memory",
            "missing" if facts.not_shared else "there",
            f"ranks of one host communicate over Gloo, which is slower: {facts.not_shared}" if facts.not_shared else "",
        ),
        judged("Gloo", "there" if facts.gloo else "missing", advice, State.FAIL),
        *([nccl(facts)] if facts.cuda_build else []),
    ]


def nccl(facts: TorchFacts) -> Finding:
    if not facts.nccl:
        return judged("NCCL", "missing", "GPU ranks would communicate over Gloo, through host memory: slow")
    sharing = "two ranks on one GPU with NCCL_MULTI_RANK_GPU_ENABLE=1"
    if facts.nccl_version < (2, 30):
        sharing = "one rank a GPU (several go through its memory without NCCL, or need 2.30)"
    return Finding("NCCL", f"{'.'.join(map(str, facts.nccl_version))}; {sharing}")


def jupyter_servers() -> list[Finding]:
    lacking = missing(Path(sys.prefix))
    if lacking:
        needs = " ".join(f"'{extension.requirement}'" for extension in lacking)
        fix = f"{sys.executable} -m pip install {needs}"
        findings = [Finding("extensions", "missing: " + ", ".join(e.folder for e in lacking), State.FAIL, fix)]
    else:
        findings = [Finding("extensions", "the pages' two extensions are installed")]
    for server in running_servers():
        name, value = f"server :{server.port}", f"pid {server.pid}, runs from {server.prefix}"
        if server.ours:
            findings.append(Finding(name, f"{value}, this environment"))
        elif lacking := missing(server.prefix):
            fix = f"to use it: {server.install_command(lacking)}; then fsdp-lab kernel install"
            findings.append(Finding(name, f"{value}, without {', '.join(e.folder for e in lacking)}", State.WARN, fix))
        else:
            fix = "to use it: fsdp-lab kernel install"
            findings.append(Finding(name, f"{value}, and has the extensions", State.OK, fix))
    return findings


ROOT = Path("/")  # this folder, and those above it, are not examined


def connection_security() -> list[Finding]:
    """Tells whether other users can read connection files of Jupyter's servers and kernels, or of ipyparallel's profiles."""
    home = Path(os.environ.get("IPYTHONDIR") or Path.home() / ".ipython")
    files = [*home.glob("profile_*/security/*.json")]
    with contextlib.suppress(ImportError):
        from jupyter_core.paths import jupyter_runtime_dir

        for pattern in ("kernel-*.json", "jpserver-*.json", "jupyter_cookie_secret"):
            files += Path(jupyter_runtime_dir()).glob(pattern)
    readable = [file for file in files if others_read(file)]
    if not readable:
        return [Finding("connection files", f"{len(files)}, readable by their owner only")]
    names = ", ".join(map(str, readable[:3])) + (", ..." if len(readable) > 3 else "")
    fix = "anyone who reads one can run code as you: chmod go-rwx " + " ".join(f"'{file}'" for file in readable[:3])
    return [Finding("connection files", f"other users can read {names}", State.WARN, fix)]


def others_read(file: Path) -> bool:
    """Tells whether users other than the owner can reach the file and read it."""
    folders = [folder for folder in file.absolute().parents if ROOT in folder.parents]
    try:
        if not os.stat(file).st_mode & (stat.S_IRGRP | stat.S_IROTH):
            return False
        return all(os.stat(folder).st_mode & (stat.S_IXGRP | stat.S_IXOTH) for folder in folders)
    except OSError:
        return False
