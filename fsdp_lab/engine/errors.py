"""`ShardError`: something was done with a sharded model that cannot be."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import distributed as dist, nn


class ShardError(RuntimeError):
    """`str()` is a sentence that names the parameter or module, and says what to do.

    Where ranks could disagree, every one of them raises it.
    """


class Unanswered(ShardError):
    """A collective that other ranks did not come to, or left. `str()` is what its process group said."""

    def __init__(self, said: str, waited_s: float) -> None:
        super().__init__(said)
        self.waited_s = waited_s


def unanswered(ranks: Sequence[int], what: str, error: Unanswered) -> ShardError:
    """The error of a rank that waited for `ranks`, of which one did not come, as after its last batch."""
    others = [rank for rank in ranks if rank != dist.get_rank()]
    who = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {', '.join(map(str, others))}"
    return ShardError(
        f"rank {dist.get_rank()} waited {error.waited_s:.1f} s {what} for {who}, which did not "
        f"come; give every rank the same number of batches, and let all make the same calls: {error}"
    )


@contextmanager
def answered(ranks: Sequence[int], what: str) -> Iterator[None]:
    """Around collectives that are waited for at once, and nothing else."""
    try:
        with giving_up():
            yield
    except Unanswered as e:
        raise unanswered(ranks, what, e) from e


@contextmanager
def giving_up() -> Iterator[None]:
    """Raises Unanswered where torch's group gives up. A group of somebody else's has errors of its own kinds: they pass."""
    began_s = time.monotonic()
    try:
        yield
    except RuntimeError as e:
        if type(e) is not RuntimeError and not isinstance(e, dist.DistError):
            raise
        raise Unanswered(str(e), time.monotonic() - began_s) from e


def check_module(given: object) -> None:
    """Raises ShardError for what is no module, such as a list of parameters."""
    if not isinstance(given, nn.Module):
        raise ShardError(
            f"a {type(given).__name__} was given where a module is needed; give the module that was sharded"
        )


def not_sharded(module: nn.Module) -> ShardError:
    return ShardError(f"{type(module).__name__} is not sharded; call fully_shard(module) first")


def replaced(name: str) -> ShardError:
    """The error for parameters that an optimizer has from before the model was sharded."""
    return ShardError(
        f"load_state_dict(assign=True) has put other parameters into the model, and this is {name} from before; make the "
        "optimizer afterwards, or load without assign=True"
    )
