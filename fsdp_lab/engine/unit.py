"""`Unit`: the parameters of one wrapped module, gathered and freed together.

unshard -> ready -> (computation) -> reshard; receive (from autograd) -> reduce.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from torch import Tensor, nn

from fsdp_lab.engine.collectives import Lane, Pending
from fsdp_lab.engine.flat import FlatBuffer
from fsdp_lab.engine.grid import Grid
from fsdp_lab.engine.policy import Policy
from fsdp_lab.engine.reduction import Reduction


class UnitState(enum.Enum):
    SHARDED = "sharded"
    FEW = "few"  # between forward and backward, shared by a smaller group
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


class Unit:
    """One or several modules whose parameters live in the same flat buffers.

    `name` is that of its first module in the root, "" for the root itself; it is known once the root is.
    """

    def __init__(self, modules: Sequence[nn.Module], flats: Sequence[FlatBuffer], grid: Grid, policy: Policy) -> None:
        self.modules, self.flats, self.grid, self.policy = tuple(modules), tuple(flats), grid, policy
        self.name = type(modules[0]).__name__
        self.state = UnitState.SHARDED
        self.pins = 0  # `unshard` contexts that hold it gathered
        self._pending: list[Pending] = []

    def renew(self, flats: Sequence[FlatBuffer]) -> None:
        """Go on with other buffers."""
        self.flats, self.state, self._pending = tuple(flats), UnitState.SHARDED, []

    # -- parameters -------------------------------------------------------------------------------------------------

    def fetch(self, lane: Lane) -> None:
        """Under offload: issue the copies from the host that a gather begins with."""
        with lane.entered():
            for flat in self.flats:
                flat.fetch()

    def unshard(self, lane: Lane) -> None:
        """Issue the all-gathers, if it is not gathered."""
        if self.state not in (UnitState.SHARDED, UnitState.FEW):
            return
        with lane.entered():
            self._pending = [flat.gather(lane) for flat in self.flats]
        self.state = UnitState.GATHERING

    def ready(self) -> None:
        """Wait for them, and let the modules see the values."""
        if self.state is not UnitState.GATHERING:
            return
        self._land()
        for flat in self.flats:
            flat.show()
        self.state = UnitState.UNSHARDED

    def reshard(self, *, to_few: bool = False) -> None:
        """Free what was gathered; `to_few`: keep what a smaller group shares. Nothing happens while it is pinned."""
        if self.state is UnitState.SHARDED or self.pins:
            return
        if self.state is UnitState.GATHERING:
            self._land()
        for flat in self.flats:
            if to_few and self.state is UnitState.UNSHARDED:
                flat.keep_few()
            elif not to_few:
                flat.forget_few()
            flat.hide()
        self.state = UnitState.FEW if to_few else UnitState.SHARDED

    @property
    def sent(self) -> list[tuple[FlatBuffer, Tensor]]:
        """What gathers in flight are sending, by buffer."""
        return [(flat, t) for flat, pending in zip(self.flats, self._pending, strict=False) for t in pending.keeps]

    def _land(self) -> None:
        pending, self._pending = self._pending, []
        for p in pending:
            p.wait()

    # -- gradients --------------------------------------------------------------------------------------------------

    @property
    def has_gradient(self) -> bool:
        """Whether gradients have come that were not reduced yet."""
        return any(flat.gradient is not None for flat in self.flats)

    def reduce(self, lane: Lane) -> list[Reduction]:
        """Issue the reductions of what has come."""
        with lane.entered():
            taken = [(flat, flat.take_gradient()) for flat in self.flats]
            return [Reduction(flat, gradient, lane) for flat, gradient in taken if gradient is not None]

    def drop_gradient(self) -> None:
        """Forget what came in a backward that was given up."""
        for flat in self.flats:
            flat.take_gradient()
