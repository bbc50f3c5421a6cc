"""`PAINS`: ten troubles that people bring to FSDP. Each can be had on two ranks, and cured.

    pain = PAINS["communication"]
    run = pain.reproduce(lab)   # waits; a run that fails is returned, too
    run.diagnoses               # the lab has named the cause from the run's events
    cured = pain.cure(lab, run)
    pain.measure.of(run), pain.measure.of(cured)

Some are a Spec, some a loop of one's own in a cell of the ranks (loops.py). Small models, some seconds each.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from course import loops
from fsdp_lab.base.errors import Cause, FieldError
from fsdp_lab.base.events import StepEvent, Track
from fsdp_lab.base.formatting import duration, size
from fsdp_lab.cluster import ClusterError
from fsdp_lab.lab import Lab
from fsdp_lab.models.weights import unwrap_names
from fsdp_lab.runs import Run, RunState, Step, WatchedRun
from fsdp_lab.spec.spec import Spec

LIMIT_S = 180.0  # of a run
AnyRun = Run | WatchedRun


@dataclass(frozen=True, kw_only=True)
class Measure:
    """The figure of a run that a cure changes. `form` writes its `value`."""

    name: str
    value: Callable[[AnyRun], float]
    form: Callable[[float], str] = "{:.0f}".format
    lower_is_better: bool = True

    def of(self, run: AnyRun) -> str:
        return self.form(self.value(run))


@dataclass(frozen=True, kw_only=True)
class Pain:
    """One of them.

    Attributes:
        title: as people say it. said: what they see, and where they have asked. look: the panel that shows it.
        sick, cured: train until it is had, and without it; `cured` is None where fields of the Spec are the cure.
        code: of the loop that has it, if it is one; "" for a Spec.
    """

    cause: Cause
    title: str
    said: str
    look: str
    measure: Measure
    sick: Callable[[Lab], AnyRun]
    cured: Callable[[Lab], AnyRun] | None = None
    code: str = ""

    def reproduce(self, lab: Lab) -> AnyRun:
        """Trains until it has the pain, some seconds. Raises FieldError or ClusterError where these ranks cannot have it."""
        return self.sick(lab)

    def cure(self, lab: Lab, run: AnyRun) -> AnyRun:
        """Trains again as the diagnosis of the run says. Raises ClusterError if it has not this cause."""
        changes = next((d.changes for d in run.diagnoses if d.cause is self.cause), None)
        if changes is None:
            raise ClusterError(f"{run!r} does not have the cause {self.cause.value!r}; reproduce it first")
        if self.cured is not None:
            return self.cured(lab)
        assert isinstance(run.spec, Spec)
        return train(lab, run.spec.replace(**changes), steps=run.step)


def train(lab: Lab, spec: Spec | None = None, **options: Any) -> AnyRun:
    """Returns the run when it is over, also if it has failed."""
    run = lab.run(spec or Spec(world_size=lab.spec.world_size), **options)
    with contextlib.suppress(FieldError, ClusterError):
        run.wait(LIMIT_S)
    run.stop(10)
    return run


def run_cell(lab: Lab, code: str) -> AnyRun:
    """Runs a loop on all ranks as `%%px` does, and returns its run when that is over. Raises ClusterError if none began."""
    before = lab.current
    _end(before)
    result, deadline_s = _execute(lab, code), time.monotonic() + LIMIT_S
    while True:
        run, ready = lab.current, result.ready()
        begun = run if run is not before else None
        if time.monotonic() > deadline_s or (ready and (begun.done if begun else not result.successful())):
            break
        time.sleep(0.02)
    if begun is None:
        try:
            result.get(0.1)
        except Exception as e:  # whatever the cell raised, on any rank
            raise ClusterError(f"the loop did not begin: {str(e).strip().partition(chr(10))[0]}") from None
        raise ClusterError("the loop did not begin: it was not watched")
    _end(begun)
    return begun


def _execute(lab: Lab, code: str) -> Any:
    return lab.cluster.client[lab.cluster.engine_ids].execute(code, block=False)


def _end(run: AnyRun | None) -> None:
    if run is not None and not run.done:
        run.stop(10, "the clinic goes on")


# -- models in folders, and little memory to load them ---------------------------------------------------------------

SIZES = {"vocab_size": 320, "n_positions": 64, "n_layer": 2, "n_head": 4, "n_embd": 64}
LARGE = {**SIZES, "n_embd": 512, "n_layer": 8, "n_head": 8}  # 100 MB
LOADING: Mapping[str, Any] = {
    "steps": 3,
    "micro_batch": 1,
    "optimizer": "sgd",
    "freeze": ("*.h.*",),
    "wrap": "class:GPT2Block",
}
MORE_BYTES = 120 << 20  # that a rank may take while it loads
LIMIT = Path(__file__).with_name("memory_limit.py")


@contextlib.contextmanager
def saved_model(lab: Lab, name: str = "{}", sizes: Mapping[str, int] = SIZES) -> Iterator[Path]:
    """A folder with the weights of a GPT-2, as `save_pretrained` writes them, but for their names; also by `torch.save`. The
    ranks hold no model afterwards, since its folder is gone."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    with tempfile.TemporaryDirectory(prefix="fsdp_lab-clinic-") as folder, torch.device("cpu"):
        model = GPT2LMHeadModel(GPT2Config.from_dict({"bos_token_id": 0, "eos_token_id": 0, **sizes}))
        model.save_pretrained(folder, state_dict={name.format(n): p.detach() for n, p in model.named_parameters()})
        torch.save(model.state_dict(), f"{folder}/weights.pt")
        del model
        try:
            yield Path(folder)
        finally:
            with contextlib.suppress(ClusterError):
                lab.cluster.call("unload")


@contextlib.contextmanager
def little_memory(lab: Lab, more_bytes: int = MORE_BYTES) -> Iterator[None]:
    """Lets each rank allocate so much more, as on a small machine. Raises ClusterError where the system sets no limit."""
    _end(lab.current)
    lab.cluster.call("unload")
    _limit_memory(lab, more_bytes)
    try:
        yield
    finally:
        with contextlib.suppress(ClusterError):  # ranks that are gone have no limit
            _limit_memory(lab, None)


def _limit_memory(lab: Lab, more_bytes: int | None) -> None:
    call = f"limit_memory({more_bytes}, globals().setdefault('_blocks_taken', []))"
    result = _execute(lab, f"{LIMIT.read_text(encoding='utf-8')}\n{call}")
    result.wait(30)  # not for its output, whose end ipyparallel may miss
    if not (result.ready() and result.successful()):
        raise ClusterError("the memory of these ranks cannot be limited: Linux alone does that")


def load_whole(lab: Lab) -> AnyRun:
    """Each rank builds the whole model from its weights, as scripts do."""
    with saved_model(lab, sizes=LARGE) as saved, little_memory(lab):
        folder = str(saved)

        def build() -> Any:
            import torch
            from transformers import GPT2Config, GPT2LMHeadModel

            model = GPT2LMHeadModel(GPT2Config.from_pretrained(folder))
            model.load_state_dict(torch.load(f"{folder}/weights.pt", weights_only=True))
            return model

        def loss(model: Any, batch: Any) -> Any:
            return model(input_ids=batch["x"], labels=batch["x"]).loss

        def data() -> Any:
            import torch

            return [{"x": torch.arange(32)} for _ in range(64)]

        return train(lab, model=build, loss=loss, data=data, **LOADING)


def load_by_range(lab: Lab) -> AnyRun:
    with saved_model(lab, sizes=LARGE) as folder, little_memory(lab):
        return train(lab, model=str(folder), seq_len=32, **LOADING)


def load_strange_names(lab: Lab, *, right: bool = False) -> AnyRun:
    with saved_model(lab, "module.{}") as folder:
        model = unwrap_names(folder, folder / "right") if right else folder
        return train(lab, steps=3, model=str(model), micro_batch=1, seq_len=32)


# -- what is measured ------------------------------------------------------------------------------------------------


def copies_s(run: AnyRun) -> float:
    """Of a traced step; on a CPU the copies are within memory, and the rest of the step hardly changes."""
    spans = [s for step in run.events.traced()[-1:] for e in step.events for s in e.spans]
    return sum(s.seconds for s in spans if s.track is Track.HOST_COPY) / max(1, run.spec.world_size)


def most(figure: Callable[[StepEvent], float]) -> Callable[[AnyRun], float]:
    """Of the ranks' newest steps."""
    return lambda run: max(map(figure, run.events.latest().values()), default=0)


def total(figure: Callable[[Step], float]) -> Callable[[AnyRun], float]:
    return lambda run: sum(map(figure, run.events.steps()))


STEPS = Measure(name="steps trained", value=total(lambda step: step.is_whole), lower_is_better=False)
PEAK = Measure(name="peak memory", value=most(lambda e: e.memory.peak_bytes), form=size)
GRADIENTS = Measure(name="gradients at the peak", value=most(lambda e: e.memory.at_peak.gradients_bytes), form=size)


# -- the ten ---------------------------------------------------------------------------------------------------------


def _spec(**options: Any) -> dict[str, Any]:
    return {"sick": partial(train, **{"model": "gpt2-1m", "micro_batch": 1, "seq_len": 32, **options})}


def _loop(code: Callable[..., str]) -> dict[str, Any]:
    sick, cured = (code(cured=cured) for cured in (False, True))
    return {"sick": partial(run_cell, code=sick), "cured": partial(run_cell, code=cured), "code": sick}


_ALL = (
    Pain(
        cause=Cause.LOADING,
        title="Out of memory before the first step",
        said="A model that fits when it is sharded does not load: every rank builds all of it first. "
        "(pytorch #104755, transformers #43749)",
        look="The run's state: it fails while it builds the model. Each rank has 120 MiB here, for 100 MB of weights.",
        measure=STEPS,
        sick=load_whole,
        cured=load_by_range,
    ),
    Pain(
        cause=Cause.ADAPTERS,
        title="LoRA saves no memory",
        said="One parameter in a hundred is trained, and the GPU is as full as before. (pytorch #91167, litgpt #1417)",
        look="Memory by class: activations are nearly all of the peak.",
        measure=PEAK,
        **_spec(steps=4, micro_batch=8, seq_len=128, lora={"r": 4}),
    ),
    Pain(
        cause=Cause.ACCUMULATION,
        title="Gradient accumulation runs out of memory",
        said="no_sync() was to save communication; now the gradients do not fit. (accelerate #2531, open-instruct #746)",
        look="Memory by class: gradients are as large as the whole model, not as a shard.",
        measure=GRADIENTS,
        **_spec(steps=4, accumulate=4, sync="last"),
    ),
    Pain(
        cause=Cause.BATCHES,
        title="It hangs at the end of an epoch",
        said="The last batches are on some ranks only; the others wait for ever. (pytorch #100069, prime-rl #2515)",
        look="The status line: who waits for whom, and in which collective.",
        measure=Measure(
            name="ended by itself",
            value=lambda run: run.state is RunState.FINISHED,
            form=lambda ended: "yes" if ended else "no",
            lower_is_better=False,
        ),
        **_loop(loops.unequal_batches),
    ),
    Pain(
        cause=Cause.GENERATION,
        title="generate() hangs",
        said="Rank 0 samples a text, to have a look, and training stops. (pytorch #100069, #101335)",
        look="The status line: the ranks issue different collectives.",
        measure=STEPS,
        **_loop(loops.generating),
    ),
    Pain(
        cause=Cause.COMMUNICATION,
        title="FSDP is slower than DDP",
        said="The same model on the same GPUs, at a fraction of the tokens a second. (OLMo #762, fms-fsdp #63)",
        look="Communication: the exposed part fills the step. The link is emulated.",
        measure=Measure(
            name="step time",
            value=lambda run: median([step.step_time_s for step in run.events.steps() if step.counts]),
            form=duration,
        ),
        **_spec(steps=8, link="0.01 GB/s, 100 us"),
    ),
    Pain(
        cause=Cause.OFFLOAD,
        title="CPU offload crawls",
        said="It fits now, and takes twice as long, though there was room. (pytorch #148532)",
        look="Timeline: copies, and an optimizer that takes as long as the backward.",
        measure=Measure(name="copies to and from the host, a step", value=copies_s, form=duration),
        **_spec(steps=10, model="gpt2-10m", seq_len=16, offload="all"),
    ),
    Pain(
        cause=Cause.COMPILATION,
        title="torch.compile never stops compiling",
        said="Each step takes as long as the first. (pytorch #138813, torchtitan #1365)",
        look="Step time: it does not fall after the first steps.",
        measure=Measure(name="recompilations", value=total(lambda step: len(step.events[0].recompiled))),
        **_loop(loops.compiled),
    ),
    Pain(
        cause=Cause.REPLICAS,
        title="Hybrid sharding trains, and learns as little as one rank",
        said="No error, a falling loss, and replicas that were never synchronised. (pytorch #154888)",
        look="Communication: no all-reduce between the replicas.",
        measure=Measure(
            name="reduced between replicas, a step",
            value=most(lambda e: e.comm["all_reduce"].link_bytes if "all_reduce" in e.comm else 0),
            form=size,
            lower_is_better=False,
        ),
        **_loop(loops.replicas),
    ),
    Pain(
        cause=Cause.CHECKPOINT,
        title="The checkpoint does not fit the model",
        said="Missing and unexpected keys, all of them. (accelerate #1462, torchtitan #765)",
        look="The run's state: what the folder lacks, and what it has instead.",
        measure=STEPS,
        sick=load_strange_names,
        cured=partial(load_strange_names, right=True),
    ),
)
PAINS: Mapping[str, Pain] = {pain.cause.value: pain for pain in _ALL}
