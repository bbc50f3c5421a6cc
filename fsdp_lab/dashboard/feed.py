"""From a lab's current run to the cards of a live view: what one tick does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..events import StepEvent
from .live import LiveView, Scene
from .panels import PANELS, Assembler, Frame, Panel, Pinnable, Step
from .panels.units import duration
from .ports import LabLike, RunLike, SwitchLike

SPEAKING = ("backend", "sharding", "precision", "model")  # fields whose values say what they are


class Feed:
    """Takes what is new of the current run, gives it to the panels and sends one message.

    Another run, another world size, or steps that begin again make new panels: a plot shows one thing.
    """

    def __init__(self, lab: LabLike, live: LiveView) -> None:
        self._lab = lab
        self._live = live
        self._run: RunLike | None = None
        self._world_size = 0
        self._last: Step | None = None
        self._cursor = 0
        self._told = 0  # switches of the run that were seen to
        self._begin(None, lab.spec.world_size)

    def tick(self) -> Sequence[StepEvent]:
        """Returns the events that are new. Not from two threads at once."""
        run = self._lab.current
        events: Sequence[StepEvent] = ()
        if run is not None:
            if self._run is None or run.id != self._run.id:
                self._begin(run, run.spec.world_size)
            # Events first: a switch is known to the run before the first event of its Spec is.
            events, self._cursor = run.events.since(self._cursor)
            switches = run.switches
            for part in self._parts(events, switches[self._told :]):
                self._show(self._assembler.add(part))
            if run.state.over:
                self._show(self._assembler.flush())
        for panel in self._pinnable:
            panel.update(())  # another step may have been asked for
        self._live.flush([e.end_unix_s for e in events])
        return events

    def _parts(self, events: Sequence[StepEvent], switches: Sequence[SwitchLike]) -> Iterator[Sequence[StepEvent]]:
        """The events up to each switch; a switch is marked, or makes new panels where it began again at step 0."""
        rest = list(events)
        for switch in switches:
            if switch.before is not None and not switch.carried:
                cut = next((i for i, e in enumerate(rest) if e.spec_id == switch.after.id), len(rest))
                yield rest[:cut]
                rest = rest[cut:]
                self._restart(switch.after.world_size)
            elif switch.before is not None:
                self._frame.mark(switch.step, *describe(switch))
            self._told += 1
        yield rest

    def _show(self, steps: Sequence[Step]) -> None:
        if not steps:
            return
        self._last = steps[-1]
        self._frame.follow(steps)
        for panel in self._panels:
            panel.update(steps)

    def _begin(self, run: RunLike | None, world_size: int) -> None:
        self._run = run
        self._cursor = 0
        self._told = 0
        self._restart(world_size)

    def _restart(self, world_size: int) -> None:
        self._assembler = Assembler()
        self._last = None
        self._frame = Frame()
        self._panels: list[Panel] = [make(self._frame, world_size) for make in PANELS]
        self._pinnable = [panel for panel in self._panels if isinstance(panel, Pinnable)]
        self._live.show(
            Scene(
                cards=self._panels,
                shared_sources=self._frame.sources,
                shared_patches=self._frame.patches,
                headline=self._headline,
                ranks=world_size,
            )
        )

    def _headline(self) -> str:
        """What is trained, how, and how far it is."""
        spec = (self._run or self._lab).spec
        s = spec.strategy
        how = [s.backend, s.sharding, _token(s.precision), *([f"offload {s.offload}"] if s.offload != "none" else [])]
        what = [_token(spec.workload.model), " ".join(how), f"{spec.world_size} rank{'s' * (spec.world_size != 1)}"]
        if self._last is not None:
            what = [f"step {self._last.number:,}", f"{duration(self._last.step_time_s)} a step", *what]
        return " · ".join(what)


def describe(switch: SwitchLike) -> tuple[str, str]:
    """A change in a few words, to write along a line; and in a sentence."""
    assert switch.before is not None
    changes = switch.before.difference(switch.after)
    label = ", ".join(
        _token(new) if name in SPEAKING else f"{name.replace('_', ' ')} {_token(new, name)}"
        for name, (_, new) in changes.items()
    )
    told = ", ".join(
        f"{name.replace('_', ' ')} {_token(old, name)} → {_token(new, name)}" for name, (old, new) in changes.items()
    )
    how = "parameters and optimizer carried over" if switch.carried else "started afresh"
    return label or "no change", f"step {switch.step:,}: {told} ({how}, {switch.seconds:.2f} s)"


def _token(value: Any, name: str = "") -> str:
    if isinstance(value, dict):
        return str(value.get("model_type") or "/".join(str(v) for v in value.values() if v))
    if isinstance(value, (list, tuple)):
        return " ".join(str(v) for v in value)
    if value is None:
        return "off" if name == "link" else "auto"
    return str(getattr(value, "param", value))
