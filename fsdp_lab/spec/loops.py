"""`WatchedLoop`: what is known of a training loop that is not the lab's: to such a run what a Spec is to the lab's own."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from fsdp_lab.spec.spec import BACKEND_TRAITS, Spec

KEY = "watched"  # by which a stored one is told from a Spec


@dataclass(frozen=True, kw_only=True)
class WatchedLoop:
    """A model as a user set it up, as far as it shows. Not a Spec: nothing can be trained, switched or exported from it.

    `backend`: "lab", "fsdp2", "fsdp1", "ddp", or "module" for a plain one. `sharding`: as in a `Strategy`, "" if unknown.
    """

    model: str  # its class
    backend: str
    sharding: str
    shard_size: int  # ranks in one shard group
    parameters: int  # of the whole model
    units: int  # below the root; of DDP and of a plain module, its repeated blocks
    optimizer: str  # its class; "" if none was given
    precision: str  # "fp32", or "bf16/fp32": of computing, and of the reduction where it differs
    offload: str
    world_size: int
    device: str  # "cpu" or "cuda"
    title: str = ""  # as given by the user

    @property
    def name(self) -> str:
        """The name, as in `watched: FSDP2 GPT2LMHeadModel`."""
        kind = BACKEND_TRAITS[self.backend].title if self.backend in BACKEND_TRAITS else "plain"
        return self.title or f"watched: {kind} {self.model}"

    @cached_property
    def id(self) -> str:
        """Eight hex digits, as of a Spec."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def flat(self) -> dict[str, Any]:
        """Field name -> value; where a Spec has a field of that name, it means the same."""
        return dataclasses.asdict(self)

    def to_dict(self) -> dict[str, Any]:
        return {KEY: self.flat()}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        return cls(**d[KEY])


Trained = Spec | WatchedLoop  # what a run trains, as far as it is known
