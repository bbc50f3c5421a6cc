"""Controls against a lab without processes: what is sent, and what is said beside each control."""

import html
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_lab.base.errors import SpecError
from fsdp_lab.dashboard.controls import Controls
from fsdp_lab.dashboard.fields import OTHER, TITLES, controls_of
from fsdp_lab.dashboard.opened_forms import WritingForm
from fsdp_lab.planner.questions import LESS, DoesNotFit
from fsdp_lab.runs import RunState
from fsdp_lab.spec.describe import describe_strategy
from fsdp_lab.spec.spec import Precision, Spec
from tests.dashboard.fake_lab import FakeLab
from tests.waiting import until

FIELDS = [f.name for title in TITLES for f in controls_of(title)]


class Desk:
    """Controls, their lab, and a tick when asked."""

    def __init__(self) -> None:
        self.lab = FakeLab(2, step_s=0.002)
        self.controls = Controls(self.lab)
        self.cursor, self.run = 0, ""

    def choose(self, name: str, value) -> None:
        self.controls._controls[name].input.value = value

    def note(self, name: str) -> str:
        return re.sub("<[^>]*>", "", self.controls._controls[name].note.value)

    def notice(self) -> str:
        """The row below the buttons; "" where it is hidden."""
        return "" if self.controls._notice.layout.display == "none" else self.controls.message.value

    def validate(self) -> str:
        return self.controls._refusals._words.value

    def tick(self) -> None:
        run, events = self.lab.current, ()
        if run is not None:
            if run.id != self.run:
                self.run, self.cursor = run.id, 0
            events, self.cursor = run.events.since(self.cursor)
        self.controls.tick(run, events)

    def until(self, what: Callable[[], bool]) -> None:
        until(what, meanwhile=self.tick)

    def start(self) -> None:
        self.controls.start()
        self.until(lambda: self.lab.current.state is RunState.RUNNING and len(self.lab.current.events) > 10)

    def options(self, name: str) -> list:
        return [value for _, value in self.controls._controls[name].input.options]


@pytest.fixture
def desk():
    d = Desk()
    yield d
    d.lab.close()


def test_what_cannot_fit_is_said_in_a_sentence_and_start_again_starts_it(desk):
    given, start = [], desk.lab.run

    def run(spec, *, anyway=False, **options):
        given.append((spec.workload.micro_batch, anyway))
        if spec.workload.micro_batch > 8 and not anyway:
            raise DoesNotFit(
                "workload.micro_batch", "a rank needs 9 TiB or more", f"give {LESS}; or call lab.run(..., anyway=True)"
            )
        return start(spec, **options)

    desk.lab.run = run
    desk.choose("micro_batch", 4096)
    desk.controls._start.click()
    said = html.unescape(desk.notice())
    assert "A rank needs 9 TiB or more: give a smaller micro_batch" in said and "or press Start again" in said
    assert "anyway" not in said and desk.lab.current is None
    desk.controls._start.click()
    assert given == [(4096, False), (4096, True)] and desk.lab.current.spec.workload.micro_batch == 4096


def test_choices_wait_for_a_start_and_then_for_a_step(desk):
    desk.choose("precision", "bf16")
    assert desk.note("precision") == "with the next start"
    desk.start()
    assert desk.lab.current.spec.strategy.precision == "bf16"
    desk.until(lambda: desk.note("precision") == "applied at step 0")
    desk.lab.current.pause()
    desk.choose("sharding", "shard_grad_op")
    assert desk.note("sharding") == "pending"
    desk.lab.current.resume()
    desk.until(lambda: desk.note("sharding").startswith("applied at step"))
    assert int(desk.note("sharding").split()[-1]) == desk.lab.current.switches[-1].step
    assert desk.lab.current.spec.strategy.sharding == "shard_grad_op"


def test_a_refused_combination_is_explained_and_not_sent_and_its_way_out_is_a_button(desk):
    desk.choose("backend", "fsdp2")
    desk.controls.start()
    desk.choose("sharding", "zero1")
    assert desk.note("sharding") == "refused, see below"
    assert "FSDP2 always shards the gradients with the parameters. Use sharding full_shard" in desk.validate()
    assert desk.lab.current.applies == [] and "fsdp-held" in desk.controls._controls["sharding"].box._dom_classes
    desk.choose("sharding", "full_shard")
    desk.choose("backend", "ddp")
    button = desk.controls._refusals.button
    assert button.description == "Also set sharding no_shard"
    button.click()
    assert desk.controls._controls["sharding"].input.value == "no_shard" and desk.validate() == ""
    desk.until(lambda: desk.lab.current.spec.strategy.backend == "ddp")
    desk.until(lambda: desk.note("backend").startswith("applied at step"))


def test_choices_are_judged_together_and_the_last_one_is_taken_back(desk):
    desk.start()
    desk.choose("offload", "all")
    desk.until(lambda: desk.note("offload").startswith("applied at step"))
    desk.choose("backend", "ddp")
    desk.choose("sharding", "no_shard")
    assert "offload" in desk.validate() and "full_shard" not in desk.validate(), "that is not chosen any more"
    assert desk.controls._refusals.button.description == "Also set offload none"
    desk.controls._refusals.button.click()
    desk.until(lambda: desk.lab.current.spec.strategy.backend == "ddp")
    assert desk.controls._undo.tooltip == "Back to backend lab, offload all"
    for kept in ("lab no_shard fp32 offload all", "lab full_shard fp32 offload all", "lab full_shard fp32"):
        desk.controls._undo.click()
        desk.until(lambda kept=kept: describe_strategy(desk.lab.current.spec) == kept)
    assert desk.controls._undo.disabled
    desk.until(lambda: desk.note("offload").startswith("applied at step"))
    desk.until(lambda: "fsdp-applied" not in desk.controls._controls["offload"].note.value)  # some steps later
    desk.controls.stop()
    desk.until(lambda: desk.lab.current.state.over)
    desk.controls._start.click()
    assert desk.note("offload") == "", "that was the run before"


def test_what_the_ranks_refuse_is_said_with_their_reason_and_their_way_out(desk):
    desk.controls.start()
    desk.lab.current.refuses = "offload"
    desk.choose("offload", "all")
    desk.until(lambda: desk.note("offload") == "refused, see below")
    assert "the ranks cannot" in desk.validate().lower() and desk.lab.current.spec.strategy.offload == "none"
    refusal = SpecError("link", "it is faster than the wire", "use another", {"link": "100 Gb/s of h100"})
    desk.choose("link", "0.5 GB/s")
    desk.controls.choices.revert({"link": "0.5 GB/s"}, Spec(), refusal)
    desk.controls._show()
    button = desk.controls._refusals.button
    assert button.description == "Set link 100 Gb/s of h100" and "faster than the wire" in desk.validate()
    button.click()
    assert desk.controls.choices.wanted.link == "100 Gb/s of h100" and "the wire" not in desk.validate()


def test_a_model_that_begins_anew_waits_for_a_start(desk):
    desk.start()
    run = desk.lab.current
    desk.choose("model", "gpt2-10m")
    desk.choose("precision", "bf16")
    desk.tick()
    assert "With another model training begins at step 0, with the next start" in desk.notice() and not run.applies
    assert desk.note("model") == desk.note("precision") == "with the next start"
    desk.choose("model", "gpt2-1m")
    desk.until(lambda: desk.note("precision").startswith("applied at step"))
    assert desk.notice() == "" and len(run.applies) == 1 and run.spec.workload.model == "gpt2-1m"


def test_what_the_end_of_a_run_overtakes_waits_for_the_next(desk):
    desk.start()
    desk.lab.current.pause()
    desk.choose("accumulate", 2)
    desk.choose("model", "gpt2-10m")
    desk.lab.current.stop()
    desk.until(lambda: desk.note("accumulate") == desk.note("model") == "with the next start")
    assert desk.notice() == "" and desk.controls._start.description == "Start", "another model does not continue"
    desk.controls.start()
    workload = desk.lab.current.spec.workload
    assert (workload.accumulate, workload.model) == (2, "gpt2-10m")


def test_start_pause_resume_stop_continue_and_memory_on_demand(desk):
    c = desk.controls

    def disabled() -> tuple[bool, ...]:
        return c._start.disabled, c._pause.disabled, c._stop.disabled, c._ledger.disabled

    assert disabled() == (False, True, True, True) and c._start.description == "Start"
    desk.start()
    assert disabled() == (True, False, False, False)
    c._ledger.click()
    assert desk.lab.current.asked_ledgers == 1
    c._pause.click()
    assert desk.lab.current.state is RunState.PAUSED and c._pause.description == "Resume"
    c._pause.click()
    assert c._pause.description == "Pause"
    threads = threading.active_count()
    c._stop.click()
    assert desk.lab.current.state in (RunState.STOPPING, RunState.STOPPED) and threading.active_count() <= threads
    desk.until(lambda: c._pause.description == "Continue")
    assert c._start.description == "Start over" and disabled() == (False, False, True, True)
    assert "stopped" in c._state.value and f"up to step {desk.lab.current.step}" in c._state.value
    c._pause.click()
    desk.until(lambda: c._pause.description == "Pause" and len(desk.lab.current.events) > 10)
    c._stop.click()
    desk.until(lambda: c._pause.description == "Continue")
    c._start.click()
    assert desk.lab.begun == ["fresh", "continued", "fresh"]


def test_on_cpus_the_first_model_is_a_small_one():
    lab = FakeLab(2)
    assert Controls(lab).choices.wanted == lab.spec.replace(model="gpt2-1m")
    lab.devices = ("cuda:0", "cuda:1")
    assert Controls(lab).choices.wanted == lab.spec, "a GPU is fast enough for the default one"
    lab.devices, lab.attached = ("cpu", "cpu"), True
    assert Controls(lab).choices.wanted == lab.spec, "what ranks hold that were taken over"
    lab.attached, lab.spec = False, lab.spec.replace(seq_len=64)
    assert Controls(lab).choices.wanted == lab.spec, "somebody chose it"


def test_hybrid_sharding_on_two_ranks_offers_four_in_one_click(desk):
    desk.controls.start()
    run = desk.lab.current
    desk.choose("sharding", "hybrid_shard")
    button = desk.controls._refusals.button
    assert "2 ranks have none" in desk.validate() and button.description == "Use 4 ranks"
    button.click()
    desk.until(lambda: desk.note("sharding").startswith("applied at step"))
    assert desk.lab.current is run and run.spec.world_size == 4 and run.spec.strategy.sharding == "hybrid_shard"
    assert 4 in desk.options("shard_size") and not desk.validate()


def test_what_is_written_is_read_and_written_back(desk):
    for name, text, value, shown in (
        ("lr", "1e-3", 1e-3, "0.001"), ("warmup_steps", 5, 5, 5),
        ("freeze", "*.wte.*, *.bias", ["*.wte.*", "*.bias"], "*.wte.*, *.bias"),
        ("devices", "cpu , cpu", ["cpu", "cpu"], "cpu, cpu"), ("devices", "auto", None, ""),
    ):  # fmt: skip
        control = desk.controls._controls[name]
        control.input.value = text
        assert desk.controls.choices.wanted.flat()[name] == value and desk.note(name) == "with the next start"
        desk.controls._show()
        assert control.input.value == shown
    desk.choose("devices", "cuda:0")
    assert "does not name one device for each of 2 ranks" in desk.validate()


@pytest.mark.parametrize(("name", "text", "reason"), [
    ("lr", "fast", "'fast' is refused. Give a finite number above 0."),
    ("decay_steps", "soon", "'soon' is refused. Give a whole number of 1 or more."),
    ("decay_steps", "50", "a constant rate has no end. Leave it out, or use lr_schedule linear or cosine."),
])  # fmt: skip
def test_a_value_that_cannot_be_is_answered_in_words_and_its_group_unfolds(desk, name, text, reason):
    desk.controls.start()
    before, row = desk.controls.choices.wanted, desk.controls._groups[3].row
    assert row.layout.display == "none"
    desk.choose(name, text)
    assert html.unescape(desk.validate()) == reason
    assert row.layout.display == "" and desk.note(name) == "refused, see below"
    assert desk.controls.choices.wanted == before and desk.lab.current.applies == []


@pytest.mark.parametrize(("name", "typed", "value"), [
    ("optimizer", "RMSprop", "RMSprop"), ("data", "/no/such.txt", None), ("lora", "few", None),
])  # fmt: skip
def test_another_value_can_be_typed(desk, name, typed, value):
    """And a path that is not there is refused, in the words of the field."""
    before = desk.controls.choices.wanted
    desk.choose(name, OTHER)
    desk.controls._controls[name].typed.value = typed
    if value is None:
        assert desk.note(name) == "refused, see below" and desk.controls.choices.wanted == before
        assert typed in html.unescape(desk.validate())
        assert desk.controls._controls[name].input.label == Path(typed).name, "there is little room"
    else:
        assert desk.controls.choices.wanted.flat()[name] == value and desk.note(name) == "with the next start"


def test_a_rate_that_falls_finds_its_end_through_the_way_out(desk):
    training = desk.controls._groups[3]
    assert training.summary.value == "optimizer adamw · learning rate 0.0003"
    training.fold.click()
    assert training.fold.description == "Hide" and training.row.layout.display == ""
    desk.choose("lr_schedule", "cosine")
    assert "cosine needs the step at which it ends" in desk.validate()
    assert desk.controls._refusals.button.description == "Also set decay steps 1000"
    desk.controls._refusals.button.click()
    desk.choose("warmup_steps", 20)
    assert training.summary.value.endswith("lr schedule cosine · warm-up steps 20 · decay steps 1000")
    rates = desk.controls.choices.wanted.workload.rates
    assert (rates.kind, rates.warmup_steps, rates.decay_steps) == ("cosine", 20, 1000)


def test_what_a_folder_or_an_engine_of_ones_own_has_is_offered_for_it(desk):
    assert "own" not in desk.options("weights") + desk.options("tokenizer") and "yours" not in desk.options("backend")
    desk.controls.choices.adopt(Spec().replace(model="/my/model"))
    desk.controls._show()
    assert "own" in desk.options("weights") and "own" in desk.options("tokenizer")
    assert desk.controls._controls["model"].input.label == "model"
    desk.controls.choices.adopt(Spec().replace(engine="package.module:Engine"))
    desk.controls._show()
    assert "yours" in desk.options("backend")
    desk.choose("backend", "yours")
    assert desk.controls.choices.wanted.strategy.is_yours
    assert desk.controls._controls["forward_prefetch"].input.label == "auto (your own)"


def test_the_controls_follow_code_also_in_what_only_code_can_give(desk):
    desk.lab.run(precision=Precision(param="bf16", reduce="bf16"), wrap="class:Block")
    desk.until(lambda: desk.controls._controls["wrap"].input.value == "class:Block")
    assert desk.controls._controls["precision"].input.label == "bf16/bf16"
    desk.choose("micro_batch", 2)
    desk.until(lambda: desk.note("micro_batch").startswith("applied"))
    desk.lab.current.apply(sharding="shard_grad_op", micro_batch=4)
    desk.until(lambda: desk.controls._controls["micro_batch"].input.value == 4)
    assert desk.controls._controls["sharding"].input.value == "shard_grad_op"
    desk.lab.current.stop()
    desk.lab.devices = ("cpu",) * 4  # as by `lab.move`
    desk.until(lambda: desk.controls.choices.wanted.world_size == 4)


def test_a_link_is_chosen_or_written(desk):
    link = desk.controls._controls["link"]
    assert link.input.options[0][0] == "off" and link.typed.layout.display == "none"
    desk.choose("link", "0.1 GB/s")
    assert desk.controls.choices.wanted.link == "0.1 GB/s"
    desk.choose("link", "other…")
    assert link.typed.layout.display == "" and desk.controls.choices.wanted.link == "0.1 GB/s"
    desk.choose("micro_batch", 2)  # what is shown anew does not take the pen away
    assert link.input.value == "other…"
    link.typed.value = "0.2GB/s, 50us"
    assert (link.input.value, link.typed.value, link.typed.layout.display) == ("0.2 GB/s, 50 us", "", "none")
    desk.controls.start()
    desk.until(lambda: desk.note("link") == "applied at step 0")
    desk.choose("link", "other…")
    link.typed.value = "fast"
    assert desk.note("link") == "refused, see below" and "is no link" in desk.validate()
    desk.choose("link", "auto")  # its key for none
    assert desk.controls.choices.wanted.link is None and desk.validate() == "" and link.input.label == "off"


def test_what_is_gathered_ahead_is_automatic_and_holds_no_backend_back(desk):
    prefetch = desk.controls._controls["forward_prefetch"]
    assert prefetch.input.label == "auto (1)"
    desk.controls.start()
    for backend, sharding in (("fsdp2", "full_shard"), ("fsdp1", "full_shard"), ("ddp", "no_shard")):
        desk.choose("sharding", sharding)
        desk.choose("backend", backend)
        assert desk.controls.choices.wanted.strategy.backend == backend and desk.validate() == desk.validate() == ""
        assert prefetch.input.label == "auto (torch's own)"
    desk.choose("backend", "lab")
    assert prefetch.input.label == "auto (1)"
    desk.choose("forward_prefetch", "other…")
    prefetch.typed.value = "5"
    assert desk.controls.choices.wanted.strategy.forward_prefetch == 5 and prefetch.input.label == "5"
    desk.choose("backend", "ddp")
    assert "DDP gathers no parameters" in desk.validate() + desk.validate()
    desk.choose("forward_prefetch", "auto")
    wanted = desk.controls.choices.wanted.strategy
    assert (wanted.backend, wanted.forward_prefetch) == ("ddp", None) and desk.validate() == desk.validate() == ""


def test_a_hang_is_said_while_it_lasts_and_a_failure_once_with_its_stack_to_be_unfolded(desk):
    line = desk.controls._state
    desk.controls.start()
    run = desk.lab.current
    desk.until(lambda: run.state is RunState.RUNNING)
    assert desk.notice() == ""
    desk.lab.waiting = "rank 0 has waited 3 s in all_gather 17 of h.3"
    desk.tick()
    assert "running" in line.value and desk.lab.waiting in line.value and "<details" not in line.value
    run.stop()
    run.state, run.reason, run.details = (
        RunState.FAILED, "rank 1 <died>; give `model` a folder", 'File "<cell>", line 3',
    )  # fmt: skip
    desk.tick()
    assert "failed" in line.value and desk.lab.waiting not in line.value and "died" not in line.value
    assert "Rank 1 &lt;died&gt;; give <code>model</code> a folder" in desk.notice()
    assert "<pre>File &quot;&lt;cell&gt;&quot;, line 3</pre></details>" in desk.notice()
    assert desk.controls._pause.description == "Pause", "nothing to continue"


# -- a text that is asked for ----------------------------------------------------------------------------------------
def test_a_text_is_asked_for_while_the_run_trains_and_when_it_is_over():
    lab = FakeLab(2, step_s=0.002)
    form = WritingForm(lab)

    def said() -> str:
        return html.unescape(re.sub("<[^>]*>", "", form.message.value))

    def until_said(text: str) -> None:
        until(lambda: said() == text, meanwhile=form.tick)
        form.tick()

    assert form._write.disabled, "the ranks hold nothing"
    run = lab.run()
    form.tick()
    assert not form._write.disabled
    form._write.click()
    assert said() == "Type a prompt first: the text that the model is to continue."
    form._prompt.value = "<Once>"
    form._write.click()
    form.tick()
    assert said() == "The model writes after the steps in progress." and form._write.disabled
    until(lambda: bool(run.texts))
    assert run.texts[0].prompts == ("<Once>",) and run.texts[0].sampling.new_tokens == 48
    run.texts[0].settle([" upon a <time>"])
    until_said("<Once> upon a <time>")
    form._write.click()
    until(lambda: len(run.texts) == 2)
    run.texts[1].settle(SpecError("prompts", "bert does not continue texts", "use a causal model"))
    until_said("Bert does not continue texts: use a causal model.")

    run.stop()
    run.wait(10)
    form._tokens.value = 7
    form._write.click()
    until_said("<Once> of 7 tokens")
    form._prompt.value = "unknown"
    form._write.click()
    until_said("Vit classifies images: ask a causal language model.")
    lab.close()
