"""A loop of a user's own, watched: the same figures as the lab's own run of the same Spec, for every wrapper. How often
steps wait for a device that lags behind the host, and that their events come anyway."""

import math
from contextlib import closing, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fsdp_lab import engine
from fsdp_lab.backends.wrapping import name_fsdp2_unit
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.events import Role, StepEvent, Track
from fsdp_lab.models.wrapping import blocks
from fsdp_lab.rank import trainer as trainer_module
from fsdp_lab.rank.measure import GUARD_CHARACTERS, Recompilations
from fsdp_lab.rank.watch import loop as watch_module
from fsdp_lab.rank.watch.loop import Watch, plain_host
from fsdp_lab.spec.describe import WatchedLoop
from fsdp_lab.spec.spec import Spec
from fsdp_lab.wire import WireContext
from tests.models.small import filled
from tests.pool import Place, Pool
from tests.rank.test_session import BACKENDS, running, session, trainer_of

# Sizes that leave no padding on two ranks.
MODEL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 384, "n_positions": 32,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
STEPS = 5


def spec(**changes: Any) -> Spec:
    return Spec(world_size=2).replace(model=MODEL, seq_len=32, micro_batch=2, lr=0.01, **changes)


def wrapped(backend: str, model: nn.Module, *, recompute: bool = False) -> nn.Module:
    """As a user does it."""
    if recompute:
        kind = type(blocks(model)[0])
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, kind))
    if backend == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    if backend == "fsdp1":
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({type(blocks(model)[0])}), use_orig_params=True,
            sharding_strategy=ShardingStrategy.FULL_SHARD, device_id=torch.device("cpu"),
        )  # fmt: skip
    shard = engine.fully_shard if backend == "lab" else fully_shard
    for block in blocks(model):
        shard(block)
    shard(model)
    return model


def holding_back(model: Any, held: bool) -> Any:
    """Whether gradients stay, to be sent with those of a later micro-batch."""
    if not held:
        return nullcontext()
    return model.no_sync() if hasattr(model, "no_sync") else engine.no_sync(model)


def _both(place: Place, backend: str, given: dict[str, Any]) -> Any:
    """The lab's own run, then a loop with the same batches."""
    messages: list[dict[str, Any]] = []
    with running(place, given, reduction="rank_ordered") as s:
        batches = trainer_of(s).batches
        own = s.train(STEPS)["events"]
        s.unload()
        wanted = Spec.from_dict(given)
        model = wrapped(backend, filled(MODEL), recompute=wanted.strategy.recompute == "full")
        optimizer = torch.optim.AdamW(model.parameters(), lr=wanted.workload.lr, weight_decay=0.0)
        count = wanted.workload.accumulate
        with Watch(model, optimizer, s.loop_host(messages.append), tokens=64 * count) as watch:
            for i in range(STEPS):
                with watch.step():
                    for micro in range(count):
                        batch = batches.batch(i * wanted.global_batch, micro)
                        with holding_back(model, micro < count - 1 and wanted.strategy.sync == "last"):
                            loss = model(**batch)["loss"]
                            watch.loss(loss)
                            (loss / count).backward()
                    optimizer.step()
                    optimizer.zero_grad()
    return own, messages


def both(pool: Pool, backend: str, given: Spec) -> list[tuple[list[StepEvent], list[StepEvent], list[dict[str, Any]]]]:
    """By rank: the lab's events, the watch's, its messages."""
    found = pool.run(_both, 2, backend, given.to_dict(), reduction=None)
    return [([StepEvent.from_dict(e) for e in own], events_of(messages), messages) for own, messages in found]


def events_of(messages: list[dict[str, Any]]) -> list[StepEvent]:
    return [e for m in messages for e in m["events"]]


def sent(event: StepEvent) -> dict[str, tuple[int, int]]:
    """Calls and bytes of what a step sends, without the trainer's vote."""
    return {kind: (t.calls, t.link_bytes) for kind, t in event.comm.items() if kind != "control"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_watched_loop_has_the_figures_of_the_labs_own_run(pool: Pool, backend: str) -> None:
    given = spec(**BACKENDS[backend], weight_decay=0.0)
    for theirs, mine, messages in both(pool, backend, given):
        loop = WatchedLoop.from_dict(messages[0]["begin"]["loop"])
        assert (loop.backend, loop.sharding) == (backend, given.strategy.sharding)
        assert (loop.model, loop.optimizer, loop.units) == ("GPT2LMHeadModel", "AdamW", 2)
        assert messages[-1]["end"]["state"] == "finished"
        assert [e.loss for e in mine] == [e.loss for e in theirs]
        assert [e.flops for e in mine] == [e.flops for e in theirs] and mine[0].peak_flops_per_s
        assert [sent(e) for e in mine] == [sent(e) for e in theirs]
        for one, other in zip(mine[2:], theirs[2:], strict=True):
            assert one.ledger == other.ledger
            fields = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "host_bytes")
            assert [getattr(one.memory, f) for f in fields] == [getattr(other.memory, f) for f in fields]
        peaks = [(one.memory.at_peak, other.memory.at_peak) for one, other in zip(mine[2:], theirs[2:], strict=True)]
        for role in Role:  # the trainer has some scalars more, for its vote
            # When a buffer that was sent is freed depends on Gloo's thread, so one step's peak may stand at another point.
            most = 64 if role in (Role.ACTIVATIONS, Role.OTHER) else 0
            assert any(abs(a.of_role(role) - b.of_role(role)) <= most for a, b in peaks), (role, peaks)
        computed = [s for s in mine[3].spans if s.track is Track.COMPUTE]
        units = {"transformer.h.0", "transformer.h.1", "root"}
        assert {s.name for s in computed} == {"forward", "backward", "optimizer"}
        assert {s.unit for s in computed} >= units
        if backend != "ddp":  # DDP tells nobody which bucket it sends
            assert {s.unit for s in mine[3].spans if s.track is Track.REDUCE_SCATTER} == units


def _parts_sharded(place: Place) -> list[list[dict[str, Any]]]:
    """Only the blocks are sharded; and then all but one parameter, which the optimizer also has."""
    found: list[list[dict[str, Any]]] = []
    with closing(session(place)) as s:
        for kind in ("blocks", "ignored"):
            model, messages = net(), list[dict[str, Any]]()
            if kind == "blocks":
                for layer in list(model)[:2]:
                    engine.fully_shard(layer)
            else:
                engine.fully_shard(model, ignored_params=[model[2].bias])
            adam = torch.optim.Adam(model.parameters())
            with Watch(model, adam, s.loop_host(messages.append)) as watch:
                train(watch, model, adam)
            found.append(messages)
    return found


def test_a_model_that_is_sharded_in_part_is_watched(pool: Pool) -> None:
    for told in pool.run(_parts_sharded, 2, reduction=None):
        for messages, gathered in zip(told, ({"0", "1"}, {"root"}), strict=True):
            events = events_of(messages)
            assert {s.unit for s in events[3].spans or () if s.track is Track.ALL_GATHER} == gathered
            assert events[2].memory_curve and events[-1].memory.parameters_bytes > 0


@pytest.mark.slow
def test_several_backwards_in_a_step_are_one_step_and_recomputation_is_counted_apart(pool: Pool) -> None:
    given = spec(weight_decay=0.0, accumulate=2, sync="last", recompute="full")
    for theirs, mine, _ in both(pool, "lab", given):
        assert [e.step for e in mine] == list(range(STEPS))
        assert [e.loss for e in mine] == pytest.approx([e.loss for e in theirs], rel=1e-6)
        assert [sent(e) for e in mine] == [sent(e) for e in theirs]
        assert [(e.flops, e.recompute_flops) for e in mine] == [(e.flops, e.recompute_flops) for e in theirs]
        assert mine[-1].recompute_flops


# -- in one process ---------------------------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])


def watch_of(model: Any, optimizer: Any, **options: Any) -> tuple[Watch, list[dict[str, Any]]]:
    messages: list[dict[str, Any]] = []
    return Watch(model, optimizer, plain_host(model, messages.append), **options), messages


def with_sgd(**options: Any) -> tuple[nn.Module, torch.optim.SGD, Watch, list[dict[str, Any]]]:
    """A model, its optimizer, a watch of both, and the messages of that."""
    model = net()
    sgd = torch.optim.SGD(model.parameters())
    return model, sgd, *watch_of(model, [sgd], **options)


def train(watch: Watch, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for _ in range(steps):
        with watch.step():
            loss = model(torch.ones(2, 8)).square().mean()
            loss.backward()
            optimizer.step()
            watch.loss(loss, grad_norm=2.0)
            optimizer.zero_grad()


def test_a_plain_module_in_one_process_is_watched() -> None:
    model = net()
    adam = torch.optim.Adam(model.parameters())
    watch, messages = watch_of(model, adam)
    hooks = (len(model._forward_hooks), len(model._forward_pre_hooks))
    with watch:
        train(watch, model, adam)
    events = events_of(messages)
    nbytes = sum(p.nbytes for p in model.parameters())
    held = events[-1].memory
    assert (held.parameters_bytes, held.gradients_bytes, held.optimizer_bytes) == (nbytes, nbytes, 2 * nbytes)
    assert events[-1].grad_norm == 2.0 and not events[-1].comm and events[2].memory_curve and events[3].spans
    product = 2 * 2 * 8 * 8
    assert events[0].flops == 3 * 3 * product - product, "nobody needs the gradient of the first layer's input"
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks
    assert not adam._optimizer_step_pre_hooks and not adam._optimizer_step_post_hooks


def test_what_the_loop_does_not_say_is_not_in_its_events_and_what_it_says_is() -> None:
    model, sgd, watch, messages = with_sgd(flops=False)
    with watch, watch.step():
        model(torch.ones(2, 8)).sum().backward()
        sgd.step()
    (event,) = events_of(messages)
    unknown = (event.loss, event.mean_loss, event.grad_norm, event.tokens_per_s, event.tflops)
    assert all(math.isnan(value) for value in unknown) and event.peak_flops_per_s is None
    model, sgd, watch, messages = with_sgd(tokens=5)
    with watch:
        for tokens in (None, 7, None):
            with watch.step(tokens=tokens):
                model(torch.ones(2, 8)).sum().backward()
                sgd.step()
    assert [(e.tokens, e.flops > 0) for e in events_of(messages)] == [(5, True), (7, False), (5, True)]


def test_a_compiled_model_has_no_flops_and_says_so() -> None:
    model = net()
    model.compile(backend="eager")
    sgd = torch.optim.SGD(model.parameters())
    watch, messages = watch_of(model, sgd)
    with watch:
        train(watch, model, sgd, 1)
    (event,) = events_of(messages)
    assert event.flops == 0 and any(note.startswith("FLOPs are not counted") for note in messages[0]["begin"]["notes"])


def test_units_are_named_on_the_wire_of_the_last_watch() -> None:
    wires = [WireContext(), WireContext()]

    class Group:
        def unshard(self) -> list[str]:
            return [wire.unit for wire in wires]

    group = Group()
    for wire in wires:
        name_fsdp2_unit("h.0", [group], wire)
    assert group.unshard() == ["", "h.0"]


def test_of_a_guard_that_failed_the_beginning_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = SimpleNamespace(compile_id="0/1", recompile_reason="0/0: " + "x" * 10_000)
    monkeypatch.setattr("torch._dynamo.utils.get_compilation_metrics", lambda: [compiled])
    assert Recompilations().take() == ("x" * GUARD_CHARACTERS,)


def test_several_optimizers_may_be_watched_and_none() -> None:
    model = net()
    parameters = list(model.parameters())
    adam, rare = torch.optim.Adam(parameters[:3]), torch.optim.SGD(parameters[3:], momentum=0.9)
    alone, untrained = watch_of(model, None)
    with alone, alone.step():  # without an optimizer every step counts
        model(torch.ones(2, 8)).sum().backward()
    watch, messages = watch_of(model, [adam, rare])
    with watch:
        for both_step in (False, True):
            with watch.step():
                model(torch.ones(2, 8)).sum().backward()
                adam.step()
                if both_step:
                    rare.step()
    of_adam, of_rare = 2 * sum(p.nbytes for p in parameters[:3]), sum(p.nbytes for p in parameters[3:])
    events = [*events_of(untrained), *events_of(messages)]
    assert [e.memory.optimizer_bytes for e in events] == [0, of_adam, of_adam + of_rare]
    assert not any(e.skipped for e in events)


def test_a_step_without_an_update_is_skipped_and_one_without_a_backward_is_none() -> None:
    model, sgd, watch, messages = with_sgd()
    with watch:
        with watch.step():
            model(torch.ones(2, 8))
        with watch.step():
            model(torch.ones(2, 8)).sum().backward()
        train(watch, model, sgd, 1)
    assert [(e.step, e.skipped) for e in events_of(messages)] == [(0, True), (1, False)]
    (note,) = messages[-1]["end"]["notes"]
    assert note.startswith("1 step without a backward and without optimizer.step()")


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [(ValueError("no more"), "failed", "ValueError: no more"), (KeyboardInterrupt(), "stopped", "interrupted")],
)
def test_the_exception_that_ends_a_loop_is_raised_and_reported(error: BaseException, state: str, reason: str) -> None:
    model, sgd, watch, messages = with_sgd()
    with pytest.raises(type(error)), watch:
        train(watch, model, sgd, 2)
        with watch.step():
            model(torch.ones(2, 8))
            raise error
    end = messages[-1]["end"]
    assert (end["state"], end["reason"]) == (state, reason) and len(events_of(messages)) == 2
    assert not model._forward_hooks and not sgd._optimizer_step_pre_hooks
    again, messages = watch_of(model, sgd)  # nothing is left of the first
    with again:
        train(again, model, sgd, 3)
    assert len(events_of(messages)) == 3


def test_a_ledger_step_is_made_up_for_after_one_that_raised_and_after_the_users_own_profiler() -> None:
    model, sgd, watch, messages = with_sgd()
    with watch:
        train(watch, model, sgd, 2)
        with pytest.raises(ValueError, match="bad batch"), watch.step():
            raise ValueError("bad batch")
        with torch.profiler.profile():
            train(watch, model, sgd, 2)
        train(watch, model, sgd, 2)
    assert [e.ledger for e in events_of(messages)] == [False] * 4 + [True, False]


def test_each_micro_batch_has_its_own_forward_and_backward_in_the_timeline() -> None:
    model, sgd, watch, messages = with_sgd()
    with watch:
        train(watch, model, sgd, 3)
        with watch.step():
            for _ in range(3):
                model(torch.ones(2, 8)).square().mean().backward()
            sgd.step()
    spans = sorted(events_of(messages)[3].spans or (), key=lambda span: span.start_s)
    assert [s.name for s in spans if s.track is Track.COMPUTE] == ["forward", "backward"] * 3 + ["optimizer"]


def test_a_first_step_that_raises_is_not_counted_into_the_next() -> None:
    model = net()
    sgd = torch.optim.SGD(model.parameters())

    def loss() -> torch.Tensor:
        return checkpoint(model, torch.ones(2, 8, requires_grad=True), use_reentrant=False).sum()

    flops = []
    for fails in (False, True):
        watch, messages = watch_of(model, sgd)
        with watch:
            if fails:
                with pytest.raises(ValueError, match="out of memory"), watch.step():
                    loss().backward()
                    raise ValueError("out of memory")
            with watch.step():
                loss().backward()
                sgd.step()
        flops += [(e.flops, e.recompute_flops) for e in events_of(messages)]
    assert flops[0] == flops[1] and flops[0][1] > 0


def test_what_cannot_be_watched_is_refused_in_a_sentence() -> None:
    model = net()
    sgd, other = torch.optim.SGD(model.parameters()), torch.optim.SGD(net().parameters())
    refused: list[tuple[Any, Any, dict[str, Any], str]] = [
        ([model, net()], sgd, {}, "model: a list is no module; give the torch.nn.Module that is trained"),
        (nn.ReLU(), None, {}, "model: ReLU has no parameters; give the module that is trained"),
        (model, "adam", {}, "optimizer: a str is no torch optimizer; give the torch.optim.Optimizer"),
        (model, other, {}, "optimizer: 6 of its tensors are no parameters of this model; make it from"),
        (model, sgd, {"tokens": 0}, "tokens: 0 is refused; give a whole number of 1 or more"),
        (model, sgd, {"trace_every": 0}, "trace_every: 0 is refused"),
        (model, sgd, {"flops": -1}, "flops: -1 is refused"),
    ]
    for given, optimizer, options, sentence in refused:
        with pytest.raises(ArgumentError) as caught:
            watch_of(given, optimizer, **options)
        assert str(caught.value).startswith(sentence)


def test_a_watch_is_open_once_and_alone() -> None:
    model = net()
    sgd = torch.optim.SGD(model.parameters())
    host = plain_host(model, lambda message: None)
    watch, inner = Watch(model, sgd, host), Watch(net(), None, host)
    too_early = "step: the watch is not open; call it inside `with fsdp_lab.watch"
    with pytest.raises(ArgumentError, match=too_early), watch.step():
        pass
    with watch:
        with pytest.raises(ArgumentError, match="watch: this rank is watching a loop already; end that one first"):
            inner.__enter__()
        with pytest.raises(ArgumentError, match="loss: no step is in progress"):
            watch.loss(1.0)
        with watch.step():
            with pytest.raises(ArgumentError, match="step: a step is in progress"), watch.step():
                pass
            with pytest.raises(ArgumentError, match=r"loss: a tensor of shape \(2,\) is no scalar; give its mean"):
                watch.loss(torch.ones(2))
    with pytest.raises(ArgumentError, match="watch: this one is over"):
        watch.__enter__()


# -- on a device that lags behind the host ----------------------------------------------------------------------------


STEP_S = 7.0  # the simulated device takes so long from one mark to the next


class LateDevice:
    """Streams that reach their marks only when somebody waits for them."""

    def __init__(self) -> None:
        self.made = self.reached = self.waits = 0

    def mark(self) -> "Mark":
        self.made += 1
        return Mark(self, self.made)

    def synchronize(self) -> None:
        self.waits += 1
        self.drain()

    def drain(self) -> None:
        self.reached = self.made


@dataclass
class Mark:
    device: LateDevice
    number: int

    def query(self) -> bool:
        return self.number <= self.device.reached

    def synchronize(self) -> None:
        self.device.reached = max(self.device.reached, self.number)

    def elapsed_time(self, later: "Mark") -> float:
        assert self.query() and later.query(), "read before the device is there"
        return 1e3 * STEP_S * (later.number - self.number)


def late(every_s: float, steps: int) -> tuple[LateDevice, list[StepEvent], list[int]]:
    """The device, all events, and how many had arrived after each step."""
    model, sgd, watch, messages = with_sgd(trace_every=1000, flops=False)
    device, arrived = LateDevice(), []
    with mock.patch.multiple(watch_module, READ_EVERY_S=every_s, PUBLISH_EVERY_S=0.0), watch:
        watch._meter._streams = device  # type: ignore[assignment]
        for _ in range(steps):
            train(watch, model, sgd, 1)
            arrived.append(len(events_of(messages)))
    return device, events_of(messages), arrived


def test_a_device_is_waited_for_now_and_then_and_every_step_is_timed_by_it() -> None:
    device, rare, arrived = late(every_s=1e9, steps=10)
    # at the first step, before the traced one and after it, and at the end
    assert device.waits <= 5 and arrived[-1] < 10
    _, often, arrived = late(every_s=0.0, steps=6)
    assert arrived == [1, 2, 3, 4, 5, 6], "while the loop runs"
    for events in (rare, often):
        # Not equal: what is added to the time since the machine's start is rounded otherwise beyond a power of two.
        parts = pytest.approx({"forward": STEP_S, "backward": STEP_S, "optimizer": STEP_S})
        assert all(e.part_s == parts and e.step_time_s == pytest.approx(3 * STEP_S) for e in events)
    assert [e.step for e in rare] == list(range(10))


def test_only_what_can_be_pinned_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set may have its tensors on the GPU already (here: on meta)."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t + 1)
    on_host, elsewhere, sparse = torch.ones(2), torch.ones(2, device="meta"), torch.ones(2).to_sparse()
    batch = {"a": on_host, "b": elsewhere, "c": sparse}
    found = trainer_module._pinned(batch, torch.device("cuda:0"))
    assert found["a"].tolist() == [2, 2] and found["b"] is elsewhere and found["c"] is sparse
    assert trainer_module._pinned(batch, torch.device("cpu")) is batch
