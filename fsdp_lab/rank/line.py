"""`Line`: questions to rank 0's store that somebody waits for with a bound.

torch's own have none: where a cable is cut, the answer is waited for as long as TCP tries, many minutes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from torch import distributed as dist

T = TypeVar("T")


class Line:
    """Each question is asked in a thread of its own, which is left behind where no answer comes.

    Args:
        limit_s: how long an answer may take.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._open: Future[Any] | None = None  # the last one, while it has no answer

    def ask(self, question: Callable[[], T]) -> T:
        """Raises what it raises, or dist.DistNetworkError: no answer came in time, or one is still waited for."""
        if self._open is not None and not self._open.done():
            raise self._silent()
        answer: Future[T] = Future()
        threading.Thread(target=_ask, args=(question, answer), name="fsdp-lab-line", daemon=True).start()
        try:
            return answer.result(self._limit_s)
        except TimeoutError:
            self._open = answer
            raise self._silent() from None

    def _silent(self) -> dist.DistNetworkError:
        return dist.DistNetworkError(f"it has not answered for {self._limit_s:g} s")


def _ask(question: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(question())
    except BaseException as e:
        answer.set_exception(e)
