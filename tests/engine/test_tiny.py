"""The engine in one file (`fsdp_lab/engine/tiny.py`) has FSDP2's bits, by its own hooks and by the lab's."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_lab.engine import tiny
from tests.covering import tiered
from tests.engine.parity import Outcomes
from tests.engine.test_parity import reference, same, steady
from tests.engine.toys import WIDTH, Block, make
from tests.pool import Place, Pool

VOCABULARY, STEPS = 11, 3
ADAMW = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1)


class Tied(nn.Module):
    """Token ids to logits by one matrix, in the root's unit, whose inputs need no gradient. `rare` is used where it is
    asked for, `never` not at all; neither by default."""

    def __init__(self, *, recompute: bool | None = None, more: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        if more:
            self.rare, self.never = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(5))
        self.recompute = recompute  # None: not; else `use_reentrant`

    def forward(self, ids: Tensor, *, rare: bool = False) -> Tensor:
        x = self.embedding(ids)
        x = self.rare(x) if rare else x
        again = (
            [] if self.recompute else [self.blocks[0]]
        )  # FSDP2 loses gradients of a reentrant checkpoint called twice
        for block in (*self.blocks, *again):
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        logits: Tensor = self.head(x)
        return logits


def held_bytes(model: nn.Module) -> int:
    """Of whole parameters and gradients."""
    gradients = (p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return sum(unit.full.untyped_storage().size() for unit in tiny.units_of(model)) + sum(gradients)


def train(
    place: Place, model: Tied, kind: str, make_optimizer: Any, *, accumulate: int = 1, rare: tuple[int, ...] = ()
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Every loss of this rank, and one under no_grad after each step; the parameters. `rare`: steps that use it."""
    net: Any = copy.deepcopy(model)
    for module in (*net.blocks, net):
        (tiny.fully_shard if kind == "tiny" else fsdp.fully_shard)(module)
    optimizer = make_optimizer(tiny.shards(net) if kind == "tiny" else net.parameters())
    losses: list[Tensor] = []
    for step in range(STEPS):
        for micro in range(accumulate + 1):
            torch.manual_seed(99 * step + 9 * micro + place.rank)
            ids = torch.randint(VOCABULARY, (2, 7))
            with torch.set_grad_enabled(micro < accumulate):  # the last one is an evaluation, after the update
                loss = F.cross_entropy(net(ids, rare=step in rare).flatten(0, 1), ids.flatten()) / accumulate
            losses.append(loss.detach())
            assert kind != "tiny" or not held_bytes(net), "freed after a forward"
            if micro < accumulate:
                loss.backward()
            if micro == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()
            assert kind != "tiny" or not held_bytes(net), "freed after a backward, with whole gradients"
    with tiny.gathered(net):
        found = {name: p.detach().clone() for name, p in net.named_parameters()}
    return losses, {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in found.items()}


def compare(place: Place, options: dict[str, Any], model: dict[str, Any]) -> None:
    made = make(Tied, **model)
    (losses, found), (their_losses, wanted) = (train(place, made, kind, **options) for kind in ("tiny", "fsdp2"))
    assert torch.equal(torch.stack(losses), torch.stack(their_losses))
    assert found.keys() == wanted.keys()
    assert [name for name, t in wanted.items() if not torch.equal(found[name], t)] == []
    same = {name for name, p in made.named_parameters() if torch.equal(found[name], p)}
    assert same == ({"never"} if "more" in model else set()), "every other parameter was trained"


SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adamw": ({"make_optimizer": ADAMW}, {}),
    "accumulated": ({"make_optimizer": ADAMW, "accumulate": 2}, {}),
    # Without decay and moments a gradient of zero is none.
    "without some gradients": ({"make_optimizer": SGD, "rare": (0, 2)}, {"more": True}),
    "checkpoints": ({"make_optimizer": ADAMW}, {"recompute": False}),
    "reentrant checkpoints": ({"make_optimizer": ADAMW}, {"recompute": True}),
}
PLACES = [(name, ranks) for name in SCENARIOS for ranks in (1, 2, 4)]


@pytest.mark.parametrize(("name", "ranks"), tiered(PLACES, lambda name, ranks: ranks == 2))
def test_its_hooks_give_the_bits_of_fsdp2(pool: Pool, name: str, ranks: int) -> None:
    pool.run(compare, ranks, *SCENARIOS[name], reduction="rank_ordered")


def decays(place: Place) -> None:
    made = make(Tied, more=True)
    (_, found), (_, wanted) = (train(place, made, kind, ADAMW) for kind in ("tiny", "fsdp2"))
    assert torch.equal(wanted["never"], torch.ones(5))
    assert torch.allclose(found["never"], torch.full((5,), (1 - 0.05 * 0.1) ** STEPS))


def test_a_parameter_without_a_gradient_decays_all_the_same(pool: Pool) -> None:
    """As its docstring says, and not so FSDP2's."""
    pool.run(decays, 2)


@pytest.mark.parametrize("model", ["gpt2", "llama tied"])
def test_the_lab_trains_it_as_an_engine_of_the_users_own(outcomes: Outcomes, model: str) -> None:
    """Its class has the methods that notebook 10 asks for."""
    options = {"optimizer": "adamw"}
    engine = {"backend": "yours", "engine": "fsdp_lab.engine.tiny:TinyFSDP", **options}
    same(outcomes, reference(outcomes, model, 2, **options), steady(model, 2, **engine))


def test_it_is_one_short_file_of_plain_torch() -> None:
    text = Path(tiny.__file__).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE))
    assert imported == {"__future__", "collections", "contextlib", "typing", "torch"}
