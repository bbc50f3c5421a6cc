"""The dashboard in JupyterLab and chromium, over a lab without processes: what depends on the page and not on ranks."""

import re

import pytest

from tests.browser.driver import DashboardPage, model

pytestmark = pytest.mark.slow


@pytest.fixture
def opened(show) -> DashboardPage:
    return show(DashboardPage)


def test_start_toggle_refuse_stop_look_and_scroll(opened):
    """A person's path: start, watch, change, be refused, take the way out, pause, stop. Then axes and inks change with the
    theme, both ways. In a low window the last plots are not in sight; their rows wait in the page and are there when it
    scrolls. A range that the reader moves stays until a double click."""
    assert opened.state() == "ready"
    opened.start()
    opened.wait_step(20)
    before = opened.wait_reading("memory", r"peak [\d.]+ MiB on the fullest rank")

    opened.choose("sharding", "shard_grad_op")
    opened.wait_note("sharding", r"applied at step \d+")
    assert opened.wait_new_reading("memory", before) != before
    opened.choose("offload", "all")
    opened.wait_note("offload", r"applied at step \d+")
    opened.wait_reading("memory", "on the host")
    opened.wait_rows("frame.markers", 2)

    opened.choose("backend", "ddp")
    opened.wait_note("backend", "refused")
    opened.wait_refusal("DDP keeps a whole replica on every rank")
    opened.page.locator("button.fsdp-fix:visible").click()
    opened.wait_note("backend", r"applied at step \d+")
    assert opened.refusals() == ""
    opened.page.locator(".fsdp-card-communication .fsdp-legend", has_text="all-reduce").wait_for()

    opened.button("Pause").click()
    opened.wait_state("paused")
    opened.page.locator(".fsdp-card-memory h3").click()  # the dashboard has the focus, and takes its keys
    opened.page.keyboard.press("Space")
    opened.wait_state("running")
    opened.tab("runs")
    name = opened.page.get_by_label("name", exact=True)
    name.press_sequentially("n o")
    opened.page.get_by_role("button", name="Copy as command").click()
    copied = opened.page.evaluate("() => getSelection().toString()")
    assert name.input_value() == "n o" and copied.startswith("fsdp-lab run --model gpt2-1m --backend ddp")
    opened.page.locator(".jp-Notebook .jp-InputPrompt").first.click()
    opened.page.keyboard.press("Space")  # for the notebook
    opened.wait_steps_more(2)
    assert opened.state() == "running"
    last = opened.stop()
    opened.tab("loss")
    opened.wait_steps_drawn(last)

    opened.start("Continue")
    opened.wait_state("running")
    opened.choose("model", "gpt2-10m")
    opened.page.locator(".fsdp-notice:visible", has_text="With another model training begins at step 0").wait_for()
    opened.choose("model", "gpt2-1m")
    opened.page.locator(".fsdp-notice:visible").wait_for(state="hidden")
    opened.button("Stop").click()
    opened.button("Start over").wait_for()
    said = opened.notebook.execute("print(lab.begun[-1], lab.current.spec.workload.model)")
    assert said.split() == ["continued", "gpt2-1m"]

    colours = """() => { const models = [...window.Bokeh.documents.at(-1)?.all_models ?? []];
        const line = models.find(m => m.type === 'Line' && m.tags.some(t => t.tint?.line_color === 'ink.mean'));
        const axis = models.find(m => m.type === 'LinearAxis');
        return axis && line && [axis.axis_label_text_color, line.line_color.value ?? line.line_color] }"""
    seen = {}
    for theme in ("Light", "Dark", "Light"):
        opened.notebook.theme(f"JupyterLab {theme}")
        opened.page.wait_for_function(
            "(dark) => document.querySelector('.fsdp-live').classList.contains('fsdp-dark') === dark",
            arg=theme == "Dark",
        )
        now = opened.page.wait_for_function(colours).json_value()  # the plots may just be built anew
        assert seen.setdefault(theme, now) == now
    assert all(a != b for a, b in zip(seen["Light"], seen["Dark"], strict=True))
    opened.tab("loss")
    opened.page.set_viewport_size({"width": 1280, "height": 500})
    opened.page.evaluate("() => { document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0 }")
    opened.start()
    opened.wait_step(3)
    opened.page.evaluate(f"() => {model('frame.x')}.setv({{start: 1, end: 7}})")
    opened.wait_step(55)  # beyond the first window: the axis would have grown
    last = opened.stop()
    assert opened.rows("loss.steps") < last
    opened.page.locator(".fsdp-card-loss").scroll_into_view_if_needed()
    opened.wait_steps_drawn(last)
    assert opened.page.evaluate(f"() => [{model('frame.x')}.start, {model('frame.x')}.end]") == [1, 7]
    opened.page.locator(".fsdp-card-memory .fsdp-plot").dblclick()
    assert opened.page.evaluate(f"() => {model('frame.x')}.end") >= 100
    for group, words in (("steps", "last 50"), ("loss axis", "log"), ("smoothing", "10")):
        opened.page.get_by_role("group", name=group).get_by_role("button", name=words, exact=True).click()
    drawn = f"""() => {{ const {{ start, end }} = {model("frame.x")};
                         return [end - start, end > {last}, {model("loss.y")}.start > 0] }}"""
    assert opened.page.evaluate(drawn) == [50, True, True]
    assert opened.rows("loss.smooth") == opened.rows("loss.steps")
    card = opened.page.locator(".fsdp-card-loss")
    assert card.locator(".fsdp-key").first.inner_text() == "mean of the last 10"
    assert card.get_by_role("img").get_attribute("aria-label") == f"Loss: {opened.reading('loss')}"
    for kind, begins in (
        ("PNG", b"\x89PNG"),
        ("SVG", b"<svg"),
        ("CSV", b"# loss.steps: loss (nats per token) against"),
    ):
        with opened.page.expect_download() as saved:
            card.locator(".fsdp-tools button", has_text=kind).click()
        assert saved.value.path().read_bytes().startswith(begins)


def test_all_that_can_be_pressed_answers_while_a_cell_is_busy(opened):
    opened.notebook.write_and_run("import time\nfor _ in range(6000): time.sleep(0.1)", wait=False)
    busy = opened.page.locator(".jp-InputPrompt", has_text="[*]:")
    busy.wait_for()
    opened.start()
    opened.wait_step(5)
    opened.choose("micro batch", "8")
    opened.wait_note("micro batch", r"applied at step \d+")
    opened.tab("timeline")
    opened.page.locator(".fsdp-card-timeline .fsdp-hold").click()
    opened.wait_reading("timeline", "^pinned · step")
    opened.button("Stop").click()
    opened.wait_state("stopped")
    opened.tab("slow")
    for word, said in (("Next", "halted"), ("Stop", "is over, its loss was")):
        opened.page.locator(".fsdp-slow button.fsdp-slow-button", has_text=word).first.click()
        opened.page.locator(".fsdp-slow .fsdp-state-line").get_by_text(said).first.wait_for()
    assert busy.count()  # the cell still runs
    opened.notebook.command("notebook:interrupt-kernel")
    busy.wait_for(state="detached")


def test_a_cell_run_again_replaces_its_dashboard_two_views_agree_and_what_is_gone_is_said_and_drawn_again(opened):
    """JupyterLab may take the output out of the page while Bokeh embeds it; and the kernel may be restarted, which one
    sentence says in place of an icon of ipywidgets' on each of its widgets."""
    page = opened.page
    opened.notebook.execute("former = dashboard")
    page.evaluate("""() => { const embed = window.Bokeh.embed, real = embed.embed_items;
        window.restored = () => { embed.embed_items = real };
        embed.embed_items = async () => { throw new Error('element must be under <body>') } }""")
    opened.notebook.execute("lab.run(steps=60)")  # ticks come meanwhile, and do not hide the banner
    opened.notebook.write_and_run("dashboard = Dashboard(lab)\ndashboard")
    page.locator(".fsdp-banner:visible", has_text="element must be under <body>").wait_for()
    page.evaluate("() => window.restored()")
    opened.wait_drawn()
    opened.wait_step(59)
    assert opened.notebook.execute("print(former.closed, dashboard.closed)").split() == ["True", "False"]
    assert not page.locator(".fsdp-banner:visible").count()
    assert all("element must be under <body>" in text for text in opened.notebook.wrong)
    opened.notebook.wrong.clear()
    page.evaluate(f"() => {model('frame.x')}.setv({{start: 1, end: 7}})")
    opened.notebook.write_and_run("dashboard")  # a second view of the same, which JupyterLab may also make by itself
    page.wait_for_function("() => document.querySelectorAll('.fsdp-live[data-ready]').length === 2")
    assert page.evaluate(f"() => [{model('frame.x')}.start, {model('frame.x')}.end]") == [1, 7]
    opened.notebook.execute("lab.run(steps=12)")
    page.wait_for_function("""() => {
        const said = [...document.querySelectorAll('.fsdp-headline')].map((e) => e.textContent);
        return said.length === 2 && said.every((text) => text.startsWith('step 11')) }""")

    opened.notebook.restart_kernel()
    opened.page.locator(".fsdp-lab.jupyter-widgets-disconnected").first.wait_for()
    said = opened.page.evaluate("""() => [...document.querySelectorAll('.jupyter-widgets-disconnected')].map(
        (e) => getComputedStyle(e, '::before').content).filter((text) => text !== 'none')""")
    assert said == ['"The kernel is gone. Run the cell again."'] * 2
    assert not opened.page.locator(".fsdp-lab :is(.fsdp-banner, .fsdp-state):visible").count(), "it is not running"
    opened.notebook.run_cell(0)
    opened.wait_drawn()
    assert not opened.page.locator(".fsdp-banner:visible").count()
    opened.start()
    opened.wait_step(5)


# What a person reads and presses, in JavaScript: controls without a name or a sentence on what they are, and texts that are
# too pale for what is behind them (WCAG 2: a ratio of 4.5; what is disabled may be paler).
NAMELESS = """() => [...document.querySelectorAll('.fsdp-lab :is(button, select, input)')].filter((e) => e.offsetParent)
    .filter((e) => !(e.ariaLabel || e.textContent.trim() || e.labels?.[0]?.textContent || e.title)
                   || (e.closest('.fsdp-bar, .fsdp-field') && !(e.title || e.labels?.[0]?.title)))
    .map((e) => e.outerHTML.slice(0, 200))"""
PALE = """() => {
    const numbers = (colour) => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number); return [r, g, b, a] };
    const linear = (c) => c <= 0.04 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
    const behind = (e) => { for (; e; e = e.parentElement) {
        const colour = numbers(getComputedStyle(e).backgroundColor);
        if (colour[3] > 0.9) return colour } return [255, 255, 255] };
    const pale = [];
    for (const e of document.querySelectorAll('.fsdp-lab *')) {
        const text = [...e.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data).join(' ').trim();
        if (!text || !e.checkVisibility({ opacityProperty: true }) || e.closest(':disabled, option, .bk-Canvas')) continue;
        const [a, b] = [light(numbers(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
        if ((a + 0.05) / (b + 0.05) < 4.5) pale.push(`${text.slice(0, 40)}: ${((a + 0.05) / (b + 0.05)).toFixed(2)}`);
    }
    return pale }"""
TABS = ("loss", "timeline", "ranks", "ledger", "compare", "runs", "settings", "safety", "slow", "generate")


def test_bar_and_four_plots_share_a_small_screen_and_every_tab_is_read_and_reached(opened):
    """At 1280 x 800, in both themes. The bar stays while the page scrolls, the keyboard goes through the tabs, the tab that
    was open is open in the next view, and the dashboard moves to a tab of JupyterLab's with one press."""
    page = opened.page
    page.set_viewport_size({"width": 1280, "height": 800})
    opened.start()
    opened.wait_step(12)
    opened.button("Keep as A").click()
    opened.choose("precision", "bf16")
    opened.wait_note("precision", r"applied at step \d+")
    opened.page.locator(".fsdp-difference", has_text=re.compile(r"A → bf16: time")).wait_for()
    page.evaluate("() => document.querySelector('.fsdp-lab').scrollIntoView()")
    boxes = {name: page.locator(f".fsdp-{name}").first.bounding_box() for name in
             ("controls", "card-memory", "card-communication", "card-tflops", "card-throughput", "tabs")}  # fmt: skip
    assert boxes["controls"]["y"] < 100 and boxes["tabs"]["y"] + boxes["tabs"]["height"] < 775, boxes
    for theme in ("Light", "Dark"):
        opened.notebook.theme(f"JupyterLab {theme}")
        for name in TABS:
            opened.tab(name)
            page.locator(f".fsdp-tab-button[data-tab={name}][aria-selected=true]").wait_for()
            assert page.evaluate(NAMELESS) == [] and page.evaluate(PALE) == [], (theme, name)
    opened.notebook.theme("JupyterLab Light")
    assert page.locator(".fsdp-controls").bounding_box()["y"] == boxes["controls"]["y"]
    page.keyboard.press("ArrowLeft")
    page.locator(".fsdp-tab-button[data-tab=slow][aria-selected=true]").wait_for()
    assert page.locator(".fsdp-slow").is_visible() and not page.locator(".fsdp-written").is_visible()

    page.get_by_role("button", name="Own tab").click()
    own = page.locator(".jp-LinkedOutputView .fsdp-lab")
    own.locator(".fsdp-live[data-ready]").first.wait_for()
    assert own.locator(".fsdp-tab-button[data-tab=slow][aria-selected=true]").is_visible()
    own.get_by_role("button", name="Undo").click()
    page.locator(".fsdp-headline", has_text="fp32").first.wait_for()
    page.evaluate("""() => [...window.jupyterapp.shell.widgets('main')]
        .filter((w) => w.node.querySelector('.jp-LinkedOutputView')).forEach((w) => w.close())""")
