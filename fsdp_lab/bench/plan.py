"""`Plan`: the work that all forms do, how often, and on what; refused before anything is started, or good."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fsdp_lab.bench.forms import FORMS, PEERS, STEP, Form
from fsdp_lab.spec import Spec, SpecError, Strategy, Workload

_LEAST = {"seq_len": 2, "vocab": 2}  # of the numbers; 1 of those not named here
SHARDINGS = ("full_shard", "shard_grad_op")  # that the lab and FSDP2 both have at any world size
PRECISIONS = ("fp32", "bf16")  # fp16 would need a loss scale, which is the trainer's


class PlanError(ValueError):
    """A refused plan. `str()` is a sentence that names the option and the way out."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """GPT-2 of these sizes on random tokens, AdamW. Raises PlanError."""

    ranks: int = 2
    steps: int = 30  # counted ones of each form
    warmup: int = 3  # before them: the first makes optimizer state, in the second DDP lays its buckets anew
    layers: int = 4
    width: int = 512
    heads: int = 8
    vocab: int = 8192
    seq_len: int = 64
    micro_batch: int = 2
    precision: str = "fp32"
    sharding: str = "full_shard"  # of lab and fsdp2
    forms: tuple[str, ...] = STEP
    devices: tuple[str, ...] = ()  # one a rank; see launch.place
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("ranks", "steps", "warmup", "layers", "width", "heads", "vocab", "seq_len", "micro_batch"):
            value, least = getattr(self, name), _LEAST.get(name, 1)
            if value < least:
                raise PlanError(f"{option(name)} {value} is refused; give a whole number of {least} or more")
        if self.width % self.heads:
            raise PlanError(
                f"--heads {self.heads} does not divide --width {self.width}; give a number of heads that does"
            )
        if not self.forms:
            raise PlanError(f"--only names no form; choose from {', '.join(STEP)}")
        for name in self.forms:
            self._check(FORMS[name])

    def _check(self, form: Form) -> None:
        try:
            self.spec(form)
        except SpecError as e:
            others = ",".join(peer for peer in PEERS if peer != form.peer)
            raise PlanError(
                f"the form {form.name} cannot be run ({e.field}: {e.reason}); leave it out with --only {others}"
            ) from e

    def spec(self, form: Form) -> Spec:
        """What the form is built from. Its `data` is not read: the tokens are random."""
        work = Workload(model=self.model, seq_len=self.seq_len, micro_batch=self.micro_batch, lr=3e-4, seed=self.seed)
        strategy = Strategy(**form.strategy(self.sharding, self.precision))
        return Spec(workload=work, strategy=strategy, world_size=self.ranks)

    @property
    def model(self) -> dict[str, Any]:
        """A transformers config."""
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
    def shares_gpu(self) -> bool:
        """Whether ranks sit on one GPU; then all talk over Gloo."""
        return self.devices[:1] != ("cpu",) and len(set(self.devices)) < len(self.devices)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Plan:
        return cls(**{**d, "forms": tuple(d["forms"]), "devices": tuple(d["devices"])})


def option(field: str) -> str:
    """As it is written on the command line."""
    return "--" + field.replace("_", "-")
