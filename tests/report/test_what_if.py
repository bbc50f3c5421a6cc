"""The what-if page without a browser: what is asked, what is answered, what is refused, and how soon."""

import json
import shlex
import threading
from typing import Any

import pytest

from fsdp_lab.base.errors import FieldError
from fsdp_lab.cli.main import main
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.planner.devices import DEVICES
from fsdp_lab.planner.questions import Target
from fsdp_lab.report import WhatIf, what_if
from fsdp_lab.report.what_if import FIELDS, Answer, Question
from fsdp_lab.spec.spec import Spec, Strategy


def small(**changes) -> Question:
    """Of a model whose plans take no time."""
    spec = Spec(world_size=16).replace(model="gpt2-124m", precision="bf16", seq_len=512)
    return Question(spec=spec).replace(**changes)


@pytest.fixture(scope="module")
def whole():
    made = WhatIf(small().spec, hardware="a100-40")
    yield made
    made.close()


@pytest.fixture
def page(whole):
    whole.choose(**small(hardware="a100-40").flat())
    assert whole.refusals == {}
    return whole


def field(page: WhatIf, name: str) -> dict[str, Any]:
    page.settle()
    return field_of(page.state, name)


def field_of(state: dict[str, Any], name: str) -> dict[str, Any]:
    return next(f for group in state["groups"] for f in group["fields"] if f["name"] == name)


def press(page: WhatIf, kind: str, **content: Any) -> None:
    page._on_message(page, {"kind": kind, **content}, [])
    page.settle()


# -- questions -------------------------------------------------------------------------------------------------------
def test_every_field_of_a_strategy_can_be_asked_for():
    assert set(vars(Strategy())) - {"engine"} <= set(FIELDS)  # of an engine of one's own nothing can be predicted
    assert {"model", "seq_len", "micro_batch", "accumulate", "optimizer", "optimizer_args", "world_size"} <= set(FIELDS)
    assert set(FIELDS) <= set(small().flat()) and list(FIELDS["model"].choices) == list(PRESETS)
    assert list(FIELDS["hardware"].choices) == [*DEVICES]


def test_what_cannot_be_is_refused_with_its_field_and_a_way_out():
    for field_, value, said in (
        ("hardware", "h1000", "h100"), ("per_host", 6, "use 4"), ("world_size", "many", "whole number"),
        ("network", 0, "above 0"), ("network", "fast", "above 0"),
    ):  # fmt: skip
        with pytest.raises(FieldError) as e:
            small().replace(**{field_: value})
        assert e.value.field == field_ and said in str(e.value)


def test_what_is_not_given_of_the_hardware_is_assumed():
    asked = small(world_size=32, per_host=4, network=400)
    machine = asked.target.machine(32)
    assert (machine.hosts, machine.per_host, machine.network_bytes_per_s) == (8, 4, 50e9)
    assert asked.replace(network=None).target.machine(32).assumed["network"]
    hybrid = small(world_size=32, sharding="hybrid_shard")
    assert Answer.of(hybrid).plan.spec.strategy.shard_size == 8
    assert "the GPUs of a host" in Answer.of(hybrid).assumed["shard size"]
    assert Answer.of(hybrid.replace(shard_size=4)).plan.spec.strategy.shard_size == 4


def test_the_curve_is_of_whole_hosts_whatever_part_of_one_is_asked_for():
    alone, eight = (Answer.of(small(world_size=n)).with_curve() for n in (1, 8))
    assert [p.machine.ranks for p in alone.along] == [1 << i for i in range(13)]
    assert [p.step_time_s for p in alone.along] == [p.step_time_s for p in eight.along]
    assert all(p.machine.per_host == min(8, p.machine.ranks) for p in alone.along)
    assert Target(hardware="h100", hosts=2).whole_host(4).per_host == 2


# -- the page --------------------------------------------------------------------------------------------------------
def test_a_choice_is_answered_with_its_figures_its_curve_and_its_command(page, capsys):
    page.choose(world_size=64, micro_batch=8)
    plan, state = page.answer.plan, page.state
    assert plan.machine.ranks == state["row"]["ranks"] == 64
    assert state["row"]["peak_memory_bytes"] == plan.memory.peak_bytes
    assert state["row"]["hardware"] == "a100-40" and state["row"]["model"] == "gpt2-124m"
    assert state["row"]["peak"].startswith(f"The peak is in the {plan.memory.peak_phase}, at ")
    assert [point["ranks"] for point in state["along"]] == [1 << i for i in range(13)]
    assert eval(state["take"]["texts"][1][1], {"Spec": Spec}) == page.answer.question.spec
    press(page, "choose", name="price", text="2.49")
    assert page.state["bill"] == {"tokens": "", "price": "2.49"}
    told = page.state["take"]["texts"][0][1].removeprefix("fsdp-lab ")
    assert main([*shlex.split(told), "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)["plans"]
    assert said["step_time_s"] == plan.step_time_s and said["cost"] > 0
    press(page, "choose", name="price", text="")
    shown = state["number"]
    page.choose(world_size=64)  # what is chosen already is answered too
    page.settle()
    assert page.state["number"] > shown


def test_a_value_stays_as_it_was_chosen_while_its_answer_is_computed(page):
    page.settle()
    shown: list[str] = []
    page.observe(lambda _: shown.append(field_of(page.state, "hardware")["value"]), "state")
    press(page, "choose", name="hardware", text="h100")
    page.unobserve_all("state")
    assert len(shown) > 1 and set(shown) == {"h100"}


def test_a_text_of_the_page_is_a_label_or_a_value(page):
    for name, text, value in (
        ("world_size", "32", 32), ("world_size", "24", 24), ("network", "100", 100), ("network", "", None),
        ("forward_prefetch", "3", 3), ("forward_prefetch", field(page, "forward_prefetch")["options"][0], None),
        ("optimizer_args", "fused", {"fused": True}), ("micro_batch", "4", 4), ("compile", "on", True),
    ):  # fmt: skip
        press(page, "choose", name=name, text=text)
        assert page.answer.question.flat()[name] == value, name
    assert field(page, "per_host")["note"] == "3 hosts"
    assert field(page, "world_size")["value"] == "24" and "24" in field(page, "world_size")["options"]


def test_what_is_refused_is_said_with_its_field_and_a_way_out_and_the_last_answer_stays(page):
    before = page.answer
    page.choose(seq_len=4096)
    assert list(page.refusals) == ["seq_len"]
    assert "over the model's 1024 positions; use 1024 or less" in page.refusals["seq_len"]
    assert page.answer is before and field(page, "seq_len")["refused"]
    (said,) = page.state["refusals"]
    assert said.startswith("sequence length: 4096 is over the model's 1024 positions. Use 1024 or less")
    page.choose(world_size=8)  # others are answered meanwhile
    assert page.answer.plan.machine.ranks == 8
    page.choose(model="gpt2-6.7b", seq_len=2048)
    assert page.refusals == {} and page.state["refusals"] == [] and page.answer.plan.spec.workload.seq_len == 2048
    page.choose(**small(hardware="a100-40").flat())
    page.choose(backend="ddp")
    assert page.refusals
    page.settle()
    (way,) = page.state["ways"]
    assert way["words"] == "Also set sharding no_shard"
    press(page, "fix", name=way["name"])
    assert page.refusals == {} and page.answer.question.spec.strategy.sharding == "no_shard"


def test_the_best_are_listed_with_reasons_and_one_is_taken(page):
    press(page, "find")
    found = page.found
    assert found is not None and len(found.top) == 5
    times = [one.plan.step_time_s for one in found.top]
    assert times == sorted(times)
    assert [row["cells"][1] for row in page.state["strategies"]["rows"]] == [one.why for one in found.top]
    press(page, "take", place=1)
    assert page.answer.plan.step_time_s == found.top[1].plan.step_time_s
    assert [row["used"] for row in page.state["strategies"]["rows"]] == [False, True, False, False, False]
    for model, shown in (("gpt2-355m", False), ("gpt2-124m", True)):
        page.choose(model=model)
        page.settle()
        assert bool(page.state["strategies"]) is shown, "with what it was found for"
    page.choose(hardware="t4", precision="fp16", model="llama-405b")
    page.find()
    assert page.found is not None and not page.found.top
    shown = page.state["strategies"]
    assert shown["reading"].startswith("None of ") and "does not fit" in shown["rows"][0]["cells"][1]


def test_a_search_that_fails_says_so_and_can_be_begun_again(page, monkeypatch):
    monkeypatch.setattr(what_if, "searched", lambda *_: 1 / 0)
    page.find()
    page.settle()
    assert "division by zero" in page.state["status"]
    monkeypatch.undo()
    page.find()
    assert page.found is not None and "division" not in page.state["status"] and not page.state["searching"]


@pytest.mark.slow  # it imports transformers
def test_a_model_that_is_no_preset_is_built_off_the_thread_of_messages(page):
    page.choose(model={**PRESETS["llama-1m"].config, "num_hidden_layers": 3}, seq_len=64)
    assert page.choices.wanted.spec.workload.model == "gpt2-124m"  # building takes seconds, and this did not wait
    assert len(page.answer.plan.shape.units) == 4 and page.refusals == {}


def test_closing_frees_the_page():
    from ipywidgets.widgets.widget import _instances as opened  # what other tests leave may close meanwhile

    before, threads = set(opened), set(threading.enumerate())
    page = WhatIf(hardware="h100")
    page.choose(world_size=1024)
    page.settle()
    made = set(opened) - before
    assert made
    page.close()
    page.close()
    assert not made & set(opened)
    page.choose(world_size=4)  # nothing comes of it
    page.settle(5)
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
        assert not thread.is_alive()
