"""`SshEngines`: engines on hosts that are reached by SSH, by one connection for each command and host."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fsdp_lab.base.process import MARK, Identity
from fsdp_lab.cluster import host_script
from fsdp_lab.cluster.addresses import Endpoint
from fsdp_lab.cluster.detached import EndCommand
from fsdp_lab.cluster.errors import StartError
from fsdp_lab.cluster.host_engines import START_S, HostEngines
from fsdp_lab.cluster.hosts import SshHosts
from fsdp_lab.cluster.shells import Command, HostAnswer, SshShell

TUNNEL_S = 1.0  # for ssh to refuse a forwarded port


class SshEngines(HostEngines):
    """Where hosts cannot connect to this machine, as to a laptop behind a router, their engines come through SSH too."""

    _asked: SshHosts
    shell: SshShell
    _tunnels: Mapping[str, Command] = {}
    _former_tunnels: Mapping[str, Identity] = {}  # of a former kernel

    def _allocate(self) -> list[str]:
        self.shell = SshShell(self._asked.path, self._asked.ssh_args)
        return list(self._asked.names)

    @property
    def _where(self) -> dict[str, Any]:
        own = {name: Identity.of(tunnel.process.pid) for name, tunnel in self._tunnels.items()}
        tunnels = {name: asdict(process) for name, process in {**self._former_tunnels, **own}.items()}
        return super()._where | {"tunnels": tunnels}

    def _take_over(self, where: Mapping[str, Any]) -> None:
        super()._take_over(where)
        self._allocate()
        self._former_tunnels = {name: Identity(**d) for name, d in where["tunnels"].items()}

    def _choose_endpoint(
        self, endpoints: Sequence[Endpoint], unreached: Mapping[str, Sequence[str]]
    ) -> Endpoint | None:
        if self._asked.tunnel:
            return None
        try:
            return super()._choose_endpoint(endpoints, unreached)
        except StartError:
            if self._asked.tunnel is False:
                raise
            self.notes += ("the hosts reach this machine through SSH alone",)
            return None

    def _agents(self, counts: Mapping[str, int]) -> dict[str, HostAnswer]:
        if self._endpoint is None:
            self._open_tunnels(counts)
        running: dict[str, Command] = {}
        for name, n in counts.items():
            host = self._hosts[name]
            running |= self.shell.start(
                [name], self._agent_command(host.code), self._orders(n, sent=host.sent, stay=False)
            )
        return self.shell.wait(running, START_S)

    def _open_tunnels(self, names: Iterable[str]) -> None:
        """Raises StartError."""
        numbers = [v for value in self._connection.values() for v in (value if isinstance(value, list) else [value])]
        ports = sorted({v for v in numbers if isinstance(v, int) and not isinstance(v, bool)})
        new = [name for name in names if not self._has_tunnel(name)]
        opened = {name: self.shell.tunnel(name, ports, {MARK: self._token}, self._asked.cut_s) for name in new}
        self._tunnels = {**self._tunnels, **opened}
        deadline = time.monotonic() + TUNNEL_S
        while new and time.monotonic() < deadline:
            time.sleep(0.02)
            for name in new:
                if self._tunnels[name].process.poll() is not None:
                    why = self._tunnels[name].error_text or "ssh ended"
                    raise StartError(f"no tunnel from {name} to this machine can be opened: {why}")

    def _has_tunnel(self, name: str) -> bool:
        own, former = self._tunnels.get(name), self._former_tunnels.get(name)
        return own.process.poll() is None if own is not None else former is not None and former.alive

    def _end_all(self) -> bool:
        ended = super()._end_all()
        for tunnel in self._tunnels.values():
            tunnel.end()
        return ended

    def _end_commands(self) -> list[EndCommand]:
        sent = host_script.request("end", token=self._token).decode()
        command = [self.shell.python, "-"]
        return [EndCommand(argv=tuple(self.shell.command(name, command)), sent=sent) for name in self._hosts]
