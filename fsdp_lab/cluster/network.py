"""`meet`: one rank of each host tries the addresses of the other hosts (addresses.py), and each host gets the one at which
torch's store, Gloo and NCCL are to listen."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_lab.cluster.addresses import Endpoint, fastest, new_token, reached_by_all
from fsdp_lab.cluster.calls import Dispatcher
from fsdp_lab.cluster.errors import ClusterError
from fsdp_lab.cluster.host_script import TRY_S
from fsdp_lab.cluster.local_engines import LOOPBACK

ANSWER_S = 3 * TRY_S  # for one round: a connection, its greeting, and the answer to the kernel


@dataclass(frozen=True, kw_only=True)
class HostAddress:
    """Where the ranks of one host listen for other ranks."""

    address: str = LOOPBACK
    interface: str = ""  # "" for loopback

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment, for the groups that users open in cells, and for NCCL."""
        if not self.interface:
            return {}
        family = "AF_INET6" if ":" in self.address else "AF_INET"
        return {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": f"={self.interface}",
                "NCCL_SOCKET_FAMILY": family}  # fmt: skip


def meet(dispatcher: Dispatcher, hosts: Sequence[str]) -> dict[str, HostAddress]:
    """The address of each host, by its name; `hosts` are those of the ranks, in rank order. Raises StartError: which host
    does not reach which other one, at which ports."""
    leaders = {host: hosts.index(host) for host in dict.fromkeys(hosts)}
    if len(leaders) == 1:
        return {host: HostAddress() for host in leaders}
    token = new_token()
    try:
        opened = dispatcher.ask("open_endpoints", {rank: {"token": token} for rank in leaders.values()}, ANSWER_S)
        endpoints = {host: opened[rank] for host, rank in leaders.items()}
        chosen = _choose(dispatcher, leaders, endpoints, token)
    finally:
        with contextlib.suppress(ClusterError):  # the first error counts
            dispatcher.ask("close_endpoints", {rank: {} for rank in leaders.values()}, ANSWER_S)
    return {
        host: HostAddress(address=endpoint.address, interface=endpoint.interface) for host, endpoint in chosen.items()
    }


def _choose(
    dispatcher: Dispatcher, leaders: Mapping[str, int], endpoints: Mapping[str, Sequence[Endpoint]], token: str
) -> dict[str, Endpoint]:
    others = {host: [other for other in leaders if other != host] for host in leaders}
    flat = {host: [endpoint for other in others[host] for endpoint in endpoints[other]] for host in leaders}
    answers = dispatcher.ask("reach", {leaders[h]: {"endpoints": flat[h], "token": token} for h in leaders}, ANSWER_S)
    tried: dict[tuple[str, str], list[str]] = {}
    for host, rank in leaders.items():
        rest = iter(answers[rank])
        tried |= {(host, other): [next(rest) for _ in endpoints[other]] for other in others[host]}
    good = reached_by_all(endpoints, tried)
    names = list(leaders)
    before = {host: names[i - 1] for i, host in enumerate(names)}  # the neighbor that measures
    several = [host for host in names if len(good[host]) > 1]
    measured = {leaders[before[host]]: {"endpoints": good[host], "token": token} for host in several}
    speeds = dispatcher.ask("measure", measured, ANSWER_S)
    fast = {host: fastest(good[host], speeds[leaders[before[host]]]) for host in several}
    return {host: fast.get(host, good[host][0]) for host in names}
