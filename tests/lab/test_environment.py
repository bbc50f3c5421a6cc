"""Where a run was trained, from what machines say of themselves."""

from __future__ import annotations

from pathlib import Path

import torch

from fsdp_lab.rank.measure import _driver, software
from fsdp_lab.runs.view import cpu_model, describe_environment


def test_a_processor_is_called_as_its_maker_does(tmp_path: Path):
    told = tmp_path / "cpuinfo"
    told.write_text("processor\t: 0\nmodel name\t: AMD EPYC 7B13\nprocessor\t: 1\nmodel name\t: AMD EPYC 7B13\n")
    assert cpu_model(told) == "AMD EPYC 7B13"
    told.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert cpu_model(told) == cpu_model(tmp_path / "none") != ""


def test_the_driver_is_read_from_the_kernel_module(tmp_path: Path):
    told = tmp_path / "version"
    for line, version in (
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65  Release Build  (root@box)", "580.65"),
        ("something else 1.2", ""),
    ):
        told.write_text(line + "\nGCC version:  gcc version 12.2.0\n")
        assert _driver(told) == version
    assert _driver(tmp_path / "none") == ""
    assert software(torch.device("cpu")) == {"torch": str(torch.__version__), "cuda": "", "nccl": "", "driver": ""}


def test_an_environment_describe_environment():
    cpu = {"host": "box", "cpu": "AMD EPYC", "cores": 2, "torch": "2.13.0", "devices": ["CPU", "CPU"], "cuda": ""}
    assert describe_environment(cpu) == "box: 2 x CPU (AMD EPYC, 2 cores), torch 2.13.0"
    mixed = {**cpu, "devices": ["NVIDIA A100", "NVIDIA H100"], "cuda": "12.8"}
    assert describe_environment(mixed) == "box: 1 x NVIDIA A100, 1 x NVIDIA H100, torch 2.13.0, cuda 12.8"
    assert describe_environment({}) == ""
