"""Python, the packages, and torch itself."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys

from fsdp_lab.cli.doctor.finding import Finding, State
from fsdp_lab.cli.doctor.torch_probe import TorchFacts

# What is looked at where fsdp-lab runs from a checkout that pip never saw, so that no metadata names the requirements.
PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "ipyparallel",
    "ipykernel",
    "ipywidgets",
    "anywidget",
    "bokeh",
    "jupyterlab",
)


def python() -> list[Finding]:
    version, where = platform.python_version(), sys.executable
    if sys.version_info < (3, 11):  # noqa: UP036 (a doctor is run where things are wrong)
        return [Finding("Python", f"{version} at {where}", State.FAIL, "make an environment with Python 3.11 or newer")]
    isolated = sys.prefix != sys.base_prefix or "CONDA_PREFIX" in os.environ
    advice = (
        "" if isolated else "no virtual environment: the system's packages can get in the way; python3 -m venv .venv"
    )
    return [Finding("Python", f"{version} at {where}", State.OK, advice)]


def packages() -> list[Finding]:
    return [package(requirement) for requirement in requirements()]


def requirements() -> list[str]:
    """The installation's requirements, extras left out: "torch<2.14,>=2.11"."""
    try:
        listed = importlib.metadata.requires("fsdp-lab") or []
    except importlib.metadata.PackageNotFoundError:
        return list(PACKAGES)
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
    return Finding(name, f"{version}, and {requirement} is wanted", State.FAIL, fix)


def satisfies(version: str, requirement: str) -> bool:
    """Whether the version is in the required range; true where nothing here can tell."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return True
    return Requirement(requirement).specifier.contains(version, prereleases=True)


def torch(facts: TorchFacts) -> list[Finding]:
    if not facts.version:
        fix = f"{sys.executable} -m pip install --force-reinstall 'torch>=2.11,<2.14'"
        return [Finding("import torch", facts.error, State.FAIL, fix)]
    build = f"built for CUDA {facts.cuda_build}" if facts.cuda_build else "built for CPUs"
    found = [Finding("import torch", f"{facts.version}, {build}, {facts.threads} threads a process")]
    gloo_advice = "" if facts.gloo else "CPU ranks and offload need it: take another build of torch"
    found.append(
        Finding("Gloo", "there" if facts.gloo else "missing", State.OK if facts.gloo else State.FAIL, gloo_advice)
    )
    if facts.cuda_build:
        found.append(nccl(facts))
    return found


def nccl(facts: TorchFacts) -> Finding:
    if not facts.nccl:
        return Finding("NCCL", "missing", State.WARN, "GPU ranks would talk over Gloo, through host memory: slow")
    version = ".".join(map(str, facts.nccl_version))
    if facts.nccl_version < (2, 30):
        return Finding("NCCL", f"{version}; one rank a GPU (two on one GPU go over Gloo, or need 2.30)")
    return Finding("NCCL", f"{version}; two ranks on one GPU with NCCL_MULTI_RANK_GPU_ENABLE=1")
