"""An allocator's error becomes a sentence with a way out."""

from __future__ import annotations

import pytest

from fsdp_lab.cluster.remote import described, memory_short


class OutOfMemoryError(RuntimeError):
    """torch's for a GPU, as far as it is read."""


ERRORS = {
    "host": (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                          "tried to allocate 134217728 bytes. Error code 12 (Cannot allocate memory)"), "128.0 MiB"),
    "gpu": (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.34 GiB. GPU 0 has a total capacity of 79.10 GiB of "
                             "which 1.20 GiB is free."), "2.34 GiB"),
    "python": (MemoryError(), "what it asked for"),
}  # fmt: skip


@pytest.mark.parametrize("where", ERRORS)
def test_what_could_not_be_had_is_said(where: str) -> None:
    error, size = ERRORS[where]
    told = described(error)
    assert told["kind"] == "OutOfMemory"
    assert told["reason"].startswith(f"{size} more could not be allocated; give a smaller micro_batch")


def test_what_another_rank_could_not_have_is_not_this_ones() -> None:
    class RankAborted(RuntimeError):
        pass

    error, _ = ERRORS["host"]
    assert described(RankAborted(f"rank 1 failed: RuntimeError: {error}"))["kind"] == "RankAborted"


def test_other_errors_keep_their_words() -> None:
    told = described(ValueError("a  memory\nof it"))
    assert (told["kind"], told["reason"], memory_short(ValueError("x"))) == ("ValueError", "a memory of it", "")
