"""What runs in an engine, on behalf of the kernel: one entry, `call`, and the resident it speaks to.

The rank's Session lives in a `Resident`, and that in the engine's IPython namespace under `KEY`; nothing is kept in a
module. What the Session offers by name (model, optimizer, mesh, ...) is pushed beside it, so that `%%px` cells
reach it, and taken away before the Session drops a model: a name that a cell still holds would keep its memory.

`call` never lets an exception reach IPython: formatting it there costs tenths of a second, and `sys.last_value` would
hold the failed step's tensors. Errors travel as plain dicts and become exceptions again in the kernel.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pkgutil
import platform
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

KEY = "_fsdp_lab"
PUBLISH_EVERY_S = 0.04  # at most 25 messages a second and rank, however fast the steps are

TRACE_CHARACTERS = 20_000


def call(what: str, arguments: Mapping[str, Any], owner: str, turn: int) -> dict[str, Any]:
    """Does `what` on this rank for the cluster `owner`, in its call of number `turn`.

    Returns {"ok": value}, {"interrupted": True} or {"error": {...}}. Engines that are the user's can be taken over by
    another lab; the former one is told so.
    """
    try:
        if what not in ANYBODYS:
            here = resident()
            if here.owner != owner:
                raise RuntimeError("another lab has taken these ranks over; close this one")
            if here.session is not None:
                here.session.turn = turn
        return {"ok": ACTIONS[what](**arguments)}
    except KeyboardInterrupt:
        return {"interrupted": True}
    except BaseException as e:
        return {"error": described(e)}
    finally:
        # A second SIGINT must not lose the reply. ipykernel puts its own handler back when the request is done.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def described(error: BaseException) -> dict[str, Any]:
    """The error as plain values; its frames let go of what they hold."""
    text = "".join(traceback.format_exception(error))[-TRACE_CHARACTERS:]
    reason = " ".join(str(error).split()) or "no message"
    kind, reason = ("OutOfMemory", short) if (short := memory_short(error)) else (type(error).__name__, reason)
    told = {"kind": kind, "reason": reason, "trace": text, "unix_s": time.time()}
    if told["kind"] == "SpecError":
        told["refusal"] = [getattr(error, name) for name in ("field", "reason", "way_out")]
        told["fix"] = dict(getattr(error, "fix", {}))
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__, seen = None, seen.__cause__ or seen.__context__
    return told


def memory_short(error: BaseException) -> str:
    """What to do, where torch could not have the memory it asked for, of a GPU or of the host; empty of other errors."""
    text, kind = str(error), type(error).__name__
    of_host = kind == "RuntimeError" and "can't allocate memory" in text  # not what another rank says of this one
    if kind not in ("OutOfMemoryError", "MemoryError") and not of_host:
        return ""
    size = "what it asked for"
    if asked := re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", text):
        number, unit = asked.groups()
        size = f"{int(number) / (1 << 20):,.1f} MiB" if unit == "bytes" else f"{number} {unit}"
    way_out = 'give a smaller micro_batch or seq_len, more sharding, recompute="full", offload="all", or more ranks'
    return f"{size} more could not be had; {way_out}"


# -- the resident ----------------------------------------------------------------------------------------------------


class Publisher:
    """Step events on their way to the kernel: the first at once, then bundled, so that fast steps are not slowed."""

    def __init__(self) -> None:
        self._waiting: list[dict[str, Any]] = []
        self._last_s = 0.0

    def say(self, event: dict[str, Any]) -> None:
        self._waiting.append(event)
        if time.monotonic() - self._last_s >= PUBLISH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            from ipyparallel.datapub import publish_data

            bundle, self._waiting = self._waiting, []
            publish_data({"events": bundle})
            self._last_s = time.monotonic()


class BeatPublisher:
    """Beats on their way to the kernel, from the thread that makes them: see `fsdp_lab.cluster.doctor.Channel`."""

    def __init__(self, header: Mapping[str, str]) -> None:
        from ipyparallel.engine.datapub import ZMQDataPublisher
        from IPython.core.getipython import get_ipython

        events: Any = get_ipython().data_pub  # type: ignore[union-attr]
        # The socket hands messages over to the thread that sends them, so any thread may write to it.
        self._publisher = ZMQDataPublisher(session=events.session, pub_socket=events.pub_socket, topic=events.topic)
        self.turn_to(header)

    def turn_to(self, header: Mapping[str, str]) -> None:
        """Whoever opened a channel under this header hears the next one."""
        self._publisher.set_parent(dict(header))

    def tell(self, beat: dict[str, Any]) -> None:
        self._publisher.publish_data({"beat": beat})


class Resident:
    """A rank's Session and the names that it has in the engine's namespace."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.publisher = Publisher()
        self.owner = ""
        self.store: Any = None
        self.session: Any = None
        self.beats: BeatPublisher | None = None
        self._pushed: dict[str, Any] = {}

    def push(self) -> None:
        """Makes the Session's names reachable from `%%px` cells."""
        self._pushed = dict(self.session.namespace())
        self.namespace.update(self._pushed)

    def withdraw(self) -> None:
        """Takes back every name that still means what we meant, and what IPython remembers of it."""
        gone = list(self._pushed.values())
        for name, value in self._pushed.items():
            if self.namespace.get(name) is value:
                del self.namespace[name]
        self._pushed = {}
        outputs = self.namespace.get("Out")
        for name, value in [*self.namespace.items()]:
            if name.startswith("_") and any(value is x for x in gone if x is not None):
                del self.namespace[name]
        if isinstance(outputs, dict):
            for number, value in [*outputs.items()]:
                if any(value is x for x in gone if x is not None):
                    del outputs[number]
        for name in ("last_value", "last_traceback", "last_type", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)  # the traceback of a failed cell holds the model too


def resident() -> Resident:
    """This engine's Resident; made when there is none. Raises RuntimeError outside an engine."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    if shell is None:
        raise RuntimeError("this process is not an IPython engine")
    if not isinstance(shell.user_ns.get(KEY), Resident):
        shell.user_ns[KEY] = Resident(shell.user_ns)
    found: Resident = shell.user_ns[KEY]
    return found


def session() -> Any:
    """This rank's Session. Raises RuntimeError where there is none, as after `%reset` in a cell."""
    here = resident()
    if here.session is None:
        raise RuntimeError("this rank has no session: it was closed, or the namespace was cleared; start the lab again")
    return here.session


# -- actions, by name ------------------------------------------------------------------------------------------------


def describe(probe: bool) -> dict[str, Any]:
    """Who this engine is. With `probe`, what its machine offers, too."""
    told: dict[str, Any] = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "address": own_address() if probe else "",  # looked up where ranks may be on several machines
    }
    if probe:
        from fsdp_lab.cluster.placement import probe as look

        told["machine"] = look(ours=frozenset({os.getpid()}))
    return told


def own_address(toward: str = "") -> str:
    """An address of this machine that others reach: that of the route to `toward`, else what its name resolves to.

    Connecting a datagram socket sends nothing; it asks the system which interface it would use.
    """
    for target in (toward, "10.255.255.255"):
        if target:
            with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                s.connect((target, 9))
                return str(s.getsockname()[0])
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def take(owner: str) -> None:
    """Makes this rank the owner's; closes the session of whoever had it."""
    leave()
    resident().owner = owner


def load(module: str) -> None:
    """Imports the rank's code, torch with it: seconds, so it is a stage of its own.

    What imports make stays anyway, so collections meanwhile would find next to nothing, and those of each switch need not
    walk it. Not later: what is frozen is kept, and whatever it refers to, a session with its groups and connections.
    """
    gc.disable()
    try:
        pkgutil.resolve_name(module)
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()


def host(module: str, address: str, toward: str) -> tuple[str, int]:
    """On rank 0: opens the store where all ranks meet. Returns its address and port."""
    here = resident()
    address = address or own_address(toward)
    here.store, port = pkgutil.resolve_name(f"{module}:host_store")(address)
    return address, int(port)


def reach(address: str, port: int) -> None:
    """Raises ConnectionError where the store cannot be reached from here."""
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError as e:
        raise ConnectionError(
            f"{socket.gethostname()} cannot reach rank 0 at {address}:{port} ({e}): a firewall is between them, or the "
            "address is wrong"
        ) from None


def join(module: str, beats: Mapping[str, str], **arguments: Any) -> dict[str, Any]:
    """Makes this rank's Session; returns when all ranks have joined. `beats` is where its beats go."""
    here, make = resident(), pkgutil.resolve_name(f"{module}:Session")
    here.beats = BeatPublisher(beats)
    here.session = make(store=here.store, say=here.publisher.say, beat=here.beats.tell, **arguments)
    here.push()
    return dict(here.session.status())


def attach(beats: Mapping[str, str]) -> dict[str, Any]:
    """Goes on for a new kernel: beats go there now, and what the former one had put aside nobody will ask for. Returns
    `Session.status`."""
    told = dict(session().status())
    drop(told.pop("aside", ()))
    if (publisher := resident().beats) is not None:
        publisher.turn_to(beats)
    return told


def leave() -> None:
    """Closes the Session, if there is one, and everything that it held."""
    here = resident()
    here.withdraw()
    left, here.session = here.session, None
    try:
        if left is not None:
            left.close()
    finally:
        here.store = None


def apply(run: str, spec: dict[str, Any], fresh: bool, evaluated: int = 0) -> dict[str, Any]:
    """See `Session.apply`. Names of the old model are gone before it is dropped."""
    here, s = resident(), session()
    here.withdraw()
    try:
        return dict(s.apply(run, spec, fresh=fresh, evaluated=evaluated))
    finally:
        here.push()


def park() -> dict[str, Any]:
    """See `Session.park`."""
    here, s = resident(), session()
    here.withdraw()
    try:
        return dict(s.park())
    finally:
        here.push()


def unpark(run: str) -> dict[str, Any]:
    """See `Session.unpark`."""
    here, s = resident(), session()
    here.withdraw()
    try:
        return dict(s.unpark(run))
    finally:
        here.push()


def drop(runs: Collection[str]) -> dict[str, Any]:
    """See `Session.drop`."""
    return dict(session().drop(runs))


def save(root: str, kind: str, last: int) -> dict[str, Any]:
    """See `Session.save`."""
    return dict(session().save(root, kind, last))


def saves(wait_s: float) -> dict[str, Any]:
    """See `Session.saves`."""
    return dict(session().saves(wait_s))


def rescue(partial: str, writers: Collection[int]) -> dict[str, Any]:
    """See `Session.rescue`."""
    return dict(session().rescue(partial, writers))


def restore(run: str, spec: dict[str, Any], path: str) -> dict[str, Any]:
    """See `Session.restore`. Names of the old model are gone before it is dropped."""
    here, s = resident(), session()
    here.withdraw()
    try:
        return dict(s.restore(run, spec, path))
    finally:
        here.push()


def train(
    steps: int,
    ledgers: Collection[int] = (),
    checks: Collection[int] = (),
    evaluations: Mapping[int, int] = {},
) -> dict[str, Any]:
    """See `Session.train`. Events are said while it runs and returned too, so that a lost message heals."""
    try:
        return dict(session().train(steps, ledgers, checks, evaluations))
    finally:
        resident().publisher.flush()


def calibrate(specs: Sequence[Mapping[str, Any]], dtypes: Sequence[str], passes: int) -> dict[str, Any]:
    """See `Session.calibrate`."""
    return dict(session().calibrate(specs, dtypes, passes))


def arm(fault: Mapping[str, Any]) -> dict[str, Any]:
    """See `Session.arm`."""
    return dict(session().arm(fault))


def disarm() -> dict[str, Any]:
    """See `Session.disarm`."""
    return dict(session().disarm())


def slow_next() -> dict[str, Any]:
    """See `Session.slow_next`."""
    try:
        return dict(session().slow_next())
    finally:
        resident().publisher.flush()


def slow_end() -> dict[str, Any]:
    """See `Session.slow_end`."""
    try:
        return dict(session().slow_end())
    finally:
        resident().publisher.flush()


def forget() -> dict[str, Any]:
    """See `Session.forget`."""
    here, s = resident(), session()
    here.withdraw()
    try:
        return dict(s.forget())
    finally:
        here.push()


def status() -> dict[str, Any]:
    return dict(session().status())


def ping() -> int:
    """Whether this engine answers at all."""
    return os.getpid()


ACTIONS: Mapping[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        describe, take, load, host, reach, join, attach, leave, apply, train, calibrate, arm, disarm, park, unpark, drop,
        slow_next, slow_end, forget, save, saves, rescue, restore, status, ping,
    )
}  # fmt: skip
ANYBODYS = ("describe", "take", "ping")
