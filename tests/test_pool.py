"""The pool of ranks outlives what tests do to it: one lost rank must not fail every later test of a process."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.pool import Place, Pool, RankError


def rank_of(place: Place) -> int:
    return place.rank


def die(place: Place) -> None:
    os._exit(3)


def never(place: Place) -> None:
    threading.Event().wait()


def killed_between_runs(pool: Pool) -> None:
    pool._workers[1].process.kill()
    pool._workers[1].process.join()


def killed_in_a_run(pool: Pool) -> None:
    with pytest.raises(RankError, match="a rank's process ended while it worked"):
        pool.run(die, 2, reduction=None)


def interrupted(pool: Pool) -> None:
    """As pytest-timeout does: an exception out of the run, whose ranks have not answered."""

    def raise_it(*_: object) -> None:
        raise TimeoutError("the test's time is over")

    before = signal.signal(signal.SIGUSR2, raise_it)
    threading.Thread(target=lambda: (time.sleep(0.2), os.kill(os.getpid(), signal.SIGUSR2))).start()
    try:
        with pytest.raises(TimeoutError, match="the test's time is over"):
            pool.run(never, 2, reduction=None)
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.slow
@pytest.mark.parametrize("accident", [killed_between_runs, killed_in_a_run, interrupted])
def test_the_pool_is_made_anew_after(accident, pool: Pool):
    accident(pool)
    assert pool.run(rank_of, 2, reduction=None) == [0, 1]
