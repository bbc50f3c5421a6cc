"""Panels: from events to rows, ranges and words; and the assembling of events into steps."""

import dataclasses
import math
import statistics

import pytest
from bokeh.document import Document
from bokeh.models import ColumnDataSource, HoverTool
from bokeh.plotting import figure

from fsdp_lab.base.events import Carrier, Memory, StepEvent
from fsdp_lab.base.formatting import size
from fsdp_lab.base.generation import Completion
from fsdp_lab.dashboard.panels import PANELS, StepAxis
from fsdp_lab.dashboard.panels.base import Prediction
from fsdp_lab.dashboard.panels.communication import CommunicationPanel, RanksPanel
from fsdp_lab.dashboard.panels.curves import CompletionsPanel, LossPanel, TflopsPanel, ThroughputPanel
from fsdp_lab.dashboard.panels.draw import ON_DEVICE
from fsdp_lab.dashboard.panels.memory import LedgerPanel, MemoryPanel
from fsdp_lab.runs.steps import Assembler, Step
from fsdp_lab.spec.spec import Spec
from tests.dashboard.fake_lab import event, on_host

MIB = 1 << 20
PREDICTION = Prediction(spec_id="chosen", peak_bytes=41 * MIB, step_time_s=0.25, tokens=1024)


def steps(count: int, ranks: int = 2, *, first: int = 0, **changes) -> list[Step]:
    spec = Spec(world_size=ranks).replace(**changes)
    return [Step(events=tuple(event(spec, "run", r, n, first=n == first) for r in range(ranks)))
            for n in range(first, first + count)]  # fmt: skip


def steps_with(count: int, *, first: int = 0, **other) -> list[Step]:
    """Steps whose events say something else."""
    return [Step(events=tuple(dataclasses.replace(e, **other) for e in s.events)) for s in steps(first + count)[first:]]


# -- what it writes -------------------------------------------------------------------------------------------------
def test_the_newest_texts_come_first_each_below_its_prompt():
    panel = CompletionsPanel(StepAxis(), 2)
    assert panel.captions().hidden
    panel.update(steps(3))
    assert panel.captions().hidden
    for first in range(7):
        (step,) = steps(1, first=first)
        texts = [Completion(prompt=f"prompt {rank}", text=f"text {rank} of {first}\n" + "x" * 999) for rank in range(2)]
        told = tuple(dataclasses.replace(e, eval_loss=2.0, completions=(texts[e.rank],)) for e in step.events)
        panel.update([Step(events=told), *steps(1, first=first + 100)])
    shown = panel.captions()
    heads, *rows = shown.table
    assert not shown.hidden and shown.reading == "after step 6"
    assert [h if isinstance(h, str) else h.text for h in heads] == ["step", "held-out loss", "prompt 0", "prompt 1"]
    assert [row[0] for row in rows] == ["6", "5", "4", "3", "2"]
    assert rows[0][2].text.startswith("text 0 of 6 xx") and len(rows[0][2].text) == 400 and "\n" in rows[0][2].title


# -- assembling ------------------------------------------------------------------------------------------------------
def test_a_silent_rank_does_not_stop_the_plots_and_what_is_left_comes_out_at_the_end():
    assembler = Assembler(patience=2)
    all_steps = steps(4)
    assert assembler.add(all_steps[0].events[:1]) == []  # rank 1 never tells of step 0
    assert assembler.add(all_steps[1].events) == []
    given = [s for step in all_steps[2:] for s in assembler.add(step.events)]
    assert [(s.number, len(s.events)) for s in given] == [(0, 1), (1, 2), (2, 2), (3, 2)]
    assembler.add(steps(1, first=4)[0].events[:1])
    assert [len(s.events) for s in assembler.flush()] == [1] and assembler.flush() == []


# -- all panels ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", PANELS)
@pytest.mark.parametrize("ranks", [1, 9])
def test_a_panel_draws_what_it_writes(make, ranks):
    """Sources have Bokeh twins of the same columns, patches name models; axes are labelled, plots have tooltips."""
    frame = StepAxis()
    panel = make(frame, ranks)
    panel.update([])
    evaluated = {"eval_loss": 4.0, "eval_metrics": {"f1": 0.5}}
    told = [Step(events=tuple(dataclasses.replace(e, **evaluated) for e in s.events)) for s in steps(30, ranks)]
    frame.follow(told)
    frame.mark_all([(12, "bf16", "step 12: precision fp32 → bf16")])
    panel.update(told[:10])
    panel.predict(PREDICTION)
    panel.update(told[10:])
    models = []
    if panel.root is not None:
        document = Document()
        document.add_root(panel.root)
        models = list(document.models)
    if models:
        axes = [m for m in models if hasattr(m, "axis_label")]
        assert axes and all(a.axis_label for a in axes) and [m for m in models if isinstance(m, HoverTool)]
    twins = {m.name: set(m.data) for m in models if isinstance(m, ColumnDataSource)}
    for source in panel.sources:
        assert twins[source.name] == {*source.numbers, *source.texts} and len(source)
    names = {m.name for m in models}
    assert set(panel.patches()) | (set(frame.patches()) if "frame.markers" in twins else set()) <= names
    words = panel.captions()
    assert words.reading or words.table or words.hidden
    assert "times are not a GPU's" not in words.note, "said once, above the cards"


@pytest.mark.parametrize(("hosts", "factor", "said"), [
    (4, 2, "Shard groups of 2 ranks are inside hosts."),
    (4, 4, "Shard groups of 4 ranks span hosts of 2; shard_size=2 shards inside them."), (4, 8, ""),
])  # fmt: skip
def test_shard_groups_are_said_of_hosts(hosts: int, factor: int, said: str):
    frame = StepAxis()
    frame.shard_factor = factor
    panel = CommunicationPanel(frame, 8)
    panel.update([Step(events=tuple(on_host(e, hosts) for e in s.events)) for s in steps(4, 8)])
    note = panel.captions().note
    assert said in note if said else "hard group" not in note


# -- each ------------------------------------------------------------------------------------------------------------
def columns(panel, index: int = 0):
    source = panel.sources[index]
    return {name: source.column(name).tolist() for name in source.numbers}


@pytest.mark.parametrize(("language", "words"), [(True, "9.0000 (perplexity 8103)"), (False, "9.0000")])
def test_evaluations_are_points_in_the_plot_of_the_loss_and_in_its_words(language, words):
    frame = StepAxis()
    frame.language = language
    panel = LossPanel(frame, 2)
    told = steps(5)
    panel.update(told[:2])
    assert [key.label for key in panel.captions().legend] == ["mean of all ranks"]
    own = {"accuracy": 0.25, "f1": 0.5, "recall": 1.0, "errors": 40.0}
    of_rank_1 = dataclasses.replace(told[3].events[1], eval_loss=9.0, eval_metrics=own)  # rank 0 gave it up
    panel.update([told[2], Step(events=(told[3].events[0], of_rank_1)), told[4]])
    drawn, words = columns(panel), f"{words}, accuracy 0.25, f1 0.5, recall 1, errors 40"
    assert [step for step, loss in zip(drawn["step"], drawn["eval_loss"], strict=True) if loss == 9] == [3]
    assert drawn["loss"] == [s.events[0].mean_loss for s in told]
    assert panel.sources[0].all().texts["evaluation"] == ["", "", "", words, ""]
    assert panel.sources[1].all().numbers.T.tolist() == [[3, 0.25, 0.5, 1]]
    said, patches = panel.captions(), panel.patches()
    assert [key.label for key in said.legend] == ["mean of all ranks", "held-out samples", "accuracy", "f1", "recall"]
    assert said.reading.endswith(" at step 4, accuracy 0.25, f1 0.5, recall 1, errors 40")
    assert f"Held-out loss {words} after 4 steps. 1 more not drawn." in said.note
    assert patches["loss.metric_2.y"]["start"] < 0.5 < patches["loss.metric_2.y"]["end"]
    assert patches["loss.metric_2.axis"] == {"visible": True, "axis_label": "f1"}
    assert panel.patches()["loss.y"]["end"] > 9
    assert panel.patches()["loss.axis"] == {"axis_label": "loss (nats per token)" if language else "loss"}


@pytest.mark.parametrize(("loss", "words"), [(0.000412, "0.000412"), (math.nan, "–")])
def test_a_small_loss_has_its_figures_the_rate_is_said_and_an_unknown_norm_is_left_out(loss, words):
    panel = LossPanel(StepAxis(), 2)
    panel.update(steps_with(1, loss=loss, mean_loss=loss, grad_norm=math.nan, lr=0.0125, loss_scale=65536.0))
    assert panel.captions().reading == f"{words} at step 0"
    assert panel.captions().note == "Learning rate 0.0125, loss scale 65,536."


def test_throughput_sums_ranks_over_the_slowest_time_and_tflops_are_of_each_of_few_ranks_or_a_band():
    panel, few, many = ThroughputPanel(StepAxis(), 9), TflopsPanel(StepAxis(), 8), TflopsPanel(StepAxis(), 9)
    told = steps(4, 9)
    for shown in (panel, many):
        shown.update(told)
    last = told[-1].events
    rate = sum(e.tokens for e in last) / max(e.step_time_s for e in last)
    assert columns(panel)["tokens_per_s"][-1] == pytest.approx(rate)
    assert columns(panel)["step"] == [1, 2, 3] and columns(panel, 1)["step"] == [0], "the first after a change is apart"
    assert "rank_7" in few.sources[0].numbers and "rank_0" not in many.sources[0].numbers
    assert many.patches()["tflops.axis"] == {"axis_label": "model GFLOPS per rank"}
    assert columns(many)["least"][-1] == pytest.approx(1e3 * min(e.tflops for e in last))
    assert columns(many)["most"][-1] == pytest.approx(1e3 * max(e.tflops for e in last))


def test_mfu_and_hfu_say_what_they_are_relative_to():
    panel, none, again = (TflopsPanel(StepAxis(), 2) for _ in range(3))
    none.update(steps_with(4, peak_flops_per_s=None))
    assert "MFU" not in none.captions().reading
    panel.update(told := steps(3))
    assert "% MFU" in panel.captions().reading and "HFU" not in panel.captions().reading
    assert "relative to 0.110 TFLOPS a rank (measured, 512 x 512 fp32)" in panel.captions().note
    panel.update(steps_with(3, first=3, peak_flops_per_s=220e9, spec_id="bf16"))
    assert "relative to 0.220 TFLOPS" in panel.captions().note
    mean, mfu = columns(panel)["mean"], columns(panel)["mfu_percent"]
    assert mfu[-1] == pytest.approx(100 * mean[-1] * 1e9 / 220e9), "the tooltip of each step has its own"
    again.update(steps_with(4, recompute_flops=told[0].events[0].flops // 4))
    assert "HFU counts recompute; both are relative to 0.110 TFLOPS" in again.captions().note
    assert columns(again)["hfu_percent"] == pytest.approx([1.25 * share for share in columns(again)["mfu_percent"]])


def lane_of(panel: MemoryPanel, fig: figure, lane: int) -> tuple[float, float]:
    """Where the foot and the top of its scale lie, in ranks from the top of the picture."""
    first, last = fig.y_range.start, fig.y_range.end  # of the axis of ranks, at the bottom and at the top
    patch = panel.patches()[f"memory.over.lane_{lane}"]
    at = [first + (last - first) * (value - patch["start"]) / (patch["end"] - patch["start"])
          for value in (0.0, panel._over._range.end)]  # fmt: skip
    return at[0], at[1]


@pytest.mark.parametrize("ranks", [1, 8])
def test_memory_is_a_stack_up_to_the_peak_for_each_rank_now_and_over_steps_in_its_own_row_with_the_host_apart(ranks):
    panel = MemoryPanel(StepAxis(), ranks)
    told = steps(3, ranks, offload="all")
    panel.update(told)
    now = columns(panel, 0)
    assert now["host"][0] > 0 and "on the host" in panel.captions().reading
    assert [k.label for k in panel.captions().legend][-2:] == ["on the host", "peak"]
    over, fig = columns(panel, 1), next(f for f in panel.root.references() if f.name == "memory.over")
    for e in told[-1].events:
        assert sum(now[c][e.rank] for c in ON_DEVICE) == pytest.approx(now["peak"][e.rank])
        assert over[f"rank_{e.rank}"][-1] == e.rank
        assert over[f"peak_{e.rank}"][-1] == pytest.approx(e.memory.peak_bytes / (1 << 20))
        assert sum(over[f"{c}_{e.rank}"][-1] for c in ON_DEVICE) == pytest.approx(over[f"peak_{e.rank}"][-1])
        foot, top = lane_of(panel, fig, e.rank)
        assert e.rank - 0.5 < top < foot < e.rank + 0.5 and foot - top == pytest.approx(0.84)
    axis = panel.patches()["memory.over.axis"]
    names = [text for _, text in axis["major_label_overrides"]["entries"]]
    if ranks == 8:
        assert names == [str(r) for r in range(8)] and axis["axis_label"].startswith("rank, each to ")
    else:
        assert names.count("0") == ranks and axis["axis_label"] == "MiB per rank"


def test_of_more_ranks_than_colours_the_fullest_and_the_emptiest_are_shown_over_steps():
    panel = MemoryPanel(StepAxis(), 9)
    (step,) = steps(1, 9)
    panel.update([step])
    by_peak = sorted(step.events, key=lambda e: e.memory.peak_bytes)
    over = columns(panel, 1)
    assert [over["rank_0"][-1], over["rank_1"][-1]] == [by_peak[-1].rank, by_peak[0].rank] and "rank_2" not in over
    assert panel.patches()["memory.over.axis"]["axis_label"] == "MiB: fullest, emptiest"


def test_memory_changes_its_unit_with_the_history():
    panel = MemoryPanel(StepAxis(), 2)
    panel.update(steps(3))
    generation = panel.sources[1].generation
    panel.update(steps(2, first=3, model="gpt2-124m", micro_batch=2048))
    assert panel.patches()["memory.over.axis"]["axis_label"].startswith("GiB")
    assert panel.sources[1].generation == generation + 1
    peaks = columns(panel, 1)["peak_0"]
    assert len(peaks) == 5 and peaks[0] < 0.2 < peaks[-1]


def test_what_was_not_measured_or_not_said_is_a_gap_and_no_slope():
    panel = MemoryPanel(StepAxis(), 2)
    told = steps(5)
    panel.update(steps_with(1, memory=Memory()))
    assert columns(panel, 1)["step"] == []  # nothing is known yet
    panel.update([told[1], *steps_with(1, first=2, memory=Memory()), told[3], Step(events=told[4].events[:1])])
    over = columns(panel, 1)
    assert over["step"] == [0, 1, 2, 3, 4]
    for lane in range(2):
        assert [math.isnan(peak) for peak in over[f"peak_{lane}"]] == [True, False, True, False, lane == 1]
        assert over[f"activations_{lane}"][2] == 0 < over[f"activations_{lane}"][3]


def test_the_hosts_peak_while_weights_were_read_is_said_also_after_a_switch():
    panel = MemoryPanel(StepAxis(), 2)
    first, second = steps(2)
    panel.update([first])
    assert "weights were read" not in panel.captions().note
    loaded = [dataclasses.replace(e, memory=dataclasses.replace(e.memory, loading_bytes=(90 + e.rank) << 20))
              for e in first.events]  # fmt: skip
    panel.update([Step(events=tuple(loaded)), second])
    assert "While weights were read, the host held 91.0 MiB more." in panel.captions().note


def test_the_limit_is_drawn_within_reach_and_said_always():
    panel = MemoryPanel(StepAxis(), 2)
    told = steps(2)
    panel.update(told[:1])
    assert panel.patches()["memory.now.limit"]["visible"] is False and "limit 64.0 GiB" in panel.captions().reading
    near = 2 * told[1].events[0].memory.peak_bytes
    panel.update([
        Step(events=tuple(
            dataclasses.replace(e, memory=dataclasses.replace(e.memory, limit_bytes=near, pool_bytes=5 << 20))
            for e in told[1].events))
    ])  # fmt: skip
    for lane in range(2):
        line = panel.patches()[f"memory.over.limit_{lane}"]
        assert line["visible"] and line["location"] == pytest.approx(near / (1 << 20))
        assert panel._over._range.end > line["location"]
    assert panel.captions().legend[-1].label == "limit"
    pool = "What is gathered and sent is in a pool of 5.00 MiB that ranks share."
    assert panel.captions().note == f"Tensors at the peak of a step; the process has 900 MiB more. {pool}"


def test_what_is_predicted_is_a_hollow_bar_before_and_after_anything_is_measured():
    panel = MemoryPanel(StepAxis(), 2)
    panel.predict(PREDICTION)
    assert panel.captions().reading == "predicted 41.0 MiB with the chosen settings"
    assert columns(panel, 2)["peak"] == [41.0, 41.0] and panel.patches()["memory.now.x"]["end"] > 41
    told = steps(12)  # the eleventh is a ledger step
    panel.update(told)
    now, predicted = columns(panel, 0), columns(panel, 2)
    assert predicted["peak"] == [41.0, 41.0]
    assert all(bar < below for bar, below in zip(now["bar"], predicted["bar"], strict=True))
    assert panel.captions().reading.endswith("; predicted 41.0 MiB with the chosen settings")
    panel.predict(dataclasses.replace(PREDICTION, spec_id=told[-1].events[0].spec_id))
    peak = max(e.memory.peak_bytes for e in told[-1].events)
    assert panel.captions().reading.endswith(f"predicted 41.0 MiB, measured {size(peak)}")
    assert "predicted" in [key.label for key in panel.captions().legend]
    after = steps(15, sharding="no_shard")  # of which a CPU knows the memory at the next ledger step
    panel.predict(dataclasses.replace(PREDICTION, spec_id=after[0].events[0].spec_id))
    panel.update(after[:10])
    assert "measured" not in panel.captions().reading
    panel.update(after[10:])
    assert "measured" in panel.captions().reading
    panel.predict(None)  # of another Spec, of which nothing can be said
    assert "predicted" not in panel.captions().reading and columns(panel, 2)["peak"] == []
    assert "predicted" not in [key.label for key in panel.captions().legend]


def test_a_predicted_step_time_is_a_line_and_stands_beside_the_median():
    panel = ThroughputPanel(StepAxis(), 2)
    panel.predict(dataclasses.replace(PREDICTION, step_time_s=None))
    assert panel.patches()["throughput.predicted"]["visible"] is False
    panel.predict(PREDICTION)
    assert panel.patches()["throughput.predicted"] == {"visible": True, "location": 4096.0}
    assert panel.captions().reading == "predicted 250 ms a step with the chosen settings"
    told = steps(30)
    panel.update(told)
    panel.predict(dataclasses.replace(PREDICTION, spec_id=told[-1].events[0].spec_id))
    assert "predicted 250 ms a step, measured " in panel.captions().reading


def test_memory_within_a_step_is_of_the_fullest_rank_of_the_last_ledger_step():
    panel = LedgerPanel(StepAxis(), 2)
    told = steps(80)
    panel.update(told[:10])
    assert not len(panel.sources[0])
    panel.update(told[10:])
    fullest = max(told[60].events, key=lambda e: e.memory.peak_bytes)
    curve = columns(panel, 0)
    assert len(curve["ms"]) == len(fullest.memory_curve)
    for i, sample in enumerate(fullest.memory_curve):
        assert curve["ms"][i] == pytest.approx(1e3 * sample.at_s)
        assert sum(curve[c][i] for c in ON_DEVICE) == pytest.approx(curve["total"][i])
        assert curve["activations"][i] == pytest.approx(sample.classes.activations_bytes / (1 << 20))
    assert panel.sources[1].all().texts["label"] == ["", "forward", "backward", "update"]  # no room for "begin"
    assert columns(panel, 2)["total"] == [max(curve["total"])]
    assert f"rank {fullest.rank} in step 60" in panel.captions().reading
    assert panel.patches()["ledger.x"]["end"] >= curve["ms"][-1]
    generation = panel.sources[0].generation
    panel.update(told[61:])
    assert panel.sources[0].generation == generation, "nothing new to draw"


def test_communication_is_by_kind_and_rank_with_link_bytes_and_what_is_exposed():
    panel = CommunicationPanel(StepAxis(), 2)
    told = steps(25)
    panel.update(told)
    now = columns(panel, 0)
    seconds = sorted(e.comm["all_gather"].seconds for s in told[-20:] for e in s.events if e.rank == 1 and s.counts)
    assert now["all_gather"][1] == pytest.approx(1e3 * seconds[len(seconds) // 2], rel=0.05)
    assert now["all_gather_mb"][1] == pytest.approx(told[-1].events[1].comm["all_gather"].link_bytes / 1e6)
    labels = [k.label for k in panel.captions().legend]
    assert labels == ["all-gather", "reduce-scatter", "control", "exposed: computing waits", "slowed by measuring"]
    exposed = [statistics.fmean(e.exposed_comm_s for e in s.events) for s in told]
    over, apart = columns(panel, 1), columns(panel, 2)
    drawn = dict(zip([*over["step"], *apart["step"]], [*over["exposed"], *apart["value"]], strict=True))
    assert [drawn[n] for n in range(25)] == pytest.approx([1e3 * x for x in exposed])
    assert set(panel.sources[2].all().texts["why"]) == {"first after a change", "traced", "memory measured"}
    middle = statistics.median(x / s.step_time_s for x, s in zip(exposed[-20:], told[-20:], strict=True))
    said = panel.captions().reading
    assert abs(float(said.split("(")[1].split(" %")[0]) - 100 * middle) <= 3 and "exposed" in said
    panel.update(steps(3, first=25, backend="ddp", sharding="no_shard"))  # a change begins new medians
    assert columns(panel, 0)["all_gather"] == [0, 0] and columns(panel, 0)["all_reduce"][0] > 0


def test_ranks_have_a_row_each_that_sorts_by_its_figures_and_a_straggler_is_marked():
    panel = RanksPanel(StepAxis(), 3)
    told = [[dataclasses.replace(on_host(e, 3), late=((1, 0.25),) if e.rank == 0 else (), input_s=0.001,
                                 step_time_s=e.step_time_s * (2 if e.rank == 1 else 1)) for e in s.events]
            for s in steps(4, 3)]  # fmt: skip
    panel.update([Step(events=tuple(events)) for events in told])
    heads, *rows = panel.captions().table
    assert heads == ("rank", "host", "step time", "works", "exposed", "late", "input", "memory peak")
    assert [row[0].tone for row in rows] == ["", "bad", ""] and panel.captions().sortable
    assert panel.captions().reading == "rank 1 works longest: the others wait; medians of 3 steps"
    assert [(row[0].about, row[1], row[5].text) for row in rows] == [
        ("0", "gpu1", "0 ms"), ("1", "gpu2", "250 ms"), ("2", "gpu3", "0 ms"),
    ]  # fmt: skip
    assert float(rows[1][2].about) == pytest.approx(statistics.median(events[1].step_time_s for events in told[1:]))
    gauge = {"gpu_percent": 97.0, "gpu_power_w": 612.4}
    later = [dataclasses.replace(e, step=4, end_unix_s=e.end_unix_s + 60, **gauge) for e in told[-1]]
    panel.update([Step(events=tuple(later))])
    heads, row, *_ = panel.captions().table
    assert heads[-3:] == ("GPU busy", "power", "temperature")
    assert [cell.text for cell in row[-3:]] == ["97 %", "612 W", "–"] and "nvidia-smi" in panel.captions().note


def test_the_note_says_what_carries_it_and_how_fast_since_the_last_switch():
    panel = CommunicationPanel(StepAxis(), 2)
    rates = {"shards": ("shared memory", 3.9e9), "replicas": ("Gloo", 0.05e9)}
    told = [Carrier(between=between, name=name, bytes_per_s=rate) for between, (name, rate) in rates.items()]
    first, *others = steps(3)
    begins = [dataclasses.replace(e, carriers=tuple(told)) for e in first.events]
    panel.update([Step(events=tuple(StepEvent.from_dict(e.to_dict()) for e in begins)), *others])
    said = "Between shards over shared memory, 3.9 GB/s a rank; between replicas over Gloo, 50 MB/s a rank. Areas:"
    assert panel.captions().note.startswith(said)
    panel.update(steps(1, first=3))
    assert panel.captions().note.startswith("Areas:"), "nothing is known of those after another switch"


# -- markers ---------------------------------------------------------------------------------------------------------
def test_markers_keep_their_labels_apart():
    frame = StepAxis()
    frame.mark_all([(step, label, f"step {step}") for step, label in ((100, "a"), (105, "b"), (600, "c"))])
    frame.follow(steps(1, first=700))
    assert frame.markers.column("step").tolist() == [100, 105, 600]
    assert frame.markers.all().texts["number"] == ["", "2", "3"] and frame.markers.all().texts["label"] == [
        "a",
        "b",
        "c",
    ]
    assert frame.markers.all().texts["detail"] == ["1 · step 100", "2 · step 105", "3 · step 600"]
