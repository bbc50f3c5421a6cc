"""`StepMeter`: time, memory, traffic and spans of a step, for the trainer, a watched loop and the metering benchmark. Below
it, the software, device and memory of this process.

Note: when a GPU is read. Nothing here waits for the device in a step. The trainer does so once, at the vote (trainer.py),
and says it (`synchronised`): all marks on the device's stream up to there can be read then, and a mark made there is known
on both clocks. So the marks of a step, whose update comes after its vote, are read at the next step's vote, or when
`pause` waits, at the end of a chunk of steps. Bytes are known to the host when the step is issued, and are read then.

Note: memory. Sizes do not change between two switches, so most of them are found once and repeated: bytes of shards,
gradients and optimizer state when they first exist, and the peak and its composition in a ledger step (ledger.py). An
ordinary step adds what the allocator, the driver and the system report."""

import contextlib
import dataclasses
import itertools
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch

from fsdp_lab.backends.base import Measured
from fsdp_lab.base.events import Memory, MemorySample, RoleBytes, StepEvent, Traffic
from fsdp_lab.base.hardware import gpu_of_device
from fsdp_lab.base.streams import streams_of
from fsdp_lab.models.flops import BestPeak
from fsdp_lab.rank.ledger import Ledger, LedgerResult
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.rank.tracing import ClockOffset, StepTrace
from fsdp_lab.wire import Collective, WireContext, across, exposed, traffic, waits

GUARD_CHARACTERS = 200  # kept of one
RSS_EVERY_S = 0.5
GPU_EVERY_S = 1.0
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_COMPUTES = ("forward", "backward", "optimizer")


class Recompilations:
    """What torch.compile compiled again, and why."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._newest: list[Any] = []

    def take(self) -> tuple[str, ...]:
        """Returns the guard that failed, such as "self.calls == 7 # self.calls += 1", for each since the last call; "" where
        torch does not say. An id is "frame/count of its compilations"; that of the backward is its forward's."""
        compiler: Any = sys.modules.get("torch._dynamo.utils")
        newest = [] if compiler is None else compiler.get_compilation_metrics()[-1:]
        if newest == self._newest:
            return ()
        self._newest, found = newest, dict[str, str]()
        for m in compiler.get_compilation_metrics():
            if m.compile_id is not None:
                found[str(m.compile_id)] = found.get(str(m.compile_id)) or (m.recompile_reason or "").strip()
        again = [why for i, why in found.items() if i not in self._known and not i.endswith("/0")]
        self._known |= found.keys()
        lines = (why.partition("\n")[0].partition("(HINT")[0] for why in again)
        return tuple(" ".join(re.sub(r"^\d+/\d+: ", "", line).split())[:GUARD_CHARACTERS] for line in lines)


_Waits = Sequence[tuple[float, float, Collective]]  # from, to
StepReader = Callable[[], dict[str, Any]]  # returns the measurements of a step, by the fields of its `StepEvent`


class StepMeter:
    """Meters the steps of one model: `step` is the context of a step, and `part`, `before_update` and `after_update` are
    called inside; then `end`, whose result is called when the device has ended the step. `ledger`: that of the last ledger
    step."""

    _troubles = (0, 0)  # retries and failures that the allocator had counted at the last event

    def __init__(
        self,
        backend: Measured,
        context: WireContext,
        info: RankInfo,
        *,
        offload: str,
        ledger: LedgerResult | None = None,
        loading_bytes: int = 0,
    ) -> None:
        """`ledger`: the result of an earlier ledger step of the same Spec, before it was suspended. `loading_bytes`: see
        `Memory`."""
        self._backend, self._context, self._info, self._offload = backend, context, info, offload
        self._device, self._on_gpu = info.device, info.device.type == "cuda"
        self._streams = streams_of(info.device)  # marks on them are times of the device; None on a CPU
        self._process = psutil.Process()
        self._parameters = backend.parameter_bytes()
        self._gradients = self._optimizer = 0  # bytes, when they first exist
        self._held_bytes = 0  # at the end of a step, and not between steps
        self._limit, self._loading_bytes = limit_bytes(info.device), loading_bytes
        self._known, self._newest = tuple[Any, ...](), Memory()  # on a CPU, and what it was made from
        self.ledger = ledger
        self._troubles = allocator_troubles(info.device)
        self._gauge = GpuGauge(info.device)
        self._recompiled = Recompilations()
        self._recording: Ledger | None = None  # of the ledger step in progress
        self._curve: tuple[MemorySample, ...] = ()  # of the step in progress, if it is a ledger step
        self._trace: StepTrace | None = None  # of the step in progress, or the last one
        self._parts: list[tuple[Any, str]] = []  # of it: when each began (seconds, or a mark)
        self._start_s = 0.0
        self._start: Any = None
        self._given_up = False  # so that nothing waits for the device
        self._anchor: tuple[Any, float] | None = None

    @property
    def runs_behind(self) -> bool:
        """Whether the device may still be at a step that has ended on the host."""
        return self._streams is not None

    @contextmanager
    def step(self, *, ledger: bool = False, traced: bool = False) -> Iterator[None]:
        """The context of a step. `ledger`: record every allocation; `traced`: record when each unit computes."""
        self._context.meter.take()  # what was sent between steps, for example by a switch
        self._context.meter.take_copies()
        self._recompiled.take()
        self._trace = StepTrace(self._backend.unit_modules(), self._device) if traced else None
        self._curve = ()
        if self._streams is not None:
            if self._anchor is None:  # the first of a chunk of steps
                self._streams.synchronize()
                self.synchronised()
            self._start = self._streams.mark()
        self._context.start_timing(self._anchor)
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._start_s = time.perf_counter()
        self._parts = [(self._start_s, "forward")]
        if ledger:
            self._recording = Ledger(self._backend, self._context, self._device, offloaded=self._offload != "none")
        recording = self._recording.recording() if self._recording is not None else nullcontext()
        try:
            with recording, self._trace or nullcontext():
                yield
            if self._recording is not None and (result := self._recording.result) is not None:
                self.ledger, self._curve = result, result.curve
        finally:
            self._recording = None

    def synchronised(self, mark: Any = None) -> None:
        """Call it when the host has just waited for the device's current stream, or for a mark."""
        if self._streams is not None:
            self._anchor = (mark or self._streams.mark(), time.perf_counter())

    def pause(self, *, wait: bool = True) -> None:
        """Call it after the last of some steps; waits for the device, so that everything can be read. The next step begins
        with a mark of its own, as times of far apart marks are not exact."""
        if self._streams is not None:
            self._anchor, self._given_up = None, not wait
            if wait:
                self._streams.synchronize()

    def part(self, name: str) -> None:
        """Begin the next part of the step: "forward", "backward" or "optimizer"; "": none; or one of the script."""
        self._parts.append((time.perf_counter() if self._streams is None else self._streams.mark(), name))
        if self._trace is not None:
            self._trace.begin(name if name in _COMPUTES else "")

    def before_update(self) -> None:
        """Call it while the gradients exist."""
        if not self._gradients:
            self._gradients = self._backend.gradient_bytes()
        if self._recording is not None:
            self._recording.before_update()

    def after_update(self) -> None:
        """Call it when the optimizer has its state."""
        if not self._optimizer:
            self._optimizer = self._backend.optimizer_bytes()

    def forget_optimizer(self) -> None:
        """Call it when there will be more state than `after_update` found."""
        self._optimizer = 0

    def end(self, *, gradients: bool = False) -> StepReader:
        """Call it after the context of a step; does not wait for the device. `gradients`: they are still held. What it
        returns waits for the step's end; `begin_s` is on this rank's clock. Where the device has not ended the step after a
        `pause` that did not wait, its time is the host's, and it has no spans."""
        read_times = self._context.end_timing()
        if self._streams is None:
            read_times()
        start_s, end_s, begin, anchor = self._start_s, time.perf_counter(), self._start, self._anchor
        end: Any = None if self._streams is None else self._streams.mark()
        collectives, copies = self._context.meter.take(), self._context.meter.take_copies()
        self._held_bytes = self._gradients if gradients else 0
        measured: dict[str, Any] = {"end_unix_s": time.time(), "memory": self._memory(), "memory_curve": self._curve}
        measured |= {"recompiled": self._recompiled.take(), **self._gauge.look()}
        trace_of_step, parts = self._trace, [*self._parts, (end_s, "")]

        def read() -> dict[str, Any]:
            begin_s, seconds, trace, begins = start_s, end_s - start_s, trace_of_step, parts
            if self._streams is not None:
                if not self._given_up:
                    end.synchronize()
                if anchor is not None and end.query():
                    read_times()
                    begin_s = anchor[1] - begin.elapsed_time(anchor[0]) / 1e3  # which was reached at a known time
                    seconds = begin.elapsed_time(end) / 1e3
                    inner = [(begin_s + begin.elapsed_time(at) / 1e3, name) for at, name in parts[1:-1]]
                    begins = [(begin_s, parts[0][1]), *inner, (begin_s + seconds, "")]
                else:
                    trace, begins = None, [parts[0], parts[-1]]
            elif trace is not None:
                begin_s = trace.begin_s
            stalls = waits(collectives)
            across_bytes, across_s = across(collectives, self._context.share_across)
            return measured | {
                "begin_s": begin_s,
                "step_time_s": seconds,
                "comm": self._traffic(collectives) if collectives else {},
                "spans": trace.spans(collectives, copies, begin_s) if trace else (),
                "host": self._context.host,
                "across_bytes": across_bytes,
                "across_s": across_s,
                "late": tuple(_late(stalls, self._context.members).items()),
                "part_s": _by_part(begins, stalls),
            }

        return read

    def event(
        self, read_step: StepReader, clock: ClockOffset, peak: BestPeak | None, fields: Mapping[str, Any]
    ) -> StepEvent:
        """The event of a step: its measurements, and what else is known of it, which takes precedence."""
        known = {**read_step(), **fields}
        executed = known["flops"] + known["recompute_flops"]
        best = None if peak is None else peak.reach(executed / known["step_time_s"])
        return StepEvent(
            rank=self._info.rank,
            world_size=self._info.world_size,
            peak_flops_per_s=None if best is None else best.flops_per_s,
            peak_source="" if best is None else best.source,
            clock_error_s=clock.error_s,
            **{**known, "begin_s": known["begin_s"] + clock.offset_s},
        )

    def _traffic(self, collectives: Sequence[Collective]) -> dict[str, Traffic]:
        """Over NCCL, exposed communication is taken from the last ledger step. It is unknown before the first, and where the
        profiler saw no kernel of NCCL, as when something else uses CUPTI. What goes over Gloo the host waits for."""
        if not self._on_gpu or self._info.shares_gpu:
            return traffic(collectives)
        kernels = None if self.ledger is None else self.ledger.kernels
        seen = {} if kernels is None or kernels.exposed_s is None else kernels.exposed_s
        over_nccl = {c.kind for c in collectives if not seen or c.start_s is not None}
        unknown = over_nccl - {"control"}  # which may be sent by a kernel of another name
        if "other" in seen:  # a sum in rank order is sent by kernels of another name
            unknown = set()
        return traffic(collectives, {**exposed(collectives), **dict.fromkeys(unknown, math.nan), **seen})

    # -- memory ---------------------------------------------------------------------------------------------------

    def _memory(self) -> Memory:
        changes = (self._gradients, self._optimizer, self.ledger, self._context.pool_bytes)
        known = (*changes, time.perf_counter() // RSS_EVERY_S)
        if self._on_gpu or known != self._known:
            self._known, self._newest = known, self._made()
        return self._newest

    def _made(self) -> Memory:
        parameters, gradients, optimizer, host = self._parameters, self._gradients, self._optimizer, 0
        if self._offload != "none":
            host, gradients, optimizer = parameters + gradients + optimizer, 0, 0
            parameters = self._backend.resident_bytes() if self._offload == "optimizer" else 0  # a copy to gather from
        whole = Memory(
            parameters_bytes=parameters,
            gradients_bytes=gradients,
            optimizer_bytes=optimizer,
            host_bytes=host,
            limit_bytes=self._limit,
            pool_bytes=self._context.pool_bytes,
            rss_bytes=rss_bytes(self._process, self._context),
            loading_bytes=self._loading_bytes,
        )
        if self._on_gpu:
            return self._gpu_memory(whole)
        # On a CPU the last ledger step is repeated: no allocator statistics exist, and all steps allocate the same.
        if self.ledger is not None:
            allocated, peak = self.ledger.end_bytes, self.ledger.peak
        else:
            allocated, peak = self._parameters + self._optimizer + self._backend.resident_bytes(), RoleBytes()
        outside = max(0, whole.rss_bytes - allocated)
        whole = dataclasses.replace(whole, peak_bytes=peak.total_bytes, at_peak=peak)
        return dataclasses.replace(whole, allocated_bytes=allocated, outside_bytes=outside)

    def _gpu_memory(self, m: Memory) -> Memory:
        """The allocator's statistics. What it reports beyond the last ledger step counts as other, and what is missing to it
        is taken from other and activations: the classes add up to its peak."""
        reserved, peak = torch.cuda.memory_reserved(self._device), torch.cuda.max_memory_allocated(self._device)
        before, self._troubles = self._troubles, allocator_troubles(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        held = RoleBytes(parameters_bytes=m.parameters_bytes, optimizer_bytes=m.optimizer_bytes)
        classes = held if self.ledger is None else self.ledger.peak
        other = classes.other_bytes + peak - classes.total_bytes
        activations = max(0, classes.activations_bytes + min(0, other))
        return dataclasses.replace(
            m,
            peak_bytes=peak,
            at_peak=dataclasses.replace(classes, other_bytes=max(0, other), activations_bytes=activations),
            allocated_bytes=torch.cuda.memory_allocated(self._device) - self._held_bytes,
            reserved_bytes=reserved,
            outside_bytes=max(0, total - free - reserved),
            alloc_retries=self._troubles[0] - before[0],
            ooms=self._troubles[1] - before[1],
        )


def _by_part(begins: Sequence[tuple[float, str]], stalls: _Waits) -> dict[str, float]:
    """Seconds of each part without those in which it waits. begins: of parts, in order, and the end of the last."""
    seconds: dict[str, float] = {}
    for (begin, name), (end, _) in itertools.pairwise(begins):
        waited = sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop, _ in stalls)
        seconds[name] = seconds.get(name, 0.0) + end - begin - waited
    return seconds


def _late(stalls: _Waits, members: Callable[[str], Sequence[int]]) -> dict[int, float]:
    """Seconds of exposed communication in which a rank had not issued the collective yet, by its number in the world.
    members: of a group; () of one that was closed."""
    by_rank: dict[int, float] = {}
    for start, end, c in stalls:
        if (seconds := min(end, c.last[0]) - start) > 0 and (ranks := members(c.group)):
            rank = ranks[c.last[1]]
            by_rank[rank] = by_rank.get(rank, 0.0) + seconds
    return by_rank


def allocator_troubles(device: torch.device) -> tuple[int, int]:
    """How often this process's caching allocator had to free what it cached, and could not allocate; 0 on a CPU."""
    stats = torch.cuda.memory_stats_as_nested_dict(device) if device.type == "cuda" else {}
    return stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0)


def limit_bytes(device: torch.device) -> int:
    """The memory limit of this process: its part of the GPU's memory, or else the machine's or the container's memory."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return int(total * torch.cuda.get_per_process_memory_fraction(device))
    limits = [psutil.virtual_memory().total]
    for path in map(Path, _CGROUPS):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)


# -- device, memory and software of the process ----------------------------------------------------------------------


DRIVER = Path("/proc/driver/nvidia/version")


def software(device: torch.device) -> dict[str, str]:
    """Versions: {"torch", "cuda", "nccl", "driver"}; the last three are empty on a CPU, or if unknown."""
    versions = {"torch": str(torch.__version__), "cuda": "", "nccl": "", "driver": ""}
    if device.type == "cuda":
        versions |= {"cuda": str(torch.version.cuda or ""), "driver": _driver()}
        with contextlib.suppress(AttributeError, RuntimeError):  # a build without it
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return versions


def device_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "CPU"


def fidelity_notes(info: RankInfo, shared_gpu_ranks: int, carrier: str = "Gloo") -> tuple[str, ...]:
    """Notes on why timings of this rank are not representative. `carrier`: of the bytes between ranks."""
    if info.device.type == "cpu":
        return (f"CPU and {carrier}: the shapes are right, the times are not a GPU's.",)
    if shared_gpu_ranks > 1:
        return (f"One GPU shared by {shared_gpu_ranks} ranks over {carrier}: memory is right, times are not.",)
    note = "Over NCCL exposed communication is measured in ledger steps and repeated; the timeline shows no waits."
    return (note,) if info.world_size > 1 else ()


def precision_notes(device_name: str, dtype: str) -> tuple[str, ...]:
    """A note where the GPU has no tensor cores for the dtype of the matrix products: a T4 or a V100 in bf16, or any in fp32
    while torch's TF32 is off; and on a CPU below fp32."""
    if device_name == "CPU" and dtype != "fp32":
        return (f"{dtype} may take many times as long as fp32 on a CPU, convolutions above all; a GPU is made for it.",)
    gpu = gpu_of_device(device_name)
    if dtype == "fp32" and gpu is not None and gpu.tf32 and gpu.bf16 and not torch.backends.cuda.matmul.allow_tf32:
        most = f"{gpu.fp32:g} TFLOP/s on this GPU at most; precision bf16 has {gpu.bf16:g}."
        return (f"fp32 products use no tensor cores, since TF32 is off: {most}",)
    if dtype != "bf16" or gpu is None or gpu.bf16 is not None:
        return ()
    return (f"{device_name} has no tensor cores for bf16: it may be slower than fp32; precision fp16 uses them.",)


def held_bytes(device: torch.device, context: WireContext) -> int:
    """Memory of this process: reserved on its GPU, or resident on the host, with its own pool of shared memory."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    return rss_bytes(psutil.Process(), context)


def rss_bytes(process: psutil.Process, context: WireContext) -> int:
    """RSS of this process, with its own pool of shared memory once, and without the other ranks'."""
    rss, pool = int(process.memory_info().rss), context.pool_bytes
    if not pool:
        return rss
    with contextlib.suppress(OSError):  # what it shares in memory files, each page as often as it is mapped
        if shared := re.search(r"^RssShmem:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE):
            rss -= int(shared[1]) * 1024
    return rss + pool


class GpuGauge:
    """Asks the driver once a second how a GPU is used, in a thread: a driver that hangs holds up nothing else."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._newest = device, dict[str, float]()
        self._asking: threading.Thread | None = None
        self._due_s = 0.0

    def look(self) -> dict[str, float]:
        """What was last read, by the fields of `StepEvent`; empty on a CPU. Does not wait."""
        asking = self._asking is not None and self._asking.is_alive()
        if self._device.type == "cuda" and time.monotonic() >= self._due_s and not asking:
            self._due_s = time.monotonic() + GPU_EVERY_S
            self._asking = threading.Thread(target=self._ask, name="fsdp-lab-gpu-gauge", daemon=True)
            self._asking.start()
        return self._newest

    def _ask(self) -> None:
        units = {"gpu_percent": 1.0, "gpu_power_w": 1e-3, "gpu_temperature_c": 1.0}  # of what torch returns
        read: dict[str, float] = {}
        for name, call in zip(
            units, (torch.cuda.utilization, torch.cuda.power_draw, torch.cuda.temperature), strict=True
        ):
            with contextlib.suppress(Exception):  # this GPU, or its driver, does not say it
                read[name] = units[name] * call(self._device)
        self._newest = read


class HostPeak:
    """The most memory that this process holds on the host beyond what it held when this was made, as seen by `look`."""

    def __init__(self, check: Callable[[], object] = lambda: None) -> None:
        """`check` is called by `look`, too."""
        self._process, self._check = psutil.Process(), check
        self.restart()

    def restart(self) -> None:
        """Measure beyond what is held now."""
        self._before_bytes = self._process.memory_info().rss
        self.nbytes = 0

    def look(self) -> None:
        self._check()
        self.nbytes = max(self.nbytes, self._process.memory_info().rss - self._before_bytes)


def _driver(file: Path = DRIVER) -> str:
    """The kernel module says it, on Linux: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  ..."."""
    with contextlib.suppress(OSError):
        if said := re.search(r"NVRM version:.*?\b(\d+\.\d+(?:\.\d+)?)\b", file.read_text()):
            return said[1]
    return ""
