"""The live view's protocol, with a page made of a few lines: what is sent, when, and how much."""

import base64
import gzip
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fsdp_lab.dashboard import live
from fsdp_lab.dashboard.live import LiveView, Scene
from fsdp_lab.dashboard.panels import StepAxis
from tests.dashboard.conftest import FEW
from tests.dashboard.test_panels import steps


class Page:
    """A view in a browser, as far as the kernel can tell: it holds rows by number and acknowledges when told to."""

    def __init__(self, view: LiveView, name: str = "page") -> None:
        self.view, self.name = view, name
        self.rows: dict[str, list[list[float]]] = {}
        self.at: dict[str, tuple[int, int]] = {}
        self.seq = 0
        self.patches: dict[str, dict[str, Any]] = {}
        self.snapshots = 0

    def say(self, kind: str, **more: Any) -> None:
        self.view._on_message(self.view, {"kind": kind, "view": self.name, **more}, [])

    def acknowledge(self) -> None:
        self.say("ack", seq=self.seq)

    def receive(self, message: Mapping[str, Any], buffers: list[bytes]) -> None:
        if message.get("view", self.name) != self.name:
            return
        if message["kind"] == "snapshot":
            self.rows, self.at, self.patches = {}, {}, {}
            self.snapshots += 1
        if message["kind"] in ("snapshot", "tick"):
            assert message["kind"] == "snapshot" or message["seq"] == self.seq + 1
            self.seq = message["seq"]
            self.patches.update(message["patches"])
            text = message.get("base64")
            self._take(message["tables"], np.frombuffer(buffers[0] if text is None else base64.b64decode(text)))

    def _take(self, tables: list[Mapping[str, Any]], numbers: np.ndarray) -> None:
        start = 0
        for t in tables:
            size = len(t["columns"]) * t["rows"]
            block = numbers[start : start + size].reshape(len(t["columns"]), t["rows"]).T.tolist()
            start += size
            generation, held = self.at.get(t["name"], (-1, 0))
            if generation != t["generation"]:
                self.rows[t["name"]], held = [], t["first"]
            assert t["first"] <= held, "rows are missing"
            self.rows[t["name"]] = (self.rows[t["name"]] + block[held - t["first"] :])[-t["limit"] :]
            self.at[t["name"]] = (t["generation"], t["first"] + t["rows"])
        assert start == len(numbers)


class Stage:
    """A view with panels, pages, and every message that was sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> None:
        self.frame = StepAxis()
        self.panels = [make(self.frame, ranks) for make in FEW]
        self.sent: list[tuple[dict[str, Any], list[bytes]]] = []
        self.pages: list[Page] = []
        monkeypatch.setattr(LiveView, "send", lambda _, content, buffers=(): self._send(content, list(buffers)))
        self.view = LiveView()
        self.scene = Scene(
            cards=self.panels, shared_sources=self.frame.sources, shared_patches=self.frame.patches, ranks=ranks
        )
        self.view.show(self.scene)
        self.step = 0

    def _send(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        json.dumps(content)  # it crosses a wire
        self.sent.append((content, buffers))
        for page in self.pages:
            page.receive(content, buffers)

    def open(self, name: str) -> Page:
        page = Page(self.view, name)
        self.pages.append(page)
        page.say("mount")
        return page

    def train(self, count: int = 1) -> None:
        told = steps(count, first=self.step)
        self.step += count
        self.frame.follow(told)
        for panel in self.panels:
            panel.update(told)

    def ticks(self) -> list[dict[str, Any]]:
        return [content for content, _ in self.sent if content["kind"] == "tick"]

    def holds_all(self, page: Page) -> bool:
        return all(page.rows[s.name] == s.all().numbers.T.tolist() or np.array_equal(
            np.array(page.rows[s.name]), s.all().numbers.T, equal_nan=True) for s in self.scene.sources)  # fmt: skip


@pytest.fixture
def stage(monkeypatch):
    return Stage(monkeypatch)


def test_a_page_gets_the_whole_history_when_it_mounts_and_without_one_nothing_is_sent(stage):
    stage.train(5)
    assert not stage.view.flush() and stage.ticks() == []
    page = stage.open("late")
    assert stage.holds_all(page)
    assert not stage.view.flush()  # and nothing twice
    page.say("ping")
    assert stage.sent[-1][0] == {"kind": "pong", "view": "late"}
    page.say("leave")
    stage.train()
    assert not stage.view.flush() and stage.view.views == 0


def test_a_first_picture_comes_with_the_widget_until_a_page_has_mounted(stage):
    stage.train(5)
    assert stage.view.first == {}
    stage.view._repr_mimebundle_()
    first = stage.view.first
    page = Page(stage.view)
    page.receive(first, [first["numbers"]])
    assert stage.holds_all(page) and "loss" in first["layout"]["roots"]
    assert gzip.decompress(first["bokehjs"]) == live.BOKEH_JS.read_bytes() and len(first["bokehjs"]) < 450_000
    assert stage.view.get_state("first")["first"] is first, "in the widget's state: a busy kernel need not answer"
    stage.open("page")
    assert stage.view.first == {}
    stage.view.prepare()
    assert stage.view.first == {}, "later pages ask"


def test_a_tick_is_one_message_with_one_buffer_of_what_changed(stage):
    page = stage.open("page")
    stage.train(10)
    assert stage.view.flush()
    (message, buffers) = stage.sent[-1]
    assert message["kind"] == "tick" and len(buffers) == 1
    assert {t["name"] for t in message["tables"]} >= {"loss.steps", "throughput.steps"} and stage.holds_all(page)
    page.acknowledge()
    stage.train()
    stage.view.flush()
    last = stage.ticks()[-1]
    assert "frame.x" not in last["patches"] and "legend" not in last["captions"]["loss"]
    assert last["captions"]["loss"]["reading"].endswith("at step 10")


def test_a_scene_of_the_same_shape_takes_over_in_one_tick_and_the_page_mounts_nothing(stage):
    """There and back, as in a sweep: what the page holds is what the scene has, shorter or longer."""
    page = stage.open("page")
    stage.train(9)
    stage.view.flush()
    former = (stage.frame, stage.panels, stage.scene)
    for count in (3, 0, 5):
        stage.frame, stage.step = StepAxis(), 0
        stage.panels = [make(stage.frame, 2) for make in FEW]
        stage.scene = Scene(cards=stage.panels, shared_sources=stage.frame.sources, shared_patches=stage.frame.patches)
        stage.view.swap(stage.scene)
        if count:
            stage.train(count)
        page.acknowledge()
        assert stage.view.flush() and stage.holds_all(page)
    stage.frame, stage.panels, stage.scene = former
    stage.view.swap(stage.scene)
    page.acknowledge()
    assert stage.view.flush() and stage.holds_all(page) and len(page.rows["loss.steps"]) == 9
    assert page.snapshots == 1 and [content["kind"] for content, _ in stage.sent].count("remount") == 1


def test_a_page_that_does_not_answer_holds_the_others_only_for_a_while_and_may_come_back(stage, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    stage.open("dead")
    page = stage.open("alive")
    for _ in range(3):
        stage.train()
        stage.view.flush()
        page.acknowledge()
    assert len(stage.ticks()) == 2
    clock[0] += live.SILENCE_S + 0.1
    assert stage.view.flush()
    page.acknowledge()
    clock[0] += live.FORGET_S
    page.acknowledge()
    assert stage.view.flush() is False and stage.view.views == 1
    for _ in range(5):
        stage.train()
        assert stage.view.flush()
        page.acknowledge()
    stage.pages[0].acknowledge()  # that was forgotten: it comes back
    stage.train()
    assert stage.view.flush() and stage.view.views == 2


def test_two_ticks_are_on_the_way_at_most_the_rest_is_coalesced_and_a_second_page_holds_everything_too(stage):
    first = stage.open("first")
    for _ in range(10):
        stage.train()
        stage.view.flush()
    assert len(stage.ticks()) == 2
    second = stage.open("second")  # its snapshot has rows that the next tick brings again
    first.acknowledge()
    assert stage.view.flush() and len(stage.ticks()) == 3 and stage.holds_all(first) and stage.holds_all(second)


def test_a_page_that_drops_buffers_gets_text_beside_one_that_does_not(stage):
    page = stage.open("usual")
    plain = Page(stage.view, "plain")
    stage.pages.append(plain)
    stage.train(3)
    plain.say("mount", text=True)
    assert "base64" in stage.sent[-1][0] and stage.sent[-1][1] == []
    stage.train(2)
    stage.view.flush()
    assert "base64" in stage.sent[-1][0] and len(stage.sent[-1][1]) == 1
    assert stage.holds_all(page) and stage.holds_all(plain)
    page.say("leave")
    stage.train()
    stage.view.flush()
    assert stage.sent[-1][1] == [] and stage.holds_all(plain)
    plain.say("bokehjs", text=True)
    content, buffers = stage.sent[-1]
    assert buffers == [] and gzip.decompress(base64.b64decode(content["base64"])) == live.BOKEH_JS.read_bytes()


def test_a_closed_view_is_silent(stage):
    page = stage.open("page")
    count = len(stage.sent)
    stage.view.close()
    stage.train()
    assert not stage.view.flush()
    page.say("mount")
    stage.view.close()
    assert len(stage.sent) == count
