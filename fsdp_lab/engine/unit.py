"""`Unit`: the parameters of one wrapped module, gathered and freed together.

unshard -> wait_for_unshard -> (computation) -> reshard; then, from autograd's gradients, reduce. One gather has three names:
`FlatBuffer.gather` issues that of a buffer, `Unit.unshard` those of a unit; `Runtime.make_ready` also waits."""

import enum
from collections.abc import Sequence

from torch import nn

from fsdp_lab.base.streams import CommStreams
from fsdp_lab.engine.buffer import FlatBuffer, Reduction, part_of
from fsdp_lab.engine.collectives import CommHandle, Group
from fsdp_lab.engine.mesh import ShardMesh
from fsdp_lab.engine.policy import ShardPolicy
from fsdp_lab.engine.schedule import OffloadPolicy, Phase


class UnitState(enum.Enum):
    SHARDED = "sharded"
    SHARDED_POST_FORWARD = "sharded post forward"  # between forward and backward, shared by a smaller group
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


class Unit:
    """One or several modules whose parameters live in the same flat buffers.

    `name` is that of its first module in the root, "" for the root itself; it is known once the root is."""

    def __init__(
        self, modules: Sequence[nn.Module], flats: Sequence[FlatBuffer], mesh: ShardMesh, policy: ShardPolicy
    ) -> None:
        self.modules, self.flats, self.mesh, self.policy = tuple(modules), tuple(flats), mesh, policy
        self.name = type(modules[0]).__name__
        self.state = UnitState.SHARDED
        self.pins = 0  # `unshard` contexts that hold it gathered
        self.asked_for = False  # gathered because a caller asked for it, and not freed since
        self.communicates = True  # whether backwards reduce
        self.ignored = frozenset[int]()  # ids of parameters in the modules that the caller keeps equal on all ranks
        self._handles: list[CommHandle] = []
        self._copied: CommHandle | None = None  # the copies from the host that its next all-gathers send

    def copy_to_device(self, streams: CommStreams) -> None:
        """Under offload: issue the copies from the host with which a gather begins."""
        with streams.to_device.entered():
            if self.policy.rules.offload == OffloadPolicy.OPTIMIZER:  # copied to the same place each time
                streams.to_device.wait_for(streams.gather)
            for flat in self.flats:
                flat.copy_to_device()
            self._copied = CommHandle(streams.to_device, None)

    @property
    def is_sharded(self) -> bool:
        return self.state in (UnitState.SHARDED, UnitState.SHARDED_POST_FORWARD)

    @property
    def is_stale(self) -> bool:
        """True if the shards have changed since the unit was gathered."""
        return self.state is not UnitState.SHARDED and any(flat.is_stale for flat in self.flats)

    def unshard(self, streams: CommStreams) -> None:
        """Issue the all-gathers, unless they have been."""
        if self.is_sharded:
            with streams.gather.entered():
                if self._copied is not None:
                    self._copied.wait()
                self._handles = [flat.gather(streams.gather, copies=self.asked_for) for flat in self.flats]
            self.state = UnitState.GATHERING

    def wait_for_unshard(self) -> None:
        """Wait for the all-gathers, and let the modules see the values."""
        if self.state is UnitState.GATHERING:
            self._wait()
            for flat in self.flats:
                flat.use_unsharded_views()
            self.state = UnitState.UNSHARDED

    def reshard(self, *, to: Group | None = None) -> None:
        """Free what was gathered, unless it is pinned. `to`: the smaller group that shares it, of which this rank keeps its
        part."""
        if self.state is UnitState.SHARDED or self.pins:
            return
        if self.state is UnitState.GATHERING:
            self._wait()
        self.asked_for = False
        for flat in self.flats:
            if to is None:
                flat.post_forward_shard = None
            elif self.state is UnitState.UNSHARDED:
                flat.post_forward_shard = part_of(flat.full, to).clone()
            flat.use_sharded_views()
        self.state = UnitState.SHARDED if to is None else UnitState.SHARDED_POST_FORWARD

    def _wait(self) -> None:
        self.mesh.now.waits_for = Phase.UNSHARD, self.name or "root"
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()

    def reduce(self, streams: CommStreams) -> list[Reduction]:
        """Issue the reductions of what has come."""
        adds = any(flat.gradients.reduced is not None for flat in self.flats)
        stays = not any(flat.reduce_hooks for flat in self.flats) and (self.policy.is_on_host(self.mesh) or not adds)
        taken = [(flat.gradients, flat.gradients.take()) for flat in self.flats]
        return [Reduction(to, *sent, streams=streams, stays=stays) for to, sent in taken if sent is not None]
