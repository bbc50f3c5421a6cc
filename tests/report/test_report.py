"""A report's file: what is in it, what it refuses, and that nothing in it can do harm. `tests/browser` opens it."""

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab import Comparison, write_report
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.report.report import MOST_POINTS, Course, bars, curves
from fsdp_lab.runs import Refusal
from fsdp_lab.runs.comparison import finite
from tests.lab.events import SPEC
from tests.lab.past import past
from tests.report.runs import BASE, CPU, FAULT, FULL, HOSTILE, run_of, sweep


class Reader(HTMLParser):
    """The tags of a page, its scripts by id, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.tags: list[str] = []
        self.scripts: dict[str, str] = {}
        self.loads: list[str] = []
        self._script: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        asked = [v for k, v in given.items() if k in ("src", "href", "srcset", "action") and v]
        self.loads += [v for v in asked if not v.startswith("data:")]
        self._script = (given.get("id") or f"script {len(self.scripts)}") if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def json(self, name: str) -> Any:
        return json.loads(self.scripts[name], parse_constant=pytest.fail)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "report.html", sweep(), title="Four and a refusal")


def test_it_is_one_file_that_loads_nothing_with_the_exact_figures_in_it(written):
    text = written.read_text(encoding="utf-8")
    page = Reader(text)
    assert page.loads == [] and "link" in page.tags
    assert re.findall(r"@import|url\((?!data:)", text[: text.index("</style>")]) == []
    assert 1.2e6 < written.stat().st_size < 2.5e6, "BokehJS is 1.27 MB of it"
    assert len(page.scripts) == 5 and written.stat().st_mode & 0o044
    kept = page.json("fsdp-lab-records")
    assert kept["records"] == finite(Comparison.of(sweep()).records())
    assert kept["title"] == "Four and a refusal" and kept["baseline"] == "A"
    assert kept["records"][2]["parity"] == "different" and kept["records"][2]["parity_first_step"] == FAULT
    assert kept["fastest"] in ("A", "B") and kept["sentences"]


def test_what_a_reader_finds(written):
    text = written.read_text(encoding="utf-8")
    words = re.sub(r"<[^>]+>", " ", unescape(text[text.index("<main>") : text.index("</main>")]))
    for said in ("Not the same computation: C", f"DIFFERENT from step {FAULT}", "equal bit for bit", "Recommendation",
                 "The fastest that fits is", "FSDP2 always shards the gradients", "offload none → optimizer", "carried over",
                 "2.13.0+cpu", "leave out the first step after a change", "Linux, 2 cores"):  # fmt: skip
        assert said in words, said
    assert text.count('<p class="fidelity">') == 1, "what the times are worth, once for the report"
    assert words.count(CPU) == 1
    assert words.count("FSDP2 always shards the gradients") == 2, "in the table's notes, and with the run"
    page = Reader(text)
    assert BASE.to_json() in words, "the Spec as JSON"
    assert set(page.json("fsdp-lab-plots")["roots"]) == {
        "loss", "time", "throughput", "tflops", "timeline0", "timeline1", "timeline2", "timeline3"}  # fmt: skip
    assert all(f'id="plot-{name}"' in text for name in ("time_ratio", "memory_ratio", "memory", "communication"))
    table = text[text.index('<table id="comparison">') : text.index("</table>")]
    columns = Comparison.of(sweep()).table().columns
    assert table.count('<th scope="col"') == len(columns) and table.count('<th scope="row"') == 4
    assert "4 runs, 1 refused, compared with A" in text and "Refused, so not in the table: E " in text
    says = r'id="plot-memory" role="img" aria-label="Memory of the fullest rank, at its peak: A [\d.]+ MiB'
    assert re.search(says, text), "plots have words"


def test_what_comes_from_a_run_is_text_and_nothing_else(tmp_path):
    spec = SPEC.replace(model=HOSTILE, data=HOSTILE)
    runs = [past("a", spec, notes=(HOSTILE,), reason=HOSTILE, environment={HOSTILE: [HOSTILE, {"b": HOSTILE}]}),
            past("b", spec.replace(sharding="shard_grad_op"), loss_off=9.0),
            Refusal({"workload": {"model": HOSTILE}}, HOSTILE)]  # fmt: skip
    file = write_report(tmp_path / "r.html", runs, title=HOSTILE, names=["<i>1</i>", HOSTILE, "3"])
    page = Reader(file.read_text(encoding="utf-8"))
    assert not {"img", "b"} & set(page.tags) and page.loads == []
    assert page.tags.count("i") == page.text.count('<i class="'), "no others"
    assert len(page.scripts) == 5 and page.json("fsdp-lab-records")["records"][1]["label"] == HOSTILE


def test_what_cannot_be_written_is_refused_and_leaves_the_former_file(tmp_path):
    said = r"^path: .*; name a \.html or \.htm file in a folder that exists and is yours"
    for path in ("report.txt", "none/report.html", ".", "x" * 300 + ".html", "a\0.html"):
        with pytest.raises(ArgumentError, match=said):
            write_report(tmp_path / path, [object()])  # type: ignore[list-item]  # before a run is read
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "report.html"
    file.write_text("former")
    for runs, more in (([], {}), ([past("a")], {"baseline": "Z"}), ([past("a")], {"names": ["a", "b"]}),
                       ([past("a")], {"limit_bytes": -1})):  # fmt: skip
        with pytest.raises(ArgumentError):
            write_report(file, runs, **more)
    assert file.read_text() == "former" and len(list(tmp_path.iterdir())) == 1
    write_report(file, [past("a")])
    assert file.read_text(encoding="utf-8").startswith("<!DOCTYPE html>") and len(list(tmp_path.iterdir())) == 1


def test_runs_without_a_step_and_refusals_alone_are_a_report(tmp_path):
    file = write_report(tmp_path / "r.htm", [past("a", steps=0), Refusal(SPEC, "no ranks")])
    page = Reader(file.read_text(encoding="utf-8"))
    assert page.json("fsdp-lab-plots")["roots"] == {} and "None of these runs" in file.read_text(encoding="utf-8")
    assert write_report(file, [Refusal(SPEC, "no ranks")]) and "no ranks" in file.read_text(encoding="utf-8")


def charts_of(run):
    return {c.name: c for c in curves([Course.of(0, Comparison.of([run]).rows[0], run)])}


def test_curves_of_long_runs_are_bounded_and_those_of_times_leave_out_what_medians_leave_out_and_both_say_so():
    charts = charts_of(past("a", steps=2 * MOST_POINTS + 100))
    source = next(r.data_source for r in charts["loss"].root.renderers if "value" in r.data_source.data)
    assert MOST_POINTS * 0.6 < len(source.data["value"]) <= MOST_POINTS
    assert "Of long runs a point is the median of 3 steps." in charts["loss"].note
    charts = charts_of(run_of(0, BASE))
    drawn = {name: c.root.renderers[0].data_source.data["step"] for name, c in charts.items()}
    assert drawn["loss"] == list(range(36)) and drawn["time"] == [s for s in range(36) if s not in (0, 10, 12, 24)]
    assert "Without first steps" in charts["time"].note and "Without" not in charts["loss"].note


def test_bars_stand_for_what_was_measured():
    compared = Comparison.of(sweep())
    charts = {c.name: c for c in bars(compared)}
    ratio, b = charts["time_ratio"].bars[0], compared["B"].time_ratio
    assert b is not None and ratio.parts[0][0] == b.median and ratio.whisker == (b.p10, b.p90)
    memory = charts["memory"].bars
    assert memory[1].parts[0][0] == compared["B"].figures.at_peak.parameters_bytes
    assert "on the host" in memory[3].text and "on the host" not in memory[1].text
    assert FULL.id == run_of(1, FULL).spec.id
    alone = {c.name for c in bars(Comparison.of([past("a")]))}
    assert alone == {"memory", "communication"}, "nothing to be relative to"
