"""An incident as a small timeline in plain HTML: a failure is detected, its ranks are freed, training resumes.

A bar of three stretches on one scale, so that what took longest is seen; the seconds stand below it in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from fsdp_lab.core.formatting import duration
from fsdp_lab.runs.recovery import CHECKPOINT, Incident

MOST = 5
NOTHING = (
    "No rank has failed in this run. If one does, this shows when it was noticed, when the other ranks were released, "
    "when training resumed, and from what."
)
UNFINISHED = {"broken": "waits for Recover or Stop", "recovering": "is being recovered", "stopping": "is given up"}


def incidents_picture(incidents: Sequence[Incident], state: str, *, over: bool) -> str:
    """The newest incident, and the others, up to `MOST`, where they are asked for.

    Args:
        state: of the run, in its own word. over: whether it has ended.
    """
    if not incidents:
        return f'<div class="fsdp-soft">{NOTHING}</div>'
    newest, *others = list(incidents)[: -MOST - 1 : -1]
    now = "the run ended before it went on" if over else UNFINISHED.get(state, "the first step is under way")
    drawn = _drawn(newest, now)
    if not others:
        return drawn
    earlier = "".join(_drawn(incident, "did not go on") for incident in others)
    more = f" of {len(incidents) - 1}" if len(incidents) > MOST else ""
    return f'{drawn}<details class="fsdp-details"><summary>{len(others)}{more} before</summary>{earlier}</details>'


def moments(incident: Incident) -> list[tuple[str, float]]:
    """What happened, in order, and how many seconds after the failure; after it was detected where the failure's moment is
    not known."""
    told = (("failed", incident.failed_unix_s), ("detected", incident.detected_unix_s),
            ("freed", incident.freed_unix_s), ("training again", incident.resumed_unix_s))  # fmt: skip
    known = [(word, unix_s) for word, unix_s in told if unix_s is not None]
    begun_unix_s = known[0][1]
    return [(word, max(0.0, unix_s - begun_unix_s)) for word, unix_s in known]


def _drawn(incident: Incident, unfinished: str) -> str:
    told = moments(incident)
    head = f"<b>step {incident.step:,}</b> · {escape(incident.sentence)}"
    parts = "".join(
        f'<i class="fsdp-stretch" data-to="{word}" style="flex-grow:{max(at_s - before_s, 1e-6):.6f}"></i>'
        for (_, before_s), (word, at_s) in pairwise(told)
    )
    open_end = "" if incident.resumed_unix_s is not None else '<i class="fsdp-stretch" data-to="open"></i>'
    times = " → ".join(f'<span class="fsdp-moment" data-of="{word}">{word} <b>{_after(at_s)}</b></span>'
                       for word, at_s in told)  # fmt: skip
    end = "" if incident.resumed_unix_s is not None else f" → <span>{unfinished}</span>"
    facts = "".join(f"<div>{escape(fact)}.</div>" for fact in _facts(incident))
    return (f'<div class="fsdp-incident"><div>{head}</div><div class="fsdp-stretches" aria-hidden="true">{parts}{open_end}'
            f'</div><div class="fsdp-moments">{times}{end}</div><div class="fsdp-soft">{facts}</div></div>')  # fmt: skip


def _after(seconds: float) -> str:
    return duration(seconds) if seconds else "0 s"


def _facts(incident: Incident) -> list[str]:
    """What it went on from, what was done again, and what is not as it was."""
    if incident.resumed_step is None:
        return []
    lost = incident.lost_steps
    at = f" of step {incident.resumed_step:,}" if incident.source == CHECKPOINT else ""
    again = f"{lost:,} step{'s' * (lost != 1)} done again" if lost else "no step done again"
    before, after = incident.ranks, incident.resumed_ranks
    ranks = f"{before} ranks" if before == after else f"{before} → {after} ranks"
    return [f"It went on from {incident.source}{at} · {again} · {ranks}", *incident.notes]
