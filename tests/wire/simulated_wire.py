"""The wire on a simulated device (tests/engine/simulated.py): over NCCL, whose collectives run when its streams come to
them; or for ranks that share a GPU, staged through the host, or in memory that ranks share. Gloo carries the bytes of the
first two."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from fsdp_lab.engine import mesh
from fsdp_lab.rank import rendezvous
from fsdp_lab.rank.rendezvous import close_groups, open_groups
from fsdp_lab.wire import Link, Nccl, Wire, group as wire_group
from fsdp_lab.wire.arena import Mapping, memory_file
from fsdp_lab.wire.work import WireWork
from tests.engine.simulated import SimulatedDevice, Work, tensors_in
from tests.pool import Place


class Over:
    """What carries a device's tensors."""

    NCCL, HOST, LINK, GPU = "nccl", "host", "host, link", "gpu"


class ExportedMemory:
    """`DeviceMemory` on the host."""

    def __init__(self) -> None:
        self._files: list[Mapping] = []

    def allocate(self, nbytes: int) -> tuple[Tensor, bytes]:
        self._files.append(file := memory_file(nbytes))
        return file.data, f"/proc/{os.getpid()}/fd/{file.descriptor}".encode()

    def open(self, handle: bytes, nbytes: int) -> Tensor:
        descriptor = os.open(handle, os.O_RDWR)
        try:
            return Mapping(descriptor, writes=False).bytes_at(0, nbytes)
        finally:
            os.close(descriptor)


class NcclOnDevice(Nccl):
    """Its collectives are given to a stream of their group's own. All streams are those of `device`, which may change."""

    def __init__(self) -> None:
        self.device: Any = None
        self._groups = 0

    def use(self, device: SimulatedDevice) -> None:
        super().__init__(device)
        self.device = device

    def carries(self, tensor: Tensor) -> bool:
        return self.device is not None and tensor.is_floating_point() and super().carries(tensor)

    def open(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        self._groups += 1
        stream = f"nccl {self._groups}"
        return GroupOf(wire_group._open_gloo(store, rank, size, timeout), lambda *given: self._issue(stream, *given))

    def _issue(self, stream: str, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Work:
        plain = tree_map_only(Tensor, Tensor.detach, args)
        outputs, inputs = tensors_in(args[0]), tensors_in(args[1:])
        return self.device.collective(name, stream, outputs, inputs, lambda: call(*plain))


# The engine's, past torch's dispatcher, which would hide what the wire does from the mode.
COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_gather": lambda full, shard, group: group.all_gather_single(full.data, shard),
    "reduce_scatter": lambda shard, full, group: group.reduce_scatter_single(shard, full),
    "all_reduce": lambda tensor, group: group.allreduce([tensor]),
}


class GroupOf:
    """A group of Gloo's whose collectives are given to `issue`, with their names. Their first argument is their outputs."""

    def __init__(self, gloo: Any, issue: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> None:
        self._gloo, self._issue = gloo, issue

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._gloo, name)
        return lambda *args: self._issue(name, call, args)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._gloo._set_default_timeout(timeout)

    def abort(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class WireOnDevice:
    """An open wire, of which all operations within `on` are a device's."""

    def __init__(self, place: Place, world: Wire, over: str) -> None:
        self.world, self._context, self._over = world, place.context, over

    @contextmanager
    def on(self, device: SimulatedDevice) -> Iterator[None]:
        context: Any = self._context
        gloo: Any = self.world._gloo

        def issue(name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
            device.reads_and_writes(name, tensors_in(args[1:]), tensors_in(args[0]))
            with _disable_current_modes():
                return call(*args)

        def land(work: WireWork) -> None:
            """In a thread of Gloo's, whose current stream is the device's default one."""
            inner: Any = work._inner
            if not work._finished:  # Gloo's own may copy its outputs again
                inner.wait()
            with device.entered(device.compute):
                work._land()

        def ring(due_s: float, call: Callable[[], None]) -> None:
            with device.entered(device.compute):
                call()

        with ExitStack() as stack:
            stack.enter_context(patch.object(context, "streams", device))
            stack.enter_context(patch.object(WireWork, "_land_when_inner_completes", land))
            stack.enter_context(patch.object(context.alarm, "at", ring))
            if context.nccl is not None:
                context.nccl.use(device)
            elif self._over == Over.GPU:  # an engine on a GPU does not ask for memory of the host
                stack.enter_context(patch.object(mesh, "pool_of", lambda group, device: None))
            else:
                stack.enter_context(patch.object(self.world, "_gloo", GroupOf(gloo, issue)))
            if self._over == Over.LINK:
                stack.enter_context(context.emulating(Link(bytes_per_s=1e9, latency_s=50e-6)))
            stack.enter_context(device.installed(COLLECTIVES))
            yield


@contextmanager
def wire_on_device(place: Place, over: str) -> Iterator[WireOnDevice]:
    nccl = NcclOnDevice() if over == Over.NCCL else None
    memory = ExportedMemory() if over == Over.GPU else None
    place.context.shared_memory = over == Over.GPU
    with (patch.object(rendezvous, "nccl_of", lambda info: nccl),
          patch.object(rendezvous, "device_memory_of", lambda info: memory)):  # fmt: skip
        world = open_groups(place.info, place.store, place.context, 0)
    try:
        yield WireOnDevice(place, world, over)
    finally:
        close_groups(place.context)
