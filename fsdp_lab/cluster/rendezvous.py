"""How engines become ranks: order, seats, and the address where they meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def rank_order(reports: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Engine ids in rank order: ranks of one machine stand together, machines in the order of their first engine.

    Neighbours share a machine then, so that the shard groups of hybrid sharding stay inside one.
    """
    first: dict[str, int] = {}
    for engine in sorted(reports):
        first.setdefault(reports[engine]["host"], engine)
    return sorted(reports, key=lambda engine: (first[reports[engine]["host"]], engine))


def meeting_place(reports: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """(address, toward) for rank 0's store, from what each rank said of itself, in rank order.

    Loopback where all ranks are on one machine: nothing listens on the network then. Otherwise the address is left to
    rank 0 (""), who takes that of its route toward the first rank elsewhere.
    """
    elsewhere = [r for r in reports if r["host"] != reports[0]["host"]]
    return ("127.0.0.1", "") if not elsewhere else ("", str(elsewhere[0]["address"]))
