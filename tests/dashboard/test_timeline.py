"""The timeline panel: rows where spans were, gaps where nothing is known, and the step that a reader holds."""

import dataclasses
import math
from typing import Any

import pytest

from fsdp_lab.base.events import Span, Track, Traffic
from fsdp_lab.dashboard.live import LiveView, Scene
from fsdp_lab.dashboard.panels import StepAxis, timeline as module
from fsdp_lab.dashboard.panels.timeline import TimelinePanel
from fsdp_lab.runs.steps import TRACED_STEPS, Step
from tests.lab.events import event
from tests.lab.test_timeline import told


class Watched:
    """A panel and its clock."""

    def __init__(self, ranks: int = 2) -> None:
        self.now_s = 0.0
        self.panel = TimelinePanel(StepAxis(), ranks, clock=lambda: self.now_s)

    def show(self, *steps: Step) -> None:
        """Half a second later."""
        self.now_s += 0.5
        self.panel.update(steps)

    def rows(self) -> list[dict[str, Any]]:
        block = self.panel.sources[0].all()
        numbers = dict(zip(self.panel.sources[0].numbers, block.numbers.tolist(), strict=True))
        columns = {**numbers, **block.texts}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    @property
    def shown(self) -> int:
        return self.panel.captions().pin.step

    @property
    def end(self) -> float:
        return self.panel.patches()["timeline.x"]["end"]


def traced(number: int, ranks: int = 2, **more: Any) -> Step:
    return Step(events=tuple(told(ranks, number, ordinal=100 * number, **more)))


def plain(number: int, ranks: int = 2) -> Step:
    return Step(events=tuple(event(r, number) for r in range(ranks)))


# -- what is drawn ---------------------------------------------------------------------------------------------------
def test_every_span_is_drawn_where_it_was_or_left_out_where_there_are_too_many_and_counted(monkeypatch):
    watched, few = Watched(), Watched()
    step = traced(7, skew_s=0.002)
    watched.show(plain(6), step)
    monkeypatch.setattr(module, "MOST_SPANS", 50)
    few.show(step)
    surplus = sum(len(e.spans) for e in step.events) - 50
    assert len(few.rows()) == 50 and f"The {surplus} shortest spans are not drawn." in few.panel.captions().note
    expected = sorted((e.rank, 2 * e.rank + 1e3 * s.start_s, 1e3 * s.seconds) for e in step.events for s in e.spans)
    got = sorted((r["rank"], r["left"], r["right"] - r["left"]) for r in watched.rows())
    assert [x for row in got for x in row] == pytest.approx([x for row in expected for x in row])
    lanes = watched.panel.sources[1]
    assert lanes.column("left").tolist() == pytest.approx([0, 2])
    assert lanes.column("right").tolist() == pytest.approx([1e3 * (e.begin_s - 5 + e.step_time_s) for e in step.events])


def test_a_lane_has_a_row_for_each_track_that_occurs_and_nothing_overlaps_in_it():
    watched = Watched(3)
    watched.show(traced(1, 3, per_s=0.1e9))  # a slow link: many collectives in flight
    rows = watched.rows()
    for r in rows:
        assert r["rank"] - 0.45 <= r["top"] < r["bottom"] <= r["rank"] + 0.45 + 1e-9
    tracks = sorted({(r["top"], r["what"] if r["what"][:5] != "waits" else "waits") for r in rows if r["rank"] == 1})
    assert [what for _, what in tracks if what in ("forward", "waits")] == ["forward", "waits"]
    for a in rows:
        for b in rows:
            if a is not b and a["top"] < b["bottom"] - 1e-9 and b["top"] < a["bottom"] - 1e-9:
                assert a["right"] <= b["left"] + 1e-6 or b["right"] <= a["left"] + 1e-6
    assert not any(r["fill"] in ("communication.all_reduce", "timeline.host_copy") for r in rows)
    assert all(k.label not in ("all-reduce", "host copy") for k in watched.panel.captions().legend)


def test_the_words_of_a_span():
    sizes = {"size": 2, "link_bytes": 2_000_000, "payload_bytes": 4_000_000}
    span = Span(track=Track.ALL_GATHER, name="all_gather", unit="transformer.h.3", start_s=0.001, end_s=0.003,
                sequence=4, ordinal=4, group="world", dtype="bfloat16", **sizes)  # fmt: skip
    wait = dataclasses.replace(span, track=Track.WAIT, start_s=0.002)
    busy = Span(track=Track.COMPUTE, name="backward", unit="transformer.h.3", start_s=0.0, end_s=0.002)
    strange = dataclasses.replace(busy, name="loss")
    watched = Watched(1)
    watched.show(Step(events=(event(0, 3, world_size=1, spans=(span, wait, busy, strange), step_time_s=0.004),)))
    said = {r["what"]: r for r in watched.rows()}
    assert said["all-gather"]["more"] == "2.00 MB, 1.00 GB/s bus, 2.00 GB/s algorithm, bfloat16, 2 ranks"
    assert "GB/s" not in said["waits for all-gather"]["more"] and said["waits for all-gather"]["ms"] == pytest.approx(1)
    assert said["backward"]["more"] == "" and said["backward"]["fill"] == "timeline.backward"
    assert said["loss"]["fill"] == "timeline.compute"
    reading = watched.panel.captions().reading
    assert reading == "traced step 3: 4.00 ms, 1.00 ms exposed on rank 0, most for transformer.h.3 (1.00 ms)"


@pytest.mark.parametrize(
    ("exposed_s", "said"),
    [(0.040, "traced step 3: 100 ms, 40.0 ms of it exposed"), (math.nan, "traced step 3: 100 ms")],
)
def test_waits_that_nobody_saw_are_not_put_down_to_a_unit(exposed_s, said):
    vote = Span(track=Track.WAIT, name="control", unit="", start_s=0.08, end_s=0.0805)
    comm = {"all_gather": Traffic(calls=1, exposed_seconds=exposed_s)}
    watched = Watched()
    watched.show(Step(events=tuple(event(r, 3, spans=(vote,), comm=comm) for r in range(2))))
    assert watched.panel.captions().reading == said and "Over NCCL streams wait" in watched.panel.captions().note


def test_a_step_without_a_rank_is_a_gap():
    watched = Watched(3)
    step = traced(2, 3)
    watched.show(Step(events=step.events[:1] + step.events[2:]))
    assert {r["rank"] for r in watched.rows()} == {0, 2}
    assert watched.panel.sources[1].column("rank").tolist() == [0, 2]
    assert "There are no spans of rank 1 in this step." in watched.panel.captions().note


def test_many_ranks_are_three_that_are_named():
    watched = Watched(64)
    step = traced(4, 64)
    watched.show(step)
    waited = {e.rank: sum(s.seconds for s in e.spans if s.track is Track.WAIT) for e in step.events}
    ordered = sorted(waited, key=lambda r: (waited[r], r))
    chosen = [ordered[0], ordered[32], ordered[-1]]
    said = f"3 of 64 ranks: {chosen[0]} waits least, {chosen[1]} is the median, {chosen[2]} waits most."
    assert said in watched.panel.captions().note
    entries = watched.panel.patches()["timeline.ranks"]["major_label_overrides"]["entries"]
    assert entries == [[i, str(r)] for i, r in enumerate(chosen)]
    assert len(watched.rows()) == sum(len(step.events[r].spans) for r in chosen)


def test_the_axis_holds_still_while_steps_differ_a_little_and_what_does_not_count_leaves_no_room():
    watched = Watched()
    watched.show(traced(0))
    end = watched.end
    for n in range(1, 10):
        watched.show(traced(n, forward_s=0.010 * (1 + 0.02 * math.sin(n))))
        assert watched.end == end
    slow = traced(10, forward_s=0.050).events
    watched.show(Step(events=tuple(dataclasses.replace(e, first_after_switch=True) for e in slow)))
    assert watched.end > 3 * end
    watched.show(traced(11))
    assert watched.end == end
    watched.show(traced(12, forward_s=0.030))
    assert watched.end > end  # what is longer fits at once
    ends = [watched.end]
    for n in range(13, 30):  # and what is shorter is followed, not at once, in one go
        watched.show(traced(n, forward_s=0.0225))
        ends.append(watched.end)
    assert ends[0] == ends[1] > ends[-1] and len(set(ends)) == 2


def test_another_spec_has_rows_of_its_own():
    watched = Watched()
    watched.show(traced(0))
    labels = {k.label for k in watched.panel.captions().legend}
    span = Span(track=Track.ALL_REDUCE, name="all_reduce", unit="bucket 0", start_s=0.0, end_s=0.01)
    watched.show(Step(events=tuple(event(r, 1, spec_id="ddp", spans=(span,)) for r in range(2))))
    assert [k.label for k in watched.panel.captions().legend] == ["all-reduce"]
    assert watched.rows()[0]["bottom"] - watched.rows()[0]["top"] == pytest.approx(0.9 * 0.88)
    watched.panel.pin(0)
    watched.show()
    assert {k.label for k in watched.panel.captions().legend} == labels


# -- which step ------------------------------------------------------------------------------------------------------
def test_it_follows_the_newest_at_most_so_often():
    watched = Watched()
    watched.panel.update([traced(1)])
    generation = watched.panel.sources[0].generation
    watched.panel.update([traced(2)])
    assert watched.shown == 1 and watched.panel.sources[0].generation == generation
    watched.show()  # no step comes any more: the last one is drawn all the same
    assert watched.shown == 2
    generation = watched.panel.sources[0].generation
    watched.show()
    assert watched.panel.sources[0].generation == generation


def test_any_kept_step_can_be_chosen_and_presses_that_come_together_all_count():
    watched = Watched()
    watched.panel.pin(3)
    watched.show()
    assert watched.panel.captions().pin is None, "before the first step"
    watched.show(*(traced(n) for n in (10, 20, 30, 40)))
    for asked, shown in (((20, 0), 20), ((24, 0), 20), ((27, 0), 30), ((-5, 0), 10), ((10**9, 0), 40), ((20, -1), 10),
                         ((30, 0), 30), ((None, -1), 20), ((None, 1), 30), ((None, 1), 40), ((None, 1), 40)):  # fmt: skip
        watched.panel.pin(*asked)
        watched.show()
        assert watched.shown == shown and watched.panel.captions().pin.held, asked
    for _ in range(3):
        watched.panel.pin(None, -1)
    watched.show()
    assert watched.shown == 10


def test_memory_is_bounded_and_a_pinned_step_outlives_it(monkeypatch):
    watched = Watched(1)
    one = event(0, 0, world_size=1, spans=(Span(track=Track.COMPUTE, name="forward", unit="", start_s=0.0, end_s=0.1),))
    watched.show(Step(events=(one,)))
    watched.panel.pin(0)
    watched.show(*(Step(events=(dataclasses.replace(one, step=n),)) for n in range(1, TRACED_STEPS + 50)))
    pin = watched.panel.captions().pin
    assert (pin.step, pin.kept, pin.oldest) == (0, TRACED_STEPS, 50)
    watched.panel.pin(0)
    watched.show()
    assert watched.shown == 0
    monkeypatch.setattr(module, "SPAN_CAP", 40)
    watched.show(Step(events=(dataclasses.replace(one, step=999),)))
    assert watched.panel.captions().pin.kept == 40


def test_the_page_asks_and_the_next_tick_answers(monkeypatch):
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(LiveView, "send", lambda _, content, buffers=(): sent.append(content))
    watched, view = Watched(), LiveView()
    watched.show(traced(1), traced(2))
    view.show(Scene(cards=(watched.panel,)))
    view._on_message(view, {"kind": "mount", "view": "a"}, [])
    assert sent[-1]["captions"]["timeline"]["pin"]["step"] == 2
    view._on_message(view, {"kind": "pin", "view": "a", "card": "timeline", "step": 1, "by": 0}, [])
    view._on_message(view, {"kind": "pin", "view": "a", "card": "nobody", "step": 1, "by": 0}, [])
    watched.show()
    assert view.flush()
    assert sent[-1]["captions"]["timeline"]["pin"] == {"step": 1, "held": True, "oldest": 1, "newest": 2, "kept": 2}
    assert {t["name"] for t in sent[-1]["tables"]} == {"timeline.spans", "timeline.lanes"}
    watched.show(traced(3))
    view.flush()
    assert not sent[-1]["tables"]  # a held step is not sent again
    view.close()
