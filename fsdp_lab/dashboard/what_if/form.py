"""The fields of the what-if page: those of the dashboard's controls, with more values, and the hardware's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_lab.core.optimizer import OPTIMIZERS
from fsdp_lab.core.spec import GATHERS, PREFETCH_POINTS
from fsdp_lab.dashboard.fields import GROUPS, ControlSpec, fixed
from fsdp_lab.dashboard.what_if.question import CUSTOM
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.planner.devices import DEVICES

CUSTOM_ONLY = ("peak_tflops", "memory_gib", "link_gb_per_s")


def parse_number(text: str) -> Any:
    """The number that is written, None for nothing; any other text as it is, to be refused with a reason."""
    plain = text.strip().replace(",", "")
    if not plain:
        return None
    for kind in (int, float):
        try:
            return kind(plain)
        except ValueError:
            continue
    return text.strip()


def number_text(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _powers(last: int) -> tuple[int, ...]:
    return tuple(1 << i for i in range(last + 1))


def _number(name: str, label: str, help: str, none: str = "") -> ControlSpec:
    return ControlSpec(name=name, label=label, help=help, none=none, read=parse_number, write=number_text)


_GROUPS = dict(GROUPS)
_FIELDS = {f.name: f for _, fields in GROUPS for f in fields}
FORM: tuple[tuple[str, tuple[ControlSpec, ...]], ...] = (
    ("Model", (
        replace(_FIELDS["model"], help="A preset; or other: a type that transformers knows, or the folder of a config",
                tokens=fixed(*PRESETS), typed="opt, or a folder"),
        replace(_FIELDS["seq_len"], tokens=fixed(*_powers(17)[7:]), typed="3000", read=parse_number),
        _FIELDS["micro_batch"],
        _FIELDS["accumulate"],
        ControlSpec(name="optimizer", label="optimizer", help="Its state is a class of memory", tokens=fixed(*OPTIMIZERS)),
        ControlSpec(name="optimizer_args", label="optimizer args", help="Fused: one pass over its state",
              tokens=fixed({}, {"fused": True})),
    )),
    ("Hardware", (
        ControlSpec(name="hardware", label="hardware", help="The GPU", tokens=fixed(*DEVICES, CUSTOM)),
        replace(_FIELDS["world_size"], label="GPUs", help="One rank each", tokens=fixed(*_powers(12)), typed="96",
                least=None, read=parse_number),
        ControlSpec(name="per_host", label="GPUs a host", help="With NVLink or PCI Express between them", none="8",
              tokens=fixed(None, 1, 2, 4, 16, 32, 72), typed="6", read=parse_number),
        _number("network", "network, Gb/s", "Of all network cards of a host, one way", "as usual"),
        _number("peak_tflops", "peak, TFLOPS", "Dense, in bf16"),
        _number("memory_gib", "memory, GiB", "Of one GPU"),
        _number("link_gb_per_s", "link, GB/s", "To the other GPUs of its host, one way"),
    )),
    ("Sharding", (
        *_GROUPS["Sharding"],
        replace(_FIELDS["shard_size"], name="reshard_size", label="reshard size",
                help="Ranks that share the parameters between forward and backward"),
        ControlSpec(name="gather", label="gather", help="Copies, or the shards where they lie, on CPUs of one host",
              tokens=fixed(*GATHERS)),
    )),
    ("Schedule", (
        *(f for f in _GROUPS["Schedule"] if f.name not in ("accumulate", "link")),
        ControlSpec(name="backward_prefetch_point", label="prefetch point", help="Before or after the backward of a unit",
              tokens=fixed(*PREFETCH_POINTS)),
        ControlSpec(name="limit_all_gathers", label="gathers in flight", help="0: no limit", least=0, most=64),
        ControlSpec(name="limit_reductions", label="reductions in flight", help="Whole gradients", least=1, most=64),
        ControlSpec(name="compile", label="compile", help="torch.compile of each block", tokens=fixed(False, True)),
    )),
)  # fmt: skip
FIELDS = {f.name: f for _, fields in FORM for f in fields}
