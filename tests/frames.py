"""Frames of a step that no rank has taken: the phases of a small GPT-2 as our engine would go through them.

Neither torch nor a schedule is needed, so that ranks, labs and pages can be tested without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_lab.base.events import ROOT, ParameterHolding, PhaseSnapshot
from fsdp_lab.spec.spec import Spec

VOCABULARY, POSITIONS = 384, 1024


@dataclass(frozen=True)
class Model:
    """Unit -> parameter -> elements, in the order of the model."""

    units: dict[str, dict[str, int]]

    @classmethod
    def gpt2(cls, width: int = 128, layers: int = 4) -> Model:
        inside = {
            "ln_1.weight": width, "ln_1.bias": width, "attn.c_attn.weight": 3 * width * width, "attn.c_attn.bias": 3 * width,
            "attn.c_proj.weight": width * width, "attn.c_proj.bias": width, "ln_2.weight": width, "ln_2.bias": width,
            "mlp.c_fc.weight": 4 * width * width, "mlp.c_fc.bias": 4 * width, "mlp.c_proj.weight": 4 * width * width,
            "mlp.c_proj.bias": width,
        }  # fmt: skip
        blocks = [f"transformer.h.{i}" for i in range(layers)]
        outside = {"transformer.wte.weight": VOCABULARY * width, "transformer.wpe.weight": POSITIONS * width,
                   "transformer.ln_f.weight": width, "transformer.ln_f.bias": width}  # fmt: skip
        return cls({ROOT: outside, **{b: {f"{b}.{name}": n for name, n in inside.items()} for b in blocks}})

    @property
    def blocks(self) -> list[str]:
        return [unit for unit in self.units if unit != ROOT]


class Step:
    """One step: `phases()` yields (phase, unit, direction) and keeps what is held up to date."""

    def __init__(self, spec: Spec, number: int = 0, model: Model | None = None) -> None:
        self.spec, self.number, self.model = spec, number, model or Model.gpt2()
        self.state = dict.fromkeys(self.model.units, "sharded")
        self.gradient = dict.fromkeys(self.model.units, "none")

    def phases(self) -> Iterator[tuple[str, str, str]]:
        keeps = self.spec.strategy.sharding not in ("full_shard", "hybrid_shard")
        blocks = self.model.blocks
        yield from self._unshard(ROOT, "forward")
        yield "compute", ROOT, "forward"
        for unit in blocks:
            yield from self._unshard(unit, "forward")
            yield "compute", unit, "forward"
            if not keeps and unit != blocks[-1]:
                yield from self._reshard(unit, "forward")
        yield "compute", ROOT, "backward"
        before = ""
        for unit, ahead in zip(blocks[::-1], [*blocks[-2::-1], ""], strict=True):
            self.state[unit] = "unsharded"
            if ahead and self.state[ahead] == "sharded":
                yield "unshard", ahead, "backward"
                self.state[ahead] = "gathering"
            yield "compute", unit, "backward"
            self.gradient[unit] = "unsharded"
            if before:
                self.gradient[before] = "sharded"
            yield from self._reshard(unit, "backward")
            yield "reduce", unit, "backward"
            self.gradient[unit], before = "reducing", unit
        self.gradient[ROOT] = "unsharded"
        yield from self._reshard(ROOT, "backward")
        yield "reduce", ROOT, "backward"
        self.gradient = dict.fromkeys(self.gradient, "sharded")
        yield "optim", ROOT, "update"

    def _unshard(self, unit: str, direction: str) -> Iterator[tuple[str, str, str]]:
        if self.state[unit] == "sharded":
            yield "unshard", unit, direction
        self.state[unit] = "unsharded"

    def _reshard(self, unit: str, direction: str) -> Iterator[tuple[str, str, str]]:
        yield "reshard", unit, direction
        self.state[unit] = "sharded"

    def holdings(self, rank: int) -> tuple[ParameterHolding, ...]:
        return tuple(h for unit in self.model.units for h in self._unit(unit, rank % self.spec.shard_factor))

    def _unit(self, unit: str, place: int) -> Iterator[ParameterHolding]:
        """Shards of equal length that cut wherever they fall."""
        shard = -(-sum(self.model.units[unit].values()) // self.spec.shard_factor)
        first = 0
        for name, n in self.model.units[unit].items():
            start, stop = max(place * shard - first, 0), min((place + 1) * shard - first, n)
            start, stop = (start, stop) if start < stop else (0, 0)
            yield ParameterHolding(name=name, unit=unit, numel=n, start=start, stop=stop, state=self.state[unit],
                          gradient=self.gradient[unit])  # fmt: skip
            first += n

    def frames(self, ranks: range | None = None) -> Iterator[list[PhaseSnapshot]]:
        """Phase after phase, the frames of these ranks, or of all."""
        world = self.spec.world_size
        for index, (phase, unit, direction) in enumerate(self.phases()):
            yield [PhaseSnapshot(rank=r, world_size=world, step=self.number, index=index, phase=phase, unit=unit,
                         direction=direction, parameters=self.holdings(r)) for r in ranks or range(world)]  # fmt: skip
