"""Text as tokens. `open_tokenizer`: a `ByteTokenizer` (a token is a byte plus 3), or a `FolderTokenizer`, a fast one of
transformers. `Tokens`: a workload's samples as token ids, memory-mapped; text as bytes as it is, other samples made once.

What is made is one Arrow file for each content, kept by `cached`. Its rows are samples, or pieces of a text: their ids,
which of them are answers (of chats), and whether they end a sample. They do not depend on seq_len.
Whatever the size of the data, `_BATCH_CHARS` of it are in memory at once.

Note: loss on the answers only. A chat, with its tools, becomes tokens by the tokenizer's template. Where the template marks
what the assistant says ({% generation %}), the mask is the template's. Otherwise the chat is rendered up to each answer,
with and without it: where the tokens of both are the beginning of the whole chat's, the answer is what lies between them, up
to its last end token (what the template writes after it is no part of an answer). Where they are not, the answers have no
exact place, and the chat is refused."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models.cache import Progress, cached, hub_folder, is_hub_name, model_folder
from fsdp_lab.models.data import BYTE_OFFSET, SMALLEST_VOCABULARY, Ids, Text, encode
from fsdp_lab.models.records import ROLES, Records, Sample, refusal
from fsdp_lab.spec.workload import Workload

if TYPE_CHECKING:
    import pyarrow

_FORMAT = 5  # a change of what is written makes all files anew
_BATCH_CHARS, _BATCH_RECORDS = 2 << 20, 4096
_FINGERPRINTED = 1 << 20  # tokens at either end
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
        has_template: whether it has a template for chats. marks_answers: whether that marks what the assistant says."""

    name, digest, vocabulary = BYTES, BYTES, SMALLEST_VOCABULARY
    pad_id, end_id, mask_id = 0, 1, 2
    special_ids = (0, 1, 2)
    marks_answers = has_template = False

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

    def encode_prompt(self, conversation: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a chat up to where the next answer begins. Raises InexactChat."""
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
        self.has_template = bool(template)
        self._roles = ", ".join(role for role in ROLES if re.search(f"['\"]{role}['\"]", "".join(templates))) or "none"
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
        if not self.has_template:
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

    def encode_prompt(self, conversation: Sequence[Mapping[str, str]]) -> list[int]:
        if not self.has_template:
            raise InexactChat("the tokenizer has no template for chats")
        return list(self._rendered({"conversation": [*map(dict, conversation)]}, add_generation_prompt=True))

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
            given = ", ".join(dict.fromkeys(str(message.get("role")) for message in chat["conversation"]))
            roles = f"its roles are {given}, those that the template names {self._roles}"
            raise InexactChat(f"the tokenizer's template refuses it ({' '.join(str(e).split())[:200]}); {roles}") from e


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


# -- the samples of a workload ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token ids of `len(ends)` samples, one after the other; `answers` is None unless they are chats."""

    ids: _Bytes | _Lists
    ends: Ids  # of each sample in `ids`
    answers: _Lists | None = None
    has_special: bool = True  # whether some may be special ones
    name: str
    notes: tuple[str, ...]
    fingerprint: str


class _Bytes:
    """The bytes of a text as token ids."""

    def __init__(self, text: Text) -> None:
        self._data = text.data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, places: Ids) -> Ids:
        return encode(self._data[places])


class _Lists:
    """The values of a column of lists, one after the other."""

    def __init__(self, column: pyarrow.ChunkedArray) -> None:
        self._parts = [chunk.flatten().to_numpy() for chunk in column.chunks]
        self._begins = np.cumsum([0, *map(len, self._parts)])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, places: Ids) -> npt.NDArray[Any]:
        values = np.empty(places.shape, dtype=self._parts[0].dtype if self._parts else np.uint16)
        parts = np.searchsorted(self._begins, places, side="right") - 1
        for part in np.unique(parts):
            chosen = parts == part
            values[chosen] = self._parts[part][places[chosen] - self._begins[part]]
        return values


def bytes_as_tokens(text: Text) -> Tokens:
    """The bytes of a text, which is one sample."""
    name, _, note = text.description.removesuffix(")").rpartition(" (")
    ends = np.array([len(text.data)], dtype=np.int64)
    mark = text.fingerprint
    return Tokens(ids=_Bytes(text), ends=ends, has_special=False, name=name, notes=(note,), fingerprint=mark)


def open_tokens(records: Records, tokenizer: Tokenizer, *, whole: bool, progress: Progress) -> Tokens:
    """The tokens of `records`, made if they are not kept yet. `whole`: each sample is a row of its own, with the special
    tokens that the tokenizer puts around it. Raises SpecError, and what `progress` raises."""
    import pyarrow

    key = repr((_FORMAT, records.digest(), tokenizer.digest, whole)).encode()
    name = f"tokens-{hashlib.blake2b(key, digest_size=16).hexdigest()}.arrow"
    file = cached(name, lambda path: _write(path, records, tokenizer, whole, progress), progress)
    with pyarrow.memory_map(str(file)) as mapped:
        table = pyarrow.ipc.open_stream(mapped).read_all()
    ids = _Lists(table["ids"])
    ends = np.cumsum(pyarrow.compute.list_value_length(table["ids"]).to_numpy(), dtype=np.int64)
    ends = ends[np.flatnonzero(table["ends"].to_numpy())]
    has_text = np.diff(ends, prepend=0) > 0
    left_out, ends = int((~has_text).sum()), ends[has_text]
    answers = _Lists(table["answers"]) if records.is_chat else None
    digest = hashlib.blake2b(repr((tokenizer.digest, len(ids), len(ends))).encode(), digest_size=8)
    edge = np.unique(np.r_[: min(_FINGERPRINTED, len(ids)), max(0, len(ids) - _FINGERPRINTED) : len(ids)])
    for column in filter(None, (ids, answers)):
        digest.update(column[edge].tobytes())
    digest.update(ends[:_FINGERPRINTED].tobytes())
    notes: tuple[str, ...] = (f"{len(ends):,} samples", f"{len(ids):,} tokens of {tokenizer.name}")
    notes = (*notes, f"{left_out:,} without text left out") if left_out else notes
    return Tokens(ids=ids, ends=ends, answers=answers, name=records.name, notes=notes, fingerprint=digest.hexdigest())


def encoded(batch: Sequence[Sample], tokenizer: Tokenizer, *, whole: bool) -> list[tuple[list[int], list[bool]]]:
    """Ids of each record, without the end token, and of chats which of them are answers. Raises SpecError for a chat."""
    if batch and not isinstance(batch[0].value, str):
        chats: list[tuple[list[int], list[bool]]] = []
        for record in batch:
            try:
                chats.append(tokenizer.encode_chat(cast("dict[str, Any]", record.value)))
            except InexactChat as e:
                hint = "correct it, give a tokenizer with a template that marks answers, or name a column of text"
                raise refusal(f"record {record.number} of {record.file}: {e}", hint) from None
        return chats
    texts = [cast(str, record.value) for record in batch]
    return [(ids if text else [], []) for ids, text in zip(tokenizer.encode(texts, whole=whole), texts, strict=True)]


def _write(path: Path, records: Records, tokenizer: Tokenizer, whole: bool, progress: Progress) -> None:
    import pyarrow

    id_type = pyarrow.uint16() if tokenizer.vocabulary <= 1 << 16 else pyarrow.uint32()
    flag = pyarrow.uint8()
    schema = pyarrow.schema([("ids", pyarrow.list_(id_type)), ("answers", pyarrow.list_(flag)), ("ends", flag)])
    length = 0  # of the sample in progress
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as stream:
        for batch in _batches(records.read()):
            parts = encoded(batch, tokenizer, whole=whole)
            for sample, (ids, _) in zip(batch, parts, strict=True):
                length += len(ids)
                if sample.ends:
                    if length and not records.is_chat and ids[-1:] != [tokenizer.end_id]:
                        ids.append(tokenizer.end_id)
                    length = 0
            columns = {
                "ids": [ids for ids, _ in parts],
                "answers": [[*map(int, answers)] for _, answers in parts],
                "ends": [int(sample.ends) for sample in batch],
            }
            stream.write_batch(pyarrow.RecordBatch.from_pydict(columns, schema=schema))
            progress(False)


def _batches(records: Iterable[Sample]) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    chars = 0
    for record in records:
        batch.append(record)
        chars += len(str(record.value))
        if chars >= _BATCH_CHARS or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
