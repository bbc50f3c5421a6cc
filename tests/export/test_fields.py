"""Every field of a Spec changes the script that is written, or is refused by its name. Never dropped."""

import dataclasses
import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.base.errors import SpecError
from fsdp_lab.export import files
from fsdp_lab.export.script import script
from fsdp_lab.models import build, check, lora
from fsdp_lab.spec.spec import Precision, Spec, Strategy
from fsdp_lab.spec.workload import Workload
from tests.export.ranks import SMALL, spec
from tests.models import words
from tests.models.small import filled
from tests.remembered import once, skeleton

FSDP2, FSDP1 = {"backend": "fsdp2"}, {"backend": "fsdp1"}
DDP = {"backend": "ddp", "sharding": "no_shard"}
OWN = {"model": "tests.own_module:build", "loss": "tests.own_module:loss", "data": "tests.own_module:Samples",
       "seq_len": 128}  # fmt: skip
LINEAR = {"lr_schedule": "linear", "decay_steps": 9}

_FOLDER = tempfile.TemporaryDirectory(prefix="fsdp_lab_fields_")
TOKENIZER = words.word_tokenizer(Path(_FOLDER.name, "tokenizer"))
RECORDS = words.json_lines(Path(_FOLDER.name, "records.jsonl"), [f"once upon a time {i}" for i in range(12)], "story")
WEIGHTS = str(Path(_FOLDER.name, "weights"))  # of the model of `spec`
WIDER = {"model": {**SMALL, "vocab_size": 400}, "weights": WEIGHTS}  # whose embedding the files have in another shape

# The field, the rest of the Spec's changes, and another value than its own in them.
FIELDS: list[tuple[str, dict[str, Any], Any]] = [
    ("model", {}, "llama-1m"), ("weights", {}, WEIGHTS), ("fresh_weights", WIDER, ["transformer.wte.*"]),
    ("data", {}, words.__file__), ("held_out", {}, 0.25), ("tokenizer", {}, TOKENIZER),
    ("text_field", {"data": RECORDS}, "story"), ("packing", {"data": RECORDS, "text_field": "story"}, "padded"),
    ("seq_len", {}, 48), ("micro_batch", {}, 3), ("accumulate", {}, 5),
    ("optimizer", {}, "sgd"), ("optimizer", {}, "RMSprop"),
    ("optimizer_args", {}, {"fused": True}), ("optimizer_args", {}, {"betas": [0.8, 0.9], "eps": 1e-6, "amsgrad": True}),
    ("lr", {}, 0.125), ("lr_schedule", LINEAR, "cosine"), ("warmup_steps", {}, 7), ("decay_steps", LINEAR, 8),
    ("lr_end", LINEAR, 0.25), ("weight_decay", {}, 0.25), ("dropout", {}, "config"),
    ("freeze", {}, ["transformer.w?e.*"]), ("lora", {}, {"r": 2, "targets": ["c_attn"]}),
    ("param_groups", {}, [{"match": ["*.bias"], "lr": 0.5, "weight_decay": 0.25}]),
    ("clip_norm", {}, 0.5), ("seed", {}, 77), ("loss", OWN, "tests.own_module:Net"),
    ("backend", {}, "fsdp2"), ("backend", {}, "fsdp1"), ("backend", {"sharding": "no_shard"}, "ddp"),
    *(("sharding", backend, "shard_grad_op") for backend in ({}, FSDP2, FSDP1)), ("sharding", {}, "no_shard"),
    ("shard_size", {"world_size": 8, "sharding": "hybrid_shard"}, 2), ("reshard_size", {"world_size": 4}, 2),
    *(("precision", {}, precision) for precision in ("bf16", "bf16-pure", "fp16", Precision(param="bf16", output="fp32"))),
    ("precision", FSDP1, "bf16-pure"), ("precision", DDP, "bf16-pure"), ("precision", DDP, Precision(buffer="bf16")),
    ("offload", {}, "all"), ("offload", FSDP1, "all"),
    ("wrap", {}, "class:GPT2MLP"), ("wrap", {}, "every:2"), ("wrap", {}, "whole"), ("wrap", FSDP1, "min_params:5000"),
    ("wrap", DDP, "whole"), ("forward_prefetch", {}, 2), ("forward_prefetch", FSDP1, 1),
    ("backward_prefetch", {}, 3), ("backward_prefetch", FSDP1, 0), ("backward_prefetch", DDP, 4),
    ("backward_prefetch_point", FSDP1, "after"), ("limit_all_gathers", FSDP1, 0), ("limit_reductions", {}, 2),
    ("gather", {}, "mapped"), ("recompute", {}, "every:2"), ("recompute", {}, "full"), ("compile", {}, True),
    *(("sync", {**backend, "accumulate": 4}, sync) for backend in (FSDP2, FSDP1, DDP) for sync in ("last", 2, 3)),
    ("sync", {}, "last"), ("world_size", {}, 6), ("devices", {}, ("cuda:1", "cuda:3")), ("devices", {}, ("cpu", "cpu")),
    ("link", {}, "0.25 GB/s, 50 us"),
]  # fmt: skip
# The Spec's changes, and the field that is named.
ONLY_IN_THE_LAB: list[tuple[dict[str, Any], str]] = [
    ({"sharding": "zero1"}, "strategy.sharding"),
    ({"backend": "yours", "engine": "tests.your_engines:FullyShard"}, "strategy.backend"),
    ({"offload": "optimizer"}, "strategy.offload"), ({"offload": "all", "sharding": "no_shard"}, "strategy.offload"),
    ({"precision": Precision(param="bf16", norm="fp32")}, "strategy.precision.norm"),
    ({"precision": Precision(param="bf16", reduce="bf16", keep_low_precision_gradients=True)},
     "strategy.precision.keep_low_precision_gradients"),
    ({"backward_prefetch": 0}, "strategy.backward_prefetch"),
    ({"backward_prefetch_point": "after"}, "strategy.backward_prefetch_point"),
    ({"limit_all_gathers": 0}, "strategy.limit_all_gathers"),
    ({"forward_prefetch": 1, "sharding": "no_shard"}, "strategy.forward_prefetch"),
    ({"limit_reductions": 2, "sharding": "no_shard"}, "strategy.limit_reductions"),
    ({"wrap": "every:2", "sharding": "no_shard"}, "strategy.wrap"),
    ({"optimizer": "sgd", "optimizer_args": {"fused": True}}, "workload.optimizer_args"),
    ({"devices": ("cuda:0", "cuda:0")}, "devices"),
]  # fmt: skip


def written(given: Spec, folder: Path | None = None) -> tuple[str, ...]:
    """What is written, with the bytes of the files in `folder`; or the field that is refused."""
    try:
        text, beside = script(given)
    except SpecError as e:
        return "refused", e.field
    if folder is None:
        return (text,)
    if beside is not None:
        folder.mkdir()
        beside.write(folder)
    return text, *(str((file.name, file.read_bytes())) for file in sorted(folder.rglob("*.*")) if file.is_file())


@pytest.fixture(scope="module", autouse=True)
def once_for_all_specs() -> Iterator[None]:
    """Most Specs differ in nothing that a model is built or data listed from."""
    filled(SMALL).save_pretrained(WEIGHTS)  # type: ignore[operator]
    with pytest.MonkeyPatch.context() as patch:
        for module in (build, lora, files):
            patch.setattr(module, "build_skeleton", skeleton)
        patch.setattr(check, "_facts_of_built", once(check._facts_of_built, lambda w: (json.dumps(w.model), w.seq_len)))
        patch.setattr(check, "data_files", functools.cache(check.data_files))
        yield


@pytest.mark.slow
def test_every_field_changes_what_is_written(tmp_path: Path) -> None:
    known: dict[str, tuple[str, ...]] = {}  # without the field
    for number, (field, others, value) in enumerate(FIELDS):
        one, other = spec(**others), spec(**{**others, field: value})
        was = known[repr(others)] = known.get(repr(others)) or written(one)
        now = written(other)
        if was == now:
            was, now = (written(given, tmp_path / f"{number} {given is one}") for given in (one, other))
        assert was != now and now[0] != "refused", (field, others, value, now)


def test_the_tables_leave_no_field_out() -> None:
    fields = {f.name for kind in (Spec, Workload, Strategy) for f in dataclasses.fields(kind)}
    assert {field for field, *_ in FIELDS} == fields - {"workload", "strategy", "engine"}  # engine: of yours alone
    given = [value for _, _, value in FIELDS] + [changes.get("precision") for changes, _ in ONLY_IN_THE_LAB]
    roles = {f.name for f in dataclasses.fields(Precision)}
    assert roles == {name for p in given if isinstance(p, Precision) for name in roles
                     if getattr(p, name) != getattr(Precision(), name)}  # fmt: skip


def test_what_cannot_be_said_is_refused_by_name() -> None:
    for changes, field in ONLY_IN_THE_LAB:
        given = spec(**changes)
        with pytest.raises(SpecError) as refused:
            script(given)
        e = refused.value
        assert e.field == field, (changes, str(e))
        assert "backend lab" not in e.hint and e.hint.endswith("or export the Spec itself, which contains it")
        if e.fix and "wrap" not in e.fix:  # the way out is one: what is refused next is another field
            assert given.replace(**e.fix) != given


def test_weights_are_named_by_an_absolute_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled("gpt2-1m").save_pretrained(tmp_path / "model", max_shard_size="2MB")  # type: ignore[operator]
    monkeypatch.chdir(tmp_path)
    given = spec(model="gpt2-1m", weights="model")
    assert f'WEIGHTS = "{tmp_path}/model"' in script(given)[0]
    with pytest.raises(SpecError, match="of another shape"):
        script(given.replace(model="gpt2-10m"))
