"""Tokens: those of transformers, in rows and with labels as expected by hand, made once, whatever happens meanwhile."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from filelock import FileLock
from transformers import AutoTokenizer

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.base.generation import Sampling
from fsdp_lab.models import cache, tokens
from fsdp_lab.models.batches import Batches
from fsdp_lab.models.cache import weights_folder
from fsdp_lab.models.check import check, notes_on
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.sources import IGNORED, Batch, TokenSource
from fsdp_lab.models.tokens import ByteTokenizer, FolderTokenizer
from fsdp_lab.rank.generation import encoded
from fsdp_lab.spec.spec import Spec
from fsdp_lab.spec.workload import Workload
from tests.models import words
from tests.models.small import filled
from tests.models.words import ASSISTANT, END, MASK, PAD, USER, chat, ids, json_lines, text, uneven, word_tokenizer
from tests.pool import Place, Pool
from tests.pretrained import minilm_folder

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 384, "n_positions": 64}
BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "vocab_size": 384, "max_position_embeddings": 64}  # fmt: skip
IN_ORDER = {"held_out": 0.0}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return word_tokenizer(tmp_path / "tokenizer")


def batches(workload: Workload, rank: int = 0, world_size: int = 1, **options: Any) -> Batches:
    return Batches(workload, resolve(workload.model), rank=rank, world_size=world_size, **options)


def rows(workload: Workload) -> Batch:
    """Every row of the data in its order."""
    source = batches(workload).source
    every = np.arange(source.count)
    return source.collate(every, every)


def refused(field: str, words_: str, **fields: Any) -> SpecError:
    """Both the kernel's check and a rank refuse it, or the check passes and the rank refuses it."""
    workload = Workload(**{"model": GPT2, "seq_len": 8, **fields})
    try:
        check(workload)
    except SpecError as e:
        found = e
    with pytest.raises(SpecError, match=words_) as caught:
        batches(workload)
    assert caught.value.field == field and caught.value.hint
    assert "found" not in locals() or str(found) == str(caught.value)
    return caught.value


# -- the tokens ------------------------------------------------------------------------------------------------------
def test_tokens_of_a_text_are_those_of_transformers_alone(tmp_path: Path) -> None:
    """Though the tokenizer's own file wants them cut after 128."""
    said = "Sharding splits each parameter over the ranks; a unit is gathered before it computes. " * 30
    (tmp_path / "said.txt").write_text(said)
    model = str(minilm_folder())
    alone = AutoTokenizer.from_pretrained(model)
    workload = Workload(model=model, data=str(tmp_path / "said.txt"), seq_len=16, micro_batch=2, held_out=0.0)
    source = batches(workload).source
    assert isinstance(source, TokenSource)
    every = source.rows(np.arange(source.count))
    made = every.ids.reshape(-1).tolist()
    assert every.is_token.all() and every.is_wanted.all() and len(every.ids) == source.count
    whole = [*alone(said, add_special_tokens=False, truncation=False).input_ids, alone.sep_token_id]
    assert made == whole[: len(made)] and len(whole) - len(made) < 16
    assert alone.decode(made[:20]) == alone.decode(whole[:20]).lower() and "1 samples" in source.description


def test_samples_are_joined_with_the_end_token_and_cut(tmp_path: Path, folder: str) -> None:
    data = json_lines(tmp_path / "some.jsonl", [text(1, 2, 3), "", text(4), text(5, 6, 7, 8, 9), "<end>"])
    workload = Workload(model=GPT2, data=data, tokenizer=folder, seq_len=4, **IN_ORDER)
    found = rows(workload)
    assert found["input_ids"].tolist() == [[*ids(1, 2, 3), END], [*ids(4), END, *ids(5, 6)], [*ids(7, 8, 9), END]]
    assert torch.equal(found["labels"], found["input_ids"]) and set(found) == {"input_ids", "labels"}
    assert "1 without text left out" in batches(workload).source.description


def test_a_padded_sample_is_a_row(tmp_path: Path, folder: str) -> None:
    data = json_lines(tmp_path / "some.jsonl", [text(1, 2), "", text(3, 4, 5)])
    found = rows(Workload(model=GPT2, data=data, tokenizer=folder, packing="padded", seq_len=4, **IN_ORDER))
    assert found["input_ids"].tolist() == [[*ids(1, 2), END, PAD], [*ids(3, 4, 5), END]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert found["labels"].tolist() == [[*ids(1, 2), END, IGNORED], [*ids(3, 4, 5), END]]


def test_lines_of_a_text_are_samples_where_they_are_padded(tmp_path: Path, folder: str) -> None:
    (tmp_path / "lines.txt").write_text("w1 w2\n\nw3\n")
    for tokenizer, begin in ((folder, [*ids(1, 2), END]), ("bytes", [b + 3 for b in b"w1 w2"] + [1])):
        lines = str(tmp_path / "lines.txt")
        workload = Workload(model=GPT2, data=lines, tokenizer=tokenizer, packing="padded", seq_len=8)
        found = rows(workload)["input_ids"]
        assert len(found) == 2 and found[0, : len(begin)].tolist() == begin


def test_how_much_is_read_at_once_does_not_show(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts are written as they come: no more is in memory."""
    (tmp_path / "some").mkdir()
    for i in range(3):
        (tmp_path / "some" / f"{i}.txt").write_text("\n".join(uneven(60, 20)[i::3]))
    workload = Workload(model=GPT2, data=str(tmp_path / "some"), tokenizer=folder, seq_len=16, **IN_ORDER)
    whole, sizes = rows(workload)["input_ids"], list[int]()
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "other"))
    monkeypatch.setattr(tokens, "_BATCH_CHARS", 50)
    monkeypatch.setattr("fsdp_lab.models.records.PIECE_CHARS", 100)

    parts = (tmp_path / "other").glob
    source = batches(workload, progress=lambda _: sizes.append(next(parts("*.part")).stat().st_size)).source
    assert torch.equal(source.collate(np.arange(source.count), np.arange(source.count))["input_ids"], whole)
    assert len(sizes) > 10 and max(np.diff(sizes)) < sizes[-1] / 8


def test_every_format_of_the_same_records_has_the_same_tokens(tmp_path: Path, folder: str) -> None:
    texts = uneven(50, 9)
    table = pa.table({"other": range(50), "text": texts})
    json_lines(tmp_path / "a" / "records.jsonl", texts)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "records.json").write_text(json.dumps([{"text": said} for said in texts], indent=1))
    for name, part in (("0", table[:20]), ("1", table[20:])):
        (tmp_path / "c").mkdir(exist_ok=True)
        pyarrow.parquet.write_table(part, tmp_path / "c" / f"{name}.parquet")
    (tmp_path / "c" / "README.md").write_text("About these records.")
    for name, writer in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        with writer(str(tmp_path / f"{name}.arrow"), table.schema) as out:
            out.write_table(table, max_chunksize=7)
    datasets.Dataset(table).save_to_disk(tmp_path / "saved", num_shards=2)
    places = (str(tmp_path / name) for name in ("a", "b/records.json", "c", "file.arrow", "stream.arrow", "saved"))
    found = [rows(Workload(model=GPT2, data=p, tokenizer=folder, seq_len=16))["input_ids"] for p in places]
    assert all(torch.equal(each, found[0]) for each in found) and len(found[0]) > 10


def test_the_column_is_text_or_messages_or_the_one_that_is_named(tmp_path: Path, folder: str) -> None:
    workload = {"model": GPT2, "tokenizer": folder, "seq_len": 4, "held_out": 0.0}
    data = json_lines(tmp_path / "named.jsonl", [text(1, 2, 3)], field="story")
    named = rows(Workload(**workload, data=data, text_field="story"))
    assert named["input_ids"].tolist() == [[*ids(1, 2, 3), END]]
    error = refused("workload.text_field", "its columns are 'story', 'other'", tokenizer=folder, data=data)
    assert "name the one" in error.hint


# -- chats -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("template", [words.PLAIN_TEMPLATE, words.MARKED_TEMPLATE], ids=["prefixes", "marked"])
def test_only_answers_of_a_chat_are_predicted(tmp_path: Path, template: str) -> None:
    folder = word_tokenizer(tmp_path / "tokenizer", template)
    said = [chat(text(1), text(2, 3), text(4), text(5)), chat(text(6)), chat(text(7), text(8))]
    data = json_lines(tmp_path / "chats.jsonl", said, field="messages")
    workload = Workload(model=GPT2, data=data, tokenizer=folder, packing="padded", seq_len=16, **IN_ORDER)
    found, n = rows(workload), IGNORED
    assert found["input_ids"][0, :14].tolist() == [USER, *ids(1), END, ASSISTANT, *ids(2, 3), END,
                                                   USER, *ids(4), END, ASSISTANT, *ids(5), END, PAD]  # fmt: skip
    assert found["labels"][0].tolist() == [n, n, n, n, *ids(2, 3), END, n, n, n, n, *ids(5), END, n, n, n]
    assert len(found["labels"]) == 2 and (found["labels"] != n).sum(dim=1).tolist() == [5, 2]
    assert "1 rows without labels left out" in batches(workload).source.description
    packed = rows(dataclasses.replace(workload, packing="packed", seq_len=8))
    assert packed["labels"].tolist() == [[n, n, n, n, *ids(2, 3), END, n], [n, n, n, *ids(5), END, n, n, n]]


@pytest.mark.parametrize(("record", "plain"), [
    ({"conversations": [{"from": "human", "value": text(1)}, {"from": "gpt", "value": text(2, 3)}]}, None),
    ({"prompt": [{"role": "user", "content": text(1)}], "completion": [{"role": "assistant", "content": text(2, 3)}]}, None),
    ({"prompt": text(1), "completion": text(2, 3)}, text(1) + text(2, 3)),
    ({"instruction": text(1), "input": "", "output": text(2, 3)}, f"{text(1)}\n\n{text(2, 3)}"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")  # fmt: skip
def test_questions_with_answers_are_chats_or_else_texts(
    tmp_path: Path, record: dict[str, Any], plain: str | None
) -> None:
    folder = word_tokenizer(tmp_path / "tokenizer", words.PLAIN_TEMPLATE)
    (tmp_path / "c.jsonl").write_text(json.dumps(record))
    pa.parquet.write_table(pa.Table.from_pylist([record]), tmp_path / "c.parquet")
    for data in (str(tmp_path / "c.jsonl"), str(tmp_path / "c.parquet")):
        workload = Workload(model=GPT2, data=data, tokenizer=folder, packing="padded", seq_len=64, **IN_ORDER)
        found, n = rows(workload), IGNORED
        assert found["input_ids"][0, :7].tolist() == [USER, *ids(1), END, ASSISTANT, *ids(2, 3), END]
        assert found["labels"][0, :8].tolist() == [n, n, n, n, *ids(2, 3), END, n]
        if plain is None:
            refused("workload.data", "bytes have no template", data=data, tokenizer="bytes")
        else:
            as_bytes = rows(dataclasses.replace(workload, tokenizer="bytes"))["input_ids"][0]
            assert bytes(i - 3 for i in as_bytes.tolist() if i > 2).decode() == plain
    spec, many = Spec(workload=workload), batches(workload)
    asked = [text(1), [{"role": "user", "content": text(1)}]]
    assert encoded(spec, many, asked, Sampling(new_tokens=1)) == [[USER, *ids(1), END, ASSISTANT]] * 2
    with pytest.raises(ArgumentError, match="is a chat, and bytes have no template for chats; give a text instead"):
        encoded(spec, batches(Workload(model=GPT2, tokenizer="bytes", seq_len=64)), asked[1:], Sampling())


def test_a_chat_whose_answers_have_no_exact_place_is_refused(tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "tokenizer", words.SHIFTING_TEMPLATE)
    data = json_lines(tmp_path / "chats.jsonl", [chat(text(1), text(2), text(3), text(4))], field="messages")
    refused("workload.data", "record 1 of .*no exact place", data=data, tokenizer=folder)
    bare = word_tokenizer(tmp_path / "bare", "")
    without = json_lines(tmp_path / "without.jsonl", [[{"content": "w1"}]], field="messages")
    refused("workload.text_field", "without.jsonl: record 1 'messages' has no role in message 1; give", data=without)
    two = "{% for m in messages if m.role not in ('user', 'assistant') %}{{ raise_exception('no') }}{% endfor %}"
    wrong = json_lines(tmp_path / "wrong.jsonl", [chat(text(1), text(2)), [{"role": "robot"}]], field="messages")
    said = r"record 2 of .*wrong.jsonl: .*refuses it \(no\); its roles are robot, those .* names user, assistant"
    refused("workload.data", said, data=wrong, tokenizer=word_tokenizer(tmp_path / "two", two + words.PLAIN_TEMPLATE))
    refused("workload.data", "no template for chats", data=data, tokenizer=bare)
    refused("workload.data", "bytes have no template", data=data, tokenizer="bytes")


MESSAGE = (
    "{% for part in m['content'] %}{{ part['text'] }} {% endfor %}{% if 'tool_calls' in m %}{% for c in m['tool_calls'] %}"
    "{{ c['function']['name'] }} {{ c['function']['arguments'] | tojson }} {% endfor %}{% endif %}<end> "
)
MARKED = "{% generation %}" + MESSAGE + "{% endgeneration %}"


@pytest.mark.parametrize("answer", [MESSAGE, MARKED], ids=["prefixes", "marked"])
def test_a_chats_tools_calls_and_parts_are_those_of_the_template_alone(tmp_path: Path, answer: str) -> None:
    """From each format; also where a table has keys that a message lacks, or tools as text."""
    template = (
        "{% if tools %}<system> {% for t in tools %}{{ t['function']['name'] }} {% endfor %}<end> {% endif %}"
        "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant> "
        + answer + "{% else %}<user> {{ m['role'] }} " + MESSAGE
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
    )  # fmt: skip
    folder = word_tokenizer(tmp_path / "tokenizer", template)
    call = {"type": "function", "function": {"name": "w9", "arguments": {"a": "w3"}}}
    said = [{"role": "developer", "content": [{"type": "text", "text": "w1"}, {"type": "text", "text": "w2"}]},
            {"role": "user", "content": [{"type": "text", "text": "w3"}]},
            {"role": "assistant", "content": [], "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "text", "text": "w4"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "w5"}]}]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "w9", "parameters": {"a": {"type": "string"}}}}]
    table = pa.Table.from_pylist([{"messages": said, "tools": tools}, {"messages": said[1:2] + said[4:]}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    told = table.drop(["tools"]).append_column("tools", [[json.dumps(tools), None]])
    datasets.Dataset(told).save_to_disk(tmp_path / "b")
    (tmp_path / "c.jsonl").write_text(
        json.dumps({"messages": said, "tools": tools}) + "\n" + json.dumps({"messages": said[1:2] + said[4:]})
    )
    alone = AutoTokenizer.from_pretrained(folder)
    whole = [alone.apply_chat_template(said, tools=tools, return_dict=False),
             alone.apply_chat_template(said[1:2] + said[4:], return_dict=False)]  # fmt: skip
    for name in ("a.parquet", "b", "c.jsonl"):
        fields = {"data": str(tmp_path / name), "packing": "padded", "seq_len": 48, **IN_ORDER}
        found = rows(Workload(model=GPT2, tokenizer=folder, **fields))
        assert [i[: len(w)] for i, w in zip(found["input_ids"].tolist(), whole, strict=True)] == whole
        learned = [i for i in found["labels"][0].tolist() if i != IGNORED]
        assert learned == [*ids(9), words.UNKNOWN, words.UNKNOWN, END, *ids(5), END]


# -- other kinds of models -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_a_masked_model_guesses_words_alone(tmp_path: Path, folder: str, packing: str) -> None:
    data = json_lines(tmp_path / "some.jsonl", uneven(300, 30))
    workload = Workload(model=BERT, data=data, tokenizer=folder, packing=packing, seq_len=32, micro_batch=40)
    reader = batches(workload)
    batch, again, later = reader.batch(0), reader.batch(0), reader.batch(reader.source.count)
    asked = batch["labels"] != IGNORED
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert not torch.equal(asked, later["labels"] != IGNORED)
    assert (batch["labels"][asked] >= words.FIRST_WORD).all(), "never a special token"
    shown = batch["input_ids"][asked]
    assert 0.6 < (shown == MASK).float().mean() < 0.95 and ((shown == MASK) | (shown >= words.FIRST_WORD)).all()
    assert not (batch["input_ids"][~asked] == MASK).any()
    if packing == "padded":
        assert not asked[batch["attention_mask"] == 0].any()
        lengths = batch["attention_mask"].sum(dim=1)
        assert torch.equal(asked.sum(dim=1), (0.15 * lengths).round().clamp(min=1).long())
    else:
        assert (asked.sum(dim=1) == round(0.15 * 32)).all() and reader.source.labels is None


def test_an_encoder_reads_the_first_half_and_the_decoder_writes_the_second(tmp_path: Path, folder: str) -> None:
    data = json_lines(tmp_path / "some.jsonl", [text(1, 2, 3, 4, 5, 6, 7), text(1, 2)])
    fields = {"model": "t5-1m", "data": data, "tokenizer": folder, "seq_len": 8, "held_out": 0.0}
    padded, n = rows(Workload(**fields, packing="padded")), IGNORED
    assert padded["input_ids"].tolist() == [ids(1, 2, 3, 4), [*ids(1), PAD, PAD, PAD]]
    assert padded["attention_mask"].tolist() == [[1] * 4, [1, 0, 0, 0]]
    assert padded["labels"].tolist() == [[*ids(5, 6, 7), END], [*ids(2), END, n, n]]
    packed = rows(Workload(**fields))
    assert packed["input_ids"].tolist() == [ids(1, 2, 3, 4)] and packed["labels"].tolist() == [[*ids(5, 6, 7), END]]


# -- the global batch ------------------------------------------------------------------------------------------------
def test_resuming_at_another_world_size_sees_the_same_samples(tmp_path: Path, folder: str) -> None:
    chats = [chat(a, b) for a, b in zip(uneven(90, 5), uneven(90, 9), strict=True)]
    data = json_lines(tmp_path / "some.jsonl", chats, field="messages")
    for packing in ("packed", "padded"):
        base = Workload(model=GPT2, data=data, tokenizer=folder, packing=packing, seq_len=24)
        for before in (0, 24, 240):
            whole = batches(dataclasses.replace(base, micro_batch=12)).batch(before)
            for world, micros in ((2, 1), (4, 1), (2, 3), (1, 3), (3, 4)):
                split = dataclasses.replace(base, micro_batch=12 // (world * micros), accumulate=micros)
                ranks = [batches(split, r, world) for r in range(world)]
                parts = [(b.batch(before, m), b.weight(before, m)) for m in range(micros) for b in ranks]
                assert all(torch.equal(torch.cat([p[name] for p, _ in parts]), whole[name]) for name in whole)
                labels = [(p["labels"][:, 1:] != IGNORED).sum().item() for p, _ in parts]
                weights = [w for _, w in parts]
                assert weights == pytest.approx([n * len(parts) / sum(labels) for n in labels])
                assert sum(weights) == pytest.approx(len(parts))


# -- once ------------------------------------------------------------------------------------------------------------
def test_tokens_are_made_once_for_a_content(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json_lines(tmp_path / "some.jsonl", uneven(40, 9))
    workload = Workload(model=GPT2, data=data, tokenizer=folder, seq_len=8)
    made: list[bool] = []
    progress = made.append  # whether it waits for another process
    before = batches(workload, progress=progress).source
    assert made == [False]
    again = batches(dataclasses.replace(workload, seq_len=16), progress=progress).source
    assert made == [False] and again.fingerprint == before.fingerprint
    (tmp_path / "else").mkdir()
    batches(dataclasses.replace(workload, data=str(shutil.copy2(data, tmp_path / "else"))), progress=progress)
    assert made == [False], "wherever it is"
    json_lines(tmp_path / "some.jsonl", uneven(41, 9))
    assert batches(workload, progress=progress).source.fingerprint != before.fingerprint and made == [False] * 2
    word_tokenizer(tmp_path / "tokenizer", words=150)
    batches(workload, progress=progress)
    assert made == [False] * 3, "another tokenizer"


def _both(place: Place, workload: Workload, folder: str) -> tuple[int, list[list[int]]]:
    """Rank 1 comes while rank 0 makes the tokens, which goes on when rank 1 waits for them. Returns how many batches of
    them each made, and what it reads."""
    made = []

    def progress(awaits: bool) -> None:
        if awaits:
            place.store.set("waiting", "1")
            return
        made.append(1)
        if place.rank == 0:
            place.store.set("making", "1")
            place.store.wait(["waiting"])

    if place.rank == 1:
        place.store.wait(["making"])
    with mock.patch.dict(os.environ, {cache.VARIABLE: folder}):  # the process is the pool's, and stays
        reader = batches(workload, place.rank, 2, progress=progress)
        return len(made), reader.batch(0)["input_ids"].tolist()


def test_of_two_processes_one_makes_the_tokens_and_the_other_waits(pool: Pool, tmp_path: Path, folder: str) -> None:
    data = json_lines(tmp_path / "some.jsonl", uneven(40, 9))
    workload = Workload(model=GPT2, data=data, tokenizer=folder, seq_len=8)
    (made, mine), (theirs_made, theirs) = pool.run(_both, 2, workload, str(tmp_path / "cache"), reduction=None)
    assert (made, theirs_made) == (1, 0) and mine != theirs


def test_what_a_killed_process_has_begun_is_made_again(tmp_path: Path, own_cache: Path) -> None:
    data = json_lines(tmp_path / "some.jsonl", uneven(40, 9))
    workload = Workload(model=GPT2, data=data, packing="padded", seq_len=64)
    child = os.fork()
    if child == 0:
        try:
            batches(workload, progress=lambda awaits: os.kill(os.getpid(), signal.SIGKILL))
        finally:
            os._exit(1)  # it is not to go on as a second pytest
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert list(own_cache.glob("*.part")) and not list(own_cache.glob("*.arrow"))
    assert batches(workload).source.count == 40
    assert list(own_cache.glob("*.arrow")) and not list(own_cache.glob("*.part"))


def test_an_interrupt_leaves_nothing_and_ends_a_wait(tmp_path: Path, own_cache: Path) -> None:
    data = json_lines(tmp_path / "some.jsonl", uneven(40, 9))
    workload = Workload(model=GPT2, data=data, packing="padded", seq_len=64)

    def interrupt(awaits: bool) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        batches(workload, progress=interrupt)
    (lock,) = own_cache.iterdir()
    with FileLock(lock), pytest.raises(KeyboardInterrupt):
        batches(workload, progress=interrupt)
    assert batches(workload).source.count == 40


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").touch()
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "taken"))
    data = json_lines(tmp_path / "some.jsonl", uneven(40, 9))
    assert "FSDP_LAB_CACHE" in refused("workload.data", "its tokens cannot be kept in .*taken", data=data).hint


# -- bad input -------------------------------------------------------------------------------------------------------
def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path, folder: str) -> None:
    small = {**GPT2, "vocab_size": 206}
    refused("workload.tokenizer", "ids of tokenizer go up to 206, and the vocabulary of the model is 206", model=small,
            tokenizer=folder)  # fmt: skip
    error = refused("workload.tokenizer", "the model, which is no folder, has no tokenizer", tokenizer="own")
    assert error.fix == {"tokenizer": "bytes"}
    refused("workload.tokenizer", "there is no folder /no/such", tokenizer="/no/such")
    refused("workload.tokenizer", "there is no tokenizer in", tokenizer=str(tmp_path))
    refused("workload.tokenizer", "has no mask token", model=BERT, tokenizer=word_tokenizer(tmp_path / "m", mask=False))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    refused("workload.tokenizer", "cannot be opened", tokenizer=str(tmp_path / "broken"))
    whole = Path(folder, "tokenizer.json").read_text()
    Path(folder, "tokenizer.json").write_text(whole.replace('"unk_token": "<unk>"', '"unk_token": "<absent>"'))
    records = json_lines(tmp_path / "some.jsonl", [text(1, 2), "nowhere"])
    with pytest.raises(SpecError, match="tokenizer cannot make tokens of a text") as caught:
        batches(Workload(model=GPT2, seq_len=8, data=records, text_field="text", tokenizer=folder))
    assert caught.value.fix == {"tokenizer": "bytes"}


CLASSIC = {"vocab.json": json.dumps({"w": 0, "o": 1, "Ġw": 2, "wo": 3, "Ġ": 4, "<|endoftext|>": 5}),
           "merges.txt": "#version: 0.2\nw o\nĠ w\n"}  # fmt: skip


def weights_in(folder: Path, files: Mapping[str, str], config: Mapping[str, Any] = GPT2) -> str:
    """A model's folder whose weights count as there, though none are read here."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {**files, "config.json": json.dumps(config), "model.safetensors": ""}.items():
        (folder / name).write_text(content)
    return str(folder)


def test_files_of_a_tokenizer_that_is_not_in_one_are_used_and_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("wo wo " * 9)
    given = {"data": str(tmp_path / "some.txt"), "seq_len": 4, "held_out": 0.0}
    gpt2 = {**GPT2, "vocab_size": 384}
    classic = Workload(model=weights_in(tmp_path / "classic", CLASSIC, gpt2), **given)
    assert (rows(classic)["input_ids"][0].tolist()
            == AutoTokenizer.from_pretrained(classic.model)("wo wo ")["input_ids"][:4])  # fmt: skip
    assert torch.equal(rows(dataclasses.replace(classic, tokenizer="own"))["input_ids"], rows(classic)["input_ids"])
    words_ = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nwo\n"
    bert = Workload(model=weights_in(tmp_path / "bert", {"vocab.txt": words_}, BERT), **given)
    assert {*rows(bert)["input_ids"].flatten().tolist()} <= {3, 4, 5}
    bare = {"tokenizer_config.json": '{"tokenizer_class": "GPT2Tokenizer"}'}
    refused("workload.tokenizer", "has no tokens of text", model=weights_in(tmp_path / "bare", bare, gpt2), **given)
    pieces = weights_in(tmp_path / "pieces", {"tokenizer.model": "\0"}, gpt2)
    refused("workload.tokenizer", "pieces cannot be opened", model=pieces, **given)
    assert notes_on(classic) == notes_on(bert) == ()


def test_bytes_that_nobody_chose_beside_weights_are_said(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    ByteTokenizer().save(folder)  # as an export of the lab has it
    exported = Workload(model=weights_in(folder, {}), seq_len=8)
    assert rows(exported)["input_ids"].max() > 100 and "reads bytes" in notes_on(exported)[0]
    chosen = (dataclasses.replace(exported, tokenizer="bytes"), dataclasses.replace(exported, weights="random"))
    assert [notes_on(w) for w in (*chosen, Workload(model=GPT2))] == [()] * 3


def test_a_tokenizer_that_the_weights_do_not_know_is_refused(tmp_path: Path) -> None:
    own = Path(word_tokenizer(tmp_path / "model", words=150))
    model = weights_in(own, {})
    more = word_tokenizer(tmp_path / "more")  # the same, and more words
    records = {"data": json_lines(tmp_path / "some.jsonl", uneven(30, 9)), "text_field": "text"}
    given = {"model": model, **records, "seq_len": 8}
    assert rows(Workload(tokenizer=more, **given))["input_ids"].max() == 206
    fewer = word_tokenizer(tmp_path / "fewer", words=140)
    error = refused("workload.tokenizer", "'w140' has another id in fewer than beside", tokenizer=fewer, **given)
    assert error.fix == {"tokenizer": str(own)}
    assert rows(Workload(tokenizer=fewer, weights="random", **given))["input_ids"].max() < 147


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("b.jsonl", b"", r"JSON that can be read \(perhaps it is empty\)"), ("b.jsonl", b"\n\n", "b.jsonl: has no records"),
        ("b.jsonl", b'{"text": "w1"}\n{"text": ', "b.jsonl: is not JSON that can be read .*in row 1"),
        ("b.jsonl", b'{"text": "w1"}\n{"text": "w1 \\ud83d"}\n', "b.jsonl: is not JSON that can be read .*surrogate pair"),
        ("b.jsonl", '{"text": "w1"}\n'.encode("utf-16"), "b.jsonl: is not JSON that can be read"),
        ("b.jsonl", b'{"text": 3}\n', "b.jsonl: record 1 'text' is of type int, not text"),
        ("b.jsonl", b'{"txt": "w1"}\n', "b.jsonl: record 1 'text' is null, not text"),
        ("b.parquet", b"PAR1 no", "b.parquet: is not Parquet that can be read"),
        ("b.arrow", b"no arrow at all", "b.arrow: is not Arrow that can be read"),
    ],
)  # fmt: skip
def test_a_broken_file_in_the_middle_of_a_folder_is_named(
    tmp_path: Path, folder: str, name: str, content: bytes, said: str
) -> None:
    for other in ("a.jsonl", "c.jsonl"):
        json_lines(tmp_path / "data" / other, uneven(40, 9))
    (tmp_path / "data" / name).write_bytes(content)
    refused("workload.data", said, data=str(tmp_path / "data"), tokenizer=folder)


def test_what_json_can_hold_is_what_the_tokenizer_gets(tmp_path: Path, folder: str) -> None:
    """A mark of the byte order, ends of lines, other separators in a text, a NUL, a column of two types, a long line."""
    said = ["w1\u2028w2\x85w3", "w4 \0 w5", "w6 \U0001f642", "w7" + " " * 1_200_000 + "w8"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, end, sides in (("a.jsonl", "\n", said), ("b.json", "\r", said[::-1])):
        records = [{"text": s, "other": i if i % 2 else s} for i, s in enumerate(sides)]
        lines = [json.dumps(record, ensure_ascii=record["text"] is said[2]) for record in records]
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + "".join(line + end for line in lines).encode())
        found = rows(Workload(model=GPT2, data=str(tmp_path / name), tokenizer=folder, seq_len=4, **IN_ORDER))
        alone = [i for s in sides for i in [*tokenizer(s).input_ids, END]]
        assert found["input_ids"].reshape(-1).tolist() == alone[: found["input_ids"].numel()]


@pytest.mark.parametrize("kind", ["file", "stream", "saved"])
def test_a_wrong_byte_in_an_arrow_file_is_refused_and_not_read_past_its_end(tmp_path: Path, folder: str, kind: str):
    """Without the check this one reads what lies behind the text, and a larger one ends the process."""
    rows, path = pa.table({"text": ["w1", "w2"]}), tmp_path / "some.arrow"
    if kind == "saved":
        datasets.Dataset.from_dict(rows.to_pydict()).save_to_disk(tmp_path / "saved")
        (path,) = (tmp_path / "saved").glob("*.arrow")
    else:
        opened = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with opened(str(path), rows.schema) as writer:
            writer.write_table(rows)
    offsets, wrong = (np.array([0, 2, last], dtype="<i4").tobytes() for last in (4, 7))
    content = path.read_bytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, wrong))
    data = str(path.parent if kind == "saved" else path)
    refused("workload.data", "is not .*rrow.* that can be read|is not a folder saved by datasets that can be read",
            data=data, tokenizer=folder)  # fmt: skip


def test_a_sample_that_is_too_long_is_named_with_ways_out(tmp_path: Path, folder: str) -> None:
    json_lines(tmp_path / "data" / "a.jsonl", uneven(40, 5))
    json_lines(tmp_path / "data" / "b.jsonl", [text(1), "", text(*range(12)), text(*range(30))])
    workload = {"data": str(tmp_path / "data"), "tokenizer": folder, "packing": "padded"}
    said = "sample 42 of .*/data, which begins with 'w0 w1 w2 w3 w4 w5 w6 w7', has 13 tokens, more than seq_len 8"
    error = refused("workload.seq_len", said, **workload)
    assert error.fix == {"seq_len": 31} and "packing packed or a seq_len of 31" in error.hint
    batches(Workload(model=GPT2, **{**workload, **error.fix}))
    error = refused("workload.seq_len", "has 13 tokens", model={**GPT2, "n_positions": 16}, **workload)
    assert error.fix == {"packing": "packed"} and "more than 16 positions" in error.hint


def test_what_has_no_samples_is_refused(tmp_path: Path, folder: str) -> None:
    data = json_lines(tmp_path / "some.jsonl", [chat(text(1)), chat(text(2))], field="messages")
    fields = {"data": data, "tokenizer": folder, "packing": "padded"}
    assert "role of the answers assistant" in refused("workload.data", "has anything to predict", **fields).hint
    short = json_lines(tmp_path / "short.jsonl", [text(1, 2)])
    error = refused("workload.data", "has 3 tokens, fewer than one sequence of 8", data=short, tokenizer=folder)
    assert "seq_len 3 or less" in error.hint
    (tmp_path / "some.txt").write_text("w1 w2")
    refused("workload.text_field", "is text, which has no columns", data=str(tmp_path / "some.txt"), text_field="x")
    (tmp_path / "latin.txt").write_bytes(b"w1 \xe9 w2")
    refused("workload.data", "is not text in UTF-8", data=str(tmp_path / "latin.txt"), tokenizer=folder)
    lines = {"data": str(tmp_path / "latin.txt"), "tokenizer": folder, "packing": "padded"}
    refused("workload.data", "latin.txt is not text in UTF-8", **lines)
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["w1"]})}).save_to_disk(tmp_path / "splits")
    error = refused("workload.data", "has several splits", data=str(tmp_path / "splits"), tokenizer=folder)
    assert error.hint.endswith("splits/train")


def test_what_is_written_beside_records_is_none_of_them(tmp_path: Path, folder: str) -> None:
    """Files about the data are left out, others are named; nothing of a file of records is read as text."""
    data = tmp_path / "data"
    json_lines(data / "b" / "A.JSONL", uneven(40, 9))
    for name in ("_SUCCESS", "dataset_infos.json", "dataset_info.json", "b/A.JSONL.lock", "README.md"):
        (data / name).write_text("{\n}" if name.endswith("json") else "")
    alone = batches(Workload(model=GPT2, data=str(data / "b" / "A.JSONL"), tokenizer=folder, seq_len=8)).source
    source = batches(Workload(model=GPT2, data=str(data), tokenizer=folder, seq_len=8)).source
    assert source.fingerprint == alone.fingerprint and "40 samples" in source.description
    (data / "c.csv").write_text("a,b")
    refused("workload.data", r"has files of records, such as A.JSONL, and others, such as .*c\.csv", data=str(data))


def test_bytes_stay_what_they_are(tmp_path: Path) -> None:
    """Text as bytes is not made into tokens, and an own file is not needed."""
    (tmp_path / "some.txt").write_bytes(bytes(range(32, 127)) * 9)
    workload = Workload(model=GPT2, data=str(tmp_path / "some.txt"), seq_len=8)
    found, said = rows(workload), (bytes(range(32, 127)) * 9)[: 8 * (95 * 9 // 8)]
    assert found["input_ids"].reshape(-1).tolist() == [b + 3 for b in said]
    assert not (tmp_path / "cache").exists() and ByteTokenizer().encode(["é"], whole=True) == [[198, 172]]
    assert FolderTokenizer(minilm_folder()).vocabulary == 30522


# -- names on the Hugging Face Hub -------------------------------------------------------------------------------------
OFFLINE = """
from fsdp_lab.spec.workload import Workload
from fsdp_lab.models.check import check
for fields in ({"model": "org/name"}, {"data": "org/name"}, {"tokenizer": "org/name"}):
    try:
        check(Workload(**fields))
    except Exception as e:
        print(e)
"""


@pytest.mark.slow
def test_a_name_is_refused_at_once_where_the_hub_cannot_be_reached(tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), cache.VARIABLE: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", OFFLINE], capture_output=True, text=True, timeout=240, env=environment)
    lines = done.stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["workload.model", "workload.data", "workload.tokenizer"]
    assert all("the Hugging Face Hub does not give it" in line and "hf download org/name" in line for line in lines)


def test_what_the_hub_has_is_fetched_once_and_read_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    word_tokenizer(tmp_path / "model")
    filled({**GPT2, "bos_token_id": None, "eos_token_id": None}).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    (tmp_path / "dataset").mkdir()
    datasets.Dataset.from_dict({"text": uneven(50, 9)}).to_parquet(tmp_path / "dataset" / "train-0.parquet")
    fetched: list[Any] = []

    def snapshot(name: str, *, repo_type: str, **options: Any) -> str:
        fetched.append((name, repo_type, options["allow_patterns"]))
        return str(tmp_path / repo_type)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    named = Workload(model="org/name", data="org/texts", seq_len=8)
    alike = Workload(model=str(tmp_path / "model"), data=str(tmp_path / "dataset" / "train-0.parquet"), seq_len=8)
    for _ in range(2):
        check(named)
        assert weights_folder(named) == tmp_path / "model"
        one, other = (batches(w).batch(0) for w in (named, alike))
        assert all(torch.equal(one[name], other[name]) for name in other)
    cache.hub_folder.cache_clear()
    assert len(fetched) == 4 and len({*map(str, fetched)}) == 4, "config, weights, tokenizer and data"
