"""Published rows of peak memory, beside what is predicted of them, in the unit and of the kind that a row has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_lab.core.errors import FieldError
from fsdp_lab.planner.memory import MemoryPlan, memory
from fsdp_lab.planner.plan import CONTEXT_BYTES, device_kind
from fsdp_lab.planner.published import PublishedCase, Row, case

GIB, MIB = 1 << 30, 1 << 20

# What torch's allocator holds, of what was allocated at the peak, while the device has room: the median over torchtitan's
# rows. Under pressure it gives back what it does not use; so this does not say what fits: `MemoryPlan.reserved_bytes` does.
SPARE = 1.5
FULL = 0.95  # of a device's memory: more than this no allocator holds

# Rows that contradict what the table says of them; reported apart. A T5 of 11.3e9 parameters takes 7 GB more on 8 GPUs than
# on 512: 5 bytes a parameter, where fp32 values and Adam's moments alone are 12. And 80.7 GB of one GPU for 8.0e9 parameters
# are 10 bytes each.
UNEXPLAINED = (
    *(f"fsdp-7c-B{b}-{n}" for b in (8, 16) for n in (8, 16, 32, 64, 128, 256, 512)), "kempner-01", "kempner-02",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Bytes, as measured and as predicted; `kind`: "allocated", "reserved" or "used"."""

    case: PublishedCase
    kind: str
    measured_bytes: float
    predicted_bytes: float

    @property
    def is_explained(self) -> bool:
        return self.case.id not in UNEXPLAINED

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.predicted_bytes / self.measured_bytes - 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.case.id, "source": self.case.source, "kind": self.kind, "is_explained": self.is_explained,
            "measured_bytes": self.measured_bytes, "predicted_bytes": self.predicted_bytes,
        }  # fmt: skip


def memory_of(one: PublishedCase) -> MemoryPlan:
    """What is predicted of a row."""
    return memory(one.spec, one.shape, device=device_kind(one.machine), software=one.software)


def in_kind(planned: MemoryPlan, row: Row) -> float | None:
    """The peak in the row's `peak_mem_unit` and of its `peak_mem_kind`; None where it names no unit that is known."""
    unit = unit_bytes(row)
    return None if unit is None else bytes_of_kind(planned, kind_of(row), _room(row)) / unit


def kind_of(row: Row) -> str:
    """What a row's author counts: tensors ("allocated"), what the allocator holds ("reserved"), or with the context too
    ("used", as nvidia-smi says it). torchtitan reports what is reserved. Of authors who do not say: reserved."""
    told = (row.get("peak_mem_kind") or "").lower()
    if "allocated" in told:
        return "allocated"
    return "used" if any(word in told for word in ("used", "smi", "context")) else "reserved"


def bytes_of_kind(planned: MemoryPlan, kind: str, room_bytes: float) -> float:
    """room_bytes: of the device."""
    if kind == "allocated":
        return planned.peak_bytes
    context = CONTEXT_BYTES if kind == "used" else 0
    held = min(SPARE * planned.peak_bytes, FULL * room_bytes - context)
    return max(held, planned.reserved_bytes) + context


def _room(row: Row) -> float:
    told = (row.get("gpu_mem_gb") or "").strip()
    return float(told) * GIB if told else float("inf")


def unit_bytes(row: Row) -> int | None:
    """Bytes of the row's unit. "slope fits MiB" says that what is called MB are MiB."""
    told = (row.get("peak_mem_unit") or "GiB").strip()
    if "MiB" in told:
        return MIB
    return {"GiB": GIB, "GB": 10**9, "MB": 10**6, "bytes": 1, "B": 1}.get(told)


def memory_rows(rows: Iterable[Row]) -> tuple[list[MemoryRow], list[tuple[str, str]]]:
    """Rows that tell a peak and can be predicted; and the ids of those that cannot, with why."""
    found, refused = [], []
    for row in rows:
        unit = unit_bytes(row)
        if not (row.get("peak_mem") or "").strip() or unit is None:
            continue
        try:
            one = case(row)
        except FieldError as e:
            refused.append((row.get("id", ""), str(e)))
            continue
        kind = kind_of(row)
        predicted = bytes_of_kind(memory_of(one), kind, one.machine.device.memory_bytes)
        found.append(
            MemoryRow(case=one, kind=kind, measured_bytes=float(row["peak_mem"]) * unit, predicted_bytes=predicted)
        )
    return found, refused


def mape(rows: Iterable[MemoryRow]) -> float:
    """Mean absolute error, relative to what was measured; NaN of none."""
    errors = [abs(row.error) for row in rows]
    return sum(errors) / len(errors) if errors else float("nan")


def lines(found: Sequence[MemoryRow]) -> list[str]:
    """Errors by kind and source, as text; the unexplained rows apart."""
    told = []
    for kind in dict.fromkeys(row.kind for row in found):
        of_kind = [row for row in found if row.kind == kind]
        explained = [row for row in of_kind if row.is_explained]
        told.append(f"{kind} memory, {len(explained)} rows: {mape(explained):.1%} off in the mean")
        for source in dict.fromkeys(row.case.source for row in of_kind):
            rows = [row for row in of_kind if row.case.source == source]
            apart = (
                "" if all(row.is_explained for row in rows) else " (left out: its rows contradict what is told of them)"
            )
            told.append(f"    {source}: {mape(rows):.1%} of {len(rows)}{apart}")
        if len(explained) < len(of_kind):
            told.append(f"    with those left out: {mape(of_kind):.1%} of {len(of_kind)}")
    return told
