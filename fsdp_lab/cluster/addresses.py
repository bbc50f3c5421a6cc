"""At which address of a host the other hosts reach it: found by trying, whatever names resolve to.

Note: finding addresses. Host names need not resolve, or resolve to loopback; a host can have several networks, of which some
end inside it (containers' bridges) or are slow; there need not be a default route. So one rank of each host listens
at every address that its interfaces have, and one of each other host connects to all of them. A token shows that it is the
right host that answers: private addresses repeat. An address is good if all other hosts reach it, since torch's store and
Gloo take one per rank. Of several that are good, link-local ones come last, then IPv6 ones, then those of slow interfaces.
The ports are free ones, as Gloo's will be, so a firewall that admits only some is noticed here, not by a timeout."""

import contextlib
import ipaddress
import os
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

from fsdp_lab.cluster import StartError
from fsdp_lab.cluster.host_script import TRY_S, digest_of, exactly, try_to_connect

INTERFACES = "GLOO_SOCKET_IFNAME"  # the user's choice of interfaces, by their names
_TOKEN_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A port where a host listens."""

    address: str
    port: int = 0  # 0: of whoever listens
    interface: str = ""  # "" for loopback

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the environment, for the groups that users open in cells, and for NCCL."""
        if not self.interface:
            return {}
        family = "AF_INET6" if ":" in self.address else "AF_INET"
        nccl = {"NCCL_SOCKET_IFNAME": f"={self.interface}", "NCCL_SOCKET_FAMILY": family}
        return {"GLOO_SOCKET_IFNAME": self.interface, **nccl}

    def __str__(self) -> str:
        return f"{self.address} port {self.port} ({self.interface})"


def own_addresses() -> list[tuple[str, str]]:
    """Returns (interface, address) of this host at which another might reach it, the likely and fast ones first. Only of the
    interfaces that the user has named in GLOO_SOCKET_IFNAME, if there are any."""
    named = {name for name in os.environ.get(INTERFACES, "").split(",") if name}
    stats, likely = psutil.net_if_stats(), []
    for interface, addresses in psutil.net_if_addrs().items():
        if (interface in stats and not stats[interface].isup) or (named and interface not in named):
            continue
        speed = stats[interface].speed if interface in stats else 0
        for a in addresses:
            if a.family in (socket.AF_INET, socket.AF_INET6) and "%" not in a.address:
                ip = ipaddress.ip_address(a.address)
                if not ip.is_loopback and not (ip.version == 6 and ip.is_link_local):
                    likely.append(((ip.is_link_local, ip.version, -speed), interface, a.address))
    return [(interface, address) for _, interface, address in sorted(likely, key=lambda entry: entry[0])]


class Endpoints:
    """Listens at every address of this host where it can, and answers who says the token."""

    def __init__(self, token: str) -> None:
        self._token = bytes.fromhex(token)
        self._listeners: list[socket.socket] = []
        self.open: list[Endpoint] = []
        for interface, address in own_addresses():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with contextlib.suppress(OSError):
                listener = socket.create_server((address, 0), family=family, backlog=256)
                self._listeners.append(listener)
                self.open.append(Endpoint(address=address, port=listener.getsockname()[1], interface=interface))
                threading.Thread(target=self._accept, args=(listener,), name="fsdp_lab-endpoint", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._answer, args=(connection,), name="fsdp_lab-endpoint", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(TRY_S)
            if secrets.compare_digest(exactly(connection, _TOKEN_BYTES), self._token):
                connection.sendall(digest_of(self._token))

    def close(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # `close` alone leaves a thread in `accept`
            listener.close()


def new_token() -> str:
    return secrets.token_hex(_TOKEN_BYTES)


def reach(endpoints: Sequence[Endpoint], token: str) -> list[str]:
    """Returns why this host does not reach each endpoint; "" where it does."""
    with ThreadPoolExecutor(min(256, len(endpoints) or 1)) as pool:
        return list(pool.map(lambda endpoint: try_to_connect(endpoint.address, endpoint.port, token), endpoints))


# -- decisions, in the kernel ----------------------------------------------------------------------------------------

# (from host, to host) -> why each of its endpoints was not reached, or ""
Tried = Mapping[tuple[str, str], Sequence[str]]


def reached_by_all(endpoints: Mapping[str, Sequence[Endpoint]], tried: Tried) -> dict[str, Endpoint]:
    """The first endpoint of each host that all others reach. Raises StartError, with two hosts, addresses and ports."""
    reached = {}
    for host, own in endpoints.items():
        if not own:
            why = f"its interfaces are down, or {INTERFACES} names none of them"
            raise StartError(f"{host} has no network that another host could reach: {why}")
        failures = {other: tried[other, host] for other in endpoints if other != host}
        good = [e for i, e in enumerate(own) if not any(why[i] for why in failures.values())]
        if not good:
            worst = max(failures, key=lambda other: sum(map(bool, failures[other])))
            where = ", ".join(f"{e}: {why}" for e, why in zip(own, failures[worst], strict=True) if why)
            network = f"a network that they share, and name its interface in {INTERFACES} if only some are meant"
            hint = f"open the ports between the hosts, or give them {network}"
            raise StartError(f"{worst} does not reach {host}: {where}; {hint}")
        reached[host] = good[0]
    return reached


def unique_names(hosts: Mapping[str, str]) -> dict[str, str]:
    """Returns a name for each host, by its id: with a number where hosts have the same name, as containers of one image."""
    seen: Counter[str] = Counter()
    unique = {}
    for key, name in hosts.items():
        seen[name] += 1
        unique[key] = name if seen[name] == 1 else f"{name} #{seen[name]}"
    return unique
