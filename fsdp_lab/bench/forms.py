"""`Form`: one way to train the work. A peer has several, as a ratio counts only against its fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LAB, CONTROL = "lab", "lab-again"
REFERENCE = "fsdp2-raw"  # losses and printed times are compared with its


@dataclass(frozen=True, kw_only=True)
class Form:
    """All forms do the same work from the same values. `peer` is the backend, `on` what carries its bytes."""

    name: str
    peer: str
    on: str = "wire"  # our Wire, or "raw": torch's own Gloo or NCCL group
    reduction: str = "auto"  # of the Wire
    forward_prefetch: int = 0
    keep_last: int = 0  # blocks at the end of the model that are not resharded between forward and backward
    metered: bool = False  # each step is measured and told as the lab does it

    def strategy(self, sharding: str, precision: str) -> dict[str, Any]:
        """Fields of Strategy."""
        whole = self.peer == "ddp"
        return {
            "backend": self.peer,
            "sharding": "no_shard" if whole else sharding,
            "precision": precision,
            "forward_prefetch": self.forward_prefetch,
        }


# In the order in which they take turns. The control stands far from the form that it repeats.
_ALL = (
    Form(name=LAB, peer="lab", forward_prefetch=1),
    Form(name=REFERENCE, peer="fsdp2", on="raw"),
    Form(name="ddp-raw", peer="ddp", on="raw"),
    Form(name="fsdp2-wire-native", peer="fsdp2", reduction="native"),
    Form(name="fsdp2-wire", peer="fsdp2"),
    Form(name=CONTROL, peer="lab", forward_prefetch=1),
    Form(name="fsdp2-raw-prefetch", peer="fsdp2", on="raw", forward_prefetch=1),
    Form(name="ddp-wire", peer="ddp"),
    Form(name="fsdp2-wire-prefetch", peer="fsdp2", forward_prefetch=1),
    Form(name="fsdp2-wire-tuned", peer="fsdp2", forward_prefetch=1, keep_last=2),  # as a careful user would have it
)
PEERS = ("fsdp2", "ddp")
STEP = tuple(form.name for form in _ALL)


def _metering(peer: str) -> tuple[Form, ...]:
    """What measuring costs a backend: the whole of it, beside torch's own group with nothing of ours, and that again."""
    return (
        Form(name=f"{peer}-bare", peer=peer, on="raw"),
        Form(name=f"{peer}-metered", peer=peer, reduction="native", metered=True),
        Form(name=f"{peer}-bare-again", peer=peer, on="raw"),
    )


METERED_PEERS = ("fsdp2", "fsdp1", "ddp", "lab")
METERING: Mapping[str, tuple[str, ...]] = {peer: tuple(f.name for f in _metering(peer)) for peer in METERED_PEERS}
FORMS: Mapping[str, Form] = {form.name: form for form in (*_ALL, *(f for p in METERED_PEERS for f in _metering(p)))}


def named(words: str) -> tuple[str, ...]:
    """The forms that a comma list names; a peer's name stands for all its forms. Raises KeyError with a stranger."""
    chosen: set[str] = set()
    for word in (w.strip() for w in words.split(",") if w.strip()):
        found = [f.name for f in _ALL if word in (f.name, f.peer)]
        if not found:
            raise KeyError(word)
        chosen.update(found)
    return tuple(name for name in STEP if name in chosen)
