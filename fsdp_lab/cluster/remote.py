"""What the kernel calls in an engine: one entry point, `call`, and the `Resident` that holds the rank's Session.

The Resident is in the engine's IPython namespace under `KEY`; modules hold no state. The Session's names (model, optimizer,
mesh, ...) are in the same namespace for `%%px` cells. They are removed before the Session drops a model, whose memory they
would keep.

`call` never lets an exception reach IPython: formatting it there costs tenths of a second, and `sys.last_value` would hold
the failed step's tensors. Errors travel as plain dicts and become exceptions again in the kernel."""

import contextlib
import gc
import os
import pkgutil
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_lab.base.errors import FieldError
from fsdp_lab.base.process import host_id
from fsdp_lab.cluster.addresses import Endpoint, Endpoints, reach
from fsdp_lab.cluster.placement import Host, probe

KEY = "_fsdp_lab"
PUBLISH_EVERY_S = 0.04  # at most 25 messages per second and rank, however fast the steps are
TRACE_CHARACTERS = 20_000
DEVICE_LOST = "DeviceLost"  # the kind of an error after which the rank's process is of no use

# The methods of Session that the kernel may call. The first ones replace or drop the model.
MODEL_METHODS = frozenset(("apply", "restore", "suspend", "resume", "unload"))
_OTHERS = "train generate slow_next slow_end calibrate arm disarm discard save saves rescue spread drop status"
SESSION_METHODS = MODEL_METHODS.union(_OTHERS.split())


def call(what: str, arguments: Mapping[str, Any], owner: str, turn: int) -> dict[str, Any]:
    """Calls an action of this module, or a method of the rank's Session, for the cluster `owner`, as its call number `turn`.
    Returns {"ok": value}, {"interrupted": True} or {"error": {...}}, as when another lab has taken over a user's engines."""
    try:
        if what not in ANY_OWNER:
            own = resident()
            if own.owner != owner:
                raise RuntimeError("another lab has taken these ranks over; close this one")
            if own.session is not None:
                own.session.begin_call(turn)
        return {"ok": ACTIONS[what](**arguments) if what in ACTIONS else _call_session(what, arguments)}
    except KeyboardInterrupt:
        return {"interrupted": True}
    except BaseException as e:
        return {"error": described(e)}
    finally:
        # A second SIGINT must not lose the reply. ipykernel restores its own handler when the request is done.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _call_session(method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Events are published while `train` runs, and also returned, so that a lost message does no harm."""
    if method not in SESSION_METHODS:
        raise LookupError(f"{method} is no method of Session that may be called from the kernel")
    own, s = resident(), session()
    if method in MODEL_METHODS:
        own.withdraw()
    try:
        return dict(getattr(s, method)(**arguments))
    finally:
        if method in MODEL_METHODS:
            own.push()
        own.publisher.flush()


def described(error: BaseException) -> dict[str, Any]:
    """The error as plain values. The frames of its traceback are cleared, so that they hold no tensors."""
    text = "".join(traceback.format_exception(error))[-TRACE_CHARACTERS:]
    kind, reason = type(error).__name__, " ".join(str(error).split()) or "no message"
    if short := memory_short(error):
        kind, reason = "OutOfMemory", short
    elif device_lost(error):
        kind = DEVICE_LOST
    d = {"kind": kind, "reason": reason, "trace": text, "unix_s": time.time()}
    if isinstance(error, FieldError):
        d["refusal"] = error.to_dict()
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__, seen = None, seen.__cause__ or seen.__context__
    return d


def device_lost(error: BaseException | None) -> bool:
    """Returns whether a CUDA error is among the causes, such as a device assert or an Xid: after one, every call of this
    process to its GPU raises it again."""
    while error is not None:
        text = str(error)
        if type(error).__name__ == "AcceleratorError" or "CUDA error" in text:
            return "out of memory" not in text
        error = error.__cause__ or error.__context__
    return False


def memory_short(error: BaseException) -> str:
    """The size and a hint if an allocation failed, on a GPU or on the host; "" for other errors."""
    text, kind = str(error), type(error).__name__
    of_host = kind == "RuntimeError" and "can't allocate memory" in text  # not when another rank reports it
    if kind not in ("OutOfMemoryError", "MemoryError") and not of_host:
        return ""
    size = "what it asked for"
    if tried := re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", text):
        number, unit = tried.groups()
        size = f"{int(number) / (1 << 20):,.1f} MiB" if unit == "bytes" else f"{number} {unit}"
    hint = 'give a smaller micro_batch or seq_len, more sharding, recompute="full", offload="all", or more ranks'
    ours = "shared memory" in text or "this machine's memory" in text  # it says what there is
    return f"{text}; {hint}" if ours else f"{size} more could not be allocated; {hint}"


# -- the resident ----------------------------------------------------------------------------------------------------


class EventPublisher:
    """Sends step events to the kernel: the first at once, then in bundles, so that fast steps are not slowed."""

    def __init__(self) -> None:
        self._waiting: list[dict[str, Any]] = []
        self._last_s = 0.0

    def publish(self, event: dict[str, Any]) -> None:
        self._waiting.append(event)
        if time.monotonic() - self._last_s >= PUBLISH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            from ipyparallel.datapub import publish_data

            bundle, self._waiting = self._waiting, []
            publish_data({"events": bundle})
            self._last_s = time.monotonic()


class HeartbeatPublisher:
    """Sends heartbeats to the kernel, from the thread that makes them, under the header of a channel (supervisor.py)."""

    def __init__(self, header: Mapping[str, str]) -> None:
        from ipyparallel.engine.datapub import ZMQDataPublisher
        from IPython.core.getipython import get_ipython

        events: Any = get_ipython().data_pub  # type: ignore[union-attr]
        # The socket passes messages to the thread that sends them, so any thread may write to it.
        self._publisher = ZMQDataPublisher(session=events.session, pub_socket=events.pub_socket, topic=events.topic)
        self.set_header(header)

    def set_header(self, header: Mapping[str, str]) -> None:
        self._publisher.set_parent(dict(header))

    def publish(self, kind: str, message: dict[str, Any]) -> None:
        """Sends a message of a kind: "beat", or "loop" of a loop that is watched in a cell, outside any call."""
        self._publisher.publish_data({kind: message})


class Resident:
    """A rank's Session, and the names that it has in the engine's namespace."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.publisher = EventPublisher()
        self.owner = ""
        self.store: Any = None
        self.session: Any = None
        self.heartbeats: HeartbeatPublisher | None = None
        self.endpoints: Endpoints | None = None
        self._pushed: dict[str, Any] = {}

    def push(self) -> None:
        """Makes the Session's names reachable from `%%px` cells."""
        self._pushed = dict(self.session.namespace())
        self.namespace.update(self._pushed)

    def withdraw(self) -> None:
        """Removes every name that still has the Session's value, and IPython's other references to that value."""
        dropped = [value for value in self._pushed.values() if value is not None]
        for name, value in self._pushed.items():
            if self.namespace.get(name) is value:
                del self.namespace[name]
        self._pushed = {}
        for name, value in [*self.namespace.items()]:
            if name.startswith("_") and any(value is x for x in dropped):
                del self.namespace[name]
        outputs = self.namespace.get("Out")
        if isinstance(outputs, dict):
            for number, value in [*outputs.items()]:
                if any(value is x for x in dropped):
                    del outputs[number]
        for name in ("last_value", "last_traceback", "last_type", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)  # the traceback of a failed cell holds the model too


def resident() -> Resident:
    """This engine's Resident, made at the first call. Raises RuntimeError outside an engine."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    if shell is None:
        raise RuntimeError("this process is not an IPython engine")
    own = shell.user_ns.get(KEY)
    if not isinstance(own, Resident):
        own = shell.user_ns[KEY] = Resident(shell.user_ns)
    return own


def session() -> Any:
    """This rank's Session. Raises RuntimeError if there is none, as after `%reset` in a cell."""
    own = resident()
    if own.session is None:
        raise RuntimeError("this rank has no session: it was closed, or the namespace was cleared; start the lab again")
    return own.session


# -- actions, by name ------------------------------------------------------------------------------------------------


def describe() -> dict[str, Any]:
    """Which process this engine is, and on which host."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "id": host_id()}


FIRST_TO_GO = "800"  # of 1000


def hardware(ours: Collection[int]) -> Host:
    """The cores and GPUs of this host; `ours` are the pids of our ranks on it."""
    return probe(ours=frozenset(ours))


def rank_code(module: str | None) -> Any:
    """The module with `Session` and `host_store`, which returns a store with its `place`. Only engines import it: it imports
    torch."""
    if module is not None:
        return pkgutil.resolve_name(module)
    from fsdp_lab import rank

    return rank


def load(module: str | None, owner: str) -> None:
    """Makes this rank the owner's: closes the former one's session, imports the rank's code, which takes seconds."""
    leave()
    resident().owner = owner
    with contextlib.suppress(OSError):  # where memory ends, Linux ends a rank, and not the kernel or its server
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
    import_code(module)


def import_code(module: str | None) -> None:
    """Imports the rank's code and torch. What imports allocate is permanent: it is not collected now, and frozen so that
    later collections, at each switch, skip it. Freezing later would also keep a session with its groups and connections."""
    gc.disable()
    try:
        rank_code(module)
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()


def open_endpoints(token: str) -> list[Endpoint]:
    """Listens at all addresses of this host, until `close_endpoints`."""
    close_endpoints()
    resident().endpoints = endpoints = Endpoints(token)
    return endpoints.open


def close_endpoints() -> None:
    own = resident()
    if own.endpoints is not None:
        own.endpoints.close()
        own.endpoints = None


def host(module: str | None, address: str | None) -> str:
    """On rank 0: opens the store where all ranks meet, of this host alone, or at an `address`. Returns its place."""
    store = resident().store = rank_code(module).host_store(address)
    return str(store.place)


def join(module: str | None, beats: Mapping[str, str], variables: Mapping[str, str], **arguments: Any) -> Any:
    """Makes this rank's Session; returns its `limits_bytes` when all ranks have joined. `beats` is the header of its
    heartbeats, `variables` are of the environment."""
    own = resident()
    os.environ.update(variables)
    own.heartbeats = HeartbeatPublisher(beats)
    on_heartbeat, on_loop = (partial(own.heartbeats.publish, kind) for kind in ("beat", "loop"))
    listeners = {"on_event": own.publisher.publish, "on_heartbeat": on_heartbeat, "on_loop": on_loop}
    own.session = rank_code(module).Session(store=own.store, **listeners, **arguments)
    own.push()
    return getattr(own.session, "limits_bytes", None)


def attach(beats: Mapping[str, str]) -> dict[str, Any]:
    """Sends heartbeats to a new kernel, and drops what the former one suspended. Returns `Session.status`."""
    status = dict(session().status())
    session().discard(status.pop("suspended", ()))
    if (heartbeats := resident().heartbeats) is not None:
        heartbeats.set_header(beats)
    return status


def receive(field: str, name: str, digest: str, packed: bytes, kept: Sequence[str]) -> None:
    """Gives the Session a function, class or dataset of the user's, which drops all others but those of `kept`."""
    from fsdp_lab.cluster.sent_code import unpacked

    session().receive(digest, unpacked(field, name, packed), kept)


def receive_modules(sent: Mapping[str, Sequence[Any]]) -> list[str]:
    """Gives this process the text of the user's own modules. Returns those that it had imported from another text; all code
    that was sent before is dropped then, because it may use them."""
    from fsdp_lab.cluster.sent_code import SentModules

    finder = next((f for f in sys.meta_path if isinstance(f, SentModules)), None)
    if finder is None:
        sys.meta_path.insert(0, finder := SentModules())
    if changed := finder.take(sent):
        session().forget_code()
    return changed


def leave() -> None:
    """Closes the Session, if there is one, with everything that it holds."""
    own = resident()
    own.withdraw()
    former, own.session, own.store = own.session, None, None
    if former is not None:
        former.close()


_LIFE = (describe, hardware, load, host, join, attach, leave)
_NETWORK, _CODE = (open_endpoints, reach, close_endpoints), (receive, receive_modules)
ACTIONS: Mapping[str, Callable[..., Any]] = {f.__name__: f for f in (*_LIFE, *_NETWORK, *_CODE)}
ANY_OWNER = ("describe", "hardware", "load")
