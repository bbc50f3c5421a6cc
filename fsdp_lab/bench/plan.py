"""What is compared on which work: a `Form` is one way to train, a `BenchPlan` the work that all forms do.

A peer has several forms, because ratios are computed against its fastest one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_lab.core.errors import FieldError
from fsdp_lab.core.spec import Spec, Strategy
from fsdp_lab.core.workload import Workload
from fsdp_lab.models.presets import PRESETS

LAB, CONTROL = "lab", "lab-again"
DCP, DCP_AGAIN = "dcp", "dcp-again"  # plain Distributed Checkpoint, which `bench checkpoint` compares with
WARM_UP, WINDOW = 100, 10  # of `bench soak`: switches before the first reading; readings of which the median counts
REFERENCE = "fsdp2-raw"  # losses and printed times are compared with its


class PlanError(ValueError):
    """A refused option. `str()` is a sentence that names it and says what to give instead."""


class BenchError(RuntimeError):
    """The bench was started and failed. `str()` is a sentence."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way to train. All forms do the same work from the same initial values; `peer` is the backend."""

    name: str
    peer: str
    group: str = "wire"  # the process group: our Wire as labs have it, "gloo", a Wire over Gloo, or "raw", torch's own
    reduction: str = "auto"  # of the Wire
    forward_prefetch: int | None = None  # None: what a user gets who sets nothing
    is_tuned: bool = False  # FSDP2 with all that makes it faster here: see `_tune` in interleave.py
    fused: bool = False  # the optimizer's update
    gather: str = "copy"  # of Strategy
    metered: bool = False  # each step is measured and reported as a lab's rank does

    def strategy(self, sharding: str, precision: str) -> dict[str, Any]:
        """Fields of Strategy."""
        replicated = self.peer == "ddp"
        return {
            "backend": self.peer,
            "sharding": "no_shard" if replicated else sharding,
            "precision": precision,
            "forward_prefetch": self.forward_prefetch,
            "gather": self.gather,
        }


# In the order in which they take turns. The control is far from the form that it repeats.
_STEP_FORMS = (
    Form(name=LAB, peer="lab"),
    Form(name=REFERENCE, peer="fsdp2", group="raw"),
    Form(name="ddp-raw", peer="ddp", group="raw"),
    Form(name="fsdp2-raw-tuned", peer="fsdp2", group="raw", forward_prefetch=1, is_tuned=True),
    Form(name="fsdp2-wire", peer="fsdp2"),
    Form(name=CONTROL, peer="lab"),
    Form(name="fsdp2-raw-prefetch", peer="fsdp2", group="raw", forward_prefetch=1),
    Form(name="ddp-wire", peer="ddp"),
    Form(name="fsdp2-wire-prefetch", peer="fsdp2", forward_prefetch=1),
    Form(name="fsdp2-wire-tuned", peer="fsdp2", forward_prefetch=1, is_tuned=True),
)
_FUSED_FORMS = (Form(name="lab-fused", peer="lab", fused=True),)  # by name alone: peers would need it as well
_GLOO_FORMS = (  # by name alone: what CPU ranks of a lab would have without shared memory
    Form(name="lab-gloo", peer="lab", group="gloo"),
    Form(name="fsdp2-gloo", peer="fsdp2", group="gloo"),
    Form(name="ddp-gloo", peer="ddp", group="gloo"),
)
_MAPPED_FORMS = (Form(name="lab-mapped", peer="lab", gather="mapped"),)  # by name alone: peers have nothing like it
PEERS = ("fsdp2", "ddp")
STEP = tuple(form.name for form in _STEP_FORMS)
NAMED = (*STEP, *(form.name for form in (*_FUSED_FORMS, *_GLOO_FORMS, *_MAPPED_FORMS)))


def _metering(peer: str) -> tuple[Form, ...]:
    """Forms for the overhead of measuring: torch's own group without our code, with all measuring, and the first again."""
    return (
        Form(name=f"{peer}-bare", peer=peer, group="raw"),
        Form(name=f"{peer}-metered", peer=peer, reduction="native", metered=True),
        Form(name=f"{peer}-bare-again", peer=peer, group="raw"),
    )


METERED_PEERS = ("fsdp2", "fsdp1", "ddp", "lab")
METERING: Mapping[str, tuple[str, ...]] = {peer: tuple(f.name for f in _metering(peer)) for peer in METERED_PEERS}
_METERED_FORMS = tuple(form for peer in METERED_PEERS for form in _metering(peer))
FORMS: Mapping[str, Form] = {
    f.name: f for f in (*_STEP_FORMS, *_FUSED_FORMS, *_GLOO_FORMS, *_MAPPED_FORMS, *_METERED_FORMS)
}


def forms_named(names: str) -> tuple[str, ...]:
    """The forms in a comma-separated list, where a peer means all its forms, in the order of turns. Raises PlanError."""
    chosen: set[str] = set()
    for name in (n.strip() for n in names.split(",") if n.strip()):
        found = [f.name for f in _STEP_FORMS if name in (f.name, f.peer)] or [name] * (name in NAMED)
        if not found:
            raise PlanError(f"--only: there is no form {name}; choose from {', '.join((*NAMED, *PEERS))}")
        chosen.update(found)
    return tuple(name for name in NAMED if name in chosen)


# -- the work -----------------------------------------------------------------------------------------------------

_MINIMUM = {"seq_len": 2, "vocab": 2}  # of these numbers; 1 of all others
SHARDINGS = ("full_shard", "shard_grad_op")  # that the lab and FSDP2 support with any number of ranks
PRECISIONS = ("fp32", "bf16")  # fp16 needs a loss scale, which the trainer computes


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """GPT-2 of these sizes, or a preset, on random tokens, AdamW. Raises PlanError."""

    ranks: int = 2
    steps: int = 30  # counted ones of each form
    warmup: int = 3  # before them: the first creates optimizer state, in the second DDP rebuilds its buckets
    layers: int = 4
    width: int = 512
    heads: int = 8
    vocab: int = 8192
    preset: str = ""  # takes the place of layers, width, heads and vocab
    seq_len: int = 64
    micro_batch: int = 2
    precision: str = "fp32"
    sharding: str = "full_shard"  # of lab and fsdp2
    forms: tuple[str, ...] = STEP
    devices: tuple[str, ...] = ()  # one for each rank; see launch.place
    seed: int = 0
    limit_s: float = 0.0  # of one launch, whose ranks are ended then; 0: none

    def __post_init__(self) -> None:
        for name in ("ranks", "steps", "warmup", "layers", "width", "heads", "vocab", "seq_len", "micro_batch"):
            value, least = getattr(self, name), _MINIMUM.get(name, 1)
            if value < least:
                raise PlanError(f"{option(name)} {value} is refused; give a whole number of {least} or more")
        if self.width % self.heads:
            raise PlanError(
                f"--heads {self.heads} does not divide --width {self.width}; give a number of heads that does"
            )
        if self.preset:
            self._check_preset()
        if not self.forms:
            raise PlanError(f"--only names no form; choose from {', '.join(STEP)}")
        for name in self.forms:
            self._check(FORMS[name])

    def _check_preset(self) -> None:
        causal = [name for name, preset in PRESETS.items() if preset.kind == "causal"]
        if self.preset not in causal:
            raise PlanError(f"--model {self.preset} is refused; give one of {', '.join(causal)}")
        config = PRESETS[self.preset].config
        positions = config.get("n_positions") or config["max_position_embeddings"]
        if self.seq_len > positions:
            raise PlanError(f"--seq-len {self.seq_len} is refused; {self.preset} takes {positions} or fewer")

    def _check(self, form: Form) -> None:
        try:
            self.spec(form)
        except FieldError as e:
            others = ",".join(peer for peer in PEERS if peer != form.peer)
            raise PlanError(
                f"the form {form.name} cannot be run ({e.field}: {e.reason}); leave it out with --only {others}"
            ) from e

    def spec(self, form: Form) -> Spec:
        """The Spec of a form. Its `data` is not read: the tokens are random."""
        work = Workload(model=self.model, seq_len=self.seq_len, micro_batch=self.micro_batch, lr=3e-4, seed=self.seed,
                        optimizer_args={"fused": form.fused})  # fmt: skip
        strategy = Strategy(**form.strategy(self.sharding, self.precision))
        return Spec(workload=work, strategy=strategy, world_size=self.ranks)

    @property
    def tokens(self) -> int:
        """How many different tokens there are."""
        return int(PRESETS[self.preset].config["vocab_size"]) if self.preset else self.vocab

    @property
    def model(self) -> str | dict[str, Any]:
        """The preset, or a transformers config."""
        if self.preset:
            return self.preset
        return {
            "model_type": "gpt2",
            "n_layer": self.layers,
            "n_embd": self.width,
            "n_head": self.heads,
            "vocab_size": self.vocab,
            "n_positions": self.seq_len,
            "bos_token_id": None,
            "eos_token_id": None,
        }

    @property
    def shares_memory(self) -> bool:
        """Whether the lab's wire is over shared memory, where the machine has it. Not where its own cost is measured, beside
        torch's group over Gloo."""
        shares = set(self.devices) == {"cpu"} or self.shares_gpu
        return shares and not any(FORMS[name].metered for name in self.forms)

    @property
    def shares_gpu(self) -> bool:
        """Whether several ranks use one GPU; then torch's own groups are Gloo's."""
        return self.devices[:1] != ("cpu",) and len(set(self.devices)) < len(self.devices)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> BenchPlan:
        return cls(**{**d, "forms": tuple(d["forms"]), "devices": tuple(d["devices"])})


def option(field: str) -> str:
    """The name of its command-line option."""
    return "--" + field.replace("_", "-")
