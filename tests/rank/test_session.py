"""A rank's Session: steps and their events, switches in place, refusals, and steps that are given up."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsdp_lab.base.errors import FieldError
from fsdp_lab.base.events import StepEvent
from fsdp_lab.engine import known_groups
from fsdp_lab.models import build
from fsdp_lab.models.flops import Peak
from fsdp_lab.rank import Session, __main__ as program, prepare
from fsdp_lab.rank.trainer import Trainer
from fsdp_lab.spec.spec import Spec
from fsdp_lab.wire import RankAborted
from tests.covering import tiered
from tests.pool import Place, Pool

SMALL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 36, "n_head": 4, "vocab_size": 384, "n_positions": 64}


def spec(world_size: int = 2, **changes: Any) -> Spec:
    return Spec(world_size=world_size).replace(model=SMALL, seq_len=32, micro_batch=2, lr=0.01).replace(**changes)


COSINE = {"lr_schedule": "cosine", "warmup_steps": 2, "decay_steps": 6, "lr_end": 0.1}
DDP = {"backend": "ddp", "sharding": "no_shard"}
BACKENDS: dict[str, dict[str, Any]] = {"lab": {"backend": "lab"}, "fsdp2": {"backend": "fsdp2"},
                                       "fsdp1": {"backend": "fsdp1"}, "ddp": DDP}  # fmt: skip


def session(place: Place, **options: Any) -> Session:
    return Session(rank=place.rank, world_size=place.world_size, device=str(place.info.device), store=place.store,
                   shared_gpu_ranks=place.sharing, memory_cap=0.9 / place.sharing,
                   **{"timeout_s": 20, "threads": 1, **options})  # fmt: skip


@contextmanager
def running(place: Place, given: Spec | dict[str, Any], *, steps: int = 0, **options: Any) -> Iterator[Session]:
    """A Session that has applied a Spec and made so many steps of it."""
    with closing(session(place, **options)) as s:
        s.apply("run", given.to_dict() if isinstance(given, Spec) else given)
        if steps:
            s.train(steps)
        yield s


def trainer_of(s: Session) -> Trainer:
    assert s.trainer is not None
    return s.trainer


Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def call(name: str, *args: Any, **options: Any) -> Call:
    """A call of a Session's method, for `play`."""
    return name, args, options


def apply(given: Spec, run: str = "run", **options: Any) -> Call:
    return call("apply", run, given.to_dict(), **options)


def train(steps: int, **options: Any) -> Call:
    return call("train", steps, **options)


def fails(wanted: Call) -> Call:
    """The same call, which is to raise; what it raises is its answer, as "Kind: sentence; fix: changes"."""
    name, args, options = wanted
    return f"{name}!", args, options


def answers(s: Session, calls: Sequence[Call]) -> list[Any]:
    found: list[Any] = []
    for name, args, options in calls:
        method, is_to_fail = getattr(s, name.rstrip("!")), name.endswith("!")
        try:
            found.append(method(*args, **options))
        except (RuntimeError, FieldError, ZeroDivisionError) as e:
            if not is_to_fail:
                raise
            fix = getattr(e, "fix", {})
            found.append(f"{type(e).__name__}: {e}{f'; fix: {fix}' if fix else ''}")
        else:
            assert not is_to_fail, f"{name}{args} raised nothing"
    return found


def _play(place: Place, calls: Sequence[Call], options: dict[str, Any]) -> list[Any]:
    with closing(session(place, **options)) as s:
        return answers(s, calls)


def play(pool: Pool, world_size: int, *calls: Call, **options: Any) -> list[list[Any]]:
    """By rank, the answers of a Session with these options to some calls, one after the other."""
    return pool.run(_play, world_size, calls, options, reduction=None)


def _beyond(place: Place, plan: list[dict[str, Any]]) -> list[Any]:
    """Events of two steps of each Spec on ranks whose peak is measured far too low."""
    slow = Peak(1e6, "measured: one slow product")
    with mock.patch.object(prepare, "device_peak", lambda device, dtype: slow), closing(session(place)) as s:
        return [(s.apply("run", given), s.train(3)["events"])[1] for given in plan]


def _follow(
    place: Place, plan: list[tuple[dict[str, Any], int]], reduction: str = "rank_ordered", shared_memory: bool = True
) -> list[Any]:
    """Apply and train each entry; what was said, and what each apply answered."""
    said: list[dict[str, Any]] = []
    s = session(place, on_event=said.append, reduction=reduction, shared_memory=shared_memory)
    answers = []
    for given, steps in plan:
        answers.append(s.apply("run", given))
        returned = s.train(steps)
        assert returned["events"] == said[-steps:] and not returned["stopped"]
    s.close()
    return [said, answers]


def follow(pool: Pool, plan: list[tuple[Spec, int]], **options: Any) -> tuple[list[list[StepEvent]], list[Any]]:
    results = pool.run(_follow, plan[0][0].world_size, [(s.to_dict(), n) for s, n in plan], reduction=None, **options)
    return [[StepEvent.from_dict(e) for e in said] for said, _ in results], results[0][1]


@pytest.mark.slow
def test_a_rank_raises_its_peak_to_what_its_steps_reach(pool: Pool) -> None:
    plan = [spec(), spec(sharding="no_shard"), spec(precision="bf16")]
    for fp32, again, bf16 in pool.run(_beyond, 2, [s.to_dict() for s in plan], reduction=None):
        events = [StepEvent.from_dict(e) for e in (*fp32, *again)]
        peaks = [e.peak_flops_per_s or 0.0 for e in events]
        assert peaks == sorted(peaks) and all(e.mfu is not None and 0 < e.mfu <= 1 for e in events)
        assert peaks[-1] == max(e.flops / e.step_time_s for e in events), "kept when the strategy changes"
        assert {e.peak_source for e in events} == {"reached in a training step, above measured: one slow product"}
        first = StepEvent.from_dict(bf16[0])
        assert first.peak_flops_per_s == first.flops / first.step_time_s, "each dtype has its own"


def test_events_say_what_was_measured(pool: Pool) -> None:
    (mine, theirs), (answer,) = follow(pool, [(spec(clip_norm=1.0), 4)])
    assert answer["step"] == 0 and not answer["carried"] and answer["parameters"] > 40_000
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert (a.rank, b.rank, a.step, b.step) == (0, 1, i, i)
        assert a.samples == (i + 1) * 4 and a.tokens == 64 and a.checksum is None
        assert a.mean_loss == b.mean_loss == (a.loss + b.loss) / 2
        assert a.loss != b.loss  # each reads its own part
        assert a.grad_norm == b.grad_norm > 0 and a.flops > 6 * 40_000 * 64 and a.tflops > 0
        assert a.mfu is not None and 0 < a.mfu < 1
        assert "measured" in a.peak_source and a.peak_flops_per_s == b.peak_flops_per_s
        assert a.notes and "CPU" in a.notes[0]
        assert a.comm["all_gather"].calls >= 3 and a.comm["all_gather"].seconds > 0
        assert a.comm["reduce_scatter"].link_bytes > 0 and a.comm["control"].calls == 1
    assert [e.first_after_switch for e in mine] == [True, False, False, False]
    assert [e.ledger for e in mine] == [False, False, True, False] and mine[3].mean_loss < mine[0].mean_loss


def test_switches_do_not_disturb_the_loss(pool: Pool) -> None:
    clip = {"clip_norm": 0.1}
    others = [spec(**DDP, **clip), spec(backend="fsdp1", wrap="whole", **clip),
              spec(sharding="shard_grad_op", offload="all", **clip)]  # fmt: skip
    (steady, _), _ = follow(pool, [(spec(**clip), 8)])
    (switched, _), answers = follow(pool, [(s, 2) for s in [spec(**clip), *others]])
    assert [(e.mean_loss, e.grad_norm) for e in switched] == [(e.mean_loss, e.grad_norm) for e in steady]
    assert steady[0].grad_norm > 0.1
    assert [(a["carried"], a["step"]) for a in answers] == [(False, 0), (True, 2), (True, 4), (True, 6)]
    assert [e.first_after_switch for e in switched] == [True, False] * 4


def test_a_light_change_rebuilds_nothing_and_as_many_reductions_are_made_as_micro_batches_communicate(pool: Pool):
    parts = [(spec(accumulate=5, sync=sync), 1) for sync in ("last", "every", 2, 3)]
    of_ddp = [(spec(**DDP, accumulate=3, sync=sync), 1) for sync in ("last", "every")]
    ((*mine, last, every), _), answers = follow(
        pool, [*parts, (spec(micro_batch=4, lr=0.001, accumulate=2, sync="last"), 1), *of_ddp]
    )
    assert all(answer["carried"] for answer in answers[1:])
    calls = [event.comm["reduce_scatter"].calls for event in mine]
    assert every.comm["all_reduce"].calls == 3 * last.comm["all_reduce"].calls
    assert calls == [times * calls[0] for times in (1, 5, 3, 2, 1)]
    assert mine[-1].tokens == 4 * 2 * 32 and mine[-1].samples - mine[-2].samples == 16


def test_a_change_of_rates_needs_no_new_backend(pool: Pool) -> None:
    """And it counts from the run's first step."""
    linear = spec(1, lr=0.02, lr_schedule="linear", decay_steps=10)
    [told] = play(pool, 1, *(c for given in (spec(1), linear, spec(1, **COSINE)) for c in (apply(given), train(2))))
    factor, rates = spec(**COSINE).workload.rates.factor, [e["lr"] for a in told[1::2] for e in a["events"]]
    assert rates == [0.01, 0.01, 0.02 * 0.8, 0.02 * 0.7, 0.01 * factor(4), 0.01 * factor(5)]


EXPERTS = {"model_type": "switch_transformers", "d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 48,
           "vocab_size": 384, "pad_token_id": 0, "num_experts": 2, "decoder_start_token_id": 0}  # fmt: skip
CACHES = {"model_type": "xlm", "emb_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 384}


def test_a_refusal_leaves_all_as_it_was(pool: Pool) -> None:
    refused = {"world_size": spec(world_size=3), "strategy.wrap": spec(wrap="class:Nothing"),
               "strategy.offload": spec(backend="fsdp1", offload="all"), "workload.data": spec(data="/nowhere/at/all"),
               "workload.seq_len": spec(seq_len=65), "workload.freeze": spec(freeze=["nothing.*"]),
               "strategy.backend": spec(model=EXPERTS, backend="fsdp2"),
               "strategy.recompute": spec(model=CACHES, recompute="full")}  # fmt: skip
    calls = [fails(apply(bad, fresh=i % 2 == 0)) for i, bad in enumerate(refused.values())]
    for _, _, *said, after in play(pool, 2, apply(spec()), train(2), *calls, train(2)):
        assert [text.split(":")[1].strip() for text in said] == [*refused]
        assert [e["step"] for e in after["events"]] == [2, 3]


@contextmanager
def before_batches(s: Session, do: Callable[[], object]) -> Iterator[None]:
    """Whatever a rank does before it takes each batch."""
    batches, inner = trainer_of(s).batches, trainer_of(s).batches.batch
    batches.batch = lambda *args: (do(), inner(*args))[1]  # type: ignore[method-assign]
    try:
        yield
    finally:
        batches.batch = inner  # type: ignore[method-assign]


def _interrupted(place: Place, changes: dict[str, Any], whom: str) -> Any:
    """Rank 1 stalls in its third step, as a hung rank would; then SIGINT reaches `whom`; then they go on."""
    with running(place, spec(**changes), reduction="rank_ordered") as s:
        losses = [e["mean_loss"] for e in s.train(2)["events"]]
        signals = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
        if whom in ("all", str(place.rank)):
            signals.start()
        start_s = time.perf_counter()
        with before_batches(s, lambda: _stall(s) if place.rank == 1 else None):
            stopped = s.train(50)
        seconds = time.perf_counter() - start_s - 0.7
        signals.cancel()  # another rank's may have ended it: ours would end whatever comes next
        losses += [e["mean_loss"] for e in stopped["events"]]
        losses += [e["mean_loss"] for e in s.train(3)["events"]]
    return stopped["stopped"], stopped["step"], losses, seconds


def _stall(s: Session) -> None:
    """Wait in Python until this rank is told to give up; a rank that never comes back is the cluster's business."""
    while s.context.aborted is None:
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("name", "whom"), tiered([("lab", "0"), ("ddp", "1"), ("fsdp1", "all")], lambda name, whom: name == "lab")
)
def test_sigint_frees_ranks_that_wait_and_loses_nothing(pool: Pool, steady: list[float], name: str, whom: str) -> None:
    for stopped, step, losses, seconds in pool.run(_interrupted, 2, BACKENDS[name], whom, reduction=None):
        assert stopped and step == 2 and seconds < 10 and losses == steady[:5]


def _interrupted_while_drawing(place: Place) -> Any:
    """Rank 0 is interrupted in its fifth draw, of more than a hundred; then the same Spec is applied again."""
    slow, draws = build.Draw.run_on, list[float]()

    def sleepy(self: build.Draw, *arguments: Any) -> None:
        draws.append(time.time())
        time.sleep(0.1)
        slow(self, *arguments)
        if len(draws) == 5 and place.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)

    with closing(session(place)) as s:
        with mock.patch.object(build, "_PIECE", 300), mock.patch.object(build.Draw, "run_on", sleepy):
            with pytest.raises(RankAborted, match="interrupted"):
                s.apply("run", spec().to_dict())
            ended, count = time.time(), len(draws)
        s.apply("run", spec().to_dict())
        return draws[4], ended, count, [e["step"] for e in s.train(1)["events"]]


def test_sigint_ends_the_drawing_of_initial_values(pool: Pool) -> None:
    (at, *_), _ = found = pool.run(_interrupted_while_drawing, 2, reduction=None)
    for _, ended, draws, steps in found:
        assert ended - at < 10 and draws < 40 and steps == [0]


def _fails(place: Place, after_s: float = 0.0) -> Any:
    """after_s: when rank 1 fails, so that the other one may be inside a collective by then."""

    def fail() -> None:
        if place.rank == 1:
            time.sleep(after_s)
            raise ZeroDivisionError("division by zero")

    with running(place, spec(), steps=2) as s:
        with before_batches(s, fail):
            (said,) = answers(s, [fails(train(3))])
        return said, [e["step"] for e in s.train(2)["events"]]


def _forgets(place: Place) -> Any:
    with running(place, spec(model={**SMALL, "n_embd": 256, "n_layer": 8}), steps=1) as s:
        names = sorted(name for name, value in s.namespace().items() if value is not None)
        freed = s.unload()["freed_bytes"]
        with pytest.raises(RuntimeError, match="apply a Spec first"):
            s.train(1)
        return names, freed, s.namespace()["model"], s.status()


def test_forget_gives_memory_back(pool: Pool) -> None:
    for names, freed, after, status in pool.run(_forgets, 2, reduction=None):
        assert names == ["device", "mesh", "model", "optimizer", "rank", "session", "world_size"]
        assert freed > 10e6 and after is None and status["step"] is None and status["last_collective"]


def _switches_groups(place: Place, plans: list[dict[str, Any]], rounds: int) -> list[tuple[int, int]]:
    """Groups and threads of this process after each round of switches, once the session is at rest."""
    s = session(place)
    found = []
    for _ in range(rounds):
        for given in plans:
            s.apply("run", given)
            s.train(1)
        found.append((len(known_groups()), len(os.listdir("/proc/self/task"))))
    s.close()
    return found


@pytest.mark.slow
def test_switches_leave_no_group_open(pool: Pool) -> None:
    """Each group has threads and connections of its own."""
    hybrid = {"sharding": "hybrid_shard", "shard_size": 2}
    plans = [{"backend": b, **hybrid} for b in ("lab", "fsdp2", "fsdp1")] + [{"reshard_size": 2}, {}]
    for by_round in pool.run(_switches_groups, 4, [spec(4, **p).to_dict() for p in plans], 2, reduction=None):
        assert [groups for groups, _ in by_round] == [0] * 2
        # a round makes many groups; torch's own threads come and go
        assert by_round[-1][1] < by_round[0][1] + 12, by_round


def _gone_before_the_other_comes(place: Place, given: dict[str, Any]) -> tuple[str, list[Any]]:
    """Rank 1 raises at once in a call that rank 0 comes to later."""
    with running(place, given, steps=1) as s:
        trainer = s._lifecycle.require()
        with mock.patch.object(trainer, "advance", lambda **_: 1 / 0) if place.rank == 1 else nullcontext():
            while place.rank == 0 and s._protocol.monitor.announced(0) is None:
                time.sleep(0.01)
            (said,) = answers(s, [fails(train(1))])
        return said, s.train(2)["events"]


def test_a_rank_that_comes_late_to_a_call_that_was_given_up_does_not_wait_in_the_next(pool: Pool) -> None:
    (late, mine), (first, theirs) = pool.run(_gone_before_the_other_comes, 2, spec().to_dict(), reduction=None)
    assert "rank 1 failed: ZeroDivisionError" in late and first == "ZeroDivisionError: division by zero"
    assert [e["step"] for e in mine] == [e["step"] for e in theirs] == [1, 2]


# -- without a notebook: `torchrun -m fsdp_lab.rank spec.json` trains the same Spec ------------------------------------
@pytest.mark.slow
def test_each_step_is_a_line_of_json_and_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    (file := tmp_path / "spec.json").write_text(spec().to_json())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
               "--standalone", "-m", "fsdp_lab.rank", str(file), "--steps", "100000"]  # fmt: skip
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    lines = [child.stdout.readline() for _ in range(3)]
    os.killpg(child.pid, signal.SIGINT)
    _, error = child.communicate(timeout=60)
    assert all(lines), error
    events = [StepEvent.from_dict(json.loads(line)) for line in lines]
    assert [e.step for e in events] == [0, 1, 2] and {e.rank for e in events} == {0}
    assert events[0].comm["all_gather"].calls > 0 and child.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)


def test_another_number_of_ranks_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "spec.json").write_text(spec().to_json())
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(sys, "argv", ["fsdp_lab.rank", str(file)])
    assert program.main() == 2
    wanted = "world_size: the Spec needs 2 ranks and torchrun started 1; give torchrun --nproc-per-node 2"
    assert wanted in capsys.readouterr().err
