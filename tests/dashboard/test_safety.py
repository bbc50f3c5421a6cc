"""The card of checkpoints, recovery, incidents and drills against a lab without processes."""

import re
import threading
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path

import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.cluster import RankLost
from fsdp_lab.dashboard.controls import Controls
from fsdp_lab.dashboard.safety import EVERY, OFF, SafetyBox, incidents_list, saves_list
from fsdp_lab.runs import RunState
from fsdp_lab.runs.recovery import REPLICA, Incident
from fsdp_lab.runs.saving import SavedCheckpoint
from fsdp_lab.spec.faults import DRILLS
from tests.dashboard.fake_lab import FakeLab
from tests.waiting import until


class Desk:
    """Controls, the card, a lab, and a tick when asked."""

    def __init__(self) -> None:
        self.lab = FakeLab(2, step_s=0.002)
        self.box = SafetyBox(self.lab, begin=lambda start: self.controls.begin(start))
        self.controls = Controls(self.lab, options=self.box.options)
        self.saving, self.drill = self.box._saving, self.box._drill

    @property
    def buttons(self) -> list[str]:
        """Of the way out, those that are seen."""
        shown = self.box.recovery.layout.display != "none"
        return [b.description for b in (self.box._same, self.box._fewer) if shown and b.layout.display != "none"]

    def head(self) -> str:
        """Why the run waits, else what is chosen."""
        shown = self.box.recovery.layout.display != "none"
        return plain((self.box.message if shown else self.box._summary).value)

    def start(self) -> None:
        self.controls.start()
        self.until(lambda: self.lab.current.step > 3)

    def tick(self) -> None:
        run = self.lab.current
        self.controls.tick(run, run.events.since(0)[0] if run is not None else ())
        self.box.tick(run)

    def until(self, what: Callable[[], bool]) -> None:
        until(what, meanwhile=self.tick)

    def lose(self) -> None:
        """A rank of a run that goes on."""
        self.start()
        self.lab.lose(1)
        self.until(lambda: self.buttons != [])


def plain(html: str) -> str:
    return unescape(re.sub("<[^>]*>", "", html))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.chdir(tmp_path)
    d = Desk()
    yield d
    d.lab.save_gate.set()
    d.lab.close()


# -- checkpoints -------------------------------------------------------------------------------------------------------
def test_what_is_chosen_holds_from_the_next_start_on(desk: Desk, tmp_path: Path) -> None:
    assert desk.head() == "saving is off · recovery: ask · no incident"
    desk.start()
    assert not any(tmp_path.iterdir()) and desk.lab.current.saving is None
    assert desk.lab.current.recovering.how == "ask"
    desk.lab.current.stop(5)
    desk.saving._when.value = EVERY
    desk.saving._every.value, desk.saving._last.value = 25, 2
    desk.box._how.value, desk.box._ranks.value = "auto", "fewer"
    assert not any(tmp_path.iterdir())
    desk.start()
    saving, recovering = desk.lab.current.saving, desk.lab.current.recovering
    assert (saving.folder, saving.every, saving.last) == (tmp_path / "checkpoints", 25, 2)
    assert (recovering.how, recovering.ranks) == ("auto", "fewer")
    desk.tick()
    assert desk.head() == "saving every 25 steps · recovery: automatic · no incident"


def test_a_folder_that_cannot_be_is_said_beside_it_and_starts_nothing(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    desk.saving._when.value, desk.saving._folder.value = EVERY, "taken"
    desk.controls._start.click()
    assert (plain(desk.saving.message.value)
            == "The folder taken cannot hold checkpoints: File exists: name a folder that is yours.")  # fmt: skip
    assert "fsdp-refused" in desk.saving.message.value and desk.lab.current is None
    desk.saving._when.value = OFF
    desk.controls._start.click()
    assert desk.saving.message.value == "" and desk.lab.current is not None


def test_save_now_saves_into_the_folder_of_the_field_whatever_was_chosen_at_the_start(desk: Desk, tmp_path: Path):
    desk.saving._when.value = EVERY
    desk.start()
    desk.saving._save.click()
    desk.until(lambda: "is saved in checkpoints" in desk.saving.message.value)
    desk.until(lambda: "13.0 MiB" in desk.saving._list.value and "12.0 ms" in desk.saving._list.value)
    desk.saving._folder.value = "other"
    desk.saving._save.click()
    desk.until(lambda: "is saved in other" in desk.saving.message.value)
    assert desk.lab.current.saving.folder == tmp_path / "other"


def test_save_now_without_a_run_never_holds_up_who_pressed(desk: Desk) -> None:
    desk.start()
    desk.lab.current.stop(5)
    desk.lab.save_gate.clear()
    desk.saving._save.click()
    assert "Saving what the ranks hold" in desk.saving.message.value
    desk.saving._save.click()
    assert len([t for t in threading.enumerate() if t.name == "fsdp-lab-ask"]) == 1
    desk.lab.save_gate.set()
    desk.until(lambda: "The state after 7 steps is saved in checkpoints." in plain(desk.saving.message.value))
    desk.saving._folder.value = "full"
    desk.saving._save.click()
    desk.until(lambda: "No space left on device" in desk.saving.message.value)


def test_resume_takes_the_choices_that_wait_and_the_controls_follow(desk: Desk) -> None:
    desk.saving._folder.value = "nowhere"
    desk.saving._resume.click()
    assert "No checkpoint in nowhere: there is no such folder: name another folder." in plain(desk.saving.message.value)
    assert desk.lab.current is None
    desk.controls.accept({"sharding": "shard_grad_op"})
    desk.saving._folder.value, desk.saving._when.value = "checkpoints", EVERY
    desk.saving._resume.click()
    assert desk.lab.resumed == [("checkpoints", {"sharding": "shard_grad_op"})]
    run = desk.lab.current
    assert run.saving.every == desk.saving._every.value and run.recovering.how == "ask"
    desk.until(lambda: desk.controls.choices.notes["sharding"].text == "applied at step 0")
    assert desk.saving._resume.disabled, "a run goes on"


def test_the_list_of_saves() -> None:
    def saved(step: int, **told: object) -> SavedCheckpoint:
        return SavedCheckpoint(step=step, kind="step", stall_s=0.01, waited_s=0.0, **told)  # type: ignore[arg-type]

    whole = [saved(s, path=Path(f"/c/{s}"), nbytes=5 << 20, seconds=0.2) for s in (10, 20, 30)]
    shown = saves_list([*whole, saved(40, seconds=0.1, error="No space <left>"), saved(50)])
    assert (
        "and 2 before" in shown and "after 30 steps is saved in /c/30: 5.00 MiB, training paused for 10.0 ms." in shown
    )
    assert "after 50 steps is being saved" in shown and "40 steps could not be saved (No space &lt;left&gt;)" in shown
    assert shown.index("50 steps") < shown.index("40 steps") < shown.index("30 steps")
    assert "No checkpoint yet" in saves_list([])


# -- evaluation --------------------------------------------------------------------------------------------------------
def test_an_evaluation_is_chosen_and_what_it_finds_is_said(desk: Desk) -> None:
    form = desk.box._evaluation
    assert form._every.disabled and plain(form.message.value).startswith("Results are drawn")
    desk.start()
    assert desk.lab.current.evaluate is None
    desk.lab.current.stop(5)
    form._when.value, form._every.value, form._samples.value, form._patience.value = "every n steps", 5, 8, 3
    form._prompt.value = " Once "
    desk.controls.start()
    chosen = desk.lab.current.evaluate
    assert (chosen.every, chosen.samples, chosen.patience, chosen.prompts) == (5, 8, 3, ("Once",))
    desk.until(lambda: len(desk.lab.current.early_stopping.evaluations) > 1)
    desk.until(lambda: plain(form.message.value).startswith("Evaluation loss "))
    assert re.search(r"best \S+ \(perplexity \S+\) after \d+ steps\.$", plain(form.message.value))
    assert desk.head() == "saving is off · evaluation every 5 steps · recovery: ask · no incident"
    form._patience.value, form._prompt.value = 0, ""
    assert form.config().patience is None and form.config().prompts == ()


# -- recovery ----------------------------------------------------------------------------------------------------------
def test_a_run_that_waits_says_why_and_recover_goes_on_which_is_shown_while_it_lasts(desk: Desk) -> None:
    desk.lab.step_s = 0.03
    desk.lose()
    assert desk.lab.current.state is RunState.BROKEN and desk.buttons == ["Recover", "Resume on fewer ranks"]
    assert "rank 1 is gone: its process 4321 on here was ended by SIGKILL" in desk.head()
    assert re.search(r"There is no checkpoint: it begins at step 0, and trains \d+ steps again", desk.head())
    assert desk.controls.message.value == "", "it is said once"
    assert "waits for Recover or Stop" in desk.box._incidents.value
    state = plain(desk.controls._state.value)
    assert state.startswith("broken Recover it") and not desk.controls._stop.disabled
    assert desk.controls._pause.disabled and desk.controls._start.disabled and desk.saving._save.disabled
    desk.box.say("An earlier press was refused.", wrong=True)
    desk.box._same.click()
    desk.until(lambda: desk.lab.current.state is RunState.RECOVERING and desk.buttons == [])
    assert "was refused" not in desk.head() and desk.buttons == [] and "is being recovered" in desk.box._incidents.value
    desk.until(lambda: desk.head().endswith("1 incident"))
    assert desk.lab.current.state is RunState.RUNNING and desk.buttons == []
    shown = plain(desk.box._incidents.value)
    assert "It resumed from a checkpoint at step" in shown and "repeating 3 steps, 2.5 s later" in shown


def test_going_on_with_fewer(desk: Desk) -> None:
    desk.lose()
    desk.box._fewer.click()
    desk.until(lambda: desk.lab.current.state is RunState.RUNNING and "2 ranks became 1" in desk.box._incidents.value)
    desk.until(lambda: desk.controls.choices.wanted.world_size == 1)
    assert desk.drill._rank.max == 0


def test_a_strategy_that_cannot_be_on_fewer_is_refused_in_words_and_stop_ends_the_run(desk: Desk) -> None:
    desk.controls.accept({"world_size": 4, "sharding": "hybrid_shard", "shard_size": 2})
    desk.lose()
    desk.box._fewer.click()
    assert "and 3 ranks have none: use 4 ranks, or full_shard." in desk.head()
    assert desk.lab.current.state is RunState.BROKEN and desk.buttons == ["Recover", "Resume on fewer ranks"]
    desk.lab.lost.clear()
    desk.until(lambda: desk.buttons == ["Recover"])  # fewer is offered only where a rank is lost
    desk.controls._stop.click()
    desk.until(lambda: "The run ended before it resumed" in desk.box._incidents.value)
    assert desk.lab.current.state is RunState.STOPPED and desk.buttons == []


def test_a_run_that_failed_can_be_recovered_too(desk: Desk) -> None:
    desk.box._how.value = "off"
    desk.start()
    former = desk.lab.current
    desk.lab.lose(1)
    desk.until(lambda: former.state is RunState.FAILED and desk.buttons != [])
    assert desk.head().startswith("Recover it, or press Start") and "Rank 1 is gone" in desk.controls.message.value
    desk.box._same.click()
    desk.until(lambda: desk.lab.current is not former and desk.buttons == [])


# -- incidents ---------------------------------------------------------------------------------------------------------
def incident(step: int, **told: object) -> Incident:
    lost = RankLost(rank=1, engine=1, pid=1, host="here", reason="was <ended>", unix_s=100.0)
    return Incident(error=lost, step=step, ranks=2, detected_unix_s=100.0, **told)  # type: ignore[arg-type]


def test_incidents_are_told_newest_first() -> None:
    known = incident(9, failed_unix_s=99.0, resumed_unix_s=103.0, source=REPLICA, resumed_step=8, resumed_ranks=2)
    shown = incidents_list([*(incident(n) for n in range(4)), known], RunState.RUNNING)
    assert re.findall(r"<b>step (\d+)</b>", shown) == ["9", "3", "2"] and "and 2 before" in shown
    assert "It resumed from a replica at step 8, repeating 1 step, 4.0 s later." in shown
    assert incidents_list([incident(7)], RunState.RUNNING).endswith(". The other ranks are freed.</div>")
    shown = incidents_list([incident(7)], RunState.BROKEN)
    assert "was &lt;ended&gt; at" in shown and shown.endswith(". The run waits for Recover or Stop.</div>")
    assert incidents_list([], RunState.STARTING).startswith('<div class="fsdp-soft">No rank has failed')


# -- drills ------------------------------------------------------------------------------------------------------------
def test_a_drill_is_explained_asked_for_and_a_slow_link_restored(desk: Desk) -> None:
    assert list(desk.drill._kind.options) == list(DRILLS) and desk.drill._inject.disabled
    for kind, what in DRILLS.items():
        desk.drill._kind.value = kind
        assert plain(desk.drill._what.value) == f"It {what}."
    desk.start()
    desk.until(lambda: not desk.drill._inject.disabled)
    desk.drill._kind.value, desk.drill._rank.value = "out-of-memory", 0
    desk.drill._inject.click()
    assert desk.lab.drills == [("out-of-memory", 0)]
    assert plain(desk.drill.message.value) == "Requested: out-of-memory on rank 0." and desk.drill._restore.disabled
    desk.drill._kind.value = "slow"
    desk.drill._inject.click()
    desk.until(lambda: not desk.drill._restore.disabled)
    desk.drill._restore.click()
    assert desk.lab.drills[1:] == [("slow", 0), ("restored", 0)] and "is restored" in desk.drill.message.value
    desk.tick()
    assert desk.drill._restore.disabled


def test_a_drill_that_is_refused_is_said_once(desk: Desk) -> None:
    desk.drill._inject.click()
    assert "there is no run to drill" in desk.drill.message.value and "fsdp-refused" in desk.drill.message.value
    desk.start()
    desk.until(lambda: not desk.drill._inject.disabled)
    desk.drill._kind.value, desk.lab.drill_refused = "slow", ArgumentError("fault.kind", "not over NCCL", "use cut")
    desk.drill._inject.click()
    desk.tick()
    assert "Not over NCCL: use cut." in desk.drill.message.value and "fsdp-refused" in desk.drill.message.value
    assert desk.drill._restore.disabled, "no link was slowed"
    desk.drill.say("")
    desk.tick()
    assert not plain(desk.drill.message.value)


# -- end ---------------------------------------------------------------------------------------------------------------
def test_a_press_that_comes_too_late_does_nothing_and_with_a_closed_lab_nothing_can_be_pressed(desk: Desk) -> None:
    """The run went on, or ended, while the page still showed the buttons."""
    desk.box._same.click()
    assert desk.buttons == []
    desk.box.retire()
    assert all(w.disabled for w in desk.box.inputs)
