"""`PAINS`: ten troubles that people bring to FSDP. Each can be had on two ranks, and cured.

    pain = PAINS["communication"]
    run = pain.reproduce(lab)   # waits; a run that fails is returned, too
    run.diagnoses               # the lab has named the cause from the run's events
    cured = pain.cure(lab, run)
    pain.measure.of(run), pain.measure.of(cured)

Some are a Spec, some a loop of one's own in a cell of the ranks (cells.py). Small models, some seconds each.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from fsdp_lab.cluster import ClusterError
from fsdp_lab.core.errors import FieldError
from fsdp_lab.core.events import Track
from fsdp_lab.core.formatting import duration, size
from fsdp_lab.core.spec import Spec
from fsdp_lab.dashboard.clinic import cells
from fsdp_lab.dashboard.lab_like import LabLike
from fsdp_lab.runs import Run, RunState, WatchedRun
from fsdp_lab.runs.diagnosis import Cause

LIMIT_S = 180.0  # of a run
LOADING_BYTES = 120 << 20  # that a rank may take more, in the pain of loading
SMALL = {"model": "gpt2-1m", "micro_batch": 1, "seq_len": 32}
SLOW_LINK = "0.005 GB/s, 100 us"

AnyRun = Run | WatchedRun


class ClinicLab(LabLike, Protocol):
    """Members of `fsdp_lab.lab.Lab`."""

    cluster: Any


@dataclass(frozen=True, kw_only=True)
class Measure:
    """The figure of a run that a cure changes. `form` writes its `value`."""

    name: str
    value: Callable[[AnyRun], float]
    form: Callable[[float], str]
    lower_is_better: bool = True

    def of(self, run: AnyRun) -> str:
        return self.form(self.value(run))


@dataclass(frozen=True, kw_only=True)
class Pain:
    """One of them.

    Attributes:
        title: as people say it. said: what they see, and where they have asked. look: the panel that shows it.
        code: of the loop that has it, if it is one; "" for a Spec.
    """

    cause: Cause
    title: str
    said: str
    look: str
    measure: Measure
    sick: Callable[[ClinicLab], AnyRun]
    cured: Callable[[ClinicLab, AnyRun], AnyRun]
    code: str = ""

    def reproduce(self, lab: ClinicLab) -> AnyRun:
        """Trains until it has the pain, some seconds. Raises FieldError or ClusterError where these ranks cannot have it."""
        return self.sick(lab)

    def cure(self, lab: ClinicLab, run: AnyRun) -> AnyRun:
        """Trains again as the diagnosis of the run says. Raises ClusterError if it has not this cause."""
        if all(d.cause is not self.cause for d in run.diagnoses):
            raise ClusterError(f"{run!r} does not have the cause {self.cause.value!r}; reproduce it first")
        return self.cured(lab, run)


# -- how they run ------------------------------------------------------------------------------------------------------


def _train(lab: ClinicLab, spec: Spec | None = None, *, steps: int, **changes: Any) -> AnyRun:
    """Returns the run when it is over, also if it has failed."""
    run = lab.run(spec, steps=steps, **changes)
    with contextlib.suppress(FieldError, ClusterError):
        run.wait(LIMIT_S)
    run.stop(10)
    return run


def _as_diagnosed(steps: int, cause: Cause) -> Callable[[ClinicLab, AnyRun], AnyRun]:
    """Trains the Spec with the changes of its diagnosis."""

    def cured(lab: ClinicLab, run: AnyRun) -> AnyRun:
        changes = next(d.changes for d in run.diagnoses if d.cause is cause)
        assert isinstance(run.spec, Spec)
        return _train(lab, run.spec.replace(**changes), steps=steps)

    return cured


def _cell(lab: ClinicLab, code: str) -> AnyRun:
    """Runs a loop on all ranks as `%%px` does, and returns its run when that is over. Raises ClusterError if none began."""
    before = lab.current
    if before is not None and not before.done:
        before.stop(10, "the clinic began")
    result = lab.cluster.client[lab.cluster.engine_ids].execute(code, block=False)
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s and not (result.ready() and _over(lab.current, before)):
        time.sleep(0.02)
        if result.ready() and lab.current is before and not result.successful():
            break
    run = lab.current
    if run is None or run is before:
        raise ClusterError(f"the loop did not begin: {_error(result)}")
    if not run.done:
        run.stop(10)
    return run


def _over(run: AnyRun | None, before: AnyRun | None) -> bool:
    return run is not None and run is not before and run.done


def _error(result: Any) -> str:
    try:
        result.get(0.1)
    except Exception as e:  # whatever the cell raised, on any rank
        return str(e).strip().partition("\n")[0]
    return "it was not watched"


def _loop_pain(code: Callable[..., str]) -> dict[str, Any]:
    """The fields of a pain that is a loop."""
    return {
        "sick": lambda lab: _cell(lab, code(cured=False)),
        "cured": lambda lab, run: _cell(lab, code(cured=True)),
        "code": code(cured=False),
    }


def _spec_pain(cause: Cause, steps: int, **changes: Any) -> dict[str, Any]:
    """The fields of a pain that is a Spec."""
    return {
        "cause": cause,
        "sick": lambda lab: _train(lab, Spec(world_size=lab.spec.world_size), steps=steps, **changes),
        "cured": _as_diagnosed(steps, cause),
    }


# -- weights in folders ------------------------------------------------------------------------------------------------


_SMALLER = {
    "vocab_size": 320,
    "n_positions": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_PICKLED = "weights.pt"
_LARGER = {"n_embd": 512, "n_layer": 8, "n_head": 8}  # 100 MB


@contextlib.contextmanager
def _saved_model(
    rename: Callable[[str], str] = str, sizes: Mapping[str, int] = {}, *, pickled: bool = False
) -> Iterator[Path]:
    """A folder with the weights of a GPT-2, as `save_pretrained` writes them, but for the names; also by `torch.save`."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    with tempfile.TemporaryDirectory(prefix="fsdp_lab-clinic-") as folder, torch.device("cpu"):
        config = GPT2Config.from_dict({**_SMALLER, **sizes})
        model = GPT2LMHeadModel(config)
        model.save_pretrained(folder, state_dict={rename(name): p.detach() for name, p in model.named_parameters()})
        if pickled:
            torch.save(model.state_dict(), Path(folder) / _PICKLED)
        del model
        yield Path(folder)


_FROZEN = ("*.h.*",)  # so that the training itself takes little


@contextlib.contextmanager
def _little_memory(lab: ClinicLab) -> Iterator[None]:
    """A limit for the memory of each rank, as a small machine has it. Raises ClusterError where the system sets none."""
    if lab.current is not None:
        lab.current.stop(10, "the clinic began")
    lab.cluster.call("unload")
    lab.cluster.call("limit_memory", more_bytes=LOADING_BYTES)
    try:
        yield
    finally:
        with contextlib.suppress(ClusterError):  # ranks that are gone have no limit
            lab.cluster.call("limit_memory", more_bytes=None)


def _load_whole(lab: ClinicLab) -> AnyRun:
    """Each rank builds the whole model from its weights, as scripts do."""
    with _saved_model(sizes=_LARGER, pickled=True) as saved, _little_memory(lab):
        folder = str(saved)

        def build() -> Any:
            import torch
            from transformers import GPT2Config, GPT2LMHeadModel

            model = GPT2LMHeadModel(GPT2Config.from_pretrained(folder))
            model.load_state_dict(torch.load(f"{folder}/{_PICKLED}", weights_only=True))
            return model

        def loss(model: Any, batch: Any) -> Any:
            return model(input_ids=batch["x"], labels=batch["x"]).loss

        def data() -> Any:
            import torch

            return [{"x": torch.arange(32)} for _ in range(64)]

        return _train(lab, steps=3, model=build, loss=loss, data=data, **_loading_fields())


def _load_by_range(lab: ClinicLab, run: AnyRun) -> AnyRun:
    with _saved_model(sizes=_LARGER) as folder, _nothing_held(lab), _little_memory(lab):
        return _train(lab, steps=3, model=str(folder), seq_len=32, **_loading_fields())


def _loading_fields() -> Mapping[str, Any]:
    return {"micro_batch": 1, "optimizer": "sgd", "freeze": _FROZEN, "wrap": "class:GPT2Block"}


@contextlib.contextmanager
def _nothing_held(lab: ClinicLab) -> Iterator[None]:
    """Afterwards the ranks hold no model, since its folder is gone."""
    try:
        yield
    finally:
        with contextlib.suppress(ClusterError):
            lab.cluster.call("unload")


def _strange_names(lab: ClinicLab) -> AnyRun:
    with _saved_model(lambda name: f"module.{name}") as folder:
        return _train(lab, steps=3, model=str(folder), micro_batch=1, seq_len=32)


def _right_names(lab: ClinicLab, run: AnyRun) -> AnyRun:
    from fsdp_lab.models.unwrapping import unwrap_names

    with _saved_model(lambda name: f"module.{name}") as folder, _nothing_held(lab):
        right = unwrap_names(folder, folder / "right")
        return _train(lab, steps=3, model=str(right), micro_batch=1, seq_len=32)


# -- what they are measured by -----------------------------------------------------------------------------------------


def _steps(run: AnyRun) -> float:
    return float(sum(step.is_whole for step in run.events.steps()))


def _step_time_s(run: AnyRun) -> float:
    return median([step.step_time_s for step in run.events.steps() if step.counts] or [float("nan")])


def _copies_s(run: AnyRun) -> float:
    """Of a traced step; on a CPU the copies are within memory, and the rest of the step hardly changes."""
    traced = run.events.traced()
    spans = [s for e in traced[-1].events for s in e.spans] if traced else []
    return sum(s.seconds for s in spans if s.track is Track.HOST_COPY) / max(1, run.spec.world_size)


def _peak_bytes(run: AnyRun) -> float:
    return float(max((e.memory.peak_bytes for e in run.events.latest().values()), default=0))


def _gradient_bytes(run: AnyRun) -> float:
    return float(max((e.memory.at_peak.gradients_bytes for e in run.events.latest().values()), default=0))


def _recompilations(run: AnyRun) -> float:
    return float(sum(len(step.events[0].recompiled) for step in run.events.steps()))


def _reduced_bytes(run: AnyRun) -> float:
    newest = run.events.latest().get(0)
    return 0.0 if newest is None or "all_reduce" not in newest.comm else float(newest.comm["all_reduce"].link_bytes)


def _ended(run: AnyRun) -> float:
    return float(run.state is RunState.FINISHED)


def _whole(value: float) -> str:
    return f"{value:.0f}"


STEPS = Measure(name="steps trained", value=_steps, form=_whole, lower_is_better=False)
ENDED = Measure(name="ended by itself", value=_ended, form=lambda v: "yes" if v else "no", lower_is_better=False)
STEP_TIME = Measure(name="step time", value=_step_time_s, form=duration)


# -- the ten -----------------------------------------------------------------------------------------------------------

PAINS: Mapping[str, Pain] = {
    pain.cause.value: pain
    for pain in (
        Pain(
            cause=Cause.LOADING,
            title="Out of memory before the first step",
            said="A model that fits when it is sharded does not load: every rank builds all of it first. "
            "(pytorch #104755, transformers #43749)",
            look="The run's state: it fails while it builds the model. Each rank has 120 MiB here, for 100 MB of weights.",
            measure=STEPS,
            sick=_load_whole,
            cured=_load_by_range,
        ),
        Pain(
            title="LoRA saves no memory",
            said="One parameter in a hundred is trained, and the GPU is as full as before. (pytorch #91167, litgpt #1417)",
            look="Memory by class: activations are nearly all of the peak.",
            measure=Measure(name="peak memory", value=_peak_bytes, form=size),
            **_spec_pain(Cause.ADAPTERS, 6, model="gpt2-1m", micro_batch=8, seq_len=128, lora={"r": 4}),
        ),
        Pain(
            title="Gradient accumulation runs out of memory",
            said="no_sync() was to save communication; now the gradients do not fit. (accelerate #2531, open-instruct #746)",
            look="Memory by class: gradients are as large as the whole model, not as a shard.",
            measure=Measure(name="gradients at the peak", value=_gradient_bytes, form=size),
            **_spec_pain(Cause.ACCUMULATION, 6, **SMALL, accumulate=4, sync="last"),
        ),
        Pain(
            cause=Cause.BATCHES,
            title="It hangs at the end of an epoch",
            said="The last batches are on some ranks only; the others wait for ever. (pytorch #100069, prime-rl #2515)",
            look="The status line: who waits for whom, and in which collective.",
            measure=ENDED,
            **_loop_pain(cells.unequal_batches),
        ),
        Pain(
            cause=Cause.GENERATION,
            title="generate() hangs",
            said="Rank 0 samples a text, to have a look, and training stops. (pytorch #100069, #101335)",
            look="The status line: the ranks issue different collectives.",
            measure=STEPS,
            **_loop_pain(cells.generating),
        ),
        Pain(
            title="FSDP is slower than DDP",
            said="The same model on the same GPUs, at a fraction of the tokens a second. (OLMo #762, fms-fsdp #63)",
            look="Communication: the exposed part fills the step. The link is emulated.",
            measure=STEP_TIME,
            **_spec_pain(Cause.COMMUNICATION, 8, **SMALL, link=SLOW_LINK),
        ),
        Pain(
            title="CPU offload crawls",
            said="It fits now, and takes twice as long, though there was room. (pytorch #148532)",
            look="Timeline: copies, and an optimizer that takes as long as the backward.",
            measure=Measure(name="copies to and from the host, a step", value=_copies_s, form=duration),
            **_spec_pain(Cause.OFFLOAD, 12, model="gpt2-10m", micro_batch=1, seq_len=16, offload="all"),
        ),
        Pain(
            cause=Cause.COMPILATION,
            title="torch.compile never stops compiling",
            said="Each step takes as long as the first. (pytorch #138813, torchtitan #1365)",
            look="Step time: it does not fall after the first steps.",
            measure=Measure(name="recompilations", value=_recompilations, form=_whole),
            **_loop_pain(cells.compiled),
        ),
        Pain(
            cause=Cause.REPLICAS,
            title="Hybrid sharding trains, and learns as little as one rank",
            said="No error, a falling loss, and replicas that were never synchronised. (pytorch #154888)",
            look="Communication: no all-reduce between the replicas.",
            measure=Measure(
                name="reduced between replicas, a step", value=_reduced_bytes, form=size, lower_is_better=False
            ),
            **_loop_pain(cells.replicas),
        ),
        Pain(
            cause=Cause.CHECKPOINT,
            title="The checkpoint does not fit the model",
            said="Missing and unexpected keys, all of them. (accelerate #1462, torchtitan #765)",
            look="The run's state: what the folder lacks, and what it has instead.",
            measure=STEPS,
            sick=_strange_names,
            cured=_right_names,
        ),
    )
}
