"""Timeline: what each rank did in a traced step, on one clock. The step is the newest one traced, or a pinned one."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from bokeh.models import CDSView, FixedTicker, GroupFilter, PanTool, Range1d, WheelZoomTool
from bokeh.plotting import figure

from fsdp_lab.base.events import Span, Track, exposed_by_unit
from fsdp_lab.base.formatting import duration, figures, traffic
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.panels import draw
from fsdp_lab.dashboard.panels.axis import FINE, StepAxis, ZeroRange
from fsdp_lab.dashboard.panels.base import Captions, Columns, Panel, Patches, Pin
from fsdp_lab.runs.steps import SPAN_CAP, TRACED_STEPS, Step
from fsdp_lab.runs.timeline import NO_UNIT, TRACK_NAMES, RankLane, Timeline, stacked

LANE_PX = ((2, 104), (4, 84), (theme.MOST_LINES, 58))  # up to this number of lanes, the height of each
AXIS_PX = 50
LANE = 0.9  # the height of a lane, of the distance between two
ROW_GAP = 0.12  # of a row's height
MOST_ROWS = 4  # for overlapping spans of a track; more of them cover each other
MOST_SPANS = 6000  # drawn; the shortest are left out
REDRAW_S = 0.4
RANGE_STEPS, HELD_STEPS = 8, 3  # the x range holds the median of the last 8, each of the last 3, and what is shown
PLACE = ("left", "right", "top", "bottom")
# Nothing of a span leaves an empty row.
TOOLTIP = """<b>@what</b> @unit<br>rank @rank, @ms{0,0.00} ms, from @left{0,0.00} ms
<div style="max-width: 340px">@more</div>"""

# Track -> theme token, unless the name of a span decides; in the order of rows in a lane, from the top.
TRACK_TOKENS: Mapping[Track, str] = {
    Track.COMPUTE: "timeline.compute",
    Track.WAIT: "timeline.waiting",
    Track.ALL_GATHER: "communication.all_gather",
    Track.REDUCE_SCATTER: "communication.reduce_scatter",
    Track.ALL_REDUCE: "communication.all_reduce",
    Track.HOST_COPY: "timeline.host_copy",
    Track.OTHER: "communication.other",
    Track.CONTROL: "communication.control",
}
# Everything that a timeline draws, in the order of the legend.
DRAWN_TOKENS = tuple(dict.fromkeys((*(f"timeline.{name}" for name in theme.COMPUTE), *TRACK_TOKENS.values())))


class TimelinePanel(Panel):
    """A lane a rank, with a thin row for each track that occurs. Of more ranks than colours, three lanes: the ranks that
    wait least (the others wait for it), median and most."""

    name = "timeline"
    title = "Step timeline"
    tab = "timeline"
    wide = True

    def __init__(self, frame: StepAxis, world_size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(Captions(reading="One step every half second is traced and drawn here."))
        self.world_size = world_size
        self._all = world_size <= theme.MOST_LINES
        self.lanes = world_size if self._all else 3
        self._clock = clock
        texts = ["fill", "what", "unit", "more"]
        self._spans = Columns("timeline.spans", [*PLACE, "ms", "rank"], texts=texts, limit=MOST_SPANS)
        self._lanes = Columns("timeline.lanes", [*PLACE, "rank"], texts=["color", "label"], limit=self.lanes)
        self._traced: deque[Step] = deque()
        self._span_count = 0  # of all traced steps
        self._lock = threading.Lock()
        self._requests: deque[tuple[int | None, int]] = deque(maxlen=20)  # guarded by the lock
        self._pinned: Step | None = None
        self._shown: Step | None = None
        self._drawn_s = float("-inf")
        self._spec_id = ""  # of the step that is shown
        self._tracks: set[Track] = set()  # that have occurred under this Spec
        self._tokens: set[str] = set()
        self._lengths: deque[float] = deque(maxlen=RANGE_STEPS)  # ms
        self._range = ZeroRange(headroom=1.02, slack=0.8, steps=FINE)
        self._timeline: Timeline | None = None  # of the step that is shown
        self._drawn_lanes: dict[int, RankLane] = {}
        self.sources = (self._spans, self._lanes)
        self.root: figure = self._draw_empty()

    def _draw_empty(self) -> figure:
        x_range = Range1d(start=0, end=1, name="timeline.x")
        fig = draw.plain_figure("timeline", "rank", x_range=x_range, y_range=Range1d(start=self.lanes - 0.5, end=-0.5))
        fig.height = AXIS_PX + self.lanes * next(px for most, px in LANE_PX if self.lanes <= most)
        fig.xaxis.axis_label = "ms since the first rank began the step"
        fig.yaxis.name = "timeline.ranks"
        fig.yaxis.ticker = FixedTicker(ticks=list(range(self.lanes)))
        fig.ygrid.visible = False
        fig.add_tools(PanTool(dimensions="width"), WheelZoomTool(dimensions="width", modifiers={"shift": True}))
        lanes = draw.twin(self._lanes)
        draw.quads(fig, lanes, fill_color="color", fill_alpha=0.1, line_alpha=0)
        fig.segment(x0="left", x1="left", y0="top", y1="bottom", source=lanes, line_color="color", line_width=3)
        spans = draw.twin(self._spans)
        drawn = []
        for token in DRAWN_TOKENS:
            view = CDSView(filter=GroupFilter(column_name="fill", group=token))
            bars = draw.quads(fig, spans, view=view, line_width=0.5)
            # A short span is seen by its outline.
            draw.paint_fill(bars.glyph, token, outline=token if draw.FILLS[token].hatch == " " else "ink.faint")
            drawn.append(bars)
        draw.hover(fig, drawn, TOOLTIP, mode="mouse", below=True)
        # Filled by the search of the page (finding.js), above the spans.
        for name, token, fill, line in (("veiled", "ink.gap", 0.8, 0.8), ("found", "ink.peak", 0.0, 1.0)):
            source = draw.twin(Columns(f"timeline.{name}", PLACE))
            marks = draw.quads(fig, source, level="annotation", fill_alpha=fill, line_alpha=line, line_width=1.5)
            draw.tint(marks.glyph, fill_color=token, line_color=token)
        return fig

    def patches(self) -> Patches:
        patches: dict[str, dict[str, Any]] = {"timeline.x": {"start": 0.0, "end": self._range.end}}
        if not self._all:
            names = [[place, str(lane.rank)] for place, lane in self._drawn_lanes.items()]
            patches["timeline.ranks"] = {"major_label_overrides": {"type": "map", "entries": names}}
        return patches

    def pin(self, step: int | None, by: int = 0) -> None:
        with self._lock:
            self._requests.append((step, by))

    def update(self, steps: Sequence[Step]) -> None:
        changed = self._apply_pins() + self._add(steps)  # in this order: a pin was chosen among the former steps
        wanted = self._pinned or (self._traced[-1] if self._traced else None)
        if wanted is None:
            return
        due = self._pinned is not None or self._clock() - self._drawn_s >= REDRAW_S
        if is_new := wanted is not self._shown and due:
            self._drawn_s, self._shown, self._timeline = self._clock(), wanted, Timeline.of(wanted.events)
            self._draw(self._timeline)
        if changed or is_new:
            self._describe()

    def _add(self, steps: Sequence[Step]) -> int:
        """Keeps the traced ones among new steps, and drops the oldest; returns how many are traced."""
        traced = [s for s in steps if any(e.spans for e in s.events)]
        for s in traced:
            if self._traced and s.number <= self._traced[-1].number:
                continue  # a repeated or late step
            self._traced.append(s)
            self._span_count += _count(s)
            if s.counts:
                self._lengths.append(1e3 * s.step_time_s)
            elif s.events[0].first_after_switch:
                self._lengths.clear()
        while len(self._traced) > TRACED_STEPS or (self._span_count > SPAN_CAP and len(self._traced) > 1):
            self._span_count -= _count(self._traced.popleft())
        return len(traced)

    def _apply_pins(self) -> int:
        """Handles the requests to pin; returns how many there were."""
        with self._lock:
            requests = list(self._requests)
            self._requests.clear()
        for step, by in requests:
            if not self._traced:
                continue
            if step is None and not by:
                self._pinned, self._drawn_s = None, float("-inf")
                continue
            at = step if step is not None else (self._pinned or self._shown or self._traced[-1]).number
            if self._pinned is not None and at == self._pinned.number and not by:
                continue  # it may be one that is no longer kept
            away = [abs(s.number - at) for s in self._traced]
            self._pinned = self._traced[min(max(0, away.index(min(away)) + by), len(away) - 1)]
        return len(requests)

    def _draw(self, timeline: Timeline) -> None:
        lanes = {lane.rank: lane for lane in timeline.lanes if lane.rank < self.lanes}
        if not self._all:  # those that wait least, median and most, from the top
            ordered = sorted(timeline.lanes, key=lambda lane: (sum(exposed_by_unit(lane.spans).values()), lane.rank))
            lanes = dict(enumerate([ordered[0], ordered[len(ordered) // 2], ordered[-1]]))
        self._drawn_lanes = lanes
        spec_id = timeline.lanes[0].event.spec_id
        if spec_id != self._spec_id:  # another strategy has other rows
            self._spec_id, self._tracks, self._tokens = spec_id, set(), set()
        for lane in lanes.values():
            self._tracks.update(s.track for s in lane.spans)
        usual_ms = median(self._lengths) if self._lengths else 0.0
        newest_ms = list(self._lengths)[-HELD_STEPS:]  # a slow one does not move the axis to and fro
        self._range.cover(np.array([usual_ms, *newest_ms, 1e3 * timeline.seconds]))
        half = LANE / 2
        rows = [[1e3 * a.begin_s, 1e3 * a.end_s, at - half, at + half, a.rank] for at, a in lanes.items()]
        colors = [theme.rank_color(lane.rank) if self._all else draw.NEUTRAL for lane in lanes.values()]
        self._lanes.replace(rows, {"color": colors, "label": [f"rank {lane.rank}" for lane in lanes.values()]})
        self._write_spans(lanes)

    def _write_spans(self, lanes: Mapping[int, RankLane]) -> None:
        placed = [(place, lane, s, row, rows) for place, lane in lanes.items() for s, row, rows in _in_rows(lane.spans)]
        placed = sorted(placed, key=lambda p: -p[2].seconds)[:MOST_SPANS]
        present = [t for t in TRACK_TOKENS if t in self._tracks]
        height = LANE / max(1, len(present))  # of a track
        numbers = []
        for place, lane, s, row, rows in placed:
            start_s, each = lane.begin_s + s.start_s, height * (1 - ROW_GAP) / rows
            top = place - LANE / 2 + height * (present.index(s.track) + ROW_GAP / 2)
            at = (1e3 * start_s, 1e3 * (start_s + s.seconds), top + row * each, top + (row + 1) * each)
            numbers.append([*at, 1e3 * s.seconds, lane.rank])
        told = [_span_texts(s) for _, _, s, _, _ in placed]
        texts = {name: [words[i] for words in told] for i, name in enumerate(self._spans.texts)}
        self._tokens.update(texts["fill"])
        self._spans.replace(numbers, texts)

    def _describe(self) -> None:
        shown, timeline = self._shown, self._timeline
        if shown is None or timeline is None:
            return
        held, oldest, newest = self._pinned is not None, self._traced[0].number, self._traced[-1].number
        lanes = list(self._drawn_lanes.values())
        notes = []
        if not self._all:
            least, middle, most = (lane.rank for lane in lanes)
            of = f"3 of {self.world_size} ranks"
            notes.append(f"{of}: {least} waits least, {middle} is the median, {most} waits most.")
        if (surplus := sum(len(lane.spans) for lane in lanes) - MOST_SPANS) > 0:
            notes.append(f"The {surplus:,} shortest spans are not drawn.")
        self._captions = Captions(
            reading=f"{'pinned ·' if held else 'traced'} {self._reading(timeline)}",
            legend=tuple(draw.fill_key(token) for token in DRAWN_TOKENS if token in self._tokens),
            note=" ".join([*notes, *filter(None, timeline.remarks)]),
            pin=Pin(step=shown.number, held=held, oldest=oldest, newest=newest, kept=len(self._traced)),
        )

    def _reading(self, timeline: Timeline) -> str:
        """The step in a sentence: its duration, and which rank waited longest, for what."""
        text = f"step {timeline.step:,}: {duration(timeline.seconds)}"
        if timeline.waits_unseen:
            whole_s = max(lane.event.exposed_comm_s for lane in timeline.lanes)
            return f"{text}, {duration(whole_s)} of it exposed" if math.isfinite(whole_s) else text
        rank, exposed = max(timeline.exposed().items(), key=lambda item: sum(item[1].values()))
        total_s = sum(exposed.values())
        if not total_s:
            return f"{text}, no communication exposed"
        unit, most_s = max(exposed.items(), key=lambda item: item[1])
        return f"{text}, {duration(total_s)} exposed on rank {rank}, most for {unit or NO_UNIT} ({duration(most_s)})"


def _in_rows(spans: Sequence[Span]) -> list[tuple[Span, int, int]]:
    """Each span with its row among the overlapping ones of its track, and the number of rows of that track."""
    placed = []
    for track in dict.fromkeys(s.track for s in spans):
        own = [s for s in spans if s.track is track]
        rows = [min(row, MOST_ROWS - 1) for row in stacked([(s.start_s, s.end_s) for s in own])]
        placed += [(s, row, max(rows) + 1) for s, row in zip(own, rows, strict=True)]
    return placed


def _span_texts(s: Span) -> tuple[str, ...]:
    """The text columns of a span: fill, what, unit, and what else is known of it."""
    named = s.name.replace("_", "-")
    is_named = s.track is Track.COMPUTE and s.name in theme.COMPUTE
    token = f"timeline.{s.name}" if is_named else TRACK_TOKENS[s.track]
    what = {Track.WAIT: f"waits for {named}", Track.COMPUTE: named}.get(s.track, TRACK_NAMES[s.track])
    link = traffic(s.link_bytes) if s.link_bytes else ""
    bus, algorithm = s.bus_bytes_per_s, s.algorithm_bytes_per_s
    rates = [f"{figures(value / 1e9)} GB/s {kind}" for kind, value in (("bus", bus), ("algorithm", algorithm)) if value]
    group = f"{s.dtype}, {s.size} ranks".removeprefix(", ") if s.ordinal >= 0 else ""
    more = ", ".join(filter(None, [link, *(rates if s.track is not Track.WAIT else ()), group]))
    return token, what, s.unit, more


def _count(step: Step) -> int:
    return sum(len(e.spans) for e in step.events)
