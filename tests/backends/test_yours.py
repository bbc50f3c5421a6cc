"""Backend "yours": right engines train as FSDP2 does, bit for bit, and each mistake is named."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_lab.backends import build, fill
from fsdp_lab.base.errors import SpecError
from fsdp_lab.spec.spec import Spec, Strategy
from tests import your_engines
from tests.backends import train
from tests.engine.parity import Outcomes, assert_equal, plan
from tests.pool import Place, Pool
from tests.your_engines import RIGHT, WRONG

SMALL = {"model_type": "gpt2", "n_layer": 3, "n_embd": 36, "n_head": 4, "vocab_size": 384, "n_positions": 32}


def spec(engine: type | str | None, sharding: str, world_size: int = 2, **changes: Any) -> Spec:
    base = Spec(world_size=world_size).replace(model=SMALL, seq_len=32, micro_batch=2, lr=0.01, optimizer="sgd")
    if engine is None:
        return base.replace(backend="fsdp2", **changes)
    name = engine if isinstance(engine, str) else engine.__name__
    return base.replace(backend="yours", engine=f"tests.your_engines:{name}", sharding=sharding, **changes)


def test_right_engines_are_equal_to_fsdp2_bit_for_bit(outcomes: Outcomes) -> None:
    theirs, *yours = outcomes.of(plan((spec(None, ""), 2)), *(plan((spec(*of), 2)) for of in RIGHT.values()))
    for found in yours:
        assert_equal(found, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), [
    ("overlapped", {"accumulate": 3, "sync": "last"}), ("data parallel", {"accumulate": 2}),
    ("overlapped", {"wrap": "every:2", "recompute": "full"}),
], ids=str)  # fmt: skip
def test_accumulation_other_units_and_recomputation(outcomes: Outcomes, name: str, changes: dict[str, Any]) -> None:
    accumulates = changes if "accumulate" in changes else {}
    yours, theirs = outcomes.of(plan((spec(*RIGHT[name], **changes), 2)), plan((spec(None, "", **accumulates), 2)))
    assert_equal(yours, theirs)


def test_a_live_training_moves_into_an_engine_and_out_again(outcomes: Outcomes) -> None:
    adam = {"optimizer": "adamw"}
    yours = plan((spec(None, "", **adam), 1), (spec(your_engines.FullyShard, "full_shard", **adam), 1),
                 (spec(your_engines.DataParallel, "no_shard", **adam), 1), (spec(None, "", **adam), 1))  # fmt: skip
    found, theirs = outcomes.of(yours, plan((spec(None, "", **adam), 4)))
    assert_equal(found, theirs)


class CalledTwice(nn.Module):
    """Its first block computes twice, and a parameter of the second is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        return first(torch.tanh(second(torch.tanh(first(x)))))


class ValuesOf:
    """Of a module, to fill a backend with."""

    buffers = ()

    def __init__(self, module: nn.Module) -> None:
        self._values = {name: p.detach().reshape(-1) for name, p in module.named_parameters()}

    def read_into(self, name: str, start: int, target: Tensor) -> None:
        target.copy_(self._values[name][start : start + target.numel()])


def twice(place: Place, wanted: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters after three steps, and those of a plain module that has seen the samples of all ranks."""
    of = Spec.from_dict(wanted)
    torch.manual_seed(1)
    plain, inputs = CalledTwice(), torch.randn(3, place.world_size, 4, 8)
    with torch.device("meta"):
        skeleton = CalledTwice()
    backend = build(skeleton, of, place.info.device)
    fill(backend, ValuesOf(plain))
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=of.workload.lr)
    for step in range(3):
        backend.begin_step(step)
        with backend.micro_batch(communicate=True):
            backend.module(inputs[step, place.rank]).square().mean().backward()
        plain(inputs[step].flatten(0, 1)).square().mean().backward()
        for one in (backend.optimizer, optimizer):
            one.step()
            one.zero_grad()
    return ({n: t.numpy() for n, t in train.whole(backend).items()},
            {n: p.detach().numpy() for n, p in plain.named_parameters()})  # fmt: skip


@pytest.mark.parametrize("name", ["data parallel", "overlapped"])
def test_a_unit_that_computes_twice_and_a_frozen_parameter(pool: Pool, name: str) -> None:
    own = {part: f"tests.own_module:{name}" for part, name in (("model", "Net"), ("loss", "loss"), ("data", "Samples"))}
    engine, sharding = RIGHT[name]
    wanted = Spec(world_size=2).replace(**own, optimizer="sgd", lr=0.1, weight_decay=0.0, backend="yours", sharding=sharding,
                                        engine=f"tests.your_engines:{engine.__name__}")  # fmt: skip
    for found, plain in pool.run(twice, 2, wanted.to_dict()):
        assert found.keys() == plain.keys()
        for key in found:
            assert found[key] == pytest.approx(plain[key], abs=1e-6), key


def said(place: Place, named: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What the first two steps of each say."""
    told = {}
    for name, wanted in named.items():
        of = Spec.from_dict(wanted)
        try:
            backend = train.start(place, of)
            for step in range(2):
                backend.begin_step(step)
                train.steps(place, of, backend, step, 1)
            told[name] = ""
        except SpecError as e:
            told[name] = str(e)
    # whoever leaves closes connections on which another begins a collective
    place.store.set(f"said by {place.rank}", "")
    place.store.wait([f"said by {rank}" for rank in range(place.world_size)])
    return told


@pytest.mark.slow
def test_each_mistake_is_named_and_right_engines_pass_the_inspection(pool: Pool) -> None:
    """In a run each: an engine that is stopped half way may leave a collective of one rank alone."""
    for name, (sharding, text) in WRONG.items():
        for told in pool.run(said, 2, {name: spec(name, sharding).to_dict()}, timeout_s=60):
            assert re.match(rf"strategy\.engine: {name}\b.*{text}", told[name]), (name, text, told[name])
    wanted = {name: spec(*of, world_size=3).to_dict() for name, of in RIGHT.items()}  # where parts have padding
    for told in pool.run(said, 3, wanted, timeout_s=60):
        assert told == dict.fromkeys(RIGHT, "")


@pytest.mark.parametrize(("changes", "text"), [
    ({"sharding": "hybrid_shard"}, "one group, that of all ranks"),
    ({"precision": "bf16"}, "trains in fp32"),
    ({"offload": "all"}, "keeps everything on the device"),
    ({"compile": True}, "hooks"),
    ({"backward_prefetch": 2}, "one unit ahead"),
    ({"freeze": ["*.bias"]}, "all trained"),
    ({"engine": None}, "a class of your own, and there is none"),
    ({"engine": your_engines.Zero1}, "a Spec holds what JSON can"),
], ids=str)  # fmt: skip
def test_what_an_engine_cannot_do_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        spec(your_engines.FullyShard, "full_shard", world_size=4).replace(**changes)


def test_other_backends_do_not_look_at_it() -> None:
    """So that one can switch from it and back; their ids do not change with it."""
    plain = Spec()
    assert plain.replace(engine="tests.your_engines:Zero1").id == plain.id
    yours = plain.replace(engine="tests.your_engines:FullyShard", backend="yours")
    assert yours.id != yours.replace(engine="tests.your_engines:Overlapped").id
    assert Spec.from_json(yours.to_json()) == yours
    assert Strategy().engine is None
