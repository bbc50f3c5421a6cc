"""Published peaks of memory and their predictions, in the unit and of the kind of each row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_lab.core.errors import FieldError
from fsdp_lab.core.formatting import GIB, MIB
from fsdp_lab.planner.memory import MemoryPlan, memory
from fsdp_lab.planner.plan import CONTEXT_BYTES, device_kind
from fsdp_lab.planner.published import PublishedCase, Row, case

# Memory that torch's allocator reserves, relative to the allocated peak, while the device has room: the median over
# torchtitan's rows. Under pressure it releases unused blocks, so what fits is decided by `MemoryPlan.reserved_bytes`.
SPARE = 1.5
FULL = 0.95  # share of device memory that an allocator reserves at most

# Rows that contradict their own description; reported separately. A T5 of 11.3e9 parameters takes 7 GB more on 8 GPUs than
# on 512: 5 bytes per parameter, where fp32 values and Adam's moments alone are 12. And 80.7 GB of one GPU for 8.0e9
# parameters are 10 bytes each.
UNEXPLAINED = (
    *(f"fsdp-7c-B{b}-{n}" for b in (8, 16) for n in (8, 16, 32, 64, 128, 256, 512)), "kempner-01", "kempner-02",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Measured and predicted bytes; `kind`: "allocated", "reserved" or "used"."""

    case: PublishedCase
    kind: str
    measured_bytes: float
    predicted_bytes: float

    @property
    def is_explained(self) -> bool:
        return self.case.id not in UNEXPLAINED

    @property
    def error(self) -> float:
        """Relative to the measurement."""
        return self.predicted_bytes / self.measured_bytes - 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.case.id, "source": self.case.source, "kind": self.kind, "is_explained": self.is_explained,
            "measured_bytes": self.measured_bytes, "predicted_bytes": self.predicted_bytes,
        }  # fmt: skip


def in_kind(planned: MemoryPlan, row: Row) -> float | None:
    """The peak in the row's `peak_mem_unit` and of its `peak_mem_kind`; None for an unknown unit."""
    unit, capacity_gib = unit_bytes(row), (row.get("gpu_mem_gb") or "").strip()
    capacity = float(capacity_gib) * GIB if capacity_gib else float("inf")
    return None if unit is None else bytes_of_kind(planned, kind_of(row), capacity) / unit


def kind_of(row: Row) -> str:
    """The kind of memory that a row counts: of tensors ("allocated"), of the allocator ("reserved"), or with the context
    ("used", as in nvidia-smi). torchtitan reports reserved memory, which is the default."""
    kind = (row.get("peak_mem_kind") or "").lower()
    if "allocated" in kind:
        return "allocated"
    return "used" if any(word in kind for word in ("used", "smi", "context")) else "reserved"


def bytes_of_kind(planned: MemoryPlan, kind: str, capacity_bytes: float) -> float:
    """The planned peak of a kind, on a device of that capacity."""
    if kind == "allocated":
        return planned.peak_bytes
    context = CONTEXT_BYTES if kind == "used" else 0
    reserved = min(SPARE * planned.peak_bytes, FULL * capacity_bytes - context)
    return max(reserved, planned.reserved_bytes) + context


def unit_bytes(row: Row) -> int | None:
    """Bytes of the row's unit; None if it is unknown. "MB (slope fits MiB)" is MiB."""
    unit = (row.get("peak_mem_unit") or "GiB").strip()
    return MIB if "MiB" in unit else {"GiB": GIB, "GB": 10**9, "MB": 10**6, "bytes": 1, "B": 1}.get(unit)


def memory_rows(rows: Iterable[Row]) -> tuple[list[MemoryRow], list[tuple[str, str]]]:
    """Rows that have a peak and can be predicted; and (row id, reason) of those that cannot."""
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
        planned = memory(one.spec, one.shape, device=device_kind(one.machine), software=one.software)
        predicted = bytes_of_kind(planned, kind, one.machine.device.memory_bytes)
        found.append(
            MemoryRow(case=one, kind=kind, measured_bytes=float(row["peak_mem"]) * unit, predicted_bytes=predicted)
        )
    return found, refused


def mape(rows: Iterable[MemoryRow]) -> float:
    """Mean absolute error relative to the measurement; NaN for no rows."""
    errors = [abs(row.error) for row in rows]
    return sum(errors) / len(errors) if errors else float("nan")


def lines(found: Sequence[MemoryRow]) -> list[str]:
    """Errors by kind and source, as text, with and without the unexplained rows."""
    found_lines = []
    for kind in dict.fromkeys(row.kind for row in found):
        of_kind = [row for row in found if row.kind == kind]
        explained = [row for row in of_kind if row.is_explained]
        found_lines.append(f"{kind} memory, {len(explained)} rows: {mape(explained):.1%} off in the mean")
        for source in dict.fromkeys(row.case.source for row in of_kind):
            rows = [row for row in of_kind if row.case.source == source]
            apart = (
                "" if all(row.is_explained for row in rows) else " (left out: its rows contradict what is told of them)"
            )
            found_lines.append(f"    {source}: {mape(rows):.1%} of {len(rows)}{apart}")
        if len(explained) < len(of_kind):
            found_lines.append(f"    with those left out: {mape(of_kind):.1%} of {len(of_kind)}")
    return found_lines
