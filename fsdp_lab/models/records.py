"""`Records`: the samples that a workload's data contains, as text or as chats, read one after the other.

A text file is one sample, or, by lines, one for each line that is not blank. A file of records (JSON, Parquet, Arrow, a
folder that `datasets` saved, a dataset of the Hugging Face Hub) has a sample in each record, in the column
`Workload.text_field` or those of `_SHAPES`; a chat's tools are in the column "tools". `datasets` reads them, and is imported
then. A folder is one of records if all its files are, apart from those about the data; one with files of records and others
is refused, but a .json beside text is text.

Note: the digest. Every rank needs it before it knows whether there is anything to do, whatever the size of the data. So it
has of each file the name, the size and the time of the last change."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeAlias

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models.cache import hub_folder, is_hub_name
from fsdp_lab.models.data import STDLIB_CAP_BYTES, stdlib_files, text_files, walk
from fsdp_lab.spec.param_groups import matches
from fsdp_lab.spec.workload import Workload

Value: TypeAlias = str | dict[str, Any]  # a text, or a chat: what `apply_chat_template` takes

PIECE_CHARS = 1 << 20  # of a text file that is read at once, but for the rest of a line
_FIELD = "workload.data"
_BATCH = 1000  # records of a table that are read at once
_TOOLS = "tools"
# Columns of which a sample is made, where there is no column of text or of messages.
_SHAPES: tuple[tuple[str, ...], ...] = (("conversations",), ("prompt", "completion"), ("instruction", "output"))
_INPUT = "input"  # what an instruction is about
ROLES = ("system", "user", "assistant", "tool")  # those that most templates take
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "observation": "tool"}
# Files about a folder's data.
_ABOUT = ("readme*", "license*", "licence*", "_*", "dataset_info.json", "dataset_infos.json", "*.lock")


class Format(Enum):
    TEXT = "text"
    JSON = "JSON"
    PARQUET = "Parquet"
    ARROW = "Arrow"
    SAVED = "a folder saved by datasets"
    HUB = "a dataset of the Hugging Face Hub"


_OF_RECORDS = {".jsonl": Format.JSON, ".ndjson": Format.JSON, ".parquet": Format.PARQUET, ".arrow": Format.ARROW}
_SUFFIXES = {**_OF_RECORDS, ".json": Format.JSON}


class Sample(NamedTuple):
    """A sample, or a piece of one."""

    file: str
    number: int  # in its file, from 1
    value: Value
    ends: bool = True  # whether it is the sample's last piece


@dataclass(frozen=True, kw_only=True)
class Records:
    """The samples of some files in their order. `field` is "" for text; with `pair`, both are columns of a sample."""

    name: str
    files: tuple[tuple[Path, Format], ...]
    field: str = ""
    pair: str = ""
    is_chat: bool = False
    by_lines: bool = False  # of text
    most_bytes: int | None = None  # of text, about

    def read(self) -> Iterator[Sample]:
        """Raises SpecError for a file or record that is not as the first one."""
        left = self.most_bytes
        for path, kind in self.files:
            try:
                if kind is Format.TEXT:
                    yield from _lines(path) if self.by_lines else _pieces(path)
                else:
                    yield from self._samples(path, kind)
            except UnicodeDecodeError:
                hint = "convert or remove that file, or use tokenizer bytes with packing packed, which takes any text"
                raise refusal(f"{path} is not text in UTF-8", hint) from None
            except OSError as e:
                raise refusal(f"{path}: cannot be read ({e.strerror or e})", "make it readable, or remove it") from None
            if left is not None and (left := left - path.stat().st_size) <= 0:
                return

    def _samples(self, path: Path, kind: Format) -> Iterator[Sample]:
        number = 0
        for number, row in enumerate(_rows(path, kind, (self.field, self.pair, _INPUT)), 1):
            value: Any = _paired(row, self.field, self.pair, self.is_chat) if self.pair else row.get(self.field)
            if not self.is_chat:
                reason = "" if isinstance(value, str) else f"is {_kind(value)}, not text"
            elif not (reason := chat_error(value := _with_roles(value))):
                tools = row.get(_TOOLS) or None
                try:  # tables, whose rows have one type, may have them as text
                    value = {"conversation": value, "tools": json.loads(tools) if isinstance(tools, str) else tools}
                except ValueError:
                    reason = "has tools that are not JSON"
            if reason:
                raise refusal(f"{path}: record {number} {self.field!r} {reason}", "correct that record, or remove it")
            yield Sample(str(path), number, value)
        if number == 0:
            raise refusal(f"{path}: has no records", "remove that file")

    def digest(self) -> str:
        """See the note."""
        given = repr((self.field, self.pair, self.is_chat, self.by_lines, self.most_bytes))
        digest = hashlib.blake2b(given.encode(), digest_size=16)
        for path, kind in self.files:
            folder = kind in (Format.SAVED, Format.HUB)
            for one in sorted(p for p in path.rglob("*") if p.is_file()) if folder else [path]:
                stat = one.stat()
                digest.update(f"{one.name}/{kind.name}/{stat.st_size}/{stat.st_mtime_ns}/".encode())
        return digest.hexdigest()


def refusal(reason: str, hint: str) -> SpecError:
    return SpecError(_FIELD, reason, hint)


def data_files(data: str) -> tuple[tuple[Path, Format], ...]:
    """The files of `Workload.data`, sorted, with their formats. Raises SpecError."""
    if data == "stdlib":
        return tuple((path, Format.TEXT) for path in stdlib_files())
    if is_hub_name(data):
        return ((hub_folder(data, _FIELD, kind="dataset"), Format.HUB),)
    path = Path(data).expanduser()
    try:
        if not path.exists():
            raise refusal(f"{data}: there is no such file or folder", 'give a file or folder, or "stdlib"')
        return _files_of_folder(path) if path.is_dir() else ((path, _format(path)),)
    except OSError as e:
        raise refusal(f"{data}: cannot be read ({e.strerror or e})", "give a file or folder that can be read") from None


def open_records(workload: Workload, files: Sequence[tuple[Path, Format]], *, has_template: bool = False) -> Records:
    """The samples of files, after a look at the first. A question with its answer is a chat if the tokenizer `has_template`
    for chats, else a text. Raises SpecError."""
    if not files:
        raise refusal(f"{workload.data} contains no text", "give a folder with files of text or of records")
    if all(kind is Format.TEXT for _, kind in files):
        if workload.text_field is not None:
            reason = f"{workload.data} is text, which has no columns"
            raise SpecError("workload.text_field", reason, "leave it out", {"text_field": None})
        most_bytes = STDLIB_CAP_BYTES if workload.data == "stdlib" else None
        by_lines = workload.packing == "padded"
        return Records(name=workload.data, files=tuple(files), by_lines=by_lines, most_bytes=most_bytes)
    path, kind = files[0]
    if (row := next(_rows(path, kind, (workload.text_field or "",)), None)) is None:
        raise refusal(f"{path}: has no records", "remove that file")
    wanted = (workload.text_field,) if workload.text_field is not None else ("text", "messages")
    field = next((name for name in wanted if name in row), None)
    if field is None and workload.text_field is None:
        shape = next((names for names in _SHAPES if row.keys() >= {*names}), ())
        field = shape[0] if shape else None
        if len(shape) == 2:
            is_chat = has_template or isinstance(row[shape[0]], list)
            return Records(name=workload.data, files=tuple(files), field=shape[0], pair=shape[1], is_chat=is_chat)
    if field is None:
        missing = " or ".join(map(repr, wanted))
        reason = f"{path} has no column {missing}; its columns are {_names(row)}"
        raise SpecError("workload.text_field", reason, "name the one to train on")
    is_chat = not isinstance(row[field], str)
    if is_chat and (error := chat_error(_with_roles(row[field]))):
        reason = f"{path}: record 1 {field!r} {error}"
        raise SpecError("workload.text_field", reason, "name a column of text, or of messages with roles")
    return Records(name=workload.data, files=tuple(files), field=field, is_chat=is_chat)


def chat_error(value: Any) -> str:
    """Why it is no chat, "" if it is one: a list of dicts with a role. The rest is for the template."""
    if not isinstance(value, list):
        return f"is {_kind(value)}, not a list of messages"
    if not value:
        return "has no messages"
    given = [isinstance(message, dict) and isinstance(message.get("role"), str) for message in value]
    return "" if all(given) else f"has no role in message {given.index(False) + 1}; give it one of {', '.join(ROLES)}"


def _with_roles(chat: Any) -> Any:
    """A chat's messages, where they have ShareGPT's "from" and "value", with "role" and "content"."""
    if not isinstance(chat, list) or not all(isinstance(m, dict) and {"from", "value"} <= m.keys() for m in chat):
        return chat
    return [{"role": _ROLES.get(m["from"], m["from"]), "content": m["value"]} for m in chat]


def _paired(row: Mapping[str, Any], field: str, pair: str, is_chat: bool) -> Any:
    """A question and its answer as a chat or a text; where they are neither, what is wrong."""
    asked, answer, about = row.get(field), row.get(pair), row.get(_INPUT) if field == "instruction" else None
    if isinstance(asked, list) and isinstance(answer, list):
        return [*asked, *answer]  # two parts of one chat
    if not (isinstance(asked, str) and isinstance(answer, str)):
        return answer if isinstance(asked, str) else asked
    question = f"{asked}\n\n{about}" if about else asked
    if is_chat:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return question + answer if field == "prompt" else f"{question}\n\n{answer}"


# -- files -----------------------------------------------------------------------------------------------------------


def _files_of_folder(folder: Path) -> tuple[tuple[Path, Format], ...]:
    if (folder / "dataset_dict.json").is_file():
        raise refusal(f"{folder} has several splits", f"give one of them, such as {folder / 'train'}")
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return ((folder, Format.SAVED),)
    paths = [p for p in walk(folder, frozenset()) if not matches(p.name.lower(), _ABOUT)]
    other = next((path for path in paths if _format(path) is Format.TEXT), None)
    if paths and other is None:
        return tuple((path, _format(path)) for path in paths)
    if records := next((path for path in paths if path.suffix.lower() in _OF_RECORDS), None):
        reason = f"{folder} has files of records, such as {records.name}, and others, such as {other}"
        raise refusal(reason, "give a folder with files of one kind, or one of the files")
    return tuple((path, Format.TEXT) for path in text_files(folder))


def _format(path: Path) -> Format:
    return _SUFFIXES.get(path.suffix.lower(), Format.TEXT)


def _pieces(path: Path) -> Iterator[Sample]:
    """A text file in pieces that end with a line, if it is not too long."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        text = _piece(file)
        while text:
            following = _piece(file)
            yield Sample(str(path), 1, text, not following)
            text = following


def _piece(file: TextIO) -> str:
    text = file.read(PIECE_CHARS)
    return text + file.readline(PIECE_CHARS) if len(text) == PIECE_CHARS else text


def _lines(path: Path) -> Iterator[Sample]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield Sample(str(path), number, line.rstrip("\n"))


# -- records ---------------------------------------------------------------------------------------------------------


def _rows(path: Path, kind: Format, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The records; of tables these columns and tools alone, if they have the first.

    Raises SpecError for a file that is broken."""
    try:
        from datasets import load_dataset, load_from_disk

        if kind is Format.SAVED:
            data: Any = load_from_disk(str(path))
        elif kind is Format.HUB:
            data = load_dataset(str(path), split="train", streaming=True)  # streaming: read in parts
        else:
            data = load_dataset(kind.name.lower(), data_files=str(path), split="train", streaming=True)
        if kind is Format.JSON:  # whose values may be of several types
            yield from map(_without_nulls, data)
            return
        for table in data.with_format("arrow").iter(_BATCH):
            names = table.column_names
            chosen = table.select([n for n in names if n in (*columns, _TOOLS)]) if columns[0] in names else table
            chosen.validate(full=True)  # a broken offset would be read outside of the file, which ends the process
            yield from map(_without_nulls, chosen.to_pylist())
    except Exception as e:  # of many classes, pyarrow's and those of what it calls
        if isinstance(e, SpecError):
            raise
        reason = " ".join(str(e.__cause__ or e).split())[:200] or "perhaps it is empty"
        raise refusal(f"{path}: is not {kind.value} that can be read ({reason})", "write it again, or remove it") from e


def _without_nulls(value: Any) -> Any:
    """Tables have a null for each key that a row or a part of it lacks."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _names(row: dict[str, Any]) -> str:
    return ", ".join(map(repr, row)) or "none"


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"
