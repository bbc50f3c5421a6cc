"""The comparison as a card: a row for each pin, each run of a sweep and the live run, compared with one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdp_lab.base.events import Role
from fsdp_lab.base.formatting import size
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.board import BoardView, Entry, Kind
from fsdp_lab.dashboard.columns import Columns
from fsdp_lab.dashboard.panels.base import Captions, Cell, Key, Part, Patches
from fsdp_lab.dashboard.panels.drawing import ON_DEVICE, class_keys
from fsdp_lab.runs.comparison import NONE, Comparison, Row, ratio_words, split_spread
from fsdp_lab.runs.parity import Verdict
from fsdp_lab.runs.recommendation import recommend
from fsdp_lab.runs.summary import RULE

SPREADS = ("step time", "tokens/s", "TFLOPS", "MFU", "exposed")  # columns whose spread is shown or told
ICONS = {Verdict.EQUAL: "=", Verdict.WITHIN: "≈", Verdict.UNKNOWN: "?"}
TONES = {Verdict.EQUAL: "good", Verdict.WITHIN: "fair", Verdict.DIFFERENT: "bad", Verdict.UNKNOWN: "soft"}
SAME_RUN = "The same run under another strategy: they have no step in common. Start it again, or press Compare…"


class ComparisonCard:
    """Texts, bars and buttons, without a Bokeh plot. Hidden while there is nothing to compare."""

    name = "comparison"
    title = "Comparison"
    wide = True
    root = None

    def __init__(self, press: Callable[[str, str], None]) -> None:
        self._press = press
        self._captions = Captions(hidden=True)

    @property
    def sources(self) -> Sequence[Columns]:
        return ()

    def patches(self) -> Patches:
        return {}

    def captions(self) -> Captions:
        return self._captions

    def press(self, word: str, about: str) -> None:
        self._press(word, about)

    def show(self, shown: BoardView, *, over: bool) -> None:
        """`over`: a sweep among the rows has ended, so that a recommendation can be made."""
        compared = shown.comparison
        if not compared.rows:
            self._captions = Captions(hidden=True)
            return
        at_peaks = [row.figures.at_peak for row in compared.rows if row.figures.peak_memory_bytes]
        drawn = [c for c in ON_DEVICE if any(peak.of_role(Role(c)) for peak in at_peaks)]
        differences = [f"{label} is {sentence}." for label, sentence in compared.differences.items()]
        ratios = [note for note in compared.notes() if note.startswith("Ratios of")]
        self._captions = Captions(
            reading=" ".join([f"{_reading(compared, shown.entries)}.", *(_recommendation(shown) if over else ())]),
            legend=tuple(class_keys(drawn)),
            note=" ".join([*compared.refusals(), *differences, RULE, *ratios, *compared.fidelity(common=False)]),
            table=table(compared, shown.entries),
        )


def table(compared: Comparison, entries: Sequence[Entry]) -> tuple[tuple[str | Cell, ...], ...]:
    """Column heads, then a row for each run that began."""
    base = compared.baseline or NONE
    longest_s = max((s.p90 for r in compared.rows if (s := r.figures.step_time_s)), default=0.0)
    largest = max((r.figures.peak_memory_bytes or 0 for r in compared.rows), default=0)
    heads = (
        "",
        "strategy",
        f"same as {base}?",
        "step time (p10–p90)",
        f"time / {base}",
        "tokens/s",
        "TFLOPS · MFU",
        "exposed",
        "peak memory",
        f"peak / {base}",
        "state",
        "",
    )
    rows = []
    for row, entry in zip(compared.rows, entries, strict=True):
        if row.refused:
            continue
        texts = compared.cells(row, SPREADS)
        rows.append(
            (
                _label(row, entry, compared),
                Cell(text=row.name, title=row.name),
                _badge(row, compared),
                _time(row, texts["step time"], longest_s),
                _ratio(ratio_words(row.time_ratio, "×")),
                _figure(texts["tokens/s"]),
                _figure(texts["TFLOPS"], texts["MFU"]),
                _figure(texts["exposed"]),
                _memory(row, largest),
                f"×{row.memory_ratio:.2f}" if row.memory_ratio else NONE,
                _state(row, entry),
                _remove(row, entry),
            )
        )
    return (heads, *rows)


# -- cells -----------------------------------------------------------------------------------------------------------


def _label(row: Row, entry: Entry, compared: Comparison) -> Cell:
    token = "ink.mean" if entry.place is None or entry.plotted else f"pin.{entry.place}"
    key = Key(label="", token=token, hatch="line" if token == "ink.mean" else "dashes") if entry.began else None
    if not entry.began:
        return Cell(text=row.label)
    on = row.label == compared.baseline
    title = "The baseline: others are compared with it" if on else f"Compare the others with {row.label}"
    return Cell(text=row.label, key=key, press="baseline", about=row.label, pressed=on, title=title)


def _badge(row: Row, compared: Comparison) -> Cell:
    parity = row.parity
    if parity is None:
        return Cell(text="baseline" if row.label == compared.baseline else NONE, tone="soft")
    same_run = parity.verdict is Verdict.UNKNOWN and row.run == compared[compared.baseline or ""].run
    text = compared.badge(row)
    if parity.verdict is not Verdict.DIFFERENT:  # that has its icon
        text = f"{ICONS[parity.verdict]} {text}"
    return Cell(text=text, tone=TONES[parity.verdict], title=SAME_RUN if same_run else parity.sentence)


def _time(row: Row, text: str, longest_s: float) -> Cell:
    spread = row.figures.step_time_s
    if spread is None or not longest_s:
        return Cell(text=NONE)
    return Cell(
        text=text.replace(" to ", "–"),
        title=f"Median of {row.figures.counted} of {row.figures.steps} steps",
        parts=(Part(share=spread.median / longest_s, token="ink.faint"),),
        whisker=(spread.p10 / longest_s, spread.p90 / longest_s),
    )


def _ratio(words: str) -> Cell:
    """The ratio, with its interval as the tooltip."""
    middle, interval = split_spread(words)
    return Cell(text=middle, title=("not told apart: " if middle.startswith("≈") else "") + interval)


def _figure(*texts: str) -> Cell:
    """Medians, and their spreads as the tooltip."""
    middles, spreads = zip(*map(split_spread, texts), strict=True)
    shown = [middle for middle in middles if middle != NONE]
    return Cell(
        text=" · ".join(shown) or NONE, title="; ".join(f"p10 to p90: {spread}" for spread in spreads if spread)
    )


def _memory(row: Row, largest: int) -> Cell:
    peak = row.figures.peak_memory_bytes
    if not peak or not largest:
        return Cell(text=NONE, title="Not measured yet: the third step of a run does")
    sizes = {c: row.figures.at_peak.of_role(Role(c)) for c in ON_DEVICE}
    host = f", {size(row.figures.host_bytes)} on the host" if row.figures.host_bytes else ""
    classes = ", ".join(f"{theme.MEMORY[c].label} {size(b)}" for c, b in sizes.items() if b)
    parts = tuple(
        Part(share=b / largest, token=f"memory.{c}", hatch=theme.MEMORY[c].hatch) for c, b in sizes.items() if b
    )
    return Cell(text=f"{size(peak)}{' + host' if host else ''}", title=f"Fullest rank: {classes}{host}", parts=parts)


def _state(row: Row, entry: Entry) -> Cell:
    tone = "bad" if row.state == "failed" or row.state.startswith("lost") else ""
    text = f"▶ {row.state}" if entry.plotted and row.state == "running" else row.state
    if entry.kind is Kind.PIN and row.state in ("running", "paused"):
        text = "pinned"  # the row is as it was then
    steps = row.figures.steps
    more = f": {row.reason}" if row.reason else f", {steps} step{'s' * (steps != 1)}"
    return Cell(text=text + more, tone=tone, title=row.reason)


def _remove(row: Row, entry: Entry) -> Cell | str:
    if entry.kind is Kind.LIVE:
        return ""
    return Cell(text="×", press="unpin", about=row.label, title=f"Remove {row.label}")


# -- words -----------------------------------------------------------------------------------------------------------


def _reading(compared: Comparison, entries: Sequence[Entry]) -> str:
    if compared.differences:
        return f"✗ NOT THE SAME COMPUTATION: {', '.join(compared.differences)}"
    runs = sum(e.began for e in entries)
    return (
        f"{runs} run{'s' * (runs != 1)}, compared with {compared.baseline}" if compared.baseline else "no run has begun"
    )


def _recommendation(shown: BoardView) -> tuple[str, ...]:
    """One of the sweep's runs: they were trained in turns, pinned ones were not."""
    rows = tuple(r for r, e in zip(shown.comparison.rows, shown.entries, strict=True) if e.kind is Kind.SWEEP)
    return recommend(replace(shown.comparison, rows=rows, baseline=None)).sentences
