"""`Sampling`: how a language model continues a text. `Completion`: a text that it continued."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fsdp_lab.base.errors import ArgumentError, check_whole, is_number, is_whole

Prompt: TypeAlias = str | Sequence[Mapping[str, str]]  # a text, or a chat: messages with "role" and "content"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How many tokens, and how each is chosen. Raises ArgumentError.

    `temperature` 0 takes the likeliest token; above, one is drawn by the probabilities, whose logits are divided by it,
    from the `top_k` likeliest, and from the likeliest that together have a probability of `top_p`; None: from all. What
    is drawn depends on `seed`, the number of the prompt and the parameters, and not on the ranks."""

    new_tokens: int = 48
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("new_tokens", self.new_tokens)
        check_whole("seed", self.seed, 0)
        if not (is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise ArgumentError("temperature", f"{self.temperature!r} is refused", "give a finite number of 0 or more")
        if self.top_k is not None and not is_whole(self.top_k):
            raise ArgumentError("top_k", f"{self.top_k!r} is refused", "give a whole number of 1 or more, or None")
        if self.top_p is not None and not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ArgumentError("top_p", f"{self.top_p!r} is refused", "give a number above 0, at most 1, or None")
        if not self.temperature and (self.top_k is not None or self.top_p is not None):
            reason = "0 takes the likeliest token, so that top_k and top_p have no meaning"
            raise ArgumentError("temperature", reason, "give a temperature such as 0.8, or leave them out")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """`text` continues `prompt`."""

    prompt: str
    text: str

    def to_row(self) -> list[str]:
        return [self.prompt, self.text]

    @classmethod
    def from_row(cls, row: Sequence[str]) -> "Completion":
        prompt, text = row
        return cls(prompt=prompt, text=text)


def checked_prompts(prompts: object, field: str = "prompts") -> tuple[Prompt, ...]:
    """One text or chat, or several. Raises ArgumentError."""
    given = [prompts] if isinstance(prompts, str) or _is_chat(prompts) else prompts
    wanted = 'give a text, or a list of texts, none empty or with half of a surrogate pair, or a chat: [{"role": ...}]'
    if not isinstance(given, Sequence) or isinstance(given, (bytes, Mapping)) or not given:
        raise ArgumentError(field, f"{prompts!r} is refused", wanted)
    for prompt in given:
        for text in (m["content"] for m in prompt) if _is_chat(prompt) else (prompt,):
            if not isinstance(text, str) or not text or re.search(r"[\ud800-\udfff]", text):
                raise ArgumentError(field, f"{prompt!r} is refused", wanted)
    return tuple(given)


def _is_chat(given: object) -> bool:
    """Whether it is a list of messages."""
    messages = given if isinstance(given, (list, tuple)) else ()
    return bool(messages) and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages)


def prompt_text(prompt: Prompt) -> str:
    """A prompt as a text: of a chat, what was said last."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
