"""`Membership`: the cluster's state, its engines, which engine is which rank, and what is known of each rank."""

import enum
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from fsdp_lab.base.hang import Heartbeat
from fsdp_lab.cluster import ClusterError, RankLost
from fsdp_lab.cluster.engines import EngineProcess, Engines
from fsdp_lab.cluster.placement import Placement


class ClusterState(enum.Enum):
    """The state of a cluster, at first NEW."""

    NEW = "new"
    ASSEMBLING = "assembling"  # engines are started and joined, by `start` or `resize`
    RUNNING = "running"
    CLOSED = "closed"  # the ranks are ended, or left to another kernel


@dataclass(frozen=True, kw_only=True)
class ReceivedHeartbeat:
    """A heartbeat, and when it arrived, on the kernel's monotonic clock."""

    beat: Heartbeat
    at_s: float

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.at_s


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The state of one rank, from data that the kernel already has."""

    rank: int
    engine: int
    pid: int
    host: str
    device: str
    alive: bool
    state: str  # "idle", "gone", or the call it works on: "train", "apply", ...
    since_unix_s: float  # of the state
    step: int | None  # steps done in its run, as it reported; None before the first
    rss_bytes: int | None  # None if the process is gone, or on another machine
    reason: str = ""  # why it is gone
    heartbeat: ReceivedHeartbeat | None = None  # its last one; a rank sends them also while it is blocked

    @property
    def waits_for(self) -> str:
        """The collective that it waits for, as in "all_gather of unit transformer.h.3"; "" if none."""
        pending = None if self.heartbeat is None else self.heartbeat.beat.pending
        return pending.label if pending is not None and self.state != "idle" else ""

    @property
    def waits_s(self) -> float:
        """How long it has waited for that collective by now; 0.0 if it does not wait."""
        last = self.heartbeat
        return last.beat.pending_s + last.age_s if last is not None and self.waits_for else 0.0


@dataclass(kw_only=True)
class Member(EngineProcess):
    """One rank's engine. Changed by the supervisor and by the thread that sends; read by all."""

    rank: int
    view: Any  # ipyparallel's DirectView of the engine
    host: str = ""
    device: str = "cpu"
    process: psutil.Process | None = None  # None on another machine
    doing: str = ""  # the call it works on
    since_unix_s: float = field(default_factory=time.time)
    step: int | None = None
    lost: RankLost | None = None
    end_reason: str = ""  # why we end it
    code: set[str] = field(default_factory=set)  # digests of the user's code that it has
    limits_bytes: tuple[int, int] | None = None  # of its device's memory for it, and of its host's; None: not known

    def set_doing(self, doing: str) -> None:
        self.doing, self.since_unix_s = doing, time.time()

    def status(self, heartbeat: ReceivedHeartbeat | None, *, closed: bool) -> RankStatus:
        rss_bytes, alive = None, self.lost is None and not closed
        if alive and self.process is not None:
            try:
                rss_bytes = self.process.memory_info().rss
            except psutil.Error:
                alive = False  # the supervisor will report the reason in a moment
        fields = ("rank", "engine", "pid", "host", "device", "since_unix_s", "step")
        return RankStatus(
            **{name: getattr(self, name) for name in fields},
            alive=alive,
            state=(self.doing or "idle") if alive else "gone",
            rss_bytes=rss_bytes,
            reason="" if self.lost is None else self.lost.reason,
            heartbeat=heartbeat if alive else None,
        )


class Membership:
    """Which engine is which rank. Read by all threads; `members`, in rank order, is replaced as a whole under `lock`."""

    def __init__(self, token: str) -> None:
        self.token = token  # marks the cluster's processes, and its ownership of the ranks
        self.engines: Engines | None = None
        self.members: list[Member] = []
        self.placement = Placement(seats=())
        self.lock = threading.RLock()
        self.state = ClusterState.NEW
        self.leaving: frozenset[int] = frozenset()  # ids of engines whose end is expected

    def enter(self, state: ClusterState) -> None:
        with self.lock:
            if self.closed:  # by another thread
                raise ClusterError(f"a cluster that is {self.state.value} cannot become {state.value}")
            self.state = state

    @property
    def closed(self) -> bool:
        return self.state is ClusterState.CLOSED

    def require_engines(self) -> Engines:
        """Raises ClusterError if the cluster is not started, or closed."""
        if self.closed:
            raise ClusterError("the ranks were closed; make a new lab")
        if self.engines is None:
            raise ClusterError("the ranks are not started")
        return self.engines

    def replace(self, members: Sequence[Member], placement: Placement | None = None) -> None:
        with self.lock:
            self.members = list(members)
            self.placement = placement or self.placement

    @property
    def present(self) -> list[Member]:
        """Members that are not lost."""
        with self.lock:
            return [m for m in self.members if m.lost is None]

    @property
    def lost(self) -> dict[int, RankLost]:
        with self.lock:
            return {m.rank: m.lost for m in self.members if m.lost is not None}

    def unexpectedly_ended(self, pid: int | None, engine: int | None) -> Member | None:
        """The member whose engine, or process of this host, has just ended; None if that was expected, or reported."""
        for m in self.present:
            if m.engine == engine or (m.pid == pid and m.process is not None):
                return None if m.engine in self.leaving else m
        return None
