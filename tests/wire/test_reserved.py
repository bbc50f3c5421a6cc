"""Tensors in a rank's arena: how long their memory is theirs, and who is given it next."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_lab.wire import host_group
from fsdp_lab.wire.arena import Arena
from fsdp_lab.wire.host_group import ReservedBuffer

PAGE = 4096
FLOATS = 5 * PAGE  # 20 pages


@pytest.fixture
def arena() -> Iterator[Arena]:
    gc.freeze()  # what other tests have left is most of what the collections below would walk
    yield Arena(1 << 26)
    gc.unfreeze()


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one when addresses are mapped."""
    found: list[Any] = []
    map_ = host_group._map
    monkeypatch.setattr(host_group, "_map", lambda *given: found.append(given) or map_(*given))
    return found


def buffer(arena: Arena, numel: int = FLOATS) -> ReservedBuffer:
    return ReservedBuffer(arena, numel, torch.float32)


def in_file(arena: Arena, tensor: Tensor) -> Tensor:
    """What is in the file where a tensor is said to be."""
    return arena.bytes_at(arena.find(tensor)[1], tensor.nbytes).view(tensor.dtype)


def test_a_block_is_free_with_the_last_view_of_its_tensor(arena: Arena) -> None:
    tensor = arena.tensor(1000, torch.float32)
    address, view = tensor.data_ptr(), tensor[10:20]
    del tensor
    assert arena.tensor(1000, torch.float32).data_ptr() != address, "a view has it"
    gc.collect()
    del view
    assert arena.tensor(1000, torch.float32).data_ptr() == address


def test_a_tensor_is_where_the_arena_says(arena: Arena) -> None:
    arena.tensor(3, torch.uint8)
    for dtype in (torch.bfloat16, torch.complex64, torch.bool):
        tensor = arena.tensor(100, dtype)
        tensor.copy_(torch.arange(100) % 2)
        assert torch.equal(in_file(arena, tensor[40:60]), tensor[40:60]) and tensor.dtype is dtype
    assert arena.find(torch.empty(3)) is None


def test_memory_that_somebody_has_to_read_is_not_given_away(arena: Arena) -> None:
    tensor = arena.tensor(1000, torch.float32)
    found = arena.find(tensor)
    arena.share(found[0])
    address = tensor.data_ptr()
    del tensor
    other = arena.tensor(1000, torch.float32)
    assert other.data_ptr() != address
    arena.free(found[0])
    assert arena.tensor(1000, torch.float32).data_ptr() == address


def test_a_finalizer_may_run_while_the_arena_is_locked(arena: Arena) -> None:
    """As when Python collects garbage in the middle of an allocation."""
    kept = [arena.tensor(1000, torch.float32)]
    ended = threading.Event()

    def drop() -> None:
        with arena._lock:
            kept.clear()
        ended.set()

    threading.Thread(target=drop, daemon=True).start()
    assert ended.wait(10)


def test_buffers_share_a_block_in_turns(arena: Arena, mapped: list[Any]) -> None:
    """As units that are gathered one after the other, two at a time, there and back."""
    units = [buffer(arena) for _ in range(6)]
    order = [*range(6), *reversed(range(6))]
    for turn in range(3):
        count = len(mapped)
        for now, ahead in zip(order, [*order[1:], None], strict=True):
            units[now].hold()
            units[now].tensor.fill_(now)
            if ahead is not None:
                units[ahead].hold()
            assert bool((units[now].tensor == now).all())
            if ahead != now:
                units[now].free()
        assert len(mapped) == count + (6 if turn == 0 else 0)
    assert arena.used_bytes == 2 * 20 * PAGE


def test_a_buffer_moves_where_its_block_is_taken(arena: Arena) -> None:
    """A view that was made before sees what it holds, wherever that is."""
    one, other = buffer(arena), buffer(arena)
    view = one.tensor.view(-1, 5).t()
    one.hold()
    one.free()
    other.hold()
    other.tensor.fill_(2)
    one.hold()
    one.tensor.fill_(1)
    assert bool((view == 1).all()) and bool((other.tensor == 2).all())


def test_what_is_unread_is_not_overwritten(arena: Arena) -> None:
    one = buffer(arena)
    one.hold()
    one.tensor.fill_(1)
    found = arena.find(one.tensor)
    arena.share(found[0])  # another rank has yet to read it
    one.free()
    one.hold()
    one.tensor.fill_(2)
    assert bool((arena.bytes_at(found[1], one.tensor.nbytes).view(torch.float32) == 1).all())


def test_nothing_is_left_of_buffers_that_nobody_has(arena: Arena) -> None:
    one = buffer(arena)
    one.hold()
    address, view = one.tensor.data_ptr(), one.tensor[:1]
    del one
    view.fill_(3)  # it is there as long as a view
    assert is_mapped_here(address)
    del view
    gc.collect()
    assert not is_mapped_here(address)
    arena.trim()
    assert arena.used_bytes == 0


def is_mapped_here(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        ranges = (line.split()[0].split("-") for line in maps)
        return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_private_memory_is_not_found(arena: Arena) -> None:
    own, sent = arena.tensor(100, torch.float32, is_private=True), arena.tensor(100, torch.float32)
    assert arena.find(own) is None and arena.find(sent) is not None
    arena.keep_private(sent[3:])
    assert arena.find(sent) is None
    address = sent.data_ptr()
    del sent
    assert arena.find(again := arena.tensor(100, torch.float32)) is not None and again.data_ptr() == address


def test_memory_that_was_given_back_is_used_for_other_sizes() -> None:
    """Whatever stays in use: the file is not filled by holes."""
    arena = Arena(1 << 26)
    stays = [arena.tensor(100, torch.float32)]
    for turn in range(60):
        blocks = [arena.tensor(numel, torch.float32) for numel in (300_000 + 20_000 * (turn % 7), 1_000_000)]
        stays.append(arena.tensor(5000, torch.float32))
        del blocks
        arena.trim()
    assert arena.used_bytes < 61 * (16 * PAGE + 6 * PAGE)


def test_a_shortage_leaves_a_buffer_as_it_was() -> None:
    small = Arena(1 << 20)
    one, other = buffer(small, 200_000), buffer(small, 200_000)
    one.hold()
    with pytest.raises(MemoryError, match="exceed this machine's memory"):
        other.hold()
    assert not other.is_held
    one.free()
    other.hold()
    assert other.is_held
