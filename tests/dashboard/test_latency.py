"""Stamps: which events a painted message carried, and how long they took."""

from __future__ import annotations

import math

from fsdp_lab.dashboard.live import Stamps


def test_an_acknowledgement_covers_all_messages_up_to_it():
    stamps = Stamps()
    assert "no event" in str(stamps.latency())
    stamps.wait([10.0])
    stamps.sent(1)
    stamps.painted(0, 10.2)
    assert stamps.latency().events == 0
    stamps.wait([10.5, 10.6])
    stamps.sent(2)
    stamps.painted(2, 11.0)
    latency = stamps.latency()
    assert latency.events == 3
    assert math.isclose(latency.p50_s, 0.5)
    assert math.isclose(latency.worst_s, 1.0)
    stamps.painted(2, 20.0)  # another view paints later: not counted again
    assert stamps.latency() == latency


def test_messages_that_nobody_paints_are_forgotten():
    stamps = Stamps(keep_messages=4)
    for seq in range(100):
        stamps.wait([float(seq)])
        stamps.sent(seq)
    stamps.painted(99, 100.0)
    assert stamps.latency().events == 4
