"""`fsdp-lab doctor`: what is here, what will work, and what to do about the rest.

Works where little does: the standard library alone, each check bounded in time, torch asked in a process of its own.
Checks stand in `software`, `gpus`, `system`, `servers` and `connections`; each is a function that returns `Finding`s.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator

from fsdp_lab.cli.doctor import connections, gpus, servers, software, system
from fsdp_lab.cli.doctor.finding import Finding, State, worst
from fsdp_lab.cli.doctor.torch_probe import TorchFacts, ask_torch
from fsdp_lab.core import nvml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints each group as it is found. The exit code is 1 where something fails."""
    findings: list[Finding] = []
    for title, group in examine():
        findings += group
        if not args.json:
            print(
                f"{title}\n" + "\n".join(line for finding in group for line in finding.lines(sys.stdout.isatty())),
                flush=True,
            )
    state = worst(findings)
    if args.json:
        print(json.dumps({"state": state, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2))
    return 1 if state is State.FAIL else 0


def examine() -> Iterator[tuple[str, list[Finding]]]:
    """(title, findings) for each group of checks, one after the other."""
    yield "Software", software.python() + software.packages()
    facts = ask_torch()
    yield "torch", software.torch(facts)
    devices = nvml.query()
    yield "GPUs", gpus.findings(devices, facts)
    yield "Machine", system.findings(gpus=len(devices.gpus))
    yield "Jupyter", servers.findings() + connections.findings()
    yield "What works here", outlook(facts, len(devices.gpus))


def outlook(facts: TorchFacts, gpus_seen: int) -> list[Finding]:
    """What a person can expect of this machine, in sentences."""
    if not facts.version:
        return [Finding("ranks", "none", State.FAIL, "torch cannot be imported; mend that first")]
    cores = system.cores()
    on_cpu = f"CPU ranks over Gloo; {cores:g} cores, more ranks than that share them and are slower, not wrong"
    found = [Finding("CPU ranks", on_cpu, State.OK if facts.gloo else State.FAIL)]
    if facts.devices:
        value = (
            f"{facts.devices}, one rank each, over {'NCCL' if facts.nccl else 'Gloo'}; more ranks share GPUs, over Gloo"
        )
        found.append(Finding("GPU ranks", value))
    elif gpus_seen:
        found.append(Finding("GPU ranks", "none: torch cannot use the GPUs", State.WARN, "see torch and GPUs above"))
    return found
