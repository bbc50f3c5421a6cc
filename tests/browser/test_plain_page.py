"""The live view in a page that is not JupyterLab's: sandboxed frames, no network, buffers as front ends hand them over."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.dashboard.test_live import Stage
from tests.front_ends.plain_page import PlainPage

pytestmark = pytest.mark.slow

READY = "() => document.querySelector('.fsdp-live[data-ready]') !== null"
DARK = "background: #1e1e1e; color: #cccccc"


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage(monkeypatch)
    stage.train(3)
    stage.view.prepare()
    return stage


@pytest.fixture
def host(stage: Stage, browser: Browser) -> Iterator[Callable[..., PlainPage]]:
    """Shows the view in a page, in which nothing may go wrong."""
    made: list[PlainPage] = []

    def host_(first: str = "", **page: Any) -> PlainPage:
        made.append(PlainPage(browser, stage, first, **page))
        return made[-1]

    yield host_
    for hosted in made:
        hosted.context.close()
    assert [hosted.wrong for hosted in made] == [[]] * len(made)


@pytest.mark.parametrize(
    ("style", "how", "frames"),
    [("background: #ffffff", "view", 1), (DARK, "bytes", 1), ("", "memory", 2), ("", "none", 1)],
    ids=["light", "dark", "two outputs in frames of their own, as in Colab", "a page that drops buffers"],
)
def test_a_page_that_is_not_jupyters(stage: Stage, style: str, how: str, frames: int, host: Callable[..., PlainPage]):
    """No frame sees another's BokehJS, and each draws all, in the colours of its page; text comes where buffers do not."""
    hosted = host(style=style, how=how, frames=frames)
    hosted.wait(READY)
    assert stage.view.views == frames
    hosted.train(4)
    ticks = [(content, buffers) for content, buffers in stage.sent if content["kind"] == "tick"]
    assert all(("base64" in content, bool(buffers)) == (how == "none", how != "none") for content, buffers in ticks)
    if style:
        contrast = hosted.frames[0].evaluate("""() => {
            const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number); return (r + g + b) / 765 };
            const card = document.querySelector('.fsdp-card');
            const ink = getComputedStyle(card.querySelector('h3')).color;
            return light(ink) - light(getComputedStyle(card).backgroundColor) }""")
        assert contrast > 0.6 if style == DARK else contrast < -0.6
        dark = hosted.frames[0].evaluate("() => document.querySelector('.fsdp-live').classList.contains('fsdp-dark')")
        assert dark == (style == DARK)


def test_another_scene_comes_while_the_first_picture_is_being_drawn(stage: Stage, host: Callable[..., PlainPage]):
    """The kernel begins a run as soon as the widget is displayed."""
    slow_to_draw = """() => {
        let bokeh, embed;
        const get = (loaded, name) => name === 'embed' ? embed : name === loaded.version ? bokeh : loaded[name];
        Object.defineProperty(window, 'Bokeh', { get: () => bokeh, set: (loaded) => {
            bokeh = new Proxy(loaded, { get });
            let first = true;
            embed = { embed_items: async (...given) => {
                if (first) {
                    first = false;
                    window.deliver({ kind: 'remount' }, [], 'view');
                    await new Promise((resolve) => setTimeout(resolve, 500));
                }
                return loaded.embed.embed_items(...given) } } } }) }"""
    hosted = host(slow_to_draw)
    (frame,) = hosted.frames
    stage.view.show(stage.scene)
    hosted.wait(READY)
    hosted.train(4)
    assert frame.evaluate("() => window.Bokeh.documents.length") == 1
    assert frame.evaluate("() => document.querySelector('.fsdp-live').dataset.scene") == "2"


def test_a_first_picture_needs_no_answer_of_a_kernel_that_is_busy(host: Callable[..., PlainPage]):
    hosted = host(busy=True)
    (frame,) = hosted.frames
    drawn = ".fsdp-live .fsdp-card canvas"
    frame.wait_for_selector(drawn, state="attached")
    canvases = len(frame.query_selector_all(drawn))
    hosted.free()
    hosted.wait(READY)
    hosted.train(4)
    assert len(frame.query_selector_all(drawn)) == canvases, "the same picture, filled anew"
    assert frame.evaluate("() => window.Bokeh.documents.length") == 1


def test_a_second_view_waits_for_a_kernel_that_is_busy(stage: Stage, host: Callable[..., PlainPage]):
    """It has nothing to draw with, since the first view has taken what came with the widget."""
    stage.open("first")
    assert not stage.view.first
    hosted = host(busy=True)
    hosted.frames[0].evaluate("() => { const now = Date.now; Date.now = () => now() + 20000 }")  # as after as long
    hosted.wait("() => document.querySelector('.fsdp-banner').textContent.startsWith('No answer from the kernel')")
    hosted.free()
    hosted.wait(READY)
    hosted.train(4)
    assert hosted.frames[0].evaluate("() => document.querySelector('.fsdp-banner').hidden")
