"""Tokenizers: `ByteTokenizer` (a token is a byte plus 3), and `FolderTokenizer`, a fast tokenizer of transformers.

Note: loss on the answers only. A chat, with its tools, becomes tokens by the tokenizer's template. Where the template marks
what the assistant says ({% generation %}), the mask is the template's. Otherwise the chat is rendered up to each answer,
with and without it: where the tokens of both are the beginning of the whole chat's, the answer is what lies between them, up
to its last end token (what the template writes after it is no part of an answer). Where they are not, the answers have no
exact place, and the chat is refused.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models.cache import hub_folder, is_hub_name, model_folder
from fsdp_lab.models.data import BYTE_OFFSET, SMALLEST_VOCABULARY
from fsdp_lab.spec.workload import Workload

BYTES, OWN = "bytes", "own"
FILE, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_CLASSIC = ("vocab.json", "merges.txt", "vocab.txt")  # AutoTokenizer makes fast ones of them
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")  # and of these, with that library
_FIELD = "workload.tokenizer"
_BESIDE = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json")
_FILES = (FILE, _CONFIG, *_CLASSIC, *_SENTENCEPIECE, *_BESIDE)
_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\b")


class Chat(NamedTuple):
    """A chat as tokens, and which of them are the assistant's."""

    ids: list[int]
    answers: list[bool]


class InexactChat(ValueError):
    """A chat that the template refuses, or whose answers have no exact place in the tokens. Its text is the reason."""


class ByteTokenizer:
    """Text to token ids that are bytes, as in `fsdp_lab.models.data`.

    Attributes, here and in `FolderTokenizer`:
        name: for descriptions.
        digest: equal where text becomes the same tokens.
        vocabulary: one more than the largest id.
        end_id: the token that ends a sample. pad_id: of padding, which no loss and no attention sees.
        mask_id: None where it has none.
        special_ids: those that stand for no text.
        marks_answers: whether its template for chats marks what the assistant says.
    """

    name, digest, vocabulary = BYTES, BYTES, SMALLEST_VOCABULARY
    pad_id, end_id, mask_id = 0, 1, 2
    special_ids = (0, 1, 2)
    marks_answers = False

    def encode(self, texts: Sequence[str], *, whole: bool) -> list[list[int]]:
        """Token ids of each text; `whole`: with the special tokens that the tokenizer puts around a sample."""
        return [[byte + BYTE_OFFSET for byte in text.encode()] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones. Ids that are no byte are left out."""
        return bytes(i - BYTE_OFFSET for i in ids if 0 <= i - BYTE_OFFSET < 256).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Write it, so that AutoTokenizer of transformers opens it."""
        from transformers import ByT5Tokenizer

        ByT5Tokenizer().save_pretrained(folder)

    def encode_chat(self, chat: Mapping[str, Any]) -> Chat:
        """`chat`: "conversation" and "tools", as of `apply_chat_template`. Raises InexactChat."""
        raise InexactChat("bytes have no template for chats")


class FolderTokenizer:
    """The fast tokenizer in a folder. Raises SpecError if it cannot be opened, or has no token that ends a text."""

    def __init__(self, folder: Path) -> None:
        import transformers
        from transformers import AutoTokenizer

        try:
            loaded: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as e:  # of many classes
            said = " ".join(str(e).split())[:200]
            raise _refusal(f"the tokenizer in {folder} cannot be opened ({said})", f"save it as a {FILE}") from e
        if not loaded.is_fast:
            raise _refusal(f"the tokenizer in {folder} is not a fast one", "give one with a tokenizer.json")
        self._tokenizer = loaded
        self._backend = self._tokenizer.backend_tokenizer
        self.name = folder.name
        kind = type(self._tokenizer).__name__  # and the library, whose versions may split text in other ways
        digest = hashlib.blake2b(f"{transformers.__version__} {kind}".encode(), digest_size=16)
        for path in (folder / name for name in _FILES):
            if path.is_file():
                digest.update(path.name.encode() + path.read_bytes())
        self.digest = digest.hexdigest()
        self.ids: Mapping[str, int] = self._tokenizer.get_vocab()  # by token
        if {*self.ids.values()} <= {*self._tokenizer.all_special_ids}:
            reason = f"the tokenizer in {folder} has no tokens of text"
            raise _refusal(reason, f"copy its files again ({FILE}, or {', '.join(_CLASSIC)})")
        self.vocabulary = max(self.ids.values()) + 1
        end = self._tokenizer.eos_token_id
        end = self._tokenizer.sep_token_id if end is None else end
        if end is None:
            raise _refusal(f"the tokenizer in {folder} has neither an end token nor a separator", "set its eos_token")
        self.end_id = end
        self.pad_id = end if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id
        self.mask_id = self._tokenizer.mask_token_id
        self.special_ids = tuple(sorted(self._tokenizer.all_special_ids))
        template = self._tokenizer.chat_template or ""
        templates = [template] if isinstance(template, str) else template.values()  # of several, one is for tools
        self.marks_answers = all(map(_MARKS_ANSWERS.search, templates))

    def encode(self, texts: Sequence[str], *, whole: bool) -> list[list[int]]:
        self._backend.no_truncation()
        self._backend.no_padding()
        try:
            return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=whole)]
        except Exception as e:  # the library raises Exception itself
            reason = f"{self.name} cannot make tokens of a text ({' '.join(str(e).split())[:200]})"
            raise _refusal(reason, "give it a token for what it does not know") from e

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    def encode_chat(self, chat: Mapping[str, Any]) -> Chat:
        if not self._tokenizer.chat_template:
            raise InexactChat("the tokenizer has no template for chats")
        if self.marks_answers:
            both = self._rendered(chat, return_dict=True, return_assistant_tokens_mask=True)
            return Chat(list(both["input_ids"]), [bool(m) for m in both["assistant_masks"]])
        ids = self._rendered(chat)
        answers = [False] * len(ids)
        for i, message in enumerate(chat["conversation"]):
            if message["role"] == "assistant":
                begin, end = self._answer(ids, chat, i)
                answers[begin:end] = [True] * (end - begin)
        return Chat(ids, answers)

    def _answer(self, ids: list[int], chat: Mapping[str, Any], number: int) -> tuple[int, int]:
        """Begin and end of an answer in the tokens of its chat; `number`: of its message."""
        before, after = ({**chat, "conversation": chat["conversation"][:count]} for count in (number, number + 1))
        asked = self._rendered(before, add_generation_prompt=True) if number else []
        answered = self._rendered(after)
        if ids[: len(asked)] != asked or ids[: len(answered)] != answered:
            what = "the template writes the beginning of a chat in another way once more follows"
            raise InexactChat(f"{what}, so that the answers have no exact place in it")
        answer = answered[len(asked) :]
        if self.end_id in answer:
            answer = answer[: len(answer) - answer[::-1].index(self.end_id)]
        return len(asked), len(asked) + len(answer)

    def _rendered(self, chat: Mapping[str, Any], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(**chat, tokenize=True, **{"return_dict": False, **options})
        except Exception as e:  # of the template, whose message names what it wants
            raise InexactChat(f"the tokenizer's template refuses it ({' '.join(str(e).split())[:200]})") from e


Tokenizer: TypeAlias = ByteTokenizer | FolderTokenizer


def open_tokenizer(workload: Workload) -> Tokenizer:
    """The workload's tokenizer. Raises SpecError."""
    folder = tokenizer_folder(workload)
    return ByteTokenizer() if folder is None else FolderTokenizer(folder)


def tokenizer_folder(workload: Workload) -> Path | None:
    """The folder of the workload's tokenizer, None for bytes. Raises SpecError if there is none."""
    given = workload.tokenizer
    if given == BYTES:
        return None
    if given is None or given == OWN:
        own = model_folder(workload.model, _FILES)
        if own is not None and has_tokenizer(own):
            return own
        if given is None:
            return None
        where = f"the model's folder {own}" if own is not None else "the model, which is no folder,"
        raise _refusal(f"{where} has no tokenizer", "give a folder with one")
    folder = hub_folder(given, _FIELD, _FILES) if is_hub_name(given) else Path(given).expanduser()
    if not has_tokenizer(folder):
        reason = f"there is no tokenizer in {given}" if folder.is_dir() else f"there is no folder {given}"
        raise _refusal(reason, "give the folder of a saved fast tokenizer")
    return folder


def has_tokenizer(folder: Path) -> bool:
    """Returns whether files of a tokenizer are there, readable or not. That of ByT5, whose tokens are bytes, is none: it is
    what `ByteTokenizer.save` writes."""
    if any((folder / name).is_file() for name in (FILE, *_CLASSIC, *_SENTENCEPIECE)):
        return True
    return (folder / _CONFIG).is_file() and '"ByT5Tokenizer"' not in (folder / _CONFIG).read_text(errors="replace")


def _refusal(reason: str, hint: str) -> SpecError:
    return SpecError(_FIELD, reason, f"{hint}, or use bytes", {"tokenizer": BYTES})
