"""The step timeline in JupyterLab and chromium, over a lab without processes: read, hovered, pinned, looked at."""

import pytest
from playwright.sync_api import Locator

from tests.browser.driver import DashboardPage, model


class TimelinePage(DashboardPage):
    """Its card: what it says, and which step it holds."""

    @property
    def card(self) -> Locator:
        return self.page.locator(".fsdp-card-timeline")

    @property
    def hold(self) -> Locator:
        return self.card.locator(".fsdp-hold")

    def shown(self) -> int:
        return int(self.reading("timeline").split("step ")[1].split(":")[0].replace(",", ""))

    def wait_shown(self, condition: str, arg: int) -> None:
        """Until the shown step `s` is so beside `n`, in JavaScript."""
        self.page.wait_for_function(
            """([condition, n]) => {
              const said = document.querySelector('.fsdp-card-timeline .fsdp-reading').textContent.match(/step ([\\d,]+):/);
              return said && Function('s', 'n', `return ${condition}`)(Number(said[1].replaceAll(',', '')), n) }""",
            arg=[condition, arg])  # fmt: skip

    def lefts(self) -> list[float]:
        return list(self.page.evaluate(f"() => [...{model('timeline.spans')}.data.left]"))


# The figure's view, wherever it is in the tree of views.
VIEW = """(() => { const all = (v) => [v, ...[...(v.child_views ?? [])].flatMap(all)];
    return Object.values(window.Bokeh.index).flatMap(all).find((v) => v.model.name === 'timeline') })()"""

PLACE = f"""() => {{
    const data = {model("timeline.spans")}.data, i = data.what.findIndex((what) => what === 'all-gather');
    const view = {VIEW}, box = view.el.getBoundingClientRect(), {{ x_scale, y_scale }} = view.frame;
    const says = ['unit', 'more'].map((column) => data[column][i]);
    return {{ x: box.x + x_scale.compute((data.left[i] + data.right[i]) / 2),
              y: box.y + y_scale.compute((data.top[i] + data.bottom[i]) / 2), says }} }}"""

TIPS = """(words) => {
    const inside = (r) => [...r.querySelectorAll('*')].flatMap((e) => [e, ...(e.shadowRoot ? inside(e.shadowRoot) : [])]);
    const tips = inside(document).filter((e) => e.classList?.contains('bk-tooltip-content'));
    return tips.some((tip) => words.every((word) => tip.innerText.includes(word))) }"""

# What the search says of all-gathers of h.1 on rank 1, where that is right and they are marked.
SUM = f"""() => {{
    const all = {model("timeline.spans")}.data, found = {model("timeline.found")}.data;
    const wanted = (what, i) => what.includes('all-gather') && all.unit[i].endsWith('h.1') && all.rank[i] === 1 ? [i] : [];
    const rows = all.what.flatMap(wanted), ms = rows.reduce((sum, i) => sum + all.ms[i], 0).toFixed(2);
    const sum = `${{rows.length}} of ${{all.unit.length}} spans, ${{ms}} ms together: rank 1 ${{ms}} ms`;
    const said = document.querySelector('.fsdp-find span').textContent;
    const veiled = {model("timeline.veiled")}.get_length() === all.unit.length - rows.length;
    const marked = veiled && `${{[...found.left]}}` === `${{rows.map((i) => all.left[i])}}`;
    return rows.length > 1 && marked && /^step [\\d,]+: /.test(said) && said.endsWith(`: ${{sum}}`) && said }}"""


@pytest.mark.slow
def test_it_follows_the_newest_traced_step_holds_a_pinned_one_and_says_what_a_span_was(show):
    """A person's path: watch, pin, look at others, type a number, hover, let go, pin when the run is over."""
    opened = show(TimelinePage)
    opened.start()
    opened.page.locator(".fsdp-card-loss .fsdp-plot").hover()
    opened.page.locator(".fsdp-tab-button[data-tab=timeline]").press("Enter")
    opened.wait_shown("s >= n", 4)
    opened.wait_shown("s > n", opened.shown())  # though the pointer rests over it
    opened.hold.click()
    opened.wait_reading("timeline", r"^pinned · step [\d,]+: [\d.]+ ms, [\d.]+ ms exposed on rank \d, most for ")
    opened.page.wait_for_function(f"() => {model('timeline.spans')}?.get_length() > 0")
    held, lefts = opened.shown(), opened.lefts()
    opened.wait_step(opened.step() + 25)
    assert opened.shown() == held and opened.lefts() == lefts
    assert opened.hold.inner_text() == "Unpin" and opened.hold.get_attribute("aria-pressed") == "true"
    opened.button("Pause").click()  # else a slow page would look for steps that are kept no longer
    opened.wait_state("paused")

    opened.card.get_by_role("button", name="before this one").click()
    opened.wait_shown("s === n", held - 5)
    opened.card.get_by_role("button", name="after this one").click()
    opened.wait_shown("s === n", held)
    number = opened.card.get_by_role("spinbutton", name="step")
    number.fill("6")
    number.press("Enter")
    opened.wait_shown("s === n", 4)  # the nearest that was traced
    assert number.input_value() == "4" and opened.lefts() != lefts

    place = opened.page.evaluate(PLACE)
    opened.page.mouse.move(place["x"], place["y"])
    assert "GB/s bus" in place["says"][1] and "float32, 2 ranks" in place["says"][1]
    opened.page.wait_for_function(TIPS, arg=["all-gather", *place["says"]])
    assert opened.clipped() == []

    opened.hold.click()
    opened.wait_shown("s > n", held)
    opened.button("Resume").click()
    opened.card.locator(".fsdp-plot").hover()
    pointed_at, lefts = opened.shown(), opened.lefts()
    opened.wait_steps_more(25)
    assert (opened.shown(), opened.lefts()) == (pointed_at, lefts), "what is read does not go away"
    opened.page.mouse.move(1, 1)
    opened.wait_shown("s > n", pointed_at)
    assert "pinned" not in opened.reading("timeline")
    opened.stop()
    opened.hold.click()
    opened.wait_shown("s === n", int(opened.notebook.execute("print(lab.current.events.traced()[-1].number)")))


@pytest.mark.slow
def test_many_ranks_are_named_by_their_hosts_three_have_a_timeline_and_slow_motion_has_a_row_for_each(show):
    ranks, hosts = 9, 3
    desk = show(TimelinePage, lab=f"{ranks}, step_s=0.1, hosts={hosts}")
    desk.tab("timeline")
    desk.start()
    desk.wait_step(5)

    def names(axis: str) -> list[str]:
        return list(desk.page.evaluate(f"() => [...{model(axis)}.major_label_overrides.values()]"))

    for figure in ("communication.now", "memory.now"):
        told = names(f"{figure}.rank_axis")
        assert [name for name in told if "gpu" in name] == [f"gpu{i + 1}  {i * ranks // hosts}" for i in range(hosts)]
    assert "% of all" in desk.page.locator(".fsdp-card-communication", has_text="To other hosts").first.text_content()
    assert f"{ranks} ranks on {hosts} hosts" in desk.page.locator(".fsdp-lab").first.inner_text()
    desk.page.locator(".fsdp-card-timeline .fsdp-note", has_text=f"3 of {ranks} ranks").wait_for()
    desk.stop()
    said = desk.card.locator(".fsdp-note").inner_text()
    assert all(rank in said for rank in names("timeline.ranks")) and len(names("timeline.ranks")) == 3
    desk.show(900, "Dark")
    desk.tab("slow")
    desk.notebook.execute(
        "slow = lab.slow_motion(model='gpt2-1m')\n"  # the name keeps it alive
        "for moment in slow:\n"
        "    if (moment.phase, moment.unit, moment.direction) == ('compute', 'transformer.h.2', 'backward'): break"
    )
    desk.wait_reading("slow", "backward · compute transformer.h.2")
    desk.wait_rows("slow.moving", ranks * (12 + 12))  # one unit is gathered ahead, one is being reduced
    assert desk.clipped() == []


@pytest.mark.slow
def test_spans_are_found_by_words_summed_by_rank_searched_anew_in_the_next_step_and_let_go_by_escape(show):
    desk = show(TimelinePage)
    desk.tab("timeline")
    desk.start()
    desk.wait_shown("s >= n", 4)
    find = desk.card.get_by_role("searchbox", name="Find spans")
    find.press_sequentially("ALL-gather h.1  rank 1 n")  # a space and an n are for the field: the run goes on
    find.press("Backspace")
    first = desk.page.wait_for_function(SUM).json_value()
    desk.page.wait_for_function(f"(first) => ![first, false].includes(({SUM})())", arg=first)
    assert desk.state() == "running" and desk.clipped() == []
    find.press("Escape")
    assert find.input_value() == desk.card.locator(".fsdp-find").inner_text() == ""
    assert desk.rows("timeline.veiled") == desk.rows("timeline.found") == 0
