"""Communication: the time that each rank's collectives take in a step, by kind, and the bytes they put on its link; and a
table of ranks, which shows who makes the others wait."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

import numpy as np
from bokeh.layouts import row
from bokeh.plotting import figure

from fsdp_lab.base.events import Carrier, StepEvent, Traffic
from fsdp_lab.base.formatting import duration, median_known, size, traffic
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.panels import draw
from fsdp_lab.dashboard.panels.axis import STEP_LIMIT, Apart, StepAxis, ZeroRange, calm
from fsdp_lab.dashboard.panels.base import APART, Captions, Cell, Columns, Key, Panel, Patches
from fsdp_lab.runs.steps import Step
from fsdp_lab.spec.link import format_rate

KINDS = tuple(theme.COMMUNICATION)
TOKENS = tuple(f"communication.{kind}" for kind in KINDS)
RECENT_STEPS = 20
AREAS = "Areas: issue to completion (in flight), overlapped time included."
STRAGGLES = 1.1  # times the median of all ranks that a straggler works
BARS_EVERY_S = 0.5  # medians change too slowly to be painted ten times a second


class CommunicationPanel(Panel):
    """On the left a bar a rank, stacked by kind, median of the last steps; on the right the mean of ranks over steps.
    Times are issue to completion: collectives that overlap with computing or with each other count in full, so a bar
    may be longer than the step. The line is exposed communication: the time that computing waited."""

    name = "communication"
    title = "Communication"
    wide = True

    def __init__(self, frame: StepAxis, world_size: int) -> None:
        super().__init__()
        self.world_size = world_size
        self._frame = frame
        now = ["rank", *KINDS, *(f"{k}_mb" for k in KINDS), "exposed", "total"]
        self._now = Columns("communication.now", now, texts=["label", "color", "place"], limit=world_size)
        self._ranks = draw.RanksByHost("communication.now", world_size)
        self._over = Columns("communication.steps", ["step", *KINDS, "exposed", "total", "step_ms"], limit=STEP_LIMIT)
        self._apart = Apart()
        self._slowed = Columns("communication.apart", ["step", "value"], texts=["why"], limit=STEP_LIMIT)
        self._now_range, self._over_range = ZeroRange(headroom=1.5, slack=0.5), ZeroRange()
        self._recent: deque[Step] = deque(maxlen=RECENT_STEPS)
        self._drawn_s = 0.0  # when the bars were drawn
        self._seen: set[str] = set()  # kinds that have occurred
        self._carriers: tuple[Carrier, ...] = ()
        self.sources = (self._now, self._over, self._slowed)
        self.root = row(self._draw_now(), self._draw_over(frame), sizing_mode="stretch_width", spacing=16)

    def _draw_now(self) -> figure:
        fig = draw.rank_bars("communication.now", f"ms a step, median of {RECENT_STEPS}", self.world_size)
        source = draw.twin(self._now)
        few = self.world_size <= theme.MOST_LINES
        bars = fig.hbar_stack(list(KINDS), y="rank", height=draw.BAR, source=source, line_width=1 if few else 0)
        draw.paint_stack(bars, TOKENS)
        if few:
            draw.sign_bars(fig, source, y="rank", end="total")
        rows = [(theme.COMMUNICATION[k].label, f"@{k}{{0,0.00}} ms, @{k}_mb{{0,0.00}} MB") for k in KINDS]
        rows = [("rank", "@place"), *rows, ("exposed", "@exposed{0,0.00} ms")]
        draw.hover_bars(fig, source, rows, right="total", y="rank", height=0.9)
        return fig

    def _draw_over(self, frame: StepAxis) -> figure:
        fig = frame.plot("communication.over", "ms per step, mean of ranks")
        source = draw.twin(self._over)
        draw.paint_stack(fig.varea_stack(list(KINDS), x="step", source=source), TOKENS, line=False)
        frame.overlays.draw(fig, "exposed_ms", seam=True)
        # A seam sets the line apart from the areas.
        for width, token in ((draw.LINE_PX + 3, "ink.gap"), (draw.LINE_PX, "timeline.waiting")):
            draw.line(fig, source, "exposed", token, line_width=width)
        total = fig.line("step", "total", source=source, line_alpha=0)
        frame.draw_apart(fig, self._slowed)
        frame.fit(fig, self._over.name, ["total", "exposed"], others="exposed_ms")
        frame.label_markers(fig)
        rows = [(theme.COMMUNICATION[k].label, f"@{k}{{0,0.00}} ms") for k in KINDS]
        times = [("all", "@total{0,0.00} ms"), ("exposed", "@exposed{0,0.00} ms"), ("step time", "@step_ms{0,0.0} ms")]
        draw.hover(fig, total, [("step", "@step"), *rows, *times])
        return fig

    def update(self, steps: Sequence[Step]) -> None:
        if not steps:
            return
        for s in steps:
            if s.events[0].first_after_switch:
                self._recent.clear()
                self._carriers = s.events[0].carriers
            if s.counts or not self._recent:
                self._recent.append(s)
            self._seen.update(k for e in s.events for k in e.comm if e.comm[k].calls)
        rows, slowed = [], []
        for s in steps:
            kinds = [fmean(_of(e.comm, k).seconds for e in s.events) * 1e3 for k in KINDS]
            exposed = fmean(e.exposed_comm_s for e in s.events) * 1e3
            if reason := self._apart.reason(s):
                slowed.append((s.number, exposed, reason))
            else:
                rows.append([s.number, *kinds, exposed, sum(kinds), s.step_time_s * 1e3])
        self._over.append(rows)
        self._slowed.append([row[:2] for row in slowed], {"why": [why for *_, why in slowed]})
        now_s = steps[-1].events[0].end_unix_s
        if now_s - self._drawn_s >= BARS_EVERY_S or len(self._recent) < RECENT_STEPS:
            self._drawn_s = now_s
            self._write_now()
        self.cover()
        self._captions = self._describe()

    def cover(self) -> None:
        own = np.fmax(self._over.column("total"), self._over.column("exposed"))
        self._over_range.cover(np.concatenate([calm(own), self._frame.others("exposed_ms")]))

    def _write_now(self) -> None:
        rows = []
        self._ranks.follow(self._recent[-1].events)
        ranks = [e.rank for e in self._recent[-1].events]
        for rank in ranks:
            own = [e for s in self._recent for e in s.events if e.rank == rank]
            ms = [median(_of(e.comm, k).seconds for e in own) * 1e3 for k in KINDS]
            mb = [median(_of(e.comm, k).link_bytes for e in own) / 1e6 for k in KINDS]
            rows.append([rank, *ms, *mb, median_known(e.exposed_comm_s for e in own) * 1e3, sum(ms)])
        texts = {"label": [duration(row[-1] / 1e3) for row in rows], "color": [*map(theme.rank_color, ranks)]}
        self._now.replace(rows, {**texts, "place": [*map(self._ranks.place, ranks)]})
        self._now_range.cover(self._now.column("total"))

    def _describe(self) -> Captions:
        recent = list(self._recent)
        seconds = median(fmean(sum(t.seconds for t in e.comm.values()) for e in s.events) for s in recent)
        link = median(fmean(sum(t.link_bytes for t in e.comm.values()) for e in s.events) for s in recent)
        exposed = median_known(fmean(e.exposed_comm_s for e in s.events) for s in recent)
        step_s = median(s.step_time_s for s in recent)
        share = 100 * exposed / step_s
        part = f"{duration(exposed)} exposed of {duration(step_s)} ({share:.0f} %); " if math.isfinite(exposed) else ""
        legend = [draw.fill_key(token) for kind, token in zip(KINDS, TOKENS, strict=True) if kind in self._seen]
        waited = Key(label="exposed: computing waits", token="timeline.waiting", hatch="line")
        slowed = (APART,) if len(self._slowed) else ()
        # Such as "Between ranks over shared memory, 3.9 GB/s a rank."
        ways = [f"between {c.between} over {c.name}, {format_rate(c.bytes_per_s)} a rank" for c in self._carriers]
        told = "; ".join(ways) + ". " if ways else ""
        return Captions(
            reading=f"{part}{duration(seconds)} in flight; {traffic(link)} a rank; median of {RECENT_STEPS}",
            legend=(*legend, waited, *slowed),
            note=f"{told[:1].upper()}{told[1:]}{self._between_hosts(recent)}{AREAS}",
        )

    def _between_hosts(self, recent: Sequence[Step]) -> str:
        """Such as "To other hosts 1.2 MB a rank and step, 5 % of all. Shard groups of 12 ranks span hosts of 8." """
        if not self._ranks.several:
            return ""
        events = [e for s in recent for e in s.events]
        sent = fmean(e.across_bytes for e in events)
        whole = fmean(sum(t.link_bytes for t in e.comm.values()) for e in events)
        seconds = fmean(e.across_s for e in events)
        rate = f", {format_rate(sent / seconds)}" if sent and seconds else ""
        share = f", {100 * sent / whole:.0f} % of all" if whole else ""
        told = f"To other hosts {traffic(sent)} a rank and step{share}{rate}. "
        n, each = self._frame.shard_factor, self._ranks.per_host
        if not 1 < n < self.world_size or each == self.world_size:
            return told
        if each % n == 0:
            return f"{told}Shard groups of {n} ranks are inside hosts. "
        way = f"; shard_size={each} shards inside them" if each > 1 else ""
        return f"{told}Shard groups of {n} ranks span hosts of {each}{way}. "

    def patches(self) -> Patches:
        return {
            **self._ranks.patches(),
            "communication.now.x": {"start": 0.0, "end": self._now_range.end},
            "communication.over.y": {"start": 0.0, "end": self._over_range.end},
        }

    def captions(self) -> Captions:
        own = self._captions
        return replace(own, legend=(*own.legend, *self._frame.other_keys("exposed")))


class RanksPanel(Panel):
    """A row for each rank, medians of its last ordinary steps; a reader sorts it by its heads. A straggler is marked: a rank
    that works longer than others, so that they wait for it. Hidden for one rank, unless its GPU is known."""

    name = "ranks"
    title = "Ranks"
    tab = "ranks"
    wide = True

    def __init__(self, frame: StepAxis, world_size: int) -> None:
        super().__init__(Captions(hidden=True))
        self.world_size = world_size
        self._recent: deque[Step] = deque(maxlen=RECENT_STEPS)
        self._apart = Apart()
        self._drawn_s = 0.0

    def update(self, steps: Sequence[Step]) -> None:
        for s in steps:
            if s.events[0].first_after_switch:
                self._recent.clear()
            if not self._apart.reason(s):
                self._recent.append(s)
        newest = self._recent[-1].events if self._recent else ()
        gpus = {e.rank: _gpu_cells(e) for e in newest}
        gauged = any(cell.about for cells in gpus.values() for cell in cells)
        if not newest or (self.world_size == 1 and not gauged):
            return
        now_s = newest[0].end_unix_s
        if now_s - self._drawn_s < BARS_EVERY_S and len(self._recent) == RECENT_STEPS:
            return
        self._drawn_s = now_s
        events = [e for s in self._recent for e in s.events]
        own: dict[int, list[StepEvent]] = {e.rank: [] for e in newest}
        late_s = dict.fromkeys(own, 0.0 if any(e.late for e in events) else math.nan)  # mean of a step
        for e in events:
            own.setdefault(e.rank, []).append(e)
            for rank, seconds in e.late:
                late_s[rank] = late_s.get(rank, 0.0) + seconds / len(self._recent)
        works_s = {r: median(_works(e) for e in told) for r, told in own.items()}
        slow = [r for r, seconds in works_s.items() if seconds > STRAGGLES * median(works_s.values())]
        named = any(e.host for e in events)
        heads = ("rank", *(("host",) if named else ()), *RANK_COLUMNS, *(GPU_COLUMNS if gauged else ()))
        rows = []
        for rank, told in own.items():
            tone, title = ("bad", "Straggler: the others wait for it") if rank in slow else ("", "")
            head = Cell(text=f"{rank}", about=f"{rank}", tone=tone, title=title)
            input_s = median_known(math.nan if e.input_s is None else e.input_s for e in told)
            exposed_s = median_known(e.exposed_comm_s for e in told)
            step_s = median(e.step_time_s for e in told)
            figures = (step_s, works_s[rank], exposed_s, late_s.get(rank, math.nan), input_s)
            peak = told[-1].memory.peak_bytes
            cells = [Cell(text=duration(s), about=f"{s}" if math.isfinite(s) else "") for s in figures]
            cells.append(Cell(text=size(peak) if peak else "–", about=f"{peak}"))
            rows.append((head, *((told[-1].host,) if named else ()), *cells, *(gpus[rank] if gauged else ())))
        reading = f"rank {', '.join(map(str, slow))} works longest: the others wait" if slow else "no rank straggles"
        note = f"Works: step time without exposed communication; marked above {STRAGGLES:g} times the median. "
        note += "Late: what the others wait until it joins, a step."
        self._captions = Captions(
            reading=f"{reading}; medians of {len(self._recent)} steps",
            note=f"{note} {GPU_NOTE}" if gauged else note,
            table=(heads, *rows),
            sortable=True,
        )


RANK_COLUMNS = ("step time", "works", "exposed", "late", "input", "memory peak")
GPU_COLUMNS = ("GPU busy", "power", "temperature")
GPU_NOTE = "GPU busy: the time in which it ran any kernel, one that waits for other ranks too, as nvidia-smi tells it."


def _gpu_cells(event: StepEvent) -> list[Cell]:
    """What the driver said of a rank's GPU before this step."""
    told = ((event.gpu_percent, "%"), (event.gpu_power_w, "W"), (event.gpu_temperature_c, "°C"))
    return [Cell(text="–" if n is None else f"{n:.0f} {unit}", about="" if n is None else f"{n}") for n, unit in told]


def _works(event: StepEvent) -> float:
    """Seconds of a step in which a rank does not wait for others."""
    exposed_s = event.exposed_comm_s
    return event.step_time_s - (exposed_s if math.isfinite(exposed_s) else 0.0)


def _of(comm: Mapping[str, Traffic], kind: str) -> Traffic:
    return comm.get(kind) or Traffic()
