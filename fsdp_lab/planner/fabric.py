"""How long a collective takes: link-speed physics.

A ring of n ranks sends (n-1)/n of the payload over every link for an all-gather or a reduce-scatter, twice that for an
all-reduce (Patarasu and Yuan, 2009; nccl-tests' "busbw" is that over the time). Within a host each device has its own
link. Between hosts NCCL makes several rings, which enter and leave a host by different network cards, so that one
group's ring has the whole host's network; groups whose members lie on the same hosts share it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_lab.planner.devices import Machine
from fsdp_lab.planner.rates import Rates

PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """`size` ranks, `stride` apart: 1 for those that share a shard, the shard's size for its replicas."""

    size: int
    stride: int = 1


def link_bytes(kind: str, payload_bytes: float, size: int) -> float:
    """What a rank sends, and receives, in a ring."""
    return PASSES[kind] * payload_bytes * (size - 1) / size


def seconds(kind: str, payload_bytes: float, group: RankGroup, machine: Machine, rates: Rates) -> float:
    """Of one collective by itself; 0 for a group of one."""
    if group.size < 2:
        return 0.0
    sent = link_bytes(kind, payload_bytes, group.size)
    if kind in machine.collectives:
        return _measured(kind, sent, group.size, machine)
    inside = min(machine.per_host, group.size * group.stride)
    shared = 1 if machine.device.switched else inside
    slowest = sent * shared / (machine.device.link_bytes_per_s * rates.link)
    if group.size * group.stride > machine.per_host:
        rings = min(group.stride, machine.per_host)  # as many groups cross a host's network at once
        slowest = max(slowest, sent * rings / (machine.network_bytes_per_s * rates.network))
    return slowest + rates.latency_s * (group.size - 1)


def _measured(kind: str, sent: float, size: int, machine: Machine) -> float:
    """Between what was measured of all ranks and of pairs, where there were pairs."""
    whole = machine.collectives[kind](sent)
    if kind not in machine.pairs or machine.ranks == 2:
        return whole
    along = (size - 2) / (machine.ranks - 2)
    return along * whole + (1 - along) * machine.pairs[kind](sent)


def late_s(size: int, rates: Rates) -> float:
    """By how much the last of so many ranks comes later than the others. Ranks are interrupted rarely and one by one, so the
    wait for the slowest grows with their number (Petrini, Kerbyson and Pakin, 2003)."""
    return rates.jitter_s * (size - 1)
