"""The buttons of slow motion against a lab without processes: what they do, and what is said beside them."""

import threading
from collections.abc import Callable, Iterator

import pytest

from fsdp_lab.cluster import RankError
from fsdp_lab.dashboard.controls import Controls
from fsdp_lab.dashboard.slow_motion import SlowMotionBox
from fsdp_lab.runs import RunState
from tests.dashboard.fake_lab import FakeLab
from tests.waiting import until


class Desk:
    """The buttons, a lab, and a tick when asked."""

    def __init__(self) -> None:
        self.lab = FakeLab(2, step_s=0.002)
        self.ranks = self.lab.slow_ranks
        self.controls = Controls(self.lab)
        self.box = SlowMotionBox(self.lab, wanted=self.controls.slow_motion_spec)

    @property
    def said(self) -> str:
        self.box.tick()
        return self.box.message.value

    @property
    def index(self) -> int:
        """Of the phase that is drawn; -1 before the first."""
        self.box.tick()
        return -1 if self.box._drawn is None else self.box._drawn.index

    def press(self, name: str) -> None:
        getattr(self.box, f"_{name}").click()

    def until(self, what: Callable[[], bool]) -> None:
        until(what, meanwhile=self.box.tick)

    def begin(self) -> None:
        """The first phase of a step."""
        self.press("next")
        self.until(lambda: self.index == 0)


@pytest.fixture
def desk() -> Iterator[Desk]:
    d = Desk()
    yield d
    d.box.close()
    d.lab.close()


def test_presses_are_counted_while_the_ranks_work(desk):
    desk.ranks.phase_s = 0.05
    for _ in range(3):
        desk.press("next")
    desk.until(lambda: desk.index == 2)


def test_earlier_phases_of_a_step_are_looked_at_again_and_next_goes_on_from_the_newest(desk):
    desk.begin()
    for _ in range(3):
        next(desk.lab.slow)
    for name, index in (("back", 2), ("back", 1), ("forward", 2), ("back", 1)):
        desk.press(name)
        assert desk.index == index and "· looking back from phase 3 ·" in desk.box._headline()
    assert "The ranks do not move backwards: they are still at phase 3" in desk.said and desk.lab.slow.moment.index == 3
    desk.press("play")
    desk.until(lambda: desk.index == 4)
    desk.press("back")
    assert desk.index == 3 and desk.box._paused.is_set()
    desk.press("next")
    desk.until(lambda: desk.index == 5 and desk.box._forward.disabled)


def test_play_ends_with_the_step_of_which_the_loss_is_said_and_next_begins_another(desk):
    desk.begin()
    while desk.lab.slow.moment.phase != "optim":
        next(desk.lab.slow)
    desk.press("play")
    desk.until(lambda: desk.box._paused.is_set())
    assert "Step 0 is over, its loss was" in desk.said and desk.box._stop.disabled and not desk.ranks.under_way
    assert f"the last is {desk.index} · the step has ended since" in desk.box._headline()
    desk.press("back")
    desk.press("next")
    desk.until(lambda: desk.index == 0 and desk.box._drawn.step == 1 and desk.box._back.disabled)


def test_presses_that_wait_end_with_the_step(desk):
    desk.begin()
    for way_out in ("next", "stop"):
        slow, desk.ranks.phase_s = desk.lab.slow, 0.05
        for _ in range(3 if way_out == "stop" else 60):
            desk.press("next")
        desk.press(way_out)
        desk.ranks.phase_s = 0.0
        desk.until(lambda: "is over" in desk.said and desk.box._jobs.empty())
        assert desk.lab.slow is slow, way_out
        desk.begin()


def test_another_backend_is_refused(desk):
    desk.controls.accept({"backend": "fsdp2"})
    run = desk.lab.run(desk.controls.choices.wanted)
    desk.until(lambda: run.state is RunState.RUNNING)
    desk.press("next")
    desk.until(lambda: "failed" in desk.said)
    assert run.state is RunState.RUNNING, "a refusal stops nothing"
    assert "Slow motion shows our own engine, and this Spec is for fsdp2: use backend lab." in desk.said
    desk.controls.accept({"backend": "lab"})
    desk.begin()
    assert run.state is RunState.STOPPED and desk.box._drawn.spec.strategy.backend == "lab"


def test_what_code_has_run_is_gone_on_with_unless_a_choice_waits(desk):
    run = desk.lab.run(micro_batch=2, steps=2)
    run.wait()
    desk.begin()
    assert desk.box._drawn.spec == run.spec != desk.controls.choices.wanted
    desk.press("stop")
    desk.until(lambda: "is over" in desk.said)
    desk.controls.accept({"sharding": "shard_grad_op"})
    desk.press("next")
    desk.until(lambda: desk.box._drawn.step == 1)
    assert desk.box._drawn.spec.strategy.sharding == "shard_grad_op"


def test_an_error_of_a_rank_is_said_and_the_buttons_live_on(desk):
    desk.begin()
    desk.ranks.breaks = RankError(rank=1, what="slow_next", kind="ValueError", reason="<broken>", unix_s=0.0)
    desk.press("next")
    desk.until(lambda: "failed" in desk.said)
    assert "rank 1 failed in slow_next" in desk.said and "&lt;broken&gt;" in desk.said
    desk.press("next")
    desk.until(lambda: desk.index == 0 and "halted" in desk.said)


def test_what_a_notebook_goes_through_is_drawn_too_and_next_goes_on_with_it(desk):
    slow = desk.lab.slow_motion()
    next(slow)
    assert desk.index == 0
    desk.press("next")
    desk.until(lambda: desk.index == 1)
    assert next(slow).index == 2 and desk.index == 2
    panel = desk.box._panel
    slow = desk.lab.slow_motion(world_size=4)
    next(slow)
    desk.box.tick()
    assert desk.box._panel is not panel and len(desk.box._drawn.frames) == 4


def test_closing_lets_the_step_end_and_leaves_no_thread(desk):
    desk.begin()
    desk.box.close()
    desk.box.close()
    desk.until(lambda: not desk.ranks.under_way)
    desk.until(lambda: not [t for t in threading.enumerate() if t.name == "fsdp-lab-slow-motion"])
    desk.press("next")
    assert not desk.ranks.under_way
    desk.box.retire()
    assert all(b.disabled for b in (desk.box._next, desk.box._play, desk.box._stop, desk.box._speed))
