"""A plan as text."""

from __future__ import annotations

from fsdp_lab.core.formatting import count, duration, figures, size
from fsdp_lab.dashboard.what_if.question import Answer
from fsdp_lab.planner.plan import Plan


def headline(answer: Answer) -> str:
    """What is planned, where."""
    p = answer.plan
    m, w = p.machine, p.spec.workload
    model = w.model if isinstance(w.model, str) else str(w.model.get("model_type", "a config"))
    many = f"{m.hosts:,} hosts at {m.network_bytes_per_s * 8 / 1e9:,.0f} Gb/s each" if m.hosts > 1 else "one host"
    batch = f"global batch {p.spec.global_batch:,}"
    return f"{model}, {billions(p.shape.parameters)} parameters · {m.ranks:,} × {m.device.name} in {many} · {batch}"


def verdict(p: Plan) -> str:
    """Whether it fits, and by how much."""
    limit = size(p.machine.device.memory_bytes)
    if p.fits:
        return f"fits {limit}, {size(p.margin_bytes)} to spare"
    return f"does not fit {limit}: {size(-p.margin_bytes)} too much"


def binding(answer: Answer) -> str:
    """What limits it, in one sentence."""
    sentence = answer.binds or f"bound by {answer.plan.binding}"
    return f"{sentence[0].upper()}{sentence[1:]}."


def assumed(answer: Answer) -> str:
    said = "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in answer.assumed.items())
    return f"Assumed: {said}." if said else ""


def billions(parameters: int) -> str:
    if parameters >= 1e9:
        return f"{figures(parameters / 1e9)} billion"
    return f"{figures(parameters / 1e6)} million"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.995 else "100 %"


def cells(p: Plan) -> tuple[tuple[str, str], ...]:
    """Head and figure, of what a reader wants to know first."""
    return (
        ("step", duration(p.step_time_s)),
        ("tokens/s", count(p.tokens_per_s)),
        ("tokens/s per GPU", count(p.tokens_per_s / p.machine.ranks)),
        ("TFLOPS per GPU", figures(p.flops_per_s / 1e12)),
        ("MFU", percent(p.mfu)),
        ("HFU", percent(p.hfu)),
        ("exposed communication", percent(p.exposed_share)),
    )
