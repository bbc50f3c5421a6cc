"""`Delivery`: the user's code, sent to the ranks that lack it."""

from __future__ import annotations

from fsdp_lab.cluster.calls import Dispatcher
from fsdp_lab.core.spec import Spec, part_of
from fsdp_lab.core.user_code import UserCode, loaded

KEPT = 9  # functions, classes and datasets: those of three Specs


class Delivery:
    """Sends code to the ranks before the Spec that needs it. It remembers the newest of what it has sent, for ranks that
    come later and for Specs that come back from a file; the ranks drop the rest."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._packed: dict[str, bytes] = {}  # by digest

    def check(self, spec: Spec) -> None:
        """Raises SpecError for code that is neither here nor on all ranks."""
        for name, code in spec.sent_code().items():
            if packed := code.packed or self._packed.get(code.digest):
                self._packed.pop(code.digest, None)
                self._packed[code.digest] = packed  # as the newest
                for oldest in list(self._packed)[:-KEPT]:
                    del self._packed[oldest]
            elif self._lacking(code):
                loaded(f"{part_of(name)}.{name}", code)

    def provide(self, spec: Spec) -> None:
        """Sends what ranks lack. Raises SpecError as `check`, and of ranks that cannot use it; else as a call to them."""
        self.check(spec)
        codes = spec.sent_code()
        kept = {*self._packed, *(code.digest for code in codes.values())}
        for name, code in codes.items():
            if ranks := self._lacking(code):
                arguments = {"field": f"{part_of(name)}.{name}", "name": code.name, "digest": code.digest,
                             "packed": self._packed[code.digest], "kept": sorted(kept)}  # fmt: skip
                self._dispatcher.send("receive", dict.fromkeys(ranks, arguments)).results()
                for member in (self._dispatcher.membership.members[rank] for rank in ranks):
                    member.code = (member.code & kept) | {code.digest}

    def _lacking(self, code: UserCode) -> list[int]:
        return [m.rank for m in self._dispatcher.membership.members if code.digest not in m.code]
