"""What is compared on which work: a `Form` is one way to train, a `BenchPlan` the work that all forms do. A peer has several
forms, because ratios are computed against its fastest one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.spec.spec import BACKEND_TRAITS, Spec

LAB = "lab"
CONTROL = "lab-again"
REFERENCE = "fsdp2-raw"  # losses and printed times are compared with its


class BenchError(RuntimeError):
    """The bench was started and failed. `str()` is a sentence."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way to train. All forms do the same work from the same initial values; `peer` is the backend."""

    name: str
    peer: str
    group: str = "wire"  # the process group: our Wire as labs have it, "gloo", a Wire over Gloo, or "raw", torch's own
    forward_prefetch: int | None = None  # None: what a user gets who sets nothing
    is_tuned: bool = False  # FSDP2 with all that makes it faster here: see `_tune` in interleave.py
    gather: str = "copy"  # of Strategy


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
_BY_NAME_ALONE = (
    Form(name="lab-gloo", peer="lab", group="gloo"),  # CPU ranks of a lab without shared memory
    Form(name="fsdp2-gloo", peer="fsdp2", group="gloo"),
    Form(name="ddp-gloo", peer="ddp", group="gloo"),
    Form(name="lab-mapped", peer="lab", gather="mapped"),  # peers have nothing like it
)
FORMS: Mapping[str, Form] = {form.name: form for form in (*_STEP_FORMS, *_BY_NAME_ALONE)}
STEP = tuple(form.name for form in _STEP_FORMS)
PEERS = tuple(dict.fromkeys(form.peer for form in _STEP_FORMS if form.peer != LAB))


def forms_named(
    names: str, forms: Sequence[Form] = _STEP_FORMS, also: Sequence[Form] = _BY_NAME_ALONE
) -> tuple[str, ...]:
    """The forms in a comma-separated list, where a peer means all its forms, in the order of turns. Raises ArgumentError."""
    chosen: set[str] = set()
    known = f"choose from {', '.join(f.name for f in (*forms, *also))}, or name a backend"
    for name in (n.strip() for n in names.split(",") if n.strip()):
        meant = [f.name for f in forms if name in (f.name, f.peer)] or [f.name for f in also if f.name == name]
        if not meant:
            raise ArgumentError("--only", f"there is no form {name}", known)
        chosen.update(meant)
    if not chosen:
        raise ArgumentError("--only", "it names no form", known)
    return tuple(f.name for f in (*forms, *also) if f.name in chosen)


def place(ranks: int, device: str | None) -> tuple[str, ...]:
    """A device per rank. None: GPUs if there is one for each rank, else CPUs. Raises ArgumentError if there is no GPU."""
    if device == "cpu":
        return ("cpu",) * ranks
    import torch

    gpus = torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise ArgumentError("--device", "torch finds no GPU here", "give --device cpu")
    if device is None and gpus < ranks:
        return ("cpu",) * ranks
    return tuple(f"cuda:{rank % gpus}" for rank in range(ranks))


MODEL: Mapping[str, Any] = {"model_type": "gpt2", "n_layer": 4, "n_embd": 512, "n_head": 8, "vocab_size": 8192}
SHARDINGS = ("full_shard", "shard_grad_op")  # that the lab and FSDP2 support with any number of ranks
PRECISIONS = ("fp32", "bf16")  # fp16 needs a loss scale, which the trainer computes


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """A preset, or a small GPT-2, on random tokens, AdamW. Raises ArgumentError."""

    ranks: int = 2
    steps: int = 30  # counted ones of each form
    warmup: int = 3  # before them: the first creates optimizer state, in the second DDP rebuilds its buckets
    preset: str = ""  # "": `MODEL`
    seq_len: int = 64
    micro_batch: int = 2
    precision: str = "fp32"
    sharding: str = "full_shard"  # of lab and fsdp2
    forms: tuple[str, ...] = STEP
    devices: tuple[str, ...] = ()  # one for each rank; see launch.place
    seed: int = 0
    limit_s: float = 0.0  # of one launch, whose ranks are ended then; 0: none
    known: ClassVar[Mapping[str, Form]] = FORMS

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("steps", 1), ("warmup", 1), ("seq_len", 2), ("micro_batch", 1)):
            if (value := getattr(self, name)) < least:
                raise ArgumentError(option(name), f"{value} is refused", f"give a whole number of {least} or more")
        if self.preset:
            causal = [name for name, preset in PRESETS.items() if preset.kind == "causal"]
            if self.preset not in causal:
                raise ArgumentError("--model", f"{self.preset} is refused", f"give one of {', '.join(causal)}")
            config = PRESETS[self.preset].config
            positions = config.get("n_positions") or config["max_position_embeddings"]
            if self.seq_len > positions:
                hint = f"{self.preset} takes {positions} or fewer"
                raise ArgumentError("--seq-len", f"{self.seq_len} is refused", hint)
        for name in self.forms:
            self.spec(self.known[name])  # raises FieldError if it cannot be

    def spec(self, form: Form) -> Spec:
        """The Spec of a form. Its `data` is not read: the tokens are random."""
        spec = Spec(world_size=self.ranks).replace(model=self.model, seq_len=self.seq_len, micro_batch=self.micro_batch)
        spec = spec.replace(lr=3e-4, seed=self.seed, precision=self.precision)
        shardings, prefetch = BACKEND_TRAITS[form.peer].shardings, form.forward_prefetch
        sharding = self.sharding if self.sharding in shardings else shardings[0]
        return spec.replace(backend=form.peer, sharding=sharding, forward_prefetch=prefetch, gather=form.gather)

    @property
    def model(self) -> str | dict[str, Any]:
        """The preset, or a transformers config."""
        return self.preset or {**MODEL, "n_positions": self.seq_len, "bos_token_id": None, "eos_token_id": None}

    @property
    def shares_memory(self) -> bool:
        """Whether the lab's wire is over shared memory, where the machine has it."""
        return set(self.devices) == {"cpu"} or self.shares_gpu

    @property
    def shares_gpu(self) -> bool:
        """Whether several ranks use one GPU; then torch's own groups are Gloo's."""
        return self.devices[:1] != ("cpu",) and len(set(self.devices)) < len(self.devices)

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        return cls(**{**d, "forms": tuple(d["forms"]), "devices": tuple(d["devices"])})


def option(field: str) -> str:
    """The name of its command-line option."""
    return "--" + field.replace("_", "-")
