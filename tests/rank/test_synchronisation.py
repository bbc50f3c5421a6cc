"""How often a step waits for the device, on a simulated one that lags behind the host; and that its events come anyway."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_lab.base.events import StepEvent
from fsdp_lab.rank import trainer as trainer_module
from fsdp_lab.rank.trainer import Trainer
from tests.pool import Place, Pool
from tests.rank.test_session import DDP, session, spec

STEPS, STEP_S = 4, 7.0  # the simulated device takes so long from one mark to the next


class LateDevice:
    """Streams that reach their marks only when somebody waits for them."""

    def __init__(self) -> None:
        self.made = self.reached = self.waits = 0

    def mark(self) -> Mark:
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

    def elapsed_time(self, later: Mark) -> float:
        assert self.query() and later.query(), "read before the device is there"
        return 1e3 * STEP_S * (later.number - self.number)


READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__")


@contextmanager
def reads_counted(trainer: Trainer) -> Iterator[Counter[str]]:
    """How often values are read on the host from the beginning of each step to its update. Not counted: the vote, which is
    on the host, and what transformers' masks ask (whether sequences are packed)."""
    found: Counter[str] = Counter()

    def counted(name: str) -> Any:
        real = getattr(torch.Tensor, name)

        def read(t: torch.Tensor, *args: Any, **more: Any) -> Any:
            ours = not str(sys._getframe(1).f_globals["__name__"]).startswith("transformers.")
            counting = trainer.state in (trainer_module.StepState.COMPUTING, trainer_module.StepState.IDLE)
            found[name] += counting and ours and t.numel() > 0
            return real(t, *args, **more)

        return read

    with mock.patch.multiple(torch.Tensor, **{name: counted(name) for name in READS}):
        yield found


def _train(place: Place, given: dict[str, Any], fails: bool) -> dict[str, Any]:
    told: list[tuple[int, int]] = []  # a step, and how many had begun when its event came
    device, begun = LateDevice(), [0]
    s = session(place, on_event=lambda event: told.append((event["step"], begun[0])))
    s.apply("run", given)
    trainer = s.trainer
    assert trainer is not None
    trainer.meter._streams = device  # type: ignore[assignment]
    s.context.start_timing = s.context.read_timing = lambda: None  # type: ignore[method-assign]
    batch, read = trainer.batches.batch, trainer_module._read

    def counted(*args: Any) -> Any:
        begun[0] += args[1] == 0
        if fails and begun[0] == STEPS:
            raise ZeroDivisionError
        return batch(*args)

    def reading(*scalars: torch.Tensor) -> list[float]:
        device.drain()
        return read(*scalars)

    trainer.batches.batch = counted  # type: ignore[method-assign]
    start_s = time.perf_counter()
    with mock.patch.object(trainer_module, "_read", reading), reads_counted(trainer) as reads:
        try:
            events = s.train(STEPS)["events"]
        except ZeroDivisionError:
            events = []
    found = {"told": told, "events": events, "waits": device.waits, "reads": dict(reads), "start_s": start_s}
    s.close()
    return found


@pytest.mark.parametrize("changes", [{}, DDP], ids=["lab", "ddp"])
def test_a_step_waits_once_and_its_event_comes_a_step_later(pool: Pool, changes: dict[str, Any]) -> None:
    (found,) = pool.run(_train, 1, spec(1, accumulate=2, **changes).to_dict(), False, reduction=None)
    reads = {name: count for name, count in found["reads"].items() if count}
    assert reads == {"tolist": STEPS}, "loss and norm at once"
    assert found["waits"] == 2, "before the first step, and after the last"
    assert found["told"] == [(step, min(step + 2, STEPS)) for step in range(STEPS)]
    events = [StepEvent.from_dict(event) for event in found["events"]]
    assert [e.step for e in events] == list(range(STEPS))
    assert {e.step_time_s for e in events} == {2 * STEP_S}, (
        "from a step's first mark to its last; the vote's is between"
    )
    first, last = events[0], events[-1]
    assert all(math.isfinite(e.loss) and e.grad_norm > 0 for e in events) and last.spans and not first.spans
    assert found["start_s"] - 2 * STEP_S < first.begin_s < last.begin_s


def test_a_step_that_fails_takes_no_event_of_another_with_it(pool: Pool) -> None:
    (found,) = pool.run(_train, 1, spec(1).to_dict(), True, reduction=None)
    assert [step for step, _ in found["told"]] == list(range(STEPS - 1))
    assert found["waits"] == 1, "a device that may hang is not waited for"


def test_only_what_can_be_pinned_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set may have its tensors on the GPU already (here: on meta)."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t + 1)
    on_host, elsewhere, sparse = torch.ones(2), torch.ones(2, device="meta"), torch.ones(2).to_sparse()
    batch = {"a": on_host, "b": elsewhere, "c": sparse}
    found = trainer_module._pinned(batch, torch.device("cuda:0"))
    assert found["a"].tolist() == [2, 2] and found["b"] is elsewhere and found["c"] is sparse
    assert trainer_module._pinned(batch, torch.device("cpu")) is batch
