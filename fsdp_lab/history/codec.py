"""Step events as compressed bytes, and back, bit for bit.

A pack is zlib over JSON, a column for each figure: neighbours in a column are alike, and a column that never changes is
told once. JSON writes a float with as many digits as name it exactly, NaN and infinities by name. Spans and memory curves,
which are larger than all the rest, are left out unless the pack is to be `heavy`.

Fields that a later version adds get their defaults when an old pack is read; fields that it no longer has are passed over.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from fsdp_lab.core.events import Memory, MemorySample, RoleBytes, Span, StepEvent, Traffic

Row = tuple[int, StepEvent]  # its cursor in the run's EventStore, and the event

PARTS = ("memory", "comm", "memory_curve", "spans", "notes")  # those that are not one scalar
LEVEL = 6  # of zlib: 9 takes twice the time for 1%


def _names(kind: type, without: Sequence[str] = ()) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind) if f.name not in without)


EVENT, MEMORY = _names(StepEvent, PARTS), _names(Memory, ("at_peak",))
CLASSES, TRAFFIC = _names(RoleBytes), _names(Traffic)


def pack(rows: Sequence[Row], *, heavy: bool = False) -> bytes:
    """`unpack(pack(rows, heavy=True))` equals `rows`; without `heavy` but for spans and memory curves."""
    events = [event for _, event in rows]
    first = rows[0][0] if rows else 0
    table: dict[str, Any] = {
        "n": len(rows),
        "first": first,
        "cursor": _column([cursor - first - i for i, (cursor, _) in enumerate(rows)]),
        "event": _columns(events, EVENT),
        "memory": _columns([e.memory for e in events], MEMORY),
        "at_peak": _columns([e.memory.at_peak for e in events], CLASSES),
        "comm": {kind: _traffic(events, kind) for kind in sorted({kind for e in events for kind in e.comm})},
        "notes": _column([list(e.notes) for e in events]),
    }
    if heavy:
        table["spans"] = [[span.to_row() for span in e.spans] for e in events]
        table["memory_curve"] = [[sample.to_row() for sample in e.memory_curve] for e in events]
    return zlib.compress(_json(table).encode(), LEVEL)


def _json(table: Mapping[str, Any]) -> str:
    """An event's spans at a time: other threads wait while JSON is made, and a traced step of 64 ranks takes some 40 ms."""
    write = json.JSONEncoder(separators=(",", ":")).encode
    parts = (f"[{','.join(map(write, v))}]" if isinstance(v, list) else write(v) for v in table.values())
    return "{" + ",".join(f"{write(name)}:{part}" for name, part in zip(table, parts, strict=True)) + "}"


def unpack(data: bytes) -> list[Row]:
    """Raises ValueError, zlib.error or KeyError for what `pack` did not make."""
    table = json.loads(zlib.decompress(data))
    n = table["n"]
    each: list[dict[str, Any]] = _rows(table["event"], EVENT, n)
    at_peak = [RoleBytes(**row) for row in _rows(table["at_peak"], CLASSES, n)]
    memory = [Memory(**row, at_peak=a) for row, a in zip(_rows(table["memory"], MEMORY, n), at_peak, strict=True)]
    for i, row in enumerate(each):
        row["memory"], row["comm"] = memory[i], {}
    for kind, columns in table["comm"].items():
        at = columns.pop("at", None) or range(n)
        for i, row in zip(at, _rows(columns, TRAFFIC, len(at)), strict=True):
            each[i]["comm"][kind] = Traffic(**row)
    _set(each, "notes", _values(table["notes"], n), tuple)
    _set(each, "spans", table.get("spans", ()), lambda told: tuple(map(Span.from_row, told)))
    _set(each, "memory_curve", table.get("memory_curve", ()), lambda told: tuple(map(MemorySample.from_row, told)))
    cursors = [table["first"] + i + more for i, more in enumerate(_values(table["cursor"], n))]
    return [(cursor, StepEvent(**row)) for cursor, row in zip(cursors, each, strict=True)]


def _columns(things: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: _column(list(map(attrgetter(name), things))) for name in names}


def _column(values: list[Any]) -> Any:
    """The values; a dict where one is all of them. Floats are told one by one: 0.0 equals -0.0, and 1 equals 1.0."""
    first = values[0] if values else 0.0
    same = not isinstance(first, float) and all(v == first and type(v) is type(first) for v in values)
    return {"all": first} if same else values


def _traffic(events: Sequence[StepEvent], kind: str) -> dict[str, Any]:
    at = [i for i, e in enumerate(events) if kind in e.comm]
    columns = _columns([events[i].comm[kind] for i in at], TRAFFIC)
    return columns if len(at) == len(events) else {"at": at, **columns}


def _values(column: Any, n: int) -> list[Any]:
    return [column["all"]] * n if isinstance(column, dict) else column


def _rows(columns: Mapping[str, Any], names: Sequence[str], n: int) -> list[dict[str, Any]]:
    known = [name for name in columns if name in names]
    if not known:
        return [{} for _ in range(n)]
    return [
        dict(zip(known, row, strict=True)) for row in zip(*(_values(columns[name], n) for name in known), strict=True)
    ]


def _set(each: Sequence[dict[str, Any]], name: str, values: Sequence[Any], make: Callable[[Any], Any]) -> None:
    """Equal neighbours share what is made of them."""
    before, made = object(), None
    for row, value in zip(each, values, strict=False):
        if value is not before:
            before, made = value, make(value)
        row[name] = made
