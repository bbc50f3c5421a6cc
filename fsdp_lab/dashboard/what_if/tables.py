"""Plans as text: the sentences and figures of an answer, and the table of the strategies that a search found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsdp_lab.core.formatting import count, duration, figures, size
from fsdp_lab.dashboard.panels.base import BaseCard, Captions, Cell
from fsdp_lab.dashboard.what_if.question import Answer, Question, searched_fields, unsearched_fields
from fsdp_lab.planner.plan import Plan, band_text, likely_text
from fsdp_lab.planner.search import Search, strategy_label


def headline(answer: Answer) -> str:
    """What is planned, and on which machine."""
    p = answer.plan
    m, w = p.machine, p.spec.workload
    model = w.model if isinstance(w.model, str) else str(w.model.get("model_type", "a config"))
    hosts = f"{m.hosts:,} hosts at {m.network_bytes_per_s * 8 / 1e9:,.0f} Gb/s each" if m.hosts > 1 else "one host"
    n = p.shape.parameters
    parameters = f"{figures(n / 1e9)} billion" if n >= 1e9 else f"{figures(n / 1e6)} million"
    batch = f"global batch {p.spec.global_batch:,}"
    return f"{model}, {parameters} parameters · {m.ranks:,} × {m.device.name} in {hosts} · {batch}"


def verdict(p: Plan) -> str:
    """Whether it fits, and by how much."""
    limit = size(p.machine.device.memory_bytes)
    if p.fits:
        return f"fits {limit}, {size(p.margin_bytes)} to spare{likely_text(p)}"
    return f"does not fit {limit}: {size(-p.margin_bytes)} too much{likely_text(p)}"


def limiting_factor(answer: Answer) -> str:
    """What limits the speed, in one sentence."""
    sentence = answer.binds or f"bound by {answer.plan.binding}"
    return f"{sentence[0].upper()}{sentence[1:]}."


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.995 else "100 %"


def taken_bytes(p: Plan) -> int:
    """The memory taken on a GPU, with the allocator's slack and the CUDA context."""
    return p.machine.device.memory_bytes - p.margin_bytes


class AnswerCard(BaseCard):
    """The main figures of a prediction, and what was assumed."""

    name = "answer"
    title = "Prediction"
    wide = True

    def show(self, answer: Answer) -> None:
        p = answer.plan
        table: dict[str, str | Cell] = {
            "": Cell(text="fits" if p.fits else "does not fit", tone="good" if p.fits else "bad"),
            "step": duration(p.step_time_s),
            "8 times in 10": band_text(p),
            "tokens/s": count(p.tokens_per_s),
            "tokens/s per GPU": count(p.tokens_per_s / p.machine.ranks),
            "TFLOPS per GPU": figures(p.flops_per_s / 1e12),
            "MFU": percent(p.mfu),
            "HFU": percent(p.hfu),
            "exposed": percent(p.exposed_share),
        }
        assumed = "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in answer.assumed.items())
        self._captions = Captions(
            reading=f"It {verdict(p)}. {limiting_factor(answer)}",
            table=(tuple(table), tuple(table.values())),
            note=f"Assumed: {assumed}." if assumed else "",
        )


class StrategiesCard(BaseCard):
    """The strategies that a search found, the fastest first; a press on one chooses it."""

    name = "strategies"
    title = "Best strategies"
    wide = True

    def __init__(self, choose: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(Captions(hidden=True))
        self._choose = choose
        self._question: Question | None = None
        self._plans: list[Plan] = []
        self.search: Search | None = None

    def show(self, question: Question, search: Search) -> None:
        self._question, self.search = question, search
        nearest = [search.nearest] if search.nearest is not None else []
        self._plans = [found.plan for found in search.top] or nearest
        self.compare(question)

    def compare(self, current: Question) -> None:
        """Marks the strategy that is chosen now, and says whether the search was for another question."""
        question, search = self._question, self.search
        if question is None or search is None:
            return
        same = unsearched_fields(current) == unsearched_fields(question)
        chosen = searched_fields(current.planned_spec) if same else None
        reasons = [found.why for found in search.top] or [verdict(p) for p in self._plans]
        rows = []
        for i, (p, why) in enumerate(zip(self._plans, reasons, strict=True)):
            used = searched_fields(p.spec) == chosen
            use = Cell(text="In use" if used else "Use", title=f"Take strategy {i + 1}", press="apply", about=f"{i}",
                       pressed=used)  # fmt: skip
            label, memory = strategy_label(question.spec, p.spec), size(taken_bytes(p))
            rows.append((use, label, f"{duration(p.step_time_s)} ({band_text(p)})", percent(p.mfu), memory, why))
        reading = f"{search.fitting:,} of {search.considered:,} that were tried fit"
        if not search.top:
            reading = (
                f"none of {search.considered:,} fits; nearest is" if search.nearest else "there is nothing to choose"
            )
        self._captions = Captions(
            reading=reading,
            table=(("", "strategy", "step", "MFU", "memory", "why"), *rows),
            note="" if same else "Found for what was asked before: press Find the best again.",
        )

    def press(self, word: str, about: str) -> None:
        """May be called from any thread."""
        if word == "apply" and int(about) < len(self._plans):
            self._choose(searched_fields(self._plans[int(about)].spec))
