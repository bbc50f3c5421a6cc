"""`checksum`: one number that says whether parameters are the same, whoever holds them and however they are sharded."""

from __future__ import annotations

import hashlib

import torch

from fsdp_lab.backends import Backend

_CHUNK = 1 << 20  # elements at a time: what is made of them is several times their size
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: no two positions of a parameter weigh the same


def checksum(backend: Backend) -> int:
    """This rank's part: the parts of all ranks of one replica add up, modulo 2^64, to that of the whole parameters.

    Every element's 32 bits (fp32; -0 as 0) are weighed by its name and its position in the parameter, and summed modulo
    2^64, so that where a value lies decides and who holds it does not. Padding is in no piece. An element that differs
    changes the sum.
    """
    total = 0
    for piece in backend.pieces():
        seed = int.from_bytes(hashlib.blake2b(piece.name.encode(), digest_size=8).digest(), "little", signed=True)
        for first in range(0, piece.numel, _CHUNK):
            bits = (piece.local[first : first + _CHUNK].detach() + 0.0).view(torch.int32).long()
            weights = torch.arange(bits.numel(), device=bits.device).add_(piece.start + first).mul_(_STRIDE).add_(seed)
            total += int(bits.mul_(weights.bitwise_or_(1)).sum())
    return total % (1 << 64)
