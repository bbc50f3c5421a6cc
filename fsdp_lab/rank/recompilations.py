"""`Recompilations`: what torch.compile compiled again during a step, and why."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MOST = 8  # reasons of one step; torch itself gives up after as many of a function
LONGEST = 200  # characters of a reason


class Recompilations:
    """Counts in the context of `during`, and forgets with `take`. It does nothing where nobody has imported the compiler."""

    def __init__(self) -> None:
        self._ids: list[str] = []

    @contextmanager
    def during(self) -> Iterator[None]:
        if "torch._dynamo" not in sys.modules:
            yield
            return
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self._begin)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(self._begin)

    def _begin(self, args: Any) -> None:
        """An id is "frame/count of its compilations"; the backward's, which comes later, is that of its forward."""
        name = str(args.compile_id)
        if not name.endswith("/0") and name not in self._ids:
            self._ids.append(name)

    def take(self) -> tuple[str, ...]:
        """The guard that failed, for each; "" where torch does not say."""
        if not self._ids:
            return ()
        from torch._dynamo.utils import get_compilation_metrics

        ids, self._ids = self._ids, []
        known = {str(m.compile_id): m.recompile_reason for m in get_compilation_metrics() if m.recompile_reason}
        return tuple(_guard(known.get(name, "")) for name in ids[:MOST])


def _guard(reason: str) -> str:
    """The failed guard of the newest compilation: "self.calls == 7  # self.calls += 1" of "0/7: self.calls == 7   # ..."."""
    line = reason.strip().partition("\n")[0].partition("(HINT")[0]
    return re.sub(r"^\d+/\d+: ", "", " ".join(line.split()))[:LONGEST]
