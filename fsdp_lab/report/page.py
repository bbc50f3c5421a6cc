"""The words and tables of a report, as HTML. Everything that comes from a run is escaped here."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.panels.base import Key
from fsdp_lab.report.charts import Chart, changed
from fsdp_lab.runs.comparison import Comparison, Refusal, Row, finite, word
from fsdp_lab.runs.kept import Kept
from fsdp_lab.runs.parity import Verdict
from fsdp_lab.runs.recommend import Recommendation
from fsdp_lab.runs.run import Switch
from fsdp_lab.spec import Spec
from fsdp_lab.table import Table, duration

CSS, JS = (Path(__file__).with_name(name) for name in ("page.css", "page.js"))
BADGES: Mapping[Verdict, str] = {
    Verdict.EQUAL: "equal",
    Verdict.WITHIN: "within",
    Verdict.DIFFERENT: "different",
    Verdict.UNKNOWN: "unknown",
}


def page(title: str, body: Sequence[str], *, bokeh_js: str, data: Mapping[str, Any]) -> str:
    """The whole file. `data`: id of a script element -> what is kept in it as JSON."""
    kept = "\n".join(
        f'<script type="application/json" id="{name}">{embedded(value)}</script>' for name, value in data.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{CSS.read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
{"".join(body)}
</main>
{kept}
<script>{bokeh_js}</script>
<script type="module">
{JS.read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def embedded(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever text is in it."""
    text = json.dumps(finite(value), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


# -- chapters ----------------------------------------------------------------------------------------------------------


def header(title: str, compared: Comparison, written_unix_s: float) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(written_unix_s))
    number = f"{len(compared)} run{'s' if len(compared) != 1 else ''}"
    held = f", held against {compared.baseline}" if compared.baseline and len(compared) > 1 else ""
    wrong = [
        f"{row.label} ({row.name}) is {row.parity.sentence}" for row in compared.rows if row.differs and row.parity
    ]
    alarm = f'<p class="alarm" role="alert">Not the same computation: {escape("; ".join(wrong))}</p>' if wrong else ""
    said = " ".join(compared.fidelity())
    fidelity = f'<p class="fidelity">{escape(said)}</p>' if said else ""
    return (
        f"<header><h1>{escape(title)}</h1><p class=soft>{number}{escape(held)} · {when}</p>{fidelity}{alarm}</header>"
    )


def advice(recommended: Recommendation) -> str:
    lines = recommended.lines()[len(recommended.sentences) :]
    chosen = "".join(f"<p>{escape(s)}</p>" for s in recommended.sentences)
    items = f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in recommended.notes)
    inner = f'<div class="card advice">{chosen}{items}<ul class="notes">{notes}</ul></div>'
    return section("recommendation", "Recommendation", inner)


def comparison(compared: Comparison) -> str:
    parity = compared.table().columns.index(f"parity with {compared.baseline}") if compared.baseline else None
    main = table(compared.table(), compared, "comparison", parity)
    memory = compared.memory_table()
    below = f'<div class="card">{table(memory, compared, "memory", None)}</div>' if len(memory) else ""
    return section(
        "comparison-chapter", "Comparison", f'<div class="stack"><div class="card">{main}</div>{below}</div>'
    )


def table(shown: Table, compared: Comparison, name: str, parity: int | None) -> str:
    """With heads for rows and columns; the run's colour before its label, and a badge in column `parity`."""
    places = {row.label: i for i, row in enumerate(compared.rows)}
    heads = "".join(f'<th scope="col"{_side(c, shown)}>{escape(c) or "run"}</th>' for c in shown.columns)
    body = "".join(
        _line(cells, shown, compared.rows[places[cells[0]]], places[cells[0]], parity) for cells in shown.rows
    )
    caption = f"<caption>{escape(shown.caption)}</caption>" if shown.caption else ""
    notes = "".join(f"<li>{escape(n)}</li>" for n in shown.notes)
    return (f'<div class="scroll" tabindex="0" role="region" aria-label="{name} table"><table id="{name}">{caption}'
            f'<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div><ul class="notes">{notes}</ul>')  # fmt: skip


def _line(cells: Sequence[str], shown: Table, row: Row, place: int, parity: int | None) -> str:
    mark = f'<span class="mark" style="--fill:{theme.rank_color(place)}"></span>'
    parts = [f'<th scope="row" class="left">{mark}{escape(cells[0])}</th>']
    for i, (head, cell) in enumerate(zip(shown.columns[1:], cells[1:], strict=True), start=1):
        parts.append(f"<td{_side(head, shown)}>{badge(cell, row) if i == parity else _cell(cell)}</td>")
    return f"<tr>{''.join(parts)}</tr>"


def badge(text: str, row: Row) -> str:
    if not text:
        return ""
    kind = BADGES[row.parity.verdict] if row.parity else "unknown"
    return f'<span class="badge {kind}"{_title(row.parity.sentence if row.parity else "")}>{escape(text)}</span>'


def _title(text: str) -> str:
    return f' title="{escape(text)}"' if text else ""


def _cell(text: str) -> str:
    """A spread, in brackets, goes below its median."""
    middle, opened, spread = text.partition(" (")
    if not opened or not spread.endswith(")") or " to " not in spread:
        return escape(text)
    return f'{escape(middle)} <span class="spread">({escape(spread)}</span>'


def _side(head: str, shown: Table) -> str:
    if head not in shown.left:
        return ""
    return ' class="left words"' if head == "what" else ' class="left"'


def plots(ident: str, heading: str, charts: Sequence[Chart]) -> str:
    return section(ident, heading, f'<div class="plots">{"".join(map(chart, charts))}</div>') if charts else ""


def chart(c: Chart) -> str:
    legend = "".join(map(key, c.legend))
    reading = f'<span class="soft">{escape(c.reading)}</span>' if c.reading else ""
    return (
        f'<figure class="card{" wide" if c.wide else ""}" aria-label="{escape(c.title)}">'
        f'<header><h3>{escape(c.title)}</h3>{reading}</header><div class="legend">{legend}</div>'
        f'<div class="plot" id="plot-{escape(c.name)}" role="img" aria-label="{escape(c.described)}"></div>'
        f"<figcaption>{escape(c.note)}</figcaption></figure>"
    )


def key(k: Key) -> str:
    token = f' data-token="{escape(k.token)}"' if k.token else ""
    color = f' style="--fill:{escape(k.color)}"' if k.color else ""
    return (
        f'<span class="key"><i class="swatch" data-hatch="{escape(k.hatch)}"{token}{color}></i>{escape(k.label)}</span>'
    )


def specs(compared: Comparison, runs: Sequence[Kept | Refusal]) -> str:
    each = "".join(_run(row, run, compared.differing) for row, run in zip(compared.rows, runs, strict=True))
    return section("runs", "Runs and their Specs", f'<div class="runs">{each}</div>')


def _run(row: Row, run: Kept | Refusal, differing: Sequence[str]) -> str:
    fields = "".join(
        f"<div{' class=differs' if name in differing else ''}><dt>{escape(name.replace('_', ' '))}</dt>"
        f"<dd>{escape(_value(value))}</dd></div>"
        for name, value in row.flat.items()
    )
    given = run.spec.to_dict() if isinstance(run.spec, Spec) else dict(run.spec)
    text = json.dumps(given, indent=2, default=str)
    known = f" · run {row.run}" if row.run else ""
    spec_id = f" · spec {row.spec.id}" if row.spec else ""
    reason = f": {row.reason}" if row.reason else ""
    changes = "" if isinstance(run, Refusal) else _switches(run)
    return (
        f'<details class="card"><summary>{escape(row.label)} · {escape(row.name)}</summary>'
        f'<p class="soft">{escape(row.state + reason + known + spec_id)}</p><dl class="fields">{fields}</dl>{changes}'
        f"<details><summary>Spec as JSON</summary><pre>{escape(text)}</pre></details></details>"
    )


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return word("", value).strip() if "param" in value else json.dumps(value)
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _switches(run: Kept) -> str:
    """What it was switched to and when; nothing where it was not."""
    if len(run.switches) < 2:
        return ""
    rows = "".join(
        f"<tr><th scope=row>{s.step:,}</th><td class=left>{escape(_change(s))}</td><td>{duration(s.seconds)}</td>"
        f"<td class=left>{'carried over' if s.carried else 'initial values'}</td></tr>"
        for s in run.switches
    )
    heads = "".join(f'<th scope="col"{side}>{head}</th>' for head, side in
                    (("step", ""), ("changed", " class=left"), ("took", ""), ("parameters", " class=left")))  # fmt: skip
    return (f'<div class="scroll"><table><caption>What it was switched to, and when</caption><thead><tr>{heads}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>")  # fmt: skip


def _change(switch: Switch) -> str:
    return changed(switch.before.difference(switch.after)) if switch.before else "began"


def environments(compared: Comparison, runs: Sequence[Kept | Refusal]) -> str:
    """Each environment once, with the runs that ran in it."""
    found: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for row, run in zip(compared.rows, runs, strict=True):
        if not isinstance(run, Refusal) and run.environment:
            same = json.dumps(run.environment, sort_keys=True, default=str)
            found.setdefault(same, (run.environment, []))[1].append(row.label)
    cards = []
    for environment, labels in found.values():
        pairs = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in _leaves("", environment))
        of = f"<h3>{escape(', '.join(labels))}</h3>" if len(found) > 1 else ""
        cards.append(f'<div class="card">{of}<dl class="fields environment">{pairs}</dl></div>')
    return section("environment", "Environment", f'<div class="stack">{"".join(cards)}</div>') if cards else ""


def _leaves(prefix: str, value: Any) -> list[tuple[str, str]]:
    """Dotted name and text of each value of a nested dict."""
    if isinstance(value, Mapping):
        return [leaf for k, v in value.items() for leaf in _leaves(f"{prefix}.{k}" if prefix else str(k), v)]
    if isinstance(value, list | tuple) and any(isinstance(v, Mapping) for v in value):
        return [leaf for i, v in enumerate(value) for leaf in _leaves(f"{prefix} {i}", v)]
    if isinstance(value, list | tuple):
        return [(prefix, ", ".join(map(str, value)) or "–")]
    return [(prefix, "–" if value is None else str(value))]


def section(ident: str, heading: str, inner: str) -> str:
    return (
        f'<section id="{ident}" aria-labelledby="{ident}-h"><h2 id="{ident}-h">{escape(heading)}</h2>{inner}</section>'
    )


def footer(version: str) -> str:
    return (f"<footer>Written by fsdp_lab {escape(version)}. The exact figures stand in this file as JSON, in the script "
            "element <code>fsdp-lab-records</code>. It opens without the network.</footer>")  # fmt: skip
