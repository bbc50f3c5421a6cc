"""The comparison as a card: a row for each pin, each run of a sweep and the live run, compared with one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress

from fsdp_lab.base.events import Role
from fsdp_lab.base.formatting import plural, size
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.board import BoardView, Entry, Kind
from fsdp_lab.dashboard.panels.base import BaseCard, Captions, Cell, Key, Part
from fsdp_lab.dashboard.panels.drawing import ON_DEVICE, class_keys
from fsdp_lab.runs.comparison import NONE, Comparison, Row, ratio_words, split_spread
from fsdp_lab.runs.parity import Verdict
from fsdp_lab.runs.recommendation import recommend
from fsdp_lab.runs.summary import RULE

SPREADS = ("step time", "tokens/s", "TFLOPS", "MFU", "exposed")  # columns whose spread is shown or told
ICONS = {Verdict.EQUAL: "=", Verdict.WITHIN: "≈", Verdict.UNKNOWN: "?"}
TONES = {Verdict.EQUAL: "good", Verdict.WITHIN: "fair", Verdict.DIFFERENT: "bad", Verdict.UNKNOWN: "soft"}
SAME_RUN = "The same run under another strategy: they have no step in common. Start it again, or press Compare…"


class ComparisonCard(BaseCard):
    """Texts, bars and buttons, without a Bokeh plot. Hidden while there is nothing to compare."""

    name = "comparison"
    title = "Comparison"
    wide = True

    def __init__(self, press: Callable[[str, str], None]) -> None:
        super().__init__(Captions(hidden=True))
        self._press = press

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
        reading = [f"{_reading(compared, shown.entries)}."]
        if over:  # one of the sweep's runs is recommended: they were trained in turns, pinned ones were not
            swept = [e.kind is Kind.SWEEP for e in shown.entries]
            reading += recommend(replace(compared, rows=tuple(compress(compared.rows, swept)), baseline=None)).sentences
        ratios = [note for note in compared.notes() if note.startswith("Ratios of")]
        self._captions = Captions(
            reading=" ".join(reading),
            legend=tuple(class_keys(drawn)),
            note=" ".join([*compared.refusals(), *differences, RULE, *ratios, *compared.fidelity(common=False)]),
            table=table(compared, shown.entries),
        )


def table(compared: Comparison, entries: Sequence[Entry]) -> tuple[tuple[str | Cell, ...], ...]:
    """Column heads, then a row for each run that began."""
    base = compared.baseline or NONE
    longest_s = max((s.p90 for r in compared.rows if (s := r.figures.step_time_s)), default=0.0)
    largest = max((r.figures.peak_memory_bytes or 0 for r in compared.rows), default=0)
    times = ("step time (p10–p90)", f"time / {base}", "tokens/s", "TFLOPS · MFU", "exposed")
    heads = ("", "strategy", f"same as {base}?", *times, "peak memory", f"peak / {base}", "state", "")
    rows: list[tuple[str | Cell, ...]] = []
    for row, entry in zip(compared.rows, entries, strict=True):
        if row.refused:
            continue
        texts = compared.cells(row, SPREADS)
        ratio, interval = split_spread(ratio_words(row.time_ratio, "×"))
        times_of_row = (
            _time(row, texts["step time"], longest_s),
            Cell(text=ratio, title=("not told apart: " if ratio.startswith("≈") else "") + interval),
            _figure(texts["tokens/s"]),
            _figure(texts["TFLOPS"], texts["MFU"]),
            _figure(texts["exposed"]),
        )
        memory = _memory(row, largest), f"×{row.memory_ratio:.2f}" if row.memory_ratio else NONE
        remove = Cell(text="×", press="unpin", about=row.label, title=f"Remove {row.label}")
        about = (_label(row, entry, compared), Cell(text=row.name, title=row.name), _badge(row, compared))
        last: str | Cell = "" if entry.kind is Kind.LIVE else remove
        rows.append((*about, *times_of_row, *memory, _state(row, entry), last))
    return (heads, *rows)


def _label(row: Row, entry: Entry, compared: Comparison) -> Cell:
    if not entry.began:
        return Cell(text=row.label)
    token = "ink.mean" if entry.place is None or entry.plotted else f"pin.{entry.place}"
    key = Key(label="", token=token, hatch="line" if token == "ink.mean" else "dashes")
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


def _figure(*texts: str) -> Cell:
    """Medians, and their spreads as the tooltip."""
    middles, spreads = zip(*map(split_spread, texts), strict=True)
    shown = [middle for middle in middles if middle != NONE]
    title = "; ".join(f"p10 to p90: {spread}" for spread in spreads if spread)
    return Cell(text=" · ".join(shown) or NONE, title=title)


def _memory(row: Row, largest: int) -> Cell:
    peak = row.figures.peak_memory_bytes
    if not peak or not largest:
        return Cell(text=NONE, title="Not measured yet: the third step of a run does")
    sizes = [(c, theme.MEMORY[c], row.figures.at_peak.of_role(Role(c))) for c in ON_DEVICE]
    host = f", {size(row.figures.host_bytes)} on the host" if row.figures.host_bytes else ""
    classes = ", ".join(f"{fill.label} {size(b)}" for _, fill, b in sizes if b)
    parts = tuple(Part(share=b / largest, token=f"memory.{c}", hatch=fill.hatch) for c, fill, b in sizes if b)
    return Cell(text=f"{size(peak)}{' + host' if host else ''}", title=f"Fullest rank: {classes}{host}", parts=parts)


def _state(row: Row, entry: Entry) -> Cell:
    tone = "bad" if row.state == "failed" or row.state.startswith("lost") else ""
    text = f"▶ {row.state}" if entry.plotted and row.state == "running" else row.state
    if entry.kind is Kind.PIN and row.state in ("running", "paused"):
        text = "pinned"  # the row is as it was then
    steps = row.figures.steps
    more = f": {row.reason}" if row.reason else f", {steps} step{'s' * (steps != 1)}"
    return Cell(text=text + more, tone=tone, title=row.reason)


def _reading(compared: Comparison, entries: Sequence[Entry]) -> str:
    if compared.differences:
        return f"✗ NOT THE SAME COMPUTATION: {', '.join(compared.differences)}"
    if not compared.baseline:
        return "no run has begun"
    return f"{plural(sum(e.began for e in entries), 'run')}, compared with {compared.baseline}"
