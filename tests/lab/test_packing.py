"""Events as bytes and back, bit for bit."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from fsdp_lab.base.events import Carrier, Memory, MemorySample, RoleBytes, Span, StepEvent, Track, Traffic
from fsdp_lab.base.generation import Completion
from fsdp_lab.runs.history.database import pack, unpack

FLOATS = st.floats() | st.sampled_from([0.0, -0.0, float("nan"), float("inf"), 5e-324, 0.1])
COUNTS = st.integers(0, 2**70)
WORDS = st.text(max_size=6)


def made(kind: type, **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Any value of a dataclass, its scalars by their types."""
    by_type = {"float": FLOATS, "int": COUNTS, "str": WORDS, "bool": st.booleans(), "int | None": st.none() | COUNTS,
               "float | None": st.none() | FLOATS, "tuple[str, ...]": st.lists(WORDS, max_size=2).map(tuple)}  # fmt: skip
    fields = {f.name: more[f.name] if f.name in more else by_type[str(f.type)] for f in dataclasses.fields(kind)}
    return st.builds(kind, **fields)


SPANS = made(Span, track=st.sampled_from(Track))
SAMPLES = made(MemorySample, classes=made(RoleBytes))
EVENTS = made(
    StepEvent,
    memory=made(Memory, at_peak=made(RoleBytes)),
    memory_curve=st.lists(SAMPLES, max_size=2).map(tuple),
    comm=st.dictionaries(st.sampled_from(["all_gather", "control", "ünbekannt"]), made(Traffic)),
    spans=st.lists(SPANS, max_size=2).map(tuple),
    completions=st.lists(made(Completion), max_size=2).map(tuple),
    carriers=st.lists(made(Carrier), max_size=2).map(tuple),
)
ROWS = st.lists(EVENTS, max_size=5).flatmap(
    lambda events: st.lists(st.integers(0, 10**9), min_size=len(events), max_size=len(events), unique=True).map(
        lambda cursors: list(zip(sorted(cursors), events, strict=True))
    )
)


def bits(value: Any) -> Any:
    """So that equality is that of bits: NaN equals itself, 0.0 is not -0.0, 1 is not 1.0."""
    if isinstance(value, float):
        return struct.pack("<d", value) if value == value else "nan"
    if isinstance(value, dict):
        return {key: bits(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(v) for v in value]
    return (type(value).__name__, value)


@pytest.mark.slow
@settings(max_examples=25)
@given(ROWS)
def test_any_events_come_back_bit_for_bit(rows: list[tuple[int, StepEvent]]):
    back = unpack(pack(rows, heavy=True))
    assert [(c, bits(e.to_dict())) for c, e in back.items()] == [(c, bits(e.to_dict())) for c, e in rows]
    light = [(c, dataclasses.replace(e, spans=(), memory_curve=())) for c, e in rows]
    assert [(c, bits(e.to_dict())) for c, e in unpack(pack(rows)).items()] == [(c, bits(e.to_dict())) for c, e in light]
