"""The engine in one file (`fsdp_lab/engine/tiny.py`) has FSDP2's bits, by its own hooks and by the lab's."""

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
from tests.engine.parity import Outcomes
from tests.engine.test_parity import reference, same, steady
from tests.engine.toys import WIDTH, Block, make
from tests.pool import Place, Pool

ADAMW, SGD = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1), partial(torch.optim.SGD, lr=0.1)


class Tied(nn.Module):
    """Token ids, which need no gradient, to logits, by one matrix in the root's unit. One block computes twice, two share an
    input; `rare` is used where it is asked for."""

    def __init__(self, *, recompute: bool = False, rare: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks, self.recompute = nn.ModuleList([Block() for _ in range(3)]), recompute
        self.rare = nn.Linear(WIDTH, WIDTH) if rare else None

    def forward(self, ids: Tensor, *, rare: bool = False) -> Tensor:
        x = self.embedding(ids)
        x = self.rare(x) if rare and self.rare is not None else x
        again = partial(checkpoint, use_reentrant=False, early_stop=False)
        first, second, third = (partial(again, block) if self.recompute else block for block in self.blocks)
        x = first(x)
        return self.head(first(second(x) + third(x)))


def train(
    place: Place, model: Tied, kind: str, make_optimizer: Any, *, accumulate: int = 1, rare: tuple[int, ...] = ()
) -> tuple[Tensor, dict[str, Tensor]]:
    """Every loss of this rank, and one under no_grad after each step; the parameters. `rare`: steps that use it."""
    is_tiny, net, losses, held = kind == "tiny", copy.deepcopy(model), list[Tensor](), [0]
    for module in (*net.blocks, net):
        (tiny.fully_shard if is_tiny else fsdp.fully_shard)(module)
    optimizer = make_optimizer(tiny.shards(net) if is_tiny else net.parameters())
    units = tiny.units_of(net)

    def gather(unit: Any) -> None:
        tiny.TinyFSDP.gather(unit.engine, unit)
        held.append(sum(other.full.untyped_storage().size() > 0 for other in units))

    for unit in units:
        unit.engine.gather = gather  # type: ignore[method-assign]
    for step in range(3):
        for micro in range(accumulate + 1):
            torch.manual_seed(99 * step + 9 * micro + place.rank)
            ids = torch.randint(11, (2, 7))
            with torch.set_grad_enabled(micro < accumulate):  # the last one is an evaluation, after the update
                loss = F.cross_entropy(net(ids, rare=step in rare).flatten(0, 1), ids.flatten()) / accumulate
            losses.append(loss.detach())
            if micro < accumulate:
                loss.backward()
            if micro == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()
            assert not any(unit.full.untyped_storage().size() for unit in units), "freed"
            assert all(p.grad is None for unit in units for p in unit.params), "whole gradients too"
    assert max(held) == (2 if is_tiny else 0), "the root and one block at most"
    with tiny.gathered(net):
        found = {name: p.detach().clone() for name, p in net.named_parameters()}
    return torch.stack(losses), {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()}


def compare(place: Place, options: dict[str, Any], **model: bool) -> None:
    made = make(Tied, **model)
    (losses, found), (their_losses, wanted) = (train(place, made, kind, **options) for kind in ("tiny", "fsdp2"))
    assert torch.equal(losses, their_losses) and found.keys() == wanted.keys()
    decayed = [name for name in wanted if name.startswith("rare") and "rare" not in options]  # as its docstring says
    assert [name for name, t in wanted.items() if not torch.equal(found[name], t)] == decayed
    assert not any(torch.equal(found[name], p) for name, p in made.named_parameters()), "all were trained"


SCENARIOS: dict[str, Any] = {
    "adamw": partial(compare, options={"make_optimizer": ADAMW}),
    "two micro-batches": partial(compare, options={"make_optimizer": ADAMW, "accumulate": 2}),
    "checkpoints": partial(compare, options={"make_optimizer": ADAMW}, recompute=True),
    "a parameter without gradients": partial(compare, options={"make_optimizer": ADAMW}, rare=True),
    # Without decay and moments a gradient of zero is none.
    "without some gradients": partial(compare, options={"make_optimizer": SGD, "rare": (0, 2)}, rare=True),
}


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_its_hooks_give_the_bits_of_fsdp2(pool: Pool, name: str, ranks: int) -> None:
    pool.run(SCENARIOS[name], ranks, reduction="rank_ordered")


@pytest.mark.parametrize("model", ["gpt2", "llama tied"])
def test_the_lab_trains_it_as_an_engine_of_the_users_own(outcomes: Outcomes, model: str) -> None:
    """Its class has the methods that notebook 10 asks for."""
    engine = {"backend": "yours", "engine": "fsdp_lab.engine.tiny:TinyFSDP"}
    same(outcomes, reference(outcomes, model, 2, optimizer="adamw"), steady(model, 2, optimizer="adamw", **engine))


def test_it_is_one_short_file_of_plain_torch() -> None:
    text = Path(tiny.__file__).read_text(encoding="utf-8")
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE))
    assert len(text.splitlines()) <= 250 and imported == {"__future__", "collections", "contextlib", "typing", "torch"}
