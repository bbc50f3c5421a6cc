"""`drawing`: the random numbers of dropout, so that a training is the same under every backend, and repeats.

Note: masks depend on (seed, global number of the micro-batch's first sample, shape of the micro-batch) alone: equal at any
number of ranks, after a resume, and in a step that is computed again. A forward that is recomputed has the masks of the
first one, since torch's checkpoints restore the generators' states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def drawing(seed: int, first_sample: int, device: torch.device) -> Iterator[None]:
    """The context of one forward and backward. Afterwards the generators of the CPU and of `device` are as before, so that a
    user's own draws are not disturbed."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else [], device_type="cuda"):
        mask_seed = seed_of_masks(seed, first_sample)
        torch.default_generator.manual_seed(mask_seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(mask_seed)
        yield


def seed_of_masks(seed: int, first_sample: int) -> int:
    digest = hashlib.blake2b(f"{seed}/dropout/{first_sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits without a sign
