"""A module, a loss and a dataset of one's own on ranks: equal under all backends, switched, saved, and refused."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.cluster.sent_code import unpacked
from fsdp_lab.spec.checkpoint_format import check_same, find
from fsdp_lab.spec.spec import Spec
from tests.covering import tiered
from tests.own import TEXT, cell, own, packed, spec
from tests.pool import Place, Pool
from tests.rank.test_session import BACKENDS, DDP, _stall, session


def rank_with(place: Place, sent: dict[str, tuple[str, bytes]]) -> Any:
    s = session(place, reduction="rank_ordered")
    for digest, (name, content) in sent.items():
        s.receive(digest, unpacked("workload.model", name, content), sent)
    return s


def _train(place: Place, sent: Any, plan: list[tuple[dict[str, Any], int, bool]], evaluated: int = 0) -> Any:
    """(losses, checksums, held-out losses) of all steps, and the last event, of each entry: a Spec, steps, afresh or not."""
    s, losses, last = rank_with(place, sent), [], []
    for given, steps, fresh in plan:
        begun = s.apply("run", given, fresh=fresh, evaluated=evaluated)["step"]
        numbers = range(begun, begun + steps)
        found = s.train(steps, checks=list(numbers), evaluations=dict.fromkeys(numbers, evaluated) if evaluated else {})
        losses += [(e["mean_loss"], e["checksum"], e["eval_loss"]) for e in found["events"]]
        last.append(found["events"][-1])
    s.close()
    return losses, last


def train(pool: Pool, plan: list[tuple[Spec, int, bool]], evaluated: int = 0) -> Any:
    """As `_train`, of rank 0, with the checksums of all ranks added up."""
    sent = {k: v for made, *_ in plan for k, v in packed(made).items()}
    given = [(made.to_dict(), steps, fresh) for made, steps, fresh in plan]
    results = pool.run(_train, plan[0][0].world_size, sent, given, evaluated, reduction=None)
    whole = [sum(r[0][i][1] for r in results) % (1 << 64) for i in range(len(results[0][0]))]
    by_step = [(loss, total, held) for (loss, _, held), total in zip(results[0][0], whole, strict=True)]
    return by_step, results[0][1]


FROZEN = TEXT.replace("self.norm = nn.LayerNorm(WIDTH)", "self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)")
VARIANTS = {
    "batch norm": TEXT.replace("nn.LayerNorm(WIDTH)", "nn.BatchNorm1d(WIDTH)"),
    "frozen and tied": FROZEN.replace("nn.Parameter(torch.randn(12, WIDTH) / 4)", "self.embed.weight")
                .replace("nn.Linear(12, WIDTH, bias=False)", "nn.Linear(WIDTH, 12, bias=False)")
                .replace("self.embed(torch.cos(x @ self.features))", "torch.cos(x @ self.features) @ self.embed.weight"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_backends_train_it_to_equal_bits(pool: Pool, variant: str) -> None:
    made = spec(**own(cell(VARIANTS[variant], 15), held_out=0.25))
    plan = [(made.replace(**backend), 3, True) for name, backend in BACKENDS.items() if name != "ddp"]
    found, last = train(pool, plan, evaluated=3)
    assert found[0:3] == found[3:6] == found[6:9]
    assert len({loss for loss, *_ in found[:3]}) == 3 and all(held for *_, held in found)
    assert [e["tokens"] for e in last] == [2, 2, 2], "samples of a rank"
    assert last[0]["flops"] > 2 * 3 * 2 * 4 * 16 * 16 and last[0]["comm"]["all_gather"]["calls"] >= 3
    replicated, _ = train(pool, [(made.replace(**DDP), 3, True)], evaluated=3)
    assert [(loss, held) for loss, _, held in replicated] == [(loss, held) for loss, _, held in found[:3]]


def test_live_switches_do_not_disturb_the_loss(pool: Pool) -> None:
    made = spec()
    steady, _ = train(pool, [(made, 8, True)])
    others = [changes for name, changes in BACKENDS.items() if name != "lab"]
    switched, _ = train(pool, [(made.replace(**changes), 2, False) for changes in (*others, {"sharding": "zero1"})])
    assert [loss for loss, *_ in switched] == [loss for loss, *_ in steady]


def test_names_that_ranks_can_import_need_nothing_sent(pool: Pool) -> None:
    made = Spec().replace(model="tests.own_module:Net", loss="tests.own_module:loss", data="tests.own_module:Samples")
    steps, _ = train(pool, [(made.replace(lr=0.01), 20, True)])
    losses = [loss for loss, *_ in steps]
    assert not packed(made) and sum(losses[-5:]) < sum(losses[:5]) / 2


def test_dropout_is_equal_under_all_backends_and_where_it_is_recomputed(pool: Pool) -> None:
    names = cell(TEXT.replace("self.fc(self.norm(x))", "F.dropout(self.fc(self.norm(x)), 0.2, self.training)"), 14)
    made = spec(**own(names, accumulate=2, sync="last"))
    specs = {str(i): made.replace(**case) for i, case in enumerate([*BACKENDS.values(), {"recompute": "full"}])}
    found = train_afresh(pool, specs, 2)
    assert all(losses == found["0"] for losses in found.values()) and len(set(found["0"])) == 2
    assert found["0"] != train_afresh(pool, {"": spec(**own(accumulate=2))}, 2)[""]


def test_an_evaluation_draws_the_same_numbers_whenever_it_is_taken(pool: Pool) -> None:
    names = cell(TEXT.replace("self.fc(self.norm(x))", "self.fc(self.norm(x + torch.randn_like(x)))"), 16)
    made = spec(**own(names, held_out=0.25, lr=1e-30, optimizer="sgd"))
    found, _ = train(pool, [(made, 2, True), (made.replace(**DDP), 2, True)], evaluated=3)
    assert len({held for *_, held in found}) == 1 < len({loss for loss, *_ in found})


def _saved(place: Place, sent: Any, given: dict[str, Any], folder: str) -> None:
    s = rank_with(place, sent)
    s.apply("run", given)
    s.train(3)
    s.save(folder)
    s.saves(30.0)
    s.close()


def _restored(place: Place, sent: Any, given: dict[str, Any], path: str) -> list[float]:
    s = rank_with(place, sent)
    s.restore("run", given, path)
    losses = [e["mean_loss"] for e in s.train(2)["events"]]
    s.close()
    return losses


def saved(pool: Pool, made: Spec, folder: Path) -> None:
    """A checkpoint of its third step, in this folder."""
    pool.run(_saved, 2, packed(made), made.to_dict(), str(folder), reduction=None)


def train_afresh(pool: Pool, specs: dict[str, Spec], steps: int) -> dict[str, list[float]]:
    """The losses of each Spec, all of one world size, by its name."""
    found, _ = train(pool, [(made, steps, True) for made in specs.values()])
    by_spec = [[loss for loss, *_ in found[i : i + steps]] for i in range(0, len(found), steps)]
    return dict(zip(specs, by_spec, strict=True))


STATE = TEXT.replace("""        return x + self.out(F.relu(self.fc(self.norm(x))))
""", """        if self.training and torch.is_grad_enabled():
            self.calls += 1
            self.cache = torch.cat([self.cache[-4:], self.fc.weight.detach().sum().reshape(1)])
            self.mean.data.mul_(0.5).add_(self.cache.mean(), alpha=0.5)
        noise = torch.randn(WIDTH, generator=self.generator)
        noise += self.of_python.random() + self.of_numpy.random() + self.legacy.random_sample()
        return x + self.out(F.relu(self.fc(self.norm(x) + noise - self.mean))) * min(1.0, self.calls / 9)

    def get_extra_state(self):
        return {"calls": self.calls, "thing": (1, 2)}

    def set_extra_state(self, state):
        self.calls = state["calls"]
""").replace("        self.norm = nn.LayerNorm(WIDTH)\n", """        self.norm = nn.LayerNorm(WIDTH)
        self.calls, self.generator = 0, torch.Generator().manual_seed(3)
        self.of_python, self.of_numpy, self.legacy = random.Random(4), np.random.default_rng(5), np.random.RandomState(6)
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
""").replace("import math\n", "import math\nimport random\n\nimport numpy as np\n")  # fmt: skip


def _with_state(
    place: Place, sent: Any, given: list[dict[str, Any]], folder: str
) -> tuple[list[float], list[float], str]:
    """The losses in one piece; those of two steps of each Spec, suspended in between, and then from a checkpoint; and what a
    refused save says."""
    s, said, losses = rank_with(place, sent), "", []
    for i, one in enumerate(given):
        s.apply("run", one, fresh=i == 0)
        losses += [e["mean_loss"] for e in s.train(2)["events"]]
        s.suspend()
        s.resume("run")
    try:
        s.save(folder)
        s.saves(30.0)
    except ArgumentError as e:
        said = str(e)
    s.apply("steady", given[0], fresh=True)
    steady = [e["mean_loss"] for e in s.train(len(losses) + 2)["events"]]
    if not said:
        s.restore("run", given[0], folder)
        losses += [e["mean_loss"] for e in s.train(2)["events"]]
    s.close()
    return steady, losses, said


@pytest.mark.parametrize("backends", [["lab", "ddp"], pytest.param([*BACKENDS], marks=pytest.mark.slow)], ids=str)
def test_the_state_of_modules_beside_their_parameters_goes_along(
    pool: Pool, tmp_path: Path, backends: list[str]
) -> None:
    made = spec(**own(cell(STATE, 18)))
    given = [made.replace(**BACKENDS[name]).to_dict() for name in backends]
    for steady, switched, said in pool.run(_with_state, 2, packed(made), given, str(tmp_path), reduction=None):
        assert (switched, said) == (steady, "")
    saved = find(tmp_path)
    check_same(saved, made.replace(world_size=4, micro_batch=1))
    saved.manifest["modules"][1]["module.1.blocks.0._extra_state"][1] = "another"
    with pytest.raises(
        SpecError, match=r"world_size: blocks.0._extra_state differs between the ranks .*resume on 2 ranks"
    ):
        check_same(saved, made.replace(world_size=4, micro_batch=1))


def test_state_of_a_class_that_no_checkpoint_holds_goes_along_and_cannot_be_saved(pool: Pool, tmp_path: Path) -> None:
    made = spec(**own(cell(STATE.replace("(1, 2)", "nn.Identity()"), 19)))
    for steady, switched, said in pool.run(
        _with_state, 2, packed(made), [made.to_dict()], str(tmp_path), reduction=None
    ):
        assert switched == steady[:2] and "save: blocks.0._extra_state has things of classes" in said


def _stopped_in_a_step(place: Place, sent: Any, given: dict[str, Any]) -> tuple[list[Any], list[Any], bool]:
    """(loss, held-out loss) of four steps in one piece; and where the third is stopped between its two micro-batches."""
    s = rank_with(place, sent)

    def trained(steps: int) -> list[Any]:
        trainer = s.trainer
        assert trainer is not None
        at = range(trainer.progress.step, trainer.progress.step + steps)
        return [(e["mean_loss"], e["eval_loss"]) for e in s.train(steps, evaluations=dict.fromkeys(at, 2))["events"]]

    s.apply("steady", given, fresh=True)
    steady = trained(4)
    s.apply("stopped", given, fresh=True)
    losses, trainer = trained(2), s.trainer
    assert trainer is not None
    inner = trainer.batches.batch

    def batch(samples: int, micro: int) -> Any:
        if micro == 1 and place.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
            _stall(threading.Event(), s)
        return inner(samples, micro)

    trainer.batches.batch = batch  # type: ignore[method-assign]
    stopped = s.train(1)["stopped"]
    trainer.batches.batch = inner  # type: ignore[method-assign]
    losses += trained(2)
    s.close()
    return steady, losses, stopped


@pytest.mark.parametrize("backend", tiered(BACKENDS, lambda name: name == "lab"))
def test_a_step_that_is_stopped_leaves_no_state_behind(pool: Pool, backend: str) -> None:
    """Statistics of batches, other buffers, `get_extra_state` and generators are as before it, and the step is the same."""
    names = cell(STATE.replace("nn.LayerNorm(WIDTH)", "nn.BatchNorm1d(WIDTH)"), 21)
    made = spec(**own(names, held_out=0.25, accumulate=2, **BACKENDS[backend]))
    for steady, losses, stopped in pool.run(_stopped_in_a_step, 2, packed(made), made.to_dict(), reduction=None):
        assert stopped and losses == steady and len(set(losses)) == 4


def test_a_checkpoint_continues_at_another_world_size(pool: Pool, tmp_path: Path) -> None:
    """One rank of four samples sees those of two ranks of two, so that losses agree to rounding."""
    made = spec()
    steady, _ = train(pool, [(made, 5, True)])
    saved(pool, made, tmp_path)
    alone = made.replace(world_size=1, micro_batch=4, backend="fsdp2")
    found = pool.run(_restored, 1, packed(made), alone.to_dict(), str(find(tmp_path).path), reduction=None)
    assert found[0] == pytest.approx([loss for loss, *_ in steady[3:]], rel=1e-5)
    assert find(tmp_path).spec.workload.model["source"].count("class Block") == 1, "the manifest has the source"


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("return Net()", {}, "raise OSError('no disk')", r"workload.model: build\(\) raised OSError: no disk"),
    ("return Net()", {}, "raise SystemExit(3)", r"workload.model: build\(\) raised SystemExit: 3"),
    ("return Net()", {}, "return 3", r"workload.model: build\(\) returned a int; return an nn.Module"),
    ("return Net()", {}, "return nn.ReLU()", "workload.model: a ReLU has no parameters"),
    ("return Net()", {}, "return nn.LazyLinear(3)", "workload.model: weight has no shape before the first forward"),
    ("return Net()", {}, "return Net().bfloat16()", "workload.model: .* is bfloat16, and masters are float32"),
    ("return Net()", {}, "return nn.Linear(8, 12)", "strategy.wrap: no repeated blocks were found"),
    ("return Net()", {"wrap": "class:Blok"}, "return Net()", "strategy.wrap: the model has no module of class Blok"),
    ("range(3)", {}, "range(2 + torch.distributed.get_rank())", "workload.model: rank 1 and rank 0"),
    ("return Net()", {"wrap": "whole"}, "build.calls = getattr(build, 'calls', 0) + 1; return nn.Linear(8, build.calls)",
     r"workload.model: build\(\) returns other parameters each time it is called"),
    ('batch["y"])\n', {}, 'batch["y"], reduction="none")\n',
     r"workload.loss: loss\(model, batch\) returned a tensor, float32 \(2,\); return a scalar"),
    ('batch["y"])\n', {}, 'batch["y"]).long()\n',
     r"workload.loss: .* returned a tensor, int64 \(\); return a scalar tensor of floats"),
    ('return F.cross_entropy(model(batch["x"]), batch["y"])', {}, "return 1.5",
     r"workload.loss: loss\(model, batch\) returned a float"),
    ('return F.cross_entropy(model(batch["x"]), batch["y"])', {}, 'return batch["x"].mean()',
     "workload.loss: .* does not depend on any parameter"),
    ('batch["y"])\n', {}, 'batch["z"])\n',
     r"workload.loss: loss\(model, batch\) raised KeyError: 'z'; .* a batch is {x: float32 \(2, 8\), y: int64 \(2,\)}"),
    ("return 48", {}, "return 0", "workload.data: Samples has no samples"),
    ('"y": i % 12', {}, '"y": str(i)', r"workload.data: a batch of Samples is {x: float32 \(1, 8\), y: list"),
    ("def __len__", {}, "def length", "workload.data: Samples is no dataset"),
    ("return {", {}, "raise ValueError(i)\n        return {", "workload.data: Samples raised ValueError: 0"),
    ("return {", {}, "raise SystemExit(4)\n        return {", "workload.data: Samples raised SystemExit: 4"),
    ('return F.cross_entropy(model(batch["x"]), batch["y"])', {}, "raise SystemExit(5)",
     r"workload.loss: loss\(model, batch\) raised SystemExit: 5; raise an error"),
    ("torch.ones(1)", {"backend": "fsdp2"}, "torch.tensor(1.0)",
     "strategy.backend: fsdp2 takes no scalar parameters, and scale is one"),
    ("torch.ones(1)", DDP, "torch.ones(1)); self.idle = nn.Parameter(torch.ones(1)",
     "strategy.backend: DDP needs a gradient for every parameter, and the loss gives none to idle"),
]  # fmt: skip


def _refusals(place: Place, sent: Any, plan: list[dict[str, Any]], good: dict[str, Any]) -> list[str]:
    """What each Spec was refused with, while a good one trains on."""
    s, told = rank_with(place, sent), []
    s.apply("run", good)
    for given in plan:
        try:
            s.apply("run", given, fresh=True)
            told.append("accepted")
        except SpecError as e:
            told.append(str(e))
        assert len(s.train(1)["events"]) == 1
    s.close()
    return told


def test_what_cannot_train_is_refused_in_a_sentence_and_the_ranks_go_on(pool: Pool) -> None:
    good, specs = spec(), []
    for number, (there, changes, instead, _) in enumerate(BAD):
        assert TEXT.count(there) == 1, there
        specs.append(spec(**own(cell(TEXT.replace(there, instead), number + 2), **changes)))
    sent = {k: v for made in (good, *specs) for k, v in packed(made).items()}
    told = pool.run(_refusals, 2, sent, [s.to_dict() for s in specs], good.to_dict(), reduction=None)
    assert told[0] == told[1]
    for said, (*_, wanted) in zip(told[0], BAD, strict=True):
        assert re.search(wanted, said), (said, wanted)


def _unknown(place: Place, given: dict[str, Any]) -> str:
    s = session(place)
    with pytest.raises(SpecError) as refused:
        s.apply("run", given)
    s.close()
    return str(refused.value)


def test_code_that_was_not_sent_and_names_that_cannot_be_imported_are_refused(pool: Pool) -> None:
    stored = spec().to_dict()
    assert "workload.model: the code of build is not here" in pool.run(_unknown, 1, {**stored, "world_size": 1},
                                                                       reduction=None)[0]  # fmt: skip
    named = Spec(world_size=1).replace(model="no_such.module:build", loss="math:floor", data="math:pi")
    said = pool.run(_unknown, 1, named.to_dict(), reduction=None)[0]
    assert said.startswith("workload.model: no_such.module:build cannot be imported on this rank (No module named")
