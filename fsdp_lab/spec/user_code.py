"""`UserCode`: a function or class of a user's in a field of a Workload, which was sent to the ranks.

A field that takes code holds an importable name, "package.module:name", or a `UserCode`: plain values, which JSON can
hold, so that a stored Spec has the source. The object itself is beside them in a process that has it: the kernel where
it was given, and the ranks that it was sent to. It is in neither the JSON nor a copy made by pickle."""

import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsdp_lab.base.errors import SpecError

_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*")
METRICS = "evaluate.metrics"  # the field of code that is in no Spec
_KEYS = ("code", "source", "digest", "missing")


class UserCode(Mapping[str, Any]):
    """Code that was sent.

    Args:
        code: its name. source: the text of a module that defines it, as far as text can; "" if there is none.
        digest: of all that it consists of; equal code has equal digests, in any process.
        missing: names that the source uses and does not define.
        given: the object itself, or nothing. packed: the object as bytes, to be sent."""

    def __init__(
        self,
        code: str,
        source: str,
        digest: str,
        missing: Sequence[str] = (),
        *,
        given: Any = None,
        packed: bytes = b"",
    ) -> None:
        self.name, self.source, self.digest, self.missing = code, source, digest, tuple(missing)
        self._values: dict[str, Any] = {"code": code, "source": source, "digest": digest, "missing": list(missing)}
        self.given, self.packed = given, packed

    @classmethod
    def of(cls, field: str, given: Mapping[str, Any]) -> "UserCode":
        """Returns the code that a mapping describes. Raises SpecError if it describes none."""
        has_texts = all(isinstance(given.get(key), str) for key in _KEYS[:3])
        if not has_texts or not isinstance(given.get("missing"), (list, tuple)) or set(given) != set(_KEYS):
            raise SpecError(field, "this is no code that a lab has sent", "give the function itself, in the notebook")
        return cls(*(given[key] for key in _KEYS))

    def with_object(self, given: Any) -> "UserCode":
        """The same code where the object is known."""
        return UserCode(self.name, self.source, self.digest, self.missing, given=given, packed=self.packed)

    def refusal(self, field: str) -> SpecError | None:
        """Why no script can have this code; None where one can."""
        reason = f"the source of {self.name} does not contain {', '.join(self.missing)}"
        hint = "define it inside the function, or in a module to import"
        if f"the state of this {self.name}" in self.missing:
            made = f" that makes it: def data(): return {self.name}(...)" if field == "workload.data" else ""
            reason, hint = "it is an object, and a script has code alone", f"give a function{made}"
        return SpecError(field, reason, hint) if self.missing or not self.source else None

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(_KEYS)

    def __len__(self) -> int:
        return len(_KEYS)

    def __deepcopy__(self, memo: Any) -> "UserCode":
        return self  # it does not change, and data may be large

    def __reduce__(self) -> tuple[Any, ...]:
        return (UserCode, (self.name, self.source, self.digest, self.missing))

    def __repr__(self) -> str:
        return f"<UserCode {self.name} {self.digest[:8]}>"


def is_code(value: Any) -> bool:
    """Returns whether a field's value is code of a user's: an importable name, or code that was sent, also as plain JSON."""
    if isinstance(value, str):
        return _NAME.fullmatch(value) is not None
    return isinstance(value, Mapping) and "code" in value and "model_type" not in value


def code_name(value: Any) -> str:
    """`build`, of either form."""
    return value.rpartition(":")[2] if isinstance(value, str) else str(value["code"])


def loaded(field: str, value: Any) -> Any:
    """The object that a field's value names. Raises SpecError if it is not here, or cannot be imported."""
    if isinstance(value, UserCode):
        if value.given is None:
            reason = f"the code of {value.name} is not here, because a stored Spec has only its source"
            raise SpecError(field, reason, f"give {field.rpartition('.')[2]}=... again")
        return value.given
    try:
        return pkgutil.resolve_name(value)
    except Exception as e:  # what an import raises is the module's
        said = " ".join(str(e).split()) or type(e).__name__
        hint = "install it where the ranks are, or give the function itself, to send it"
        raise SpecError(field, f"{value} cannot be imported on this rank ({said})", hint) from None
