"""A rank without torch: the interface of `fsdp_lab.rank`, steps that take 20 ms, and failures to order.

Ranks meet in a barrier each step, served by a thread of rank 0, so that a rank that dies leaves the others waiting, as a
collective would. `spec["workload"]["data"]` orders a failure: "refuse" (SpecError in apply), "raise:R" (rank R raises in
its third step), "cuda:R" (its GPU fails in that step),
"raise-all", "deaf" (ignores SIGINT for a minute), "slow-apply" (half a minute, can be interrupted),
"slow-phase" (in slow motion the fourth phase takes half a minute, and can be interrupted)."""

import math
import os
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.events import Memory, StepEvent, Traffic
from fsdp_lab.spec.spec import Spec
from tests.frames import Step

STEP_S = 0.02
EVAL_LOSSES = (9.0, 7.0, 8.0, 6.0, 5.0, 5.5, math.nan, 5.2)  # by step; the last of all that follow
GIVE_UP = b"\2"
if "IMPORT_USES_GPU" in os.environ:
    sys.modules["__main__"].used_gpu = lambda: True  # which the server of the engines asks


class RankAborted(RuntimeError):
    pass


class AcceleratorError(RuntimeError):
    """As torch raises it."""


class Barrier:
    """Everyone waits for everyone; a flag that one rank brings is told to all."""

    def __init__(self, listener: socket.socket):
        self.listener, self.place = listener, "{} {}".format(*listener.getsockname())
        self.links, self.flags = [], []
        self.lock, self.closed = threading.Condition(), False
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                link, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(link,), daemon=True).start()

    def serve(self, link):
        world = int.from_bytes(link.recv(1))
        while flag := link.recv(1):
            with self.lock:
                if flag == GIVE_UP:
                    self.flags = [f for one, f in zip(self.links, self.flags, strict=True) if one is not link]
                    self.links = [one for one in self.links if one is not link]
                    link.sendall(GIVE_UP)
                    continue
                self.links.append(link)
                self.flags.append(flag)
                if len(self.links) == world:
                    for one in self.links:
                        one.sendall(max(self.flags))
                    self.links, self.flags = [], []


def host_store(address=None):
    family = socket.AF_INET6 if address and ":" in address else socket.AF_INET
    return Barrier(socket.create_server((address or "127.0.0.1", 0), family=family))


class Session:
    limits_bytes = (8 << 30, 8 << 30)

    def __init__(self, *, rank, world_size, device, place, store=None, reduction="auto", timeout_s=60, threads=None,
                 memory_cap=None, shared_gpu_ranks=1, on_event=lambda event: None, on_heartbeat=None,
                 on_loop=None, hang_s=None, address="", hosts=()):  # fmt: skip
        self.rank, self.world_size, self.device, self.on_event, self.store = rank, world_size, device, on_event, store
        self.link = socket.create_connection(place.split(), timeout=timeout_s)
        self.link.sendall(bytes([world_size]))
        self.flag, self.step, self.samples, self.spec, self.run, self.model = b"\0", 0, 0, None, "", None
        self.fresh, self.slow, self.suspended = True, None, {}
        self.meet(timeout_s)

    def begin_call(self, number):
        pass

    def meet(self, timeout_s=60):
        """The barrier. Returns whether anyone wants to stop."""
        self.link.sendall(self.flag or b"\0")
        self.link.settimeout(0.05)
        asked = time.monotonic()
        while True:
            try:
                got = self.link.recv(1)
            except TimeoutError:
                if self.flag == b"\1" and time.monotonic() - asked > 0.2:
                    self.link.settimeout(10)
                    self.link.sendall(GIVE_UP)
                    while self.link.recv(1) != GIVE_UP:
                        pass
                    raise RankAborted(f"rank {self.rank} was interrupted") from None
                if time.monotonic() - asked > timeout_s:
                    raise RuntimeError("a rank is missing") from None
                continue
            if not got:
                raise RankAborted("connection closed by peer")
            return got == b"\1"

    def apply(self, run, spec, fresh=False, evaluated=0, prompts=(), sampling=()):
        began = time.perf_counter()
        spec = Spec.from_dict(spec)
        if evaluated > 2000 * spec.workload.held_out:
            raise SpecError("workload.held_out", f"{evaluated} are too many", "give fewer")
        if spec.workload.data == "refuse":
            raise SpecError("workload.data", "it is refused here", "give another")
        if spec.workload.data == "slow-apply":
            time.sleep(30)
        carried = not fresh and self.spec is not None and spec.workload.seed == self.spec.workload.seed
        if not carried:
            self.step, self.samples, self.model = 0, 0, SimpleNamespace(name=spec.workload.model)
        self.spec, self.run, self.fresh = spec, run, True
        seconds = time.perf_counter() - began
        return {"step": self.step, "seconds": seconds, "carried": carried, "parameters": 10, "notes": []}

    def train(self, steps, ledgers=(), checks=(), evaluations=()):
        events, stopped, self.flag = [], False, b"\0"
        before = signal.signal(signal.SIGINT, self.interrupted)
        try:
            for _ in range(steps):
                event = self.one_step()
                if stopped := event is None:
                    break
                if event["step"] in evaluations:
                    event["eval_loss"] = EVAL_LOSSES[min(event["step"], len(EVAL_LOSSES) - 1)]
                events.append(event)
                self.on_event(event)
        finally:
            signal.signal(signal.SIGINT, before)
            self.flag = b"\0"
        return {"events": events, "stopped": stopped, "step": self.step}

    def suspend(self):
        self.suspended[self.run] = (self.spec, self.step, self.samples, self.model)
        self.spec = self.model = None
        return {"suspended_bytes": 10}

    def resume(self, run):
        if run not in self.suspended:
            return {"step": None}
        self.spec, self.step, self.samples, self.model = self.suspended.pop(run)
        self.run, self.fresh = run, True
        return {"step": self.step}

    def discard(self, runs):
        return {"discarded": sum(self.suspended.pop(run, None) is not None for run in runs)}

    def slow_next(self):
        if self.spec is None:
            raise RuntimeError("nothing to train: apply a Spec first")
        self.flag = b"\0"
        before = signal.signal(signal.SIGINT, self.interrupted)
        try:
            if self.slow is None:
                self.slow = Step(self.spec, self.step).frames(range(self.rank, self.rank + 1))
            frame = next(self.slow, [None])[0]
            if frame is None:
                return {"frame": None, **self.slow_end()}
            if frame.index == 3 and self.spec.workload.data == f"raise:{self.rank}":
                raise ValueError(f"rank {self.rank} was told to fail")
            if frame.index == 3 and self.spec.workload.data == "slow-phase":
                end = time.monotonic() + 30
                while time.monotonic() < end and self.flag == b"\0":
                    time.sleep(0.01)
            if self.meet():
                raise KeyboardInterrupt
            return {"frame": frame.to_dict(), "event": None}
        except BaseException:
            self.slow = None
            raise
        finally:
            signal.signal(signal.SIGINT, before)
            self.flag = b"\0"

    def slow_end(self):
        if self.slow is None:
            return {"event": None}
        self.slow = None
        return {"event": self.one_step()}

    def interrupted(self, *_):
        self.flag = b"\1"

    def one_step(self):
        began, data = time.perf_counter(), self.spec.workload.data
        if data == f"raise:{self.rank}" and self.step == 2:
            raise ValueError(f"rank {self.rank} was told to fail")
        if data == f"cuda:{self.rank}" and self.step == 2:
            raise AcceleratorError("CUDA error: device-side assert triggered")
        if data == "raise-all" and self.step == 2:
            raise SpecError("workload.data", "all fail", "give another")
        if data == "deaf" and self.rank == 1 and self.step == 2:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            end = time.monotonic() + 60
            while time.monotonic() < end:
                time.sleep(1)
        time.sleep(STEP_S)
        if self.meet():
            return None
        self.samples += self.spec.global_batch
        event = StepEvent(
            run=self.run, spec_id=self.spec.id, rank=self.rank, world_size=self.world_size, step=self.step,
            samples=self.samples, end_unix_s=time.time(), step_time_s=time.perf_counter() - began, tokens=512,
            loss=5.0 - 0.01 * self.step + 0.001 * self.rank, mean_loss=5.0 - 0.01 * self.step, grad_norm=1.0,
            flops=10**9, memory=Memory(parameters_bytes=10, peak_bytes=1000 + self.step, rss_bytes=10**8),
            comm={"all_gather": Traffic(calls=2, link_bytes=1000 * (1 + self.rank), seconds=0.001 * (1 + self.rank))},
            first_after_switch=self.fresh,
        ).to_dict()  # fmt: skip
        self.step, self.fresh = self.step + 1, False
        return event

    def unload(self):
        self.model, self.spec = None, None
        return {"freed_bytes": 0}

    def status(self):
        spec = self.spec.to_dict() if self.spec else None
        return {"rank": self.rank, "pid": os.getpid(), "device": self.device, "step": self.step, "spec": spec,
                "spec_id": self.spec.id if self.spec else None, "slow": self.slow is not None}  # fmt: skip

    def namespace(self):
        return {"session": self, "model": self.model, "optimizer": None, "mesh": None, "rank": self.rank,
                "world_size": self.world_size, "device": self.device}  # fmt: skip

    def close(self):
        self.link.close()
        if self.store is not None:
            self.store.listener.close()
