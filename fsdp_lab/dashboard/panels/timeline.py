"""Timeline: what each rank did in a traced step, on one clock. The newest of them, or the one that is pinned."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import CDSView, FixedTicker, GroupFilter, HoverTool, PanTool, Range1d, WheelZoomTool
from bokeh.models.renderers import DataRenderer
from bokeh.models.ui import UIElement
from bokeh.plotting import figure

from fsdp_lab.core.events import Span, Track, exposed_by_unit
from fsdp_lab.core.formatting import duration, figures, traffic
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.columns import Columns
from fsdp_lab.dashboard.panels.base import Captions, Key, Patches, Pin, StepAxis, paint_fill, plain_figure, twin
from fsdp_lab.dashboard.panels.ranges import FINE, ZeroRange
from fsdp_lab.runs.steps import SPAN_CAP, TRACED_STEPS, Step
from fsdp_lab.runs.timeline import NO_UNIT, TRACK_NAMES, RankLane, Timeline, stacked

LANE_PX = ((2, 104), (4, 84), (theme.MOST_LINES, 58))  # up to so many lanes, each so high
AXIS_PX = 50
LANE = 0.9  # of the room of a lane is drawn in
ROW_GAP = 0.12  # of a row's height
MOST_ROWS = 4  # that overlapping spans of a track are spread over; deeper ones cover each other
MOST_SPANS = 6000  # drawn; the shortest are left out
REDRAW_S = 0.4
RANGE_STEPS = 8  # the range holds the longest of so many last ones
RANGE_PATIENCE = 4  # and after so many pictures that leave a tenth of it empty, it follows
NOBODYS = "#808890"

# Track -> fill, where its name does not decide; in the order of rows in a lane, from the top.
FILLS: Mapping[Track, str] = {
    Track.COMPUTE: "timeline.compute",
    Track.WAIT: "timeline.waiting",
    Track.ALL_GATHER: "communication.all_gather",
    Track.REDUCE_SCATTER: "communication.reduce_scatter",
    Track.ALL_REDUCE: "communication.all_reduce",
    Track.HOST_COPY: "timeline.host_copy",
    Track.OTHER: "communication.other",
    Track.CONTROL: "communication.control",
}


class TimelinePanel:
    """A lane a rank; in it a thin row for each track that occurs. Of more ranks than colours, those that say most: the ones
    that wait least (the others wait for it), middling and most.

    `update` draws; `pin` may be called from any thread and is seen to by the next `update`.
    """

    name = "timeline"
    title = "Step timeline"
    wide = True

    def __init__(self, frame: StepAxis, world_size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.world_size = world_size
        self._all = world_size <= theme.MOST_LINES
        self.lanes = world_size if self._all else 3
        self._clock = clock
        place = ["left", "right", "top", "bottom"]
        texts = ["fill", "what", "unit", "link", "bandwidth", "group"]
        self._spans = Columns("timeline.spans", [*place, "ms", "rank"], texts=texts, limit=MOST_SPANS)
        self._lanes = Columns("timeline.lanes", [*place, "rank"], texts=["color", "label"], limit=self.lanes)
        self._kept: deque[Step] = deque()
        self._kept_spans = 0
        self._lock = threading.Lock()
        self._asked: deque[tuple[int | None, int]] = deque(maxlen=20)  # guarded by the lock
        self._pinned: Step | None = None
        self._shown: Step | None = None
        self._drawn_s = float("-inf")
        self._spec_id = ""  # of the step that is shown
        self._tracks: dict[Track, None] = {}  # met with this Spec, as an ordered set
        self._fills: dict[str, None] = {}
        self._lengths: deque[float] = deque(maxlen=RANGE_STEPS)  # ms
        self._range = ZeroRange(headroom=1.02, slack=0.6, steps=FINE, patience=RANGE_PATIENCE)
        self._timeline: Timeline | None = None  # of the step that is shown
        self._chosen: dict[int, RankLane] = {}
        self._captions = Captions(reading="One step every half second is traced and drawn here.")
        self._root = self._draw_empty()

    # -- the picture ----------------------------------------------------------------------------------------------

    def _draw_empty(self) -> figure:
        x_range = Range1d(start=0, end=1, name="timeline.x")
        fig = plain_figure("timeline", "rank", x_range=x_range, y_range=Range1d(start=self.lanes - 0.5, end=-0.5))
        fig.height = AXIS_PX + self.lanes * next(px for most, px in LANE_PX if self.lanes <= most)
        fig.xaxis.axis_label = "ms since the first rank began the step"
        fig.yaxis.name = "timeline.ranks"
        fig.yaxis.ticker = FixedTicker(ticks=list(range(self.lanes)))
        fig.ygrid.visible = False
        fig.add_tools(PanTool(dimensions="width"), WheelZoomTool(dimensions="width", modifiers={"shift": True}))
        lanes = twin(self._lanes)
        fig.quad(left="left", right="right", top="top", bottom="bottom", source=lanes, fill_color="color", fill_alpha=0.1,
                 line_alpha=0)  # fmt: skip
        fig.segment(x0="left", x1="left", y0="top", y1="bottom", source=lanes, line_color="color", line_width=3)
        spans = twin(self._spans)
        drawn: list[DataRenderer] = []
        for token, fill in _fills().items():
            view = CDSView(filter=GroupFilter(column_name="fill", group=token))
            bars = fig.quad(
                left="left", right="right", top="top", bottom="bottom", source=spans, view=view, line_width=0.5
            )
            # A short span is seen by its outline.
            paint_fill(bars.glyph, token, fill, outline=token if fill.hatch == " " else "ink.faint")
            drawn.append(bars)
        rows = [("rank", "@rank"), ("what", "@what"), ("unit", "@unit"), ("time", "@ms{0,0.00} ms, from @left{0,0.00} ms"),
                ("link", "@link"), ("bandwidth", "@bandwidth"), ("group", "@group")]  # fmt: skip
        fig.add_tools(HoverTool(renderers=drawn, tooltips=rows, mode="mouse", attachment="horizontal"))
        return fig

    # -- a card of the live view ----------------------------------------------------------------------------------

    @property
    def sources(self) -> Sequence[Columns]:
        return (self._spans, self._lanes)

    @property
    def root(self) -> UIElement:
        return self._root

    def patches(self) -> Patches:
        patches: dict[str, dict[str, Any]] = {"timeline.x": {"start": 0.0, "end": self._range.end}}
        if not self._all:
            names = [[place, str(lane.rank)] for place, lane in self._chosen.items()]
            patches["timeline.ranks"] = {"major_label_overrides": {"type": "map", "entries": names}}
        return patches

    def captions(self) -> Captions:
        return self._captions

    def pin(self, step: int | None, by: int = 0) -> None:
        """Holds the kept step nearest to `step`, or the one `by` places after what is shown; without either, lets go."""
        with self._lock:
            self._asked.append((step, by))

    def update(self, steps: Sequence[Step]) -> int:
        changed = self._answer() + self._keep(steps)  # what was asked for was asked of what was there
        wanted = self._pinned or (self._kept[-1] if self._kept else None)
        if wanted is None:
            return 0
        written = 0
        due = self._pinned is not None or self._clock() - self._drawn_s >= REDRAW_S
        if wanted is not self._shown and due:
            self._drawn_s, self._shown, self._timeline = self._clock(), wanted, Timeline.of(wanted.events)
            written = self._draw(self._timeline)
        if changed or written:
            self._say()
        return written

    def _keep(self, steps: Sequence[Step]) -> int:
        """Traced steps among the new ones, in order; the oldest make room. Returns how many came."""
        traced = [s for s in steps if any(e.spans for e in s.events)]
        for s in traced:
            if self._kept and s.number <= self._kept[-1].number:
                continue  # told twice, or too late
            self._kept.append(s)
            self._kept_spans += _count(s)
            if s.counts:
                self._lengths.append(1e3 * s.step_time_s)
            elif s.events[0].first_after_switch:
                self._lengths.clear()
        while len(self._kept) > TRACED_STEPS or (self._kept_spans > SPAN_CAP and len(self._kept) > 1):
            self._kept_spans -= _count(self._kept.popleft())
        return len(traced)

    def _answer(self) -> int:
        """Sees to what was asked for; returns how much that was."""
        with self._lock:
            asked = list(self._asked)
            self._asked.clear()
        for step, by in asked:
            if not self._kept:
                continue
            if step is None and not by:
                self._pinned, self._drawn_s = None, float("-inf")
                continue
            at = step if step is not None else (self._pinned or self._shown or self._kept[-1]).number
            numbers = [s.number for s in self._kept]
            if self._pinned is not None and at == self._pinned.number and not by:
                continue  # it may be one that is no longer kept
            nearest = min(range(len(numbers)), key=lambda i: abs(numbers[i] - at))
            self._pinned = self._kept[min(max(0, nearest + by), len(numbers) - 1)]
        return len(asked)

    # -- a step ---------------------------------------------------------------------------------------------------

    def _draw(self, timeline: Timeline) -> int:
        self._chosen = chosen = self._choose(timeline)
        spec_id = timeline.lanes[0].event.spec_id
        if spec_id != self._spec_id:  # another strategy has other rows
            self._spec_id, self._tracks, self._fills = spec_id, {}, {}
        for lane in chosen.values():
            self._tracks.update(dict.fromkeys(s.track for s in lane.spans))
        self._range.cover(np.array([*self._lengths, 1e3 * timeline.seconds]))
        return self._write_lanes(chosen) + self._write_spans(chosen)

    def _choose(self, timeline: Timeline) -> dict[int, RankLane]:
        """Place from the top -> lane. Of many ranks three: waiting least, in the middle, most."""
        if self._all:
            return {lane.rank: lane for lane in timeline.lanes if lane.rank < self.lanes}
        ordered = sorted(timeline.lanes, key=lambda lane: (sum(exposed_by_unit(lane.spans).values()), lane.rank))
        return dict(enumerate([ordered[0], ordered[len(ordered) // 2], ordered[-1]]))

    def _write_lanes(self, chosen: Mapping[int, RankLane]) -> int:
        rows, colors, labels = [], [], []
        for place, lane in chosen.items():
            top, bottom = place - LANE / 2, place + LANE / 2
            rows.append([1e3 * lane.begin_s, 1e3 * lane.end_s, top, bottom, lane.rank])
            colors.append(theme.rank_color(lane.rank) if self._all else NOBODYS)
            labels.append(f"rank {lane.rank}")
        return self._lanes.replace(rows, {"color": colors, "label": labels})

    def _write_spans(self, chosen: Mapping[int, RankLane]) -> int:
        placed = [
            (place, lane, s, row, rows) for place, lane in chosen.items() for s, row, rows in _in_rows(lane.spans)
        ]
        placed = sorted(placed, key=lambda p: -p[2].seconds)[:MOST_SPANS]
        numbers = []
        texts: dict[str, list[str]] = {name: [] for name in self._spans.texts}
        for place, lane, s, row, rows in placed:
            top, bottom = self._row(place, s.track, row, rows)
            start_s = lane.begin_s + s.start_s
            numbers.append([1e3 * start_s, 1e3 * (start_s + s.seconds), top, bottom, 1e3 * s.seconds, lane.rank])
            for name, text in zip(self._spans.texts, _words(s), strict=True):
                texts[name].append(text)
        self._fills.update(dict.fromkeys(texts["fill"]))
        return self._spans.replace(numbers, texts)

    def _row(self, place: int, track: Track, row: int, rows: int) -> tuple[float, float]:
        """Top and bottom of a row of a track, in places of lanes."""
        present = [t for t in FILLS if t in self._tracks]
        height = LANE / len(present)
        top = place - LANE / 2 + height * (present.index(track) + ROW_GAP / 2)
        each = height * (1 - ROW_GAP) / rows
        return top + row * each, top + (row + 1) * each

    def _say(self) -> None:
        shown, timeline = self._shown, self._timeline
        if shown is None or timeline is None:
            return
        legend = tuple(
            Key(label=fill.label, token=token, hatch=fill.hatch)
            for token, fill in _fills().items()
            if token in self._fills
        )
        self._captions = Captions(
            reading=("pinned · " if self._pinned is not None else "") + self._reading(timeline),
            legend=legend,
            note=" ".join(filter(None, [self._left_out(), *timeline.remarks])),
            pin=Pin(
                step=shown.number,
                held=self._pinned is not None,
                oldest=self._kept[0].number,
                newest=self._kept[-1].number,
                kept=len(self._kept),
            ),
        )

    def _reading(self, timeline: Timeline) -> str:
        """The step in a sentence: how long, and who waited longest, for what."""
        said = f"step {timeline.step:,}: {duration(timeline.seconds)}"
        if timeline.waits_unseen:
            whole_s = max(lane.event.exposed_comm_s for lane in timeline.lanes)
            return f"{said}, {duration(whole_s)} of it exposed" if math.isfinite(whole_s) else said
        rank, exposed = max(timeline.exposed().items(), key=lambda item: sum(item[1].values()))
        total_s = sum(exposed.values())
        if not total_s:
            return f"{said}, no communication exposed"
        unit, most_s = max(exposed.items(), key=lambda item: item[1])
        return f"{said}, {duration(total_s)} exposed on rank {rank}, most for {unit or NO_UNIT} ({duration(most_s)})"

    def _left_out(self) -> str:
        """What of the step is not drawn."""
        lanes = list(self._chosen.values())
        said = []
        if not self._all:
            least, middle, most = (lane.rank for lane in lanes)
            said.append(f"3 of {self.world_size} ranks: {least} waits least, {middle} middling, {most} most.")
        surplus = sum(len(lane.spans) for lane in lanes) - MOST_SPANS
        if surplus > 0:
            said.append(f"The {surplus:,} shortest spans are not drawn.")
        return " ".join(said)


def _fills() -> dict[str, theme.Fill]:
    """Token -> fill of everything that a timeline draws, in the order of the legend."""
    compute = {f"timeline.{name}": fill for name, fill in theme.COMPUTE.items()}
    wire = {token: theme.COMMUNICATION[token.partition(".")[2]] for token in FILLS.values() if token not in compute}
    return {**compute, **wire}


def _in_rows(spans: Sequence[Span]) -> list[tuple[Span, int, int]]:
    """Each span with its row among those of its track that it overlaps, and how many rows that track needs."""
    found = []
    for track in dict.fromkeys(s.track for s in spans):
        mine = [s for s in spans if s.track is track]
        rows = [min(row, MOST_ROWS - 1) for row in stacked([(s.start_s, s.end_s) for s in mine])]
        found += [(s, row, max(rows) + 1) for s, row in zip(mine, rows, strict=True)]
    return found


def _words(s: Span) -> tuple[str, ...]:
    """The texts of a row: fill, what, unit, link, bandwidth, group."""
    named = s.name.replace("_", "-")
    fill = FILLS[s.track]
    if s.track is Track.COMPUTE and s.name in theme.COMPUTE:
        fill = f"timeline.{s.name}"
    what = (
        f"waits for {named}" if s.track is Track.WAIT else named if s.track is Track.COMPUTE else TRACK_NAMES[s.track]
    )
    link = traffic(s.link_bytes) if s.link_bytes else "–"
    bus, algorithm = s.bus_bytes_per_s, s.algorithm_bytes_per_s
    rates = [f"{figures(value / 1e9)} GB/s {kind}" for kind, value in (("bus", bus), ("algorithm", algorithm)) if value]
    speed = ", ".join(rates) if s.track is not Track.WAIT and rates else "–"
    group = f"{s.dtype}, {s.size} ranks".removeprefix(", ") if s.ordinal >= 0 else "–"
    return fill, what, s.unit or "–", link, speed, group


def _count(step: Step) -> int:
    return sum(len(e.spans) for e in step.events)
