"""`Cluster`: ipyparallel engines that are ranks. Its parts: `Membership` (which engine is which rank), `Assembly` (start,
join, replace), `Dispatcher` (calls and signals), `Supervisor` (deaths and hangs), `Delivery` (the user's code).

Note: threads. There are four kinds here and in the packages above; each datum belongs to one of them, or has a lock.

- The *kernel's main thread*, or a subshell, runs cells and widget callbacks. It calls `Lab`, and waits only where the user
  requested it. Nothing here needs it: a run continues during a long cell.
- The *driver*, one thread per run (`fsdp_lab.runs`), is the only one that sends work to the ranks during a run, so all ranks
  get the same calls in the same order. Stop, pause and apply are requests left for it under its lock.
- The *client's IO thread* of ipyparallel receives replies and step events. It appends to the event store, wakes waiters, and
  returns: what it calls never blocks, never calls ipyparallel, never touches a widget.
- The *supervisor*, one per cluster, learns of deaths from the client's IO thread and from the *launcher thread* by a queue,
  ends the calls that wait for a lost rank, and calls the callbacks given to `on_lost`. It also looks for ranks that hang."""

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import psutil

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.hang import limit
from fsdp_lab.base.process import marked
from fsdp_lab.cluster import ClusterError, RankLost
from fsdp_lab.cluster.assembly import Assembly, ClusterConfig, OnProgress, RestoredError
from fsdp_lab.cluster.calls import Dispatcher
from fsdp_lab.cluster.code_delivery import Delivery
from fsdp_lab.cluster.detached import persist_limit_s
from fsdp_lab.cluster.hosts import Hosts
from fsdp_lab.cluster.local_engines import LocalEngines, shown_execute
from fsdp_lab.cluster.membership import ClusterState, Membership, RankStatus
from fsdp_lab.cluster.supervisor import Supervisor


class Cluster:
    """Ranks that live in ipyparallel engines.

    Args:
        hang_s: how long a collective may wait for a rank before that rank is considered hung; None: half of `timeout_s`.
        persist: the ranks outlive this process, for a day or a number of hours, until another cluster with the same
            arguments takes them over (see `attached`).
        report: called with the progress of a start, on the thread that starts.
        ranks, arguments: those of `ClusterConfig`.

    Attributes:
        submit, call: of the `Dispatcher`. check_devices: of the `Assembly`.

    Nothing is started by the constructor."""

    def __init__(
        self,
        ranks: int | None = None,
        *,
        hang_s: float | None = None,
        persist: bool | float = False,
        report: OnProgress | None = None,
        **arguments: Any,
    ) -> None:
        persist_s = persist_limit_s(persist, arguments.get("given"))
        config = ClusterConfig(ranks=ranks, persist_s=persist_s, **arguments)
        self.membership = Membership(secrets.token_hex(8))
        self.dispatcher = Dispatcher(self.membership)
        self.supervisor = Supervisor(self.dispatcher, limit(hang_s, config.timeout_s))
        self.assembly = Assembly(config, self.dispatcher, self.supervisor, report or (lambda progress: None))
        self.delivery = Delivery(self.dispatcher)
        self.submit, self.call = self.dispatcher.submit, self.dispatcher.call
        self.check_devices = self.assembly.check_devices
        self._changing = threading.Lock()  # one start, resize or close at a time

    # -- start and end ----------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Starts or takes the engines and joins them; about 3 s, and the time of torch's import where no
        former lab of the notebook has left what has imported it. Raises StartError, SpecError (devices) or RankError;
        everything that was started is ended again."""
        with self._changing:
            if self.membership.state is not ClusterState.NEW:
                raise ClusterError("this cluster was started before; make another one")
            self.supervisor.start()
            self._assemble(self.assembly.start)
        return self

    def resize(self, ranks: int, devices: Sequence[str] | None = None) -> None:
        """Joins exactly `ranks` healthy ranks anew: engines are reused, added or ended, and lost ranks replaced, as needed.
        What the ranks had trained is lost. Raises as `start`; the cluster is closed then, unless it could join as many ranks
        as before anew."""
        with self._changing:
            self.membership.require_engines()
            self._assemble(lambda: self.assembly.resize(ranks, devices))

    def move(
        self,
        hosts: Hosts | None,
        ranks: int | None = None,
        report: OnProgress | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Ends the ranks and starts others on these hosts, or on this one. What they had trained is lost. `report`: as in
        the constructor, for this start alone; it cancels the start by raising. `before`: called before anything is ended,
        when the hosts were looked at, or Slurm has granted them. Raises as `resize`; ArgumentError: not our engines."""
        if self.assembly.config.given is not None:
            yours = "the engines of a given cluster are yours, and stay where they are"
            raise ArgumentError("hosts", yours, "make a lab with Lab.ssh, Lab.slurm or Lab")
        looked_at = self.assembly.look_at(hosts, report) if hosts is not None else None
        try:
            before()
            with self._changing:
                self.membership.require_engines()
                self._assemble(lambda: self.assembly.move(hosts, ranks, report, looked_at))
        except BaseException:
            if looked_at is not None:
                looked_at.close()
            raise

    def _assemble(self, work: Callable[[], None]) -> None:
        self.membership.enter(ClusterState.ASSEMBLING)
        try:
            work()
            self._enter_running()
        except RestoredError as e:
            self._enter_running()
            raise e.__cause__ or e from None
        except BaseException:
            self._close()
            if (engines := self.membership.engines) is not None:
                engines.close()  # if another thread has closed the cluster before they were there
            raise

    def _enter_running(self) -> None:
        """Makes `%px` and `%%px` run on the ranks, in rank order, in IPython. Cells run between chunks of steps. Pause the
        run before a cell that communicates: all ranks must reach it at the same point."""
        from IPython.core.getipython import get_ipython

        self.membership.enter(ClusterState.RUNNING)
        with contextlib.suppress(Exception):  # magics are a convenience: no reason to lose the ranks
            if get_ipython() is not None:
                view = self.client.activate(targets=self.engine_ids)
                view.execute = partial(shown_execute, view.execute)

    def close(self, *, keep: bool = False) -> None:
        """Ends what we started, in any state; ten seconds at most. Idempotent. `keep`: what starts engines is left in
        `assembly.kept` where it can be, for the next lab."""
        engines = self.membership.engines
        is_ours = self._changing.acquire(timeout=1)
        if not is_ours:  # another thread starts or resizes
            if engines is not None:
                engines.close()  # that fails then, and cleans up after itself
            is_ours = self._changing.acquire(timeout=8)
        try:
            self._close(keep=keep and is_ours)
        finally:
            if is_ours:
                self._changing.release()

    def _close(self, *, keep: bool = False) -> None:
        if self.membership.closed:
            return
        self.membership.enter(ClusterState.CLOSED)
        engines = self.membership.engines
        if engines is not None:
            with contextlib.suppress(Exception):
                self.dispatcher.dismiss(self.membership.present)
        self.supervisor.stop()
        self.dispatcher.abandon()
        if keep and isinstance(engines, LocalEngines) and engines.keep():
            self.assembly.kept = engines
        elif engines is not None:
            engines.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def detach(self) -> None:
        """Leaves persistent ranks as they are, for another process. Raises ClusterError: they are not persistent."""
        with self._changing:
            self.membership.require_engines().detach()
            self.membership.enter(ClusterState.CLOSED)
            self.supervisor.stop()
            self.dispatcher.abandon()

    # -- calls ------------------------------------------------------------------------------------------------------

    def interrupt(self, *, cells: bool = False) -> None:
        """SIGINT to every rank that works; its session ends the step in progress and keeps its state. `cells`: also to those
        that work on a user's cell."""
        self.dispatcher.signal([m.rank for m in self.membership.present if m.doing or cells])

    def send_signal(self, rank: int, number: int) -> None:
        """Sends a signal to one rank's process. Raises ClusterError if it is not ours."""
        process = self.membership.members[rank].process
        if not self.owned or process is None:
            raise ClusterError(f"rank {rank} is not ours to signal: its engine was started by another program")
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)

    def on_lost(self, callback: Callable[[RankLost], None]) -> None:
        """`callback(lost)` on the supervisor's thread when a rank's process ends unexpectedly."""
        self.supervisor.on_lost.append(callback)

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def token(self) -> str:
        """Marks the processes of this cluster, in their environment."""
        return self.membership.token

    @property
    def ranks(self) -> int:
        return len(self.membership.members)

    @property
    def lost(self) -> dict[int, RankLost]:
        return self.membership.lost

    @property
    def memory(self) -> list[tuple[str, str, int, int]]:
        """The host, the device and the `Member.limits_bytes` of each rank that has told them."""
        return [(one.host, one.device, *one.limits_bytes) for one in self.membership.members if one.limits_bytes]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on how representative the times are, and on how the ranks were started."""
        return (*self.membership.placement.notes, *self.assembly.notes)

    @property
    def attached(self) -> bool:
        """Whether the ranks were started by a former kernel."""
        return self.membership.engines is not None and self.membership.engines.attached

    @property
    def owned(self) -> bool:
        """Whether the engines were started by this package."""
        return self.membership.engines is not None and self.membership.engines.owned

    @property
    def local(self) -> bool:
        """Whether all ranks are on this host, with its files."""
        return self.membership.require_engines().local

    @property
    def most_ranks(self) -> int | None:
        """How many engines a given cluster has, or GPUs the hosts; None: we start as many as needed."""
        engines = self.membership.engines
        return None if engines is None else engines.most_ranks

    @property
    def running(self) -> bool:
        """Started, not closed, and no rank lost."""
        return self.membership.state is ClusterState.RUNNING and not self.lost

    @property
    def closed(self) -> bool:
        return self.membership.closed

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [m.pid for m in self.membership.members]

    @property
    def processes(self) -> list[int]:
        """Process ids of what was started here and still runs: engines, their nannies, the controller."""
        return [p.pid for p in marked(self.token)] if self.owned else []

    @property
    def engine_ids(self) -> list[int]:
        """ipyparallel's engine ids in rank order."""
        return [m.engine for m in self.membership.members]

    @property
    def client(self) -> Any:
        """An `ipyparallel.Client` for the user: views, `%px`. Not the one used here, if the engines are ours."""
        return self.membership.require_engines().user_client

    def status(self) -> list[RankStatus]:
        """Every rank, in rank order; never waits for a rank."""
        return [m.status(self.supervisor.monitor.last(m.rank), closed=self.closed) for m in self.membership.members]

    def __repr__(self) -> str:
        devices = ", ".join(self.membership.placement.devices) or "nothing yet"
        what = "closed" if self.closed else f"{self.ranks} ranks on {devices}"
        return f"<Cluster: {what}{f', {len(self.lost)} lost' if self.lost else ''}>"
