"""Questions to a store that does not answer."""

from __future__ import annotations

import threading
import time

import pytest
from torch import distributed as dist

from fsdp_lab.rank.line import Line


def test_a_silent_store_is_not_waited_for_and_one_that_speaks_again_is_heard() -> None:
    line, speaks = Line(0.2), threading.Event()
    assert line.ask(lambda: 1) == 1
    begun_s = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match=r"it has not answered for 0\.2 s"):
        line.ask(speaks.wait)
    assert time.monotonic() - begun_s < 10, "not for ever"
    with pytest.raises(dist.DistNetworkError):
        line.ask(lambda: 2)  # is not asked while the former one is open
    speaks.set()
    assert line._open is not None and line._open.result(10)
    assert line.ask(lambda: 3) == 3


def test_what_a_store_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        Line(5).ask(lambda: 1 / 0)
