"""A module, a loss, a dataset and metrics of one's own on ranks: equal under backends, switched, saved, and refused."""

import itertools
import math
import os
import re
import signal
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fsdp_lab.base.errors import SpecError
from fsdp_lab.cluster.sent_code import unpacked
from fsdp_lab.runs.evaluation import EvalConfig
from fsdp_lab.spec.checkpoint_format import check_same, find
from fsdp_lab.spec.spec import Spec
from tests.own import TEXT, cell, own, packed, spec
from tests.pool import Place, Pool
from tests.rank.test_generation import RESNET, SAMPLES, T5
from tests.rank.test_labels import BERT
from tests.rank.test_session import (
    BACKENDS,
    DDP,
    Call,
    _stall,
    answers,
    apply,
    before_batches,
    call,
    fails,
    play,
    session,
    spec as of_text,
    train as steps,
)


def rank_with(place: Place, sent: dict[str, tuple[str, bytes]]) -> Any:
    s = session(place, reduction="rank_ordered")
    for digest, (name, content) in sent.items():
        s.receive(digest, unpacked("workload.model", name, content), sent)
    return s


def train(pool: Pool, specs: Sequence[Spec], count: int, evaluated: int = 0) -> tuple[list[Any], list[dict[str, Any]]]:
    """(loss, checksum of all ranks, held-out loss) of each step of each Spec, trained afresh; and the last event of each."""
    asked = {"checks": range(count), "evaluations": dict.fromkeys(range(count), evaluated) if evaluated else {}}
    calls = [c for made in specs for c in (apply(made, fresh=True, evaluated=evaluated), steps(count, **asked))]
    by_rank = play_own(pool, *calls, specs=specs, world_size=specs[0].world_size)
    events = [[e for answer in told[1::2] for e in answer["events"]] for told in by_rank]
    by_step = [(es[0]["mean_loss"], sum(e["checksum"] for e in es) % (1 << 64), es[0]["eval_loss"])
               for es in zip(*events, strict=True)]  # fmt: skip
    return by_step, events[0][count - 1 :: count]


BATCH_NORM_FROZEN_AND_TIED = (
    TEXT.replace("nn.LayerNorm(WIDTH)", "nn.BatchNorm1d(WIDTH).requires_grad_(False)")
    .replace("nn.Parameter(torch.randn(12, WIDTH) / 4)", "self.embed.weight")
    .replace("nn.Linear(12, WIDTH, bias=False)", "nn.Linear(WIDTH, 12, bias=False)")
    .replace("self.fc(self.norm(x))", "F.dropout(self.fc(self.norm(x)), 0.2, self.training)")
    .replace("self.embed(torch.cos(x @ self.features))", "torch.cos(x @ self.features) @ self.embed.weight")
)


@pytest.mark.slow
def test_all_backends_train_it_to_equal_bits(pool: Pool) -> None:
    made = spec(**own(cell(BATCH_NORM_FROZEN_AND_TIED, 15), held_out=0.25))
    kinds = [*BACKENDS.values(), {"recompute": "full"}]
    found, last = train(pool, [made.replace(**backend) for backend in kinds], 3, evaluated=3)
    assert found[0:3] == found[3:6] == found[6:9]
    assert len({loss for loss, *_ in found[:3]}) == 3 and all(held for *_, held in found)
    assert [e["tokens"] for e in last] == [2] * 5, "samples of a rank"
    assert last[0]["flops"] > 2 * 3 * 2 * 4 * 16 * 16 and last[0]["comm"]["all_gather"]["calls"] >= 3
    losses = [(loss, held) for loss, _, held in found]
    assert losses[9:12] == losses[:3], "of DDP"
    assert [loss for loss, _ in losses[12:]] == [loss for loss, _ in losses[:3]], "recomputed with the same masks"


def test_names_that_ranks_can_import_need_nothing_sent(pool: Pool) -> None:
    made = Spec().replace(model="tests.own_module:Net", loss="tests.own_module:loss", data="tests.own_module:Samples")
    found, _ = train(pool, [made.replace(lr=0.01)], 10)
    losses = [loss for loss, *_ in found]
    assert not packed(made) and sum(losses[-3:]) < sum(losses[:3])


def test_an_evaluation_draws_the_same_numbers_whenever_it_is_taken(pool: Pool) -> None:
    names = cell(TEXT.replace("self.fc(self.norm(x))", "self.fc(self.norm(x + torch.randn_like(x)))"), 16)
    made = spec(**own(names, held_out=0.25, lr=1e-30, optimizer="sgd"))
    found, _ = train(pool, [made, made.replace(**DDP)], 2, evaluated=3)
    assert len({held for *_, held in found}) == 1 < len({loss for loss, *_ in found})


def _play_own(place: Place, sent: Any, calls: Sequence[Call]) -> list[Any]:
    with closing(rank_with(place, sent)) as s:
        return answers(s, calls)


def play_own(pool: Pool, *calls: Call, specs: Sequence[Spec | EvalConfig], world_size: int = 2) -> list[list[Any]]:
    """By rank, the answers of a Session to some calls, which has the code of these Specs."""
    sent = {k: v for made in specs for k, v in packed(made).items()}
    return pool.run(_play_own, world_size, sent, calls, reduction=None)


def saved(pool: Pool, made: Spec, folder: Path) -> None:
    """A checkpoint of its third step, in this folder."""
    play_own(pool, apply(made), steps(3), call("save", str(folder)), call("saves", 30.0), specs=[made])


def train_afresh(pool: Pool, specs: dict[str, Spec], count: int) -> dict[str, list[float]]:
    """The losses of so many steps of each Spec, all of one world size, by its name."""
    found, _ = train(pool, [*specs.values()], count)
    by_spec = [[loss for loss, *_ in found[i : i + count]] for i in range(0, len(found), count)]
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


def turns(specs: Sequence[Spec]) -> list[Call]:
    """Two steps of each, suspended after them."""
    return [c for i, made in enumerate(specs)
            for c in (apply(made, fresh=i == 0), steps(2), call("suspend"), call("resume", "run"))]  # fmt: skip


def losses_in(answers: Sequence[Any]) -> list[float]:
    return [e["mean_loss"] for answer in answers if "events" in answer for e in answer["events"]]


@pytest.mark.slow
def test_the_state_of_modules_beside_their_parameters_goes_along(pool: Pool, tmp_path: Path) -> None:
    """Through switches, suspensions and a checkpoint; of a class that no checkpoint holds, through the others."""
    unsaved = spec(**own(cell(STATE.replace("(1, 2)", "nn.Identity()"), 19)))
    made = spec(**own(cell(STATE, 18)))
    switched = turns([made.replace(**changes) for changes in BACKENDS.values()])
    switched += [call("save", str(tmp_path)), call("saves", 30.0)]
    resumed = [call("restore", "run", made.to_dict(), str(tmp_path)), steps(2)]
    before = play_own(pool, *switched, specs=[made])
    resumed += [apply(made, "steady", fresh=True), steps(10), *turns([unsaved] * 2), fails(call("save", str(tmp_path)))]
    after = play_own(pool, *resumed, apply(unsaved, "steady", fresh=True), steps(4), specs=[made, unsaved])
    for begun, (_, end, _, steady, *turned, refused, _, other) in zip(before, after, strict=True):
        assert [*losses_in(begun), *losses_in([end])] == losses_in([steady])
        assert losses_in(turned) == losses_in([other])
        assert "save: blocks.0._extra_state has things of classes" in refused
    saved = find(tmp_path)
    check_same(saved, made.replace(world_size=4, micro_batch=1))
    saved.manifest["modules"][1]["module.1.blocks.0._extra_state"][1] = "another"
    sentence = r"world_size: blocks.0._extra_state differs between the ranks .*resume on 2 ranks"
    with pytest.raises(SpecError, match=sentence):
        check_same(saved, made.replace(world_size=4, micro_batch=1))


def _stopped_in_a_step(place: Place, sent: Any, given: dict[str, Any]) -> tuple[list[Any], list[Any], bool]:
    """(loss, held-out loss) of four steps in one piece; and where the third is stopped between its two micro-batches."""
    s = rank_with(place, sent)

    def trained(steps: int) -> list[Any]:
        trainer = s.trainer
        at = range(trainer.progress.step, trainer.progress.step + steps)
        return [(e["mean_loss"], e["eval_loss"]) for e in s.train(steps, evaluations=dict.fromkeys(at, 2))["events"]]

    s.apply("steady", given, fresh=True)
    steady = trained(4)
    s.apply("stopped", given, fresh=True)
    losses, taken = trained(2), itertools.count()

    def stop_in_the_second() -> None:
        if next(taken) == 1 and place.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
            _stall(s)

    with before_batches(s, stop_in_the_second):
        stopped = s.train(1)["stopped"]
    losses += trained(2)
    s.close()
    return steady, losses, stopped


def test_a_step_that_is_stopped_leaves_no_state_behind(pool: Pool) -> None:
    """Statistics of batches, other buffers, `get_extra_state` and generators are as before it, and the step is the same."""
    names = cell(STATE.replace("nn.LayerNorm(WIDTH)", "nn.BatchNorm1d(WIDTH)"), 21)
    made = spec(**own(names, held_out=0.25, accumulate=2))
    for steady, losses, stopped in pool.run(_stopped_in_a_step, 2, packed(made), made.to_dict(), reduction=None):
        assert stopped and losses == steady and len(set(losses)) == 4


@pytest.mark.slow
def test_a_checkpoint_continues_at_another_world_size(pool: Pool, tmp_path: Path) -> None:
    """One rank of four samples sees those of two ranks of two, so that losses agree to rounding."""
    made = spec()
    steady, _ = train(pool, [made], 5)
    saved(pool, made, tmp_path)
    alone = made.replace(world_size=1, micro_batch=4, backend="fsdp2")
    restore = call("restore", "run", alone.to_dict(), str(tmp_path))
    (told,) = play_own(pool, restore, steps(2), specs=[made], world_size=1)
    assert losses_in(told) == pytest.approx([loss for loss, *_ in steady[3:]], rel=1e-5)
    assert find(tmp_path).spec.workload.model["source"].count("class Block") == 1, "the manifest has the source"


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("return Net()", {}, "raise OSError('no disk')", r"workload.model: build\(\) raised OSError: no disk"),
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
    ('return F.cross_entropy(model(batch["x"]), batch["y"])', {}, "raise SystemExit(5)",
     r"workload.loss: loss\(model, batch\) raised SystemExit: 5; raise an error"),
    ("torch.ones(1)", {"backend": "fsdp2"}, "torch.tensor(1.0)",
     "strategy.backend: fsdp2 takes no scalar parameters, and scale is one"),
    ("torch.ones(1)", DDP, "torch.ones(1)); self.idle = nn.Parameter(torch.ones(1)",
     "strategy.backend: DDP needs a gradient for every parameter, and the loss gives none to idle"),
]  # fmt: skip


@pytest.mark.slow
def test_what_cannot_train_is_refused_in_a_sentence_and_the_ranks_go_on(pool: Pool) -> None:
    good, specs = spec(), []
    for number, (there, changes, instead, _) in enumerate(BAD):
        assert TEXT.count(there) == 1, there
        specs.append(spec(**own(cell(TEXT.replace(there, instead), number + 2), **changes)))
    calls = [c for bad in specs for c in (fails(apply(bad, fresh=True)), steps(1))]
    one, other = play_own(pool, apply(good), *calls, specs=[good, *specs])
    assert one[1::2] == other[1::2] and losses_in(one) == losses_in(other)
    for said, (*_, wanted) in zip(one[1::2], BAD, strict=True):
        assert re.search(wanted, said), (said, wanted)


def test_code_that_was_not_sent_and_names_that_cannot_be_imported_are_refused(pool: Pool) -> None:
    named = Spec(world_size=1).replace(model="no_such.module:build", loss="math:floor", data="math:pi")
    ((unsent, unknown),) = play(pool, 1, fails(apply(spec(1))), fails(apply(named)))
    assert "workload.model: the code of build is not here" in unsent
    assert "workload.model: no_such.module:build cannot be imported on this rank (No module named" in unknown


# -- metrics ---------------------------------------------------------------------------------------------------------
METRICS = {"entropy": lambda logits, labels: F.cross_entropy(logits.flatten(0, -2), labels.flatten()),
           "accuracy": lambda logits, labels: (logits.argmax(-1) == labels)[labels != -100].float().mean()}  # fmt: skip
WRONG: dict[str, Any] = {
    r"ZeroDivisionError: .*\); it gets float32 \(2, 31, 384\) and int64 \(2, 31\),": lambda *given: 1 / 0,
    "ValueError: only one element .*, and returns one finite number": lambda *given: torch.zeros(3),
    r"ValueError: it returned nan\)": lambda *given: math.nan,
    r"TypeError: float\(\) argument must be a": lambda *given: None,
}


def evaluating(given: Spec, config: EvalConfig) -> list[Call]:
    """Two steps with an evaluation after each, once the metrics are tried."""
    asked, evaluations = config.arguments, dict.fromkeys(range(2), SAMPLES)
    return [apply(given, fresh=True, evaluated=SAMPLES, **asked), steps(2, evaluations=evaluations, **asked)]


@pytest.mark.slow
def test_metrics_get_the_places_and_weights_of_the_loss_and_equal_bits_under_backends(pool: Pool) -> None:
    """A cross entropy as a metric is the held-out loss."""
    config = EvalConfig(every=1, metrics=METRICS)
    of_own = EvalConfig(every=1, metrics={"entropy": lambda outputs, batch: F.cross_entropy(outputs, batch["y"])})
    kinds: list[dict[str, Any]] = [{"model": BERT}, {"model": T5, **DDP}, {"model": RESNET, "data": "images"}]
    made = [(of_text(**kind), config) for kind in kinds]
    for backend in ("lab", "fsdp2"):
        made += [(of_text(backend=backend), config), (spec().replace(backend=backend), of_own)]
    calls = [one for given in made for one in evaluating(*given)]
    told = play_own(pool, *calls, specs=[config, of_own, made[-1][0]])
    found, other = ([[e["eval_metrics"] for e in a["events"]] for a in answers[1::2]] for answers in told)
    assert found == other and found[3:5] == found[5:], "on every rank, and under lab and fsdp2"
    for metrics, answer in zip(found, told[0][1::2], strict=True):
        assert [m["entropy"] for m in metrics] == pytest.approx([e["eval_loss"] for e in answer["events"]], rel=1e-5)
        assert all(0 <= m.get("accuracy", 0) < 1 for m in metrics) and metrics[0] != metrics[1]


def test_a_wrong_metric_is_told_by_its_name_before_it_trains_or_when_it_is_found(pool: Pool) -> None:
    """A step that was made stays, and the ranks go on."""
    configs = [EvalConfig(every=1, metrics={**METRICS, "own": wrong}) for wrong in WRONG.values()]
    rare = EvalConfig(every=1, metrics={"own": lambda logits, labels: math.nan if len(labels) == 1 else 1.0})
    tried, trained = evaluating(of_text(), rare)  # on two samples; the last evaluated is alone on rank 1
    calls = [*(fails(evaluating(of_text(), config)[0]) for config in configs), tried, fails(trained), steps(1)]
    told = play_own(pool, apply(of_text()), *calls, specs=[*configs, rare])
    for _, *refused, _, _, last in told:
        for said, wanted in zip(refused, WRONG, strict=True):
            assert re.search(rf"^ArgumentError: evaluate.metrics: own failed \({wanted}", said), said
        assert [e["step"] for e in last["events"]] == [1]
    assert [answers[-2].split(":")[0] for answers in told] == ["RankAborted", "ArgumentError"]
