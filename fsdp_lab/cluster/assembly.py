"""`Assembly`: makes ranks of engines. Starts or takes the engines, places and joins them, replaces ranks that are lost, and
takes over ranks that a former kernel left. `meet` finds the addresses at which the ranks of several hosts listen."""

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import psutil

from fsdp_lab.base import __version__
from fsdp_lab.base.errors import ArgumentError, FieldError
from fsdp_lab.base.process import alive, host_id
from fsdp_lab.cluster import ClusterError, StartError
from fsdp_lab.cluster.addresses import Endpoint, new_token, reached_by_all, unique_names
from fsdp_lab.cluster.batch_engines import SlurmEngines
from fsdp_lab.cluster.calls import SECOND_INTERRUPT_S, Dispatcher
from fsdp_lab.cluster.detached import Claimed, DetachedCluster, claim
from fsdp_lab.cluster.engine_server import forks
from fsdp_lab.cluster.engines import Engines, exposure_notes
from fsdp_lab.cluster.host_engines import Report, SshEngines
from fsdp_lab.cluster.host_script import TRY_S
from fsdp_lab.cluster.hosts import Hosts, SshHosts
from fsdp_lab.cluster.local_engines import LOOPBACK, EngineOrder, LocalEngines
from fsdp_lab.cluster.membership import Member
from fsdp_lab.cluster.placement import Host, Placement, free_gpus, place, probe, without_ours
from fsdp_lab.cluster.supervisor import Supervisor

ATTACHED_S = 1.0  # for all ranks to answer once the first has
ROUND_S = 3 * TRY_S  # for one round of `meet`: a connection, its greeting, and the answer to the kernel


@dataclass(frozen=True, kw_only=True)
class StartProgress:
    """How far a start has come: `done` of `total` within `stage`."""

    stage: str
    done: int
    total: int
    seconds: float  # since the start began


OnProgress = Callable[[StartProgress], None]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The arguments of `Cluster` that concern its ranks.

    Args:
        ranks: how many. None: 2, or one on each free GPU, or all engines of a given cluster.
        devices: one for each rank, or None to choose (see `placement.place`).
        given: the user's own ipyparallel Cluster or Client, a profile, a cluster id, or a connection file. Its engines are
            never ended.
        hosts: other hosts, where engines are started.
        reduction: the wire's, "auto", "rank_ordered" or "native".
        rank_module: the module with `Session` and `host_store`, imported on the ranks; None: `fsdp_lab.rank`.
        environment: for the engines that are started here.
        timeout_s: for a start, and for the ranks' collectives.
        persist_s: how long the ranks wait for another kernel; None: they end with this one."""

    ranks: int | None = None
    devices: Sequence[str] | None = None
    given: Any = None
    hosts: Hosts | None = None
    reduction: str = "auto"
    rank_module: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 60
    persist_s: float | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """The arguments and this environment, as JSON values; those of detached ranks that are taken over are the same."""
        arguments = {name: value for name, value in vars(self).items() if name not in ("given", "persist_s")}
        return arguments | {
            "devices": None if self.devices is None else list(self.devices),
            "hosts": None if self.hosts is None else json.loads(json.dumps(asdict(self.hosts))),
            "notebook": os.environ.get("JPY_SESSION_NAME", ""),  # set by JupyterLab
            "python": sys.executable,
            "version": __version__,
        }


class RestoredError(Exception):
    """A change of ranks failed with its cause, and as many as before are joined anew, without what they had trained."""


class Assembly:
    """Makes ranks of engines.

    Attributes:
        config: where they are is changed by `move`.
        notes: on how the ranks were started.
        attached_status: `Session.status` of each rank when it was taken over, empty if it was started here.
        kept: what the kernel's former lab left for this one, or this one leaves (see `LocalEngines.keep`)."""

    def __init__(
        self, config: ClusterConfig, dispatcher: Dispatcher, supervisor: Supervisor, report: OnProgress
    ) -> None:
        self.config, self._dispatcher, self._supervisor = config, dispatcher, supervisor
        self._membership, self._monitor, self._on_progress = dispatcher.membership, supervisor.monitor, report
        self._began_s, self._default_ranks = 0.0, 2
        self.notes: tuple[str, ...] = ()
        self.attached_status: tuple[Mapping[str, Any], ...] = ()
        self.kept: LocalEngines | None = None

    @property
    def _engines(self) -> Engines:
        assert self._membership.engines is not None
        return self._membership.engines

    def start(self) -> None:
        config = self.config
        self._began_s = time.monotonic()
        self._report("starting engines", 0, config.ranks or self._default_ranks)
        if config.persist_s is not None and self._attach(config.persist_s):
            return
        if config.given is None and config.hosts is None:  # devices are refused before anything is started
            host = self._this_host()
            if config.ranks is None and config.devices is None and (free := len(free_gpus(host))) > self._default_ranks:
                self._default_ranks = free
                self.notes = (f"{free} ranks, one on each GPU that is free; Lab(2) takes two of them.",)
            place([host] * (config.ranks or self._default_ranks), config.devices)
        self._connect()
        self._assemble(config.ranks or self._engines.default_ranks, config.devices)

    def resize(self, ranks: int, devices: Sequence[str] | None) -> None:
        """Raises RestoredError if no rank was lost before, and so many cannot be joined."""
        self._began_s = time.monotonic()
        if self._engines.broken:  # engines are of no use without their controller
            self._end_engines()
            self._connect()
        seats, whole = self._membership.placement.seats, not self._membership.lost
        try:
            self._assemble(ranks, devices)
        except (StartError, FieldError) as e:
            if not whole or self._engines.broken or self._membership.closed:
                raise
            self._assemble(len(seats), [seat.device for seat in seats])
            raise RestoredError from e

    def look_at(self, hosts: Hosts, report: OnProgress | None) -> LocalEngines:
        """Looks at hosts, or waits in a queue, and ends nothing. Returns what is to add engines. Raises StartError."""
        say = partial(self._say, report or self._on_progress, time.monotonic())
        return self._engines_on(hosts, secrets.token_hex(8), say)

    def move(
        self, hosts: Hosts | None, ranks: int | None, report: OnProgress | None, looked_at: LocalEngines | None
    ) -> None:
        """Ends the engines and starts those of `look_at`, or others here. Raises RestoredError if that fails or is
        interrupted."""
        self._began_s = time.monotonic()
        former, seats, former_report = self.config, self._membership.placement.seats, self._on_progress
        self._on_progress = report or former_report
        self.config = replace(former, hosts=hosts, ranks=ranks, devices=None)
        self._end_engines()
        try:
            self._connect(looked_at)
            self._assemble(ranks or self._engines.default_ranks, None)
        except BaseException as e:
            self.config, self._on_progress = former, former_report
            if self._membership.closed:
                raise
            self._end_engines()
            self._connect()
            self._assemble(len(seats), [seat.device for seat in seats])
            raise RestoredError from e
        self._on_progress = former_report

    def _end_engines(self) -> None:
        """Ends them, with their controller."""
        self._membership.replace([])
        self._engines.close()
        self._membership.token = secrets.token_hex(8)
        self.notes = ()

    def _connect(self, looked_at: LocalEngines | None = None) -> None:
        config, membership = self.config, self._membership
        if looked_at is None and config.given is None:
            looked_at = self._engines_on(config.hosts, membership.token, self._report)
        if looked_at is not None:
            membership.token, membership.engines = looked_at.token, looked_at
        else:
            membership.engines = Engines(config.given, config.timeout_s)
        if self.kept is not None:
            self.kept.close()
            self.kept = None
        membership.leaving = frozenset()  # another controller counts engines from 0 again
        membership.engines.sending = self._dispatcher.sending
        self._supervisor.watch(membership.engines.client)

    def _engines_on(
        self, hosts: Hosts | None, token: str, report: Report, former: Claimed | None = None
    ) -> LocalEngines:
        """Engines on these hosts or on this one, which start when they are added; or `former` ones. Raises StartError."""
        config, on_end = self.config, self._supervisor.process_ended
        environment, timeout_s = config.environment, config.timeout_s
        order = EngineOrder(token=token, environment=environment, on_end=on_end, timeout_s=timeout_s, former=former)
        if hosts is None:
            ranks = config.ranks or self._default_ranks
            kept, self.kept = (self.kept, None) if former is None else (None, self.kept)
            if kept is not None and kept.take(order, ranks, config.rank_module):
                engines = kept
            else:
                forked = former is None and forks()
                engines = LocalEngines(order, ranks, forked=forked, rank_module=config.rank_module)
            engines.default_ranks = ranks
            return engines
        return (SshEngines if isinstance(hosts, SshHosts) else SlurmEngines)(order, hosts, report)

    def _report(self, stage: str, done: int, total: int) -> None:
        self._say(self._on_progress, self._began_s, stage, done, total)

    def _say(self, on_progress: OnProgress, began_s: float, stage: str, done: int, total: int) -> None:
        if self._membership.closed:
            raise ClusterError("the ranks were closed meanwhile")
        on_progress(StartProgress(stage=stage, done=done, total=total, seconds=time.monotonic() - began_s))

    # -- from engines to ranks --------------------------------------------------------------------------------------

    def _assemble(self, n: int, devices: Sequence[str] | None) -> None:
        """Joins exactly `n` healthy ranks anew."""
        if n < 1:
            raise ClusterError(f"{n} ranks: one is the least")
        self._engines.unpersist()
        self.attached_status = ()
        engines, view = self._enough_engines(n), self._engines.client.direct_view
        self._membership.replace([Member(rank=i, engine=engine, view=view(engine)) for i, engine in enumerate(engines)])
        described = self._dispatcher.call("describe", timeout_s=self.config.timeout_s)
        by_engine = dict(zip(engines, described, strict=True))
        chosen = rank_order(by_engine, self._engines.place_of)[:n]
        reports = [by_engine[engine] for engine in chosen]
        placement = place(self._hosts(reports), devices)
        wanted = None if self.config.hosts is None else self.config.hosts.gpus_per_host
        for seat in placement.seats if wanted is not None else ():
            if seat.device == "cpu" or seat.shared_gpu_ranks > 1:
                has = "none is free, or torch cannot use it" if seat.device == "cpu" else "some are shared then"
                lacking = f"{wanted} GPUs a host are not to be had on {seat.host}: {has}"
                raise ArgumentError("gpus_per_host", lacking, "ask for fewer, or give ranks_per_host")
        members = [self._member(rank, chosen[rank], report, placement) for rank, report in enumerate(reports)]
        self._membership.replace(members, placement)
        self._join([seat.host for seat in placement.seats])
        if not self._engines.local:
            exposed = exposure_notes(self._engines.client, [r["id"] for r in described])
            self.notes = (*exposed, *self._engines.notes)
        if self.config.persist_s is not None:
            self._engines.persist(
                asked=self.config.identity,
                engines=tuple(chosen),
                pids=tuple(m.pid for m in members),
                host_ids=tuple(m.host_id for m in members),
                placement=asdict(placement),
                limit_s=self.config.persist_s,
            )

    def _enough_engines(self, n: int) -> list[int]:
        """Returns the ids of `n` engines: those of healthy ranks, and new ones. Ends the others. Engines of a given cluster
        are all returned, which may be more."""
        before, healthy = self._membership.members, self._membership.present
        unresponsive = self._dispatcher.dismiss(healthy) if healthy else []
        reused = [m for m in healthy if m not in unresponsive][:n]
        others = [m for m in before if m not in reused]
        self._membership.leaving |= {m.engine for m in others}  # their end is no loss
        self._membership.replace([])
        self._engines.end(others, term_s=0.7)
        self._monitor.close_channels()
        if not self._engines.owned:
            ids = list(self._engines.client.ids)
            if len(ids) < n:
                has = f"the given cluster has {len(ids)} engine{'s' * (len(ids) != 1)}"
                raise StartError(f"{n} ranks were asked for and {has}; ask for fewer, or start more engines")
            return ids
        if (missing := n - len(reused)) <= 0:
            return [m.engine for m in reused]
        # The first forked engines wait for the imports of their server.
        imports = self._engines.forked and not self._engines.imported and not before
        stage = "importing torch" if imports else "starting engines"
        self._report(stage, 0, missing)
        try:
            added = self._engines.add(missing, lambda k: self._report(stage, k, missing), self.config.timeout_s)
        except StartError:
            self._membership.replace(reused)  # they can be joined again
            raise
        return [*(m.engine for m in reused), *added]

    def _hosts(self, reports: Sequence[Mapping[str, Any]]) -> list[Host]:
        """Returns the host of each rank, as one rank on it sees it, under names that differ."""
        if self._engines.local:
            return [self._this_host(frozenset(r["pid"] for r in reports))] * len(reports)
        names = unique_names({r["id"]: r["host"] for r in reports})
        leaders: dict[str, int] = {}
        for rank, r in enumerate(reports):
            leaders.setdefault(r["id"], rank)
        asked = {rank: {"ours": [r["pid"] for r in reports if r["id"] == key]} for key, rank in leaders.items()}
        hosts = self._dispatcher.ask("hardware", asked, self.config.timeout_s)
        return [replace(hosts[leaders[r["id"]]], name=names[r["id"]]) for r in reports]

    def _this_host(self, ours: frozenset[int] = frozenset()) -> Host:
        return without_ours(probe(ours=ours), self._membership.placement.devices if ours else ())

    def check_devices(self, ranks: int, devices: Sequence[str] | None) -> None:
        """Raises FieldError where all ranks are on this host, for devices that it has not."""
        if self._membership.require_engines().local:
            ours = frozenset(m.pid for m in self._membership.members)
            place([self._this_host(ours)] * ranks, devices)

    def _member(self, rank: int, engine: int, report: Mapping[str, Any], placement: Placement) -> Member:
        seat, view = placement.seats[rank], self._engines.client.direct_view(engine)
        pid, id_ = report["pid"], report["id"]
        member = Member(rank=rank, engine=engine, view=view, pid=pid, host=seat.host, host_id=id_, device=seat.device)
        if member.host_id == host_id() and alive(member.pid):
            with contextlib.suppress(psutil.Error):
                member.process = psutil.Process(member.pid)
        return member

    def _join(self, hosts: Sequence[str]) -> None:
        """`hosts`: of the ranks, in rank order."""
        n, module, timeout_s = len(hosts), self.config.rank_module, self.config.timeout_s
        if not self._engines.forked:
            self._report("importing torch", 0, n)
        self._dispatcher.call("load", module=module, owner=self._membership.token, timeout_s=2 * timeout_s)
        self._report("joining ranks", 0, n)
        met = meet(self._dispatcher, hosts)
        at = met[hosts[0]].address if len(met) > 1 else None
        place = self._dispatcher.send("host", {0: {"module": module, "address": at}}).results(timeout_s)[0]
        headers = self._monitor.open_channels(self._engines.client, range(n))
        common = {"module": module, "world_size": n, "place": place, "timeout_s": timeout_s}
        common |= {"reduction": self.config.reduction, "hosts": list(hosts)}
        each = {}
        for seat in self._membership.placement.seats:
            own = {"address": met[seat.host].address, "variables": met[seat.host].variables}
            each[seat.rank] = {**seat.arguments, **common, **own, "beats": headers[seat.rank]}
        joined = self._dispatcher.send("join", each).results(timeout_s + 10)
        for member, limits_bytes in zip(self._membership.members, joined, strict=True):
            member.limits_bytes = limits_bytes and tuple(limits_bytes)
        self._report("ready", n, n)

    # -- ranks that a former kernel left ----------------------------------------------------------------------------

    def _attach(self, limit_s: float) -> bool:
        """Takes over detached ranks, and ends those that do not answer. Returns whether it has taken over any."""
        while (claimed := claim(self.config.identity, limit_s)) is not None:
            record, _ = claimed
            self._membership.token = record.token
            engines = self._engines_on(self.config.hosts, record.token, self._report, claimed)
            try:
                engines.reach()
                engines.sending = self._dispatcher.sending
                self._membership.engines = engines
                self._supervisor.watch(engines.client)
                self._adopt_ranks(record)
                return True
            except BaseException as e:
                self._membership.engines, self._membership.token = None, secrets.token_hex(8)
                self._membership.replace([])
                if not isinstance(e, ClusterError):
                    engines.detach()  # an interrupt is no reason to lose what they hold
                    raise
                engines.close()
                self.notes = (f"ranks that a former kernel left were ended, and new ones started: {e.sentence}",)
        return False

    def _adopt_ranks(self, record: DetachedCluster) -> None:
        """Makes the ranks report to this client. What they work on ends first."""
        placement = Placement.from_dict(record.placement)
        members = [
            self._member(rank, engine, {"pid": pid, "id": id_}, placement)
            for rank, (engine, pid, id_) in enumerate(zip(record.engines, record.pids, record.host_ids, strict=True))
        ]
        self._membership.replace(members, placement)
        with self._dispatcher.sending:
            self._dispatcher.turn = time.time_ns()  # continues with numbers that no call of the former kernel had
        headers = self._monitor.open_channels(self._engines.client, range(len(members)))
        call = self._dispatcher.send("attach", {rank: {"beats": header} for rank, header in headers.items()})
        deadline = time.monotonic() + self.config.timeout_s
        while not call.wait(0.05) and len(call.pending) == len(members) and time.monotonic() < deadline:
            continue
        if not call.wait_all(ATTACHED_S):  # these wait for ranks to which the former kernel did not live to send a call
            call.interrupt()
            call.wait_all(SECOND_INTERRUPT_S)
        self.attached_status = tuple(call.results(0))
        for member, status in zip(members, self.attached_status, strict=True):
            member.step, member.limits_bytes = status["step"], status.get("limits_bytes")
            member.code.update(status.get("code", ()))
        if not self._engines.local:
            self.notes = exposure_notes(self._engines.client, record.host_ids)
        self._report("ready", len(members), len(members))


def rank_order(
    reports: Mapping[int, Mapping[str, Any]], place_of: Callable[[str], int] = lambda host_id: 0
) -> list[int]:
    """Engine ids in rank order: ranks of one host are neighbors, so that the shard groups of hybrid sharding stay inside one
    host; hosts are in their order, else in that of their first engine."""
    first: dict[str, int] = {}
    for engine in sorted(reports):
        first.setdefault(reports[engine]["id"], engine)
    return sorted(reports, key=lambda engine: (place_of(host := reports[engine]["id"]), first[host], engine))


# -- where the ranks of several hosts listen ---------------------------------------------------------------------------


def meet(dispatcher: Dispatcher, hosts: Sequence[str]) -> dict[str, Endpoint]:
    """One rank of each host tries the addresses of the other hosts. Returns where each host's ranks listen for others, by
    its name; `hosts` are those of the ranks, in rank order. Raises StartError: which host does not reach which other one, at
    which ports."""
    leaders = {host: hosts.index(host) for host in dict.fromkeys(hosts)}
    if len(leaders) == 1:
        return {host: Endpoint(address=LOOPBACK) for host in leaders}
    token = new_token()
    try:
        opened = dispatcher.ask("open_endpoints", {rank: {"token": token} for rank in leaders.values()}, ROUND_S)
        all_ = [(host, endpoint) for host, rank in leaders.items() for endpoint in opened[rank]]
        each = {"endpoints": [endpoint for _, endpoint in all_], "token": token}
        answers = dispatcher.ask("reach", dict.fromkeys(leaders.values(), each), ROUND_S)
    finally:
        with contextlib.suppress(ClusterError):  # the first error counts
            dispatcher.ask("close_endpoints", {rank: {} for rank in leaders.values()}, ROUND_S)
    tried: dict[tuple[str, str], list[str]] = {(host, other): [] for host in leaders for other in leaders}
    for host, rank in leaders.items():
        for (other, _), why in zip(all_, answers[rank], strict=True):
            tried[host, other].append(why)
    return reached_by_all({host: opened[rank] for host, rank in leaders.items()}, tried)
