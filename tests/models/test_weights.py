"""Weights of a folder: which files are read, under which names, and how what does not fit is refused."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.workload import Workload
from fsdp_lab.models import Initializer, Pretrained, Weights, build_skeleton, resolve, weights_folder
from fsdp_lab.models.check import check
from fsdp_lab.models.pretrained import smallest_patterns
from fsdp_lab.models.torch_checkpoint import InertRecord, _ForeignName, _Unpickler
from tests.models.small import SMALL, filled

UNTIED = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 300, "n_positions": 128,
          "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
TIED = {**UNTIED, "tie_word_embeddings": True}


def saved(folder: Path, model: Any, seed: int = 5, **options: Any) -> PreTrainedModel:
    made = filled(model, seed)
    assert isinstance(made, PreTrainedModel)
    made.save_pretrained(folder, **options)
    return made


def values_of(model: Any, folder: Path, **fields: Any) -> dict[str, Tensor]:
    """What the lab reads, parameters and buffers."""
    skeleton = build_skeleton(resolve(model))
    given = Pretrained(skeleton, Workload(model=model, weights=str(folder), **fields), Weights(folder))
    found = {}
    for name, t in [*skeleton.named_parameters(), *skeleton.named_buffers()]:
        if isinstance(t, torch.nn.Parameter) or name in given.buffers:
            found[name] = torch.empty(t.numel(), dtype=t.dtype)
            given.read_into(name, 0, found[name])
            found[name] = found[name].view(t.shape)
    return found


def refusal(folder: Path, model: Any = None, **fields: Any) -> SpecError:
    model = str(folder) if model is None else model
    with pytest.raises(SpecError) as caught:
        check(Workload(model=model, weights=str(folder), **fields))
    assert caught.value.field == "workload.weights" and "\n" not in str(caught.value) and caught.value.hint
    return caught.value


# -- the values are those of from_pretrained ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", [*SMALL.values(), TIED, UNTIED], ids=[*SMALL, "gpt2 tied", "gpt2 untied"])
def test_every_family_gets_back_what_was_saved(tmp_path: Path, model: Any) -> None:
    made = saved(tmp_path, model)
    found = values_of(model, tmp_path)
    assert all(torch.equal(found[name], p.detach()) for name, p in made.named_parameters())
    persistent = made.state_dict().keys() & dict(made.named_buffers()).keys()
    assert persistent <= found.keys() and all(torch.equal(found[n], made.get_buffer(n)) for n in persistent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_of_another_dtype_are_those_of_from_pretrained(tmp_path: Path, dtype: torch.dtype) -> None:
    filled(TIED, 5).to(dtype).save_pretrained(tmp_path)  # type: ignore[operator]
    alone = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    found = values_of(str(tmp_path), tmp_path)
    assert all(
        torch.equal(found[name], p.detach()) and p.dtype == torch.float32 for name, p in alone.named_parameters()
    )


def test_several_files_with_an_index_are_one_model(tmp_path: Path) -> None:
    made = saved(tmp_path, "gpt2-1m", max_shard_size="500KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    found = values_of("gpt2-1m", tmp_path)
    assert all(torch.equal(found[name], p.detach()) for name, p in made.named_parameters())


def test_a_base_models_file_has_no_prefix_and_old_names_are_known(tmp_path: Path) -> None:
    made = saved(tmp_path, "bert-1m")
    file = tmp_path / "model.safetensors"
    names = (("bert.", ""), ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    old = {functools.reduce(lambda n, change: n.replace(*change), names, n): t for n, t in load_file(file).items()}
    save_file(old, file, {"format": "pt"})
    assert any("gamma" in name for name in old) and not any(name.startswith("bert.") for name in old)
    found, alone = values_of("bert-1m", tmp_path), AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert all(torch.equal(found[name], p.detach()) for name, p in alone.named_parameters())
    assert all(torch.equal(found[name], p.detach()) for name, p in made.named_parameters())


def test_a_tied_parameter_is_read_under_any_of_its_names(tmp_path: Path) -> None:
    made, file = saved(tmp_path, TIED), tmp_path / "model.safetensors"
    held = load_file(file)
    embedding = held["transformer.wte.weight"]
    both = {**held, "lm_head.weight": embedding.clone()}
    save_file(both, file, {"format": "pt"})
    assert torch.equal(values_of(TIED, tmp_path)["transformer.wte.weight"], embedding)
    save_file({n: t for n, t in both.items() if "wte" not in n}, file, {"format": "pt"})
    assert torch.equal(values_of(TIED, tmp_path)["transformer.wte.weight"], embedding)
    assert torch.equal(made.get_parameter("transformer.wte.weight"), embedding)


def test_two_values_of_one_tied_parameter_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, UNTIED)
    given = Pretrained(build_skeleton(resolve(TIED)), Workload(model=TIED, weights=str(tmp_path)), Weights(tmp_path))
    found = []
    for part in range(3):  # as three ranks share the comparison
        try:
            given.check_ties(part, 3)
        except SpecError as e:
            found.append(str(e))
    assert len(found) == 3 and "lm_head.weight and transformer.wte.weight have different values" in found[0]
    Pretrained(build_skeleton(resolve(UNTIED)), Workload(model=UNTIED), Weights(tmp_path)).check_ties(0, 1)


def test_ranges_are_those_of_the_whole(tmp_path: Path) -> None:
    saved(tmp_path, TIED)
    weights, looks = Weights(tmp_path), []
    for name in ("transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight", "transformer.ln_f.bias"):
        whole = weights.read(name, 0, weights[name].numel)
        for start, stop in ((0, 1), (1, 17), (31, 32), (5, len(whole)), (3, 3)):
            part = torch.full((stop - start,), torch.nan, dtype=torch.bfloat16)
            weights.read_into(name, start, part, lambda: looks.append(0))
            assert torch.equal(part, whole[start:stop].bfloat16())
    assert looks


def test_reading_ends_between_two_pieces(tmp_path: Path) -> None:
    save_file({"w": torch.arange(6 << 20, dtype=torch.float32)}, tmp_path / "model.safetensors")
    looks: list[int] = []

    def check() -> None:
        looks.append(0)
        if len(looks) > 3:
            raise InterruptedError

    target = torch.full((6 << 20,), -1.0)
    with pytest.raises(InterruptedError):
        Weights(tmp_path).read_into("w", 0, target, check)
    done = int((target >= 0).sum())
    assert done == 3 * (1 << 20) and torch.equal(target[:done], torch.arange(done, dtype=torch.float32))


def test_a_tensor_that_was_saved_in_boxes_is_one(tmp_path: Path) -> None:
    """As a mesh of 2 x 2 ranks saves rows and columns; the third dimension is whole."""
    whole = torch.randn(5, 6, 3)
    for i, (rows, columns) in enumerate((r, c) for r in ((0, 3), (3, 5)) for c in ((0, 4), (4, 6))):
        box = whole[rows[0] : rows[1], columns[0] : columns[1]].contiguous()
        offsets = json.dumps({"w": {"saved_offsets": [rows[0], columns[0], 0]}})
        file = tmp_path / f"shard-{i + 1:05d}-model-00001-of-00001.safetensors"
        save_file({"w": box}, file, {"format": "pt", "DCP_SHARDING_INFO": offsets})
    weights = Weights(tmp_path)
    assert weights["w"].shape == (5, 6, 3) and not weights.is_plain
    for start, stop in ((0, 90), (7, 8), (10, 61), (89, 90)):
        assert torch.equal(weights.read("w", start, stop), whole.reshape(-1)[start:stop])
    next(tmp_path.glob("shard-00002*")).unlink()
    with pytest.raises(SpecError, match="lacks a part of w"):
        Weights(tmp_path)


# -- where they are ----------------------------------------------------------------------------------------------------


def test_own_weights_are_the_default_where_there_are_any(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    for model in (str(tmp_path), str(config)):
        assert weights_folder(Workload(model=model)) is None
        assert weights_folder(Workload(model=model, weights="own")) == tmp_path
    (tmp_path / "adapter_model.safetensors").touch()
    assert weights_folder(Workload(model=str(tmp_path))) is None, "an adapter is no model"
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    for model in (str(tmp_path), str(config)):
        assert weights_folder(Workload(model=model)) == tmp_path
        assert weights_folder(Workload(model=model, weights="random")) is None
    assert weights_folder(Workload()) is None and weights_folder(Workload(model=TIED)) is None
    assert weights_folder(Workload(model=TIED, weights=str(tmp_path))) == tmp_path


@pytest.mark.parametrize("model", ["gpt2-1m", "opt", TIED], ids=["preset", "type", "dict"])
def test_a_model_without_a_folder_has_no_weights_of_its_own(model: Any) -> None:
    with pytest.raises(SpecError, match="the model has no weights of its own") as caught:
        check(Workload(model=model, weights="own"))
    check(Workload(model=model, **caught.value.fix))


# -- what does not fit -------------------------------------------------------------------------------------------------


def _change(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors", {"format": "pt"})


def test_missing_extra_and_misshapen_tensors_are_named_together_and_begin_fresh_on_request(tmp_path: Path) -> None:
    made = saved(tmp_path, UNTIED)

    def change(held: dict[str, Tensor]) -> None:
        for name in [n for n in held if n.startswith("transformer.h.1.mlp.")]:
            del held[name]
        held["lm_head.weight"] = held["lm_head.weight"][:, :8].clone()
        held["classifier.out.weight"] = torch.zeros(2)

    _change(tmp_path, change)
    refused = refusal(tmp_path)
    assert "lack 4 of the model's tensors (transformer.h.1.mlp.c_fc.weight, " in refused.reason
    assert "have 1 of another shape (lm_head.weight: [300, 8] instead of [300, 32])" in refused.reason
    assert "have 1 that it has no place for (classifier.out.weight)" in refused.reason
    assert refused.fix == {"fresh_weights": ["classifier.out.weight", "lm_head.weight", "transformer.h.1.mlp.*"]}
    check(Workload(model=str(tmp_path), **refused.fix))
    found = values_of(str(tmp_path), tmp_path, **refused.fix)
    drawn = Initializer(build_skeleton(resolve(UNTIED)), 0)
    for name, p in made.named_parameters():
        fresh = name == "lm_head.weight" or name.startswith("transformer.h.1.mlp.")
        assert torch.equal(found[name], drawn(name) if fresh else p.detach()), name
    partly = refusal(tmp_path, fresh_weights=["lm_head.*", "classifier*"])
    assert "lack 4" in partly.reason and "shape" not in partly.reason
    assert partly.fix == {"fresh_weights": ["lm_head.*", "classifier*", "transformer.h.1.mlp.*"]}


def test_a_pattern_that_matches_nothing_is_refused_as_others_are(tmp_path: Path) -> None:
    saved(tmp_path, UNTIED)
    with pytest.raises(SpecError, match=r"^workload.fresh_weights: 'head.\*' matches no tensor") as caught:
        check(Workload(model=str(tmp_path), fresh_weights=["lm_head.*", "head.*"]))
    assert caught.value.fix == {"fresh_weights": ["lm_head.*"]}


def test_the_smallest_patterns_have_nothing_that_is_loaded() -> None:
    names = ["a.b.w", "a.b.v", "a.c.w", "d.w", "e[0].w"]
    assert smallest_patterns(["a.b.w", "a.b.v"], names) == ["a.b.*"]
    assert smallest_patterns(["a.b.w", "d.w"], names) == ["a.b.w", "d.w"]
    assert smallest_patterns(["a.b.w", "a.b.v", "a.c.w", "e[0].w"], names) == ["a.*", "e[[]0].w"]


def test_a_trained_bert_lacks_a_head_and_says_how_to_begin(minilm: Path) -> None:
    refused = refusal(minilm)
    assert (
        "lack 5 of the model's tensors" in refused.reason and "pooler.dense.bias, pooler.dense.weight" in refused.reason
    )
    assert refused.fix == {"fresh_weights": ["cls.*", "pooler.*"]}
    check(Workload(model=str(minilm), **refused.fix))


MIXTRAL = {"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 300,
           "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "bos_token_id": None,
           "eos_token_id": None, "pad_token_id": None, "experts_implementation": "eager"}  # fmt: skip


def test_experts_that_must_be_merged_are_refused_with_the_call_that_merges_them(tmp_path: Path) -> None:
    made = saved(tmp_path / "single", MIXTRAL)
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in Weights(tmp_path / "single").names
    refused = refusal(tmp_path / "single", MIXTRAL)
    assert "must be merged or split to become model.layers.0.mlp.experts." in refused.reason
    assert "model.save_pretrained(folder, save_original_format=False)" in refused.hint
    check(Workload(model=MIXTRAL, **refused.fix))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "single", dtype=torch.float32)
    opened.save_pretrained(tmp_path / "merged", save_original_format=False)
    found = values_of(MIXTRAL, tmp_path / "merged")
    assert all(torch.equal(found[name], p.detach()) for name, p in made.named_parameters())


# -- folders that cannot be read ---------------------------------------------------------------------------------------


def _truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _without_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 20)


def _empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _split(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    saved(folder, UNTIED, max_shard_size="40KB")


def _missing_part(folder: Path) -> None:
    _split(folder)
    next(folder.glob("model-00002*")).unlink()


def _bad_index(folder: Path) -> None:
    _split(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [')


def _wrong_index(folder: Path) -> None:
    _split(folder)
    index = folder / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    held["weight_map"]["transformer.nothing"] = next(iter(held["weight_map"].values()))
    index.write_text(json.dumps(held))


def _elsewhere(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "m.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../m.safetensors"}}')


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _gguf(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.Q4_1.gguf")


def _two_files(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())


def _quantised(folder: Path) -> None:
    _change(folder, lambda held: held.update({"lm_head.weight": held["lm_head.weight"].to(torch.int8)}))


def _eight_bits(folder: Path) -> None:
    _change(folder, lambda held: held.update({"lm_head.weight": held["lm_head.weight"].to(torch.float8_e4m3fn)}))


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


BROKEN: dict[Callable[[Path], None], str] = {
    _truncated: "model.safetensors is no whole safetensors file: it has .* bytes and should have",
    _without_header: "model.safetensors is no whole safetensors file: it is too short for its header",
    _empty: "model.safetensors is no whole safetensors file: it is too short",
    _pointer: "^workload.weights: .*safetensors is only Git LFS's pointer to the file; run git lfs pull",
    _missing_part: "model-00002-of-.*.safetensors is missing",
    _bad_index: "model.safetensors.index.json is no index of safetensors",
    _wrong_index: "lacks transformer.nothing, which the index says it has",
    _elsewhere: "is no index of safetensors .*does not lie beside it",
    _pickle: "pytorch_model.bin is a pickle, .*save_pretrained",
    _gguf: "model.Q4_1.gguf is a GGUF file, .*from_pretrained.*save_pretrained",
    _two_files: "has 2 files a.safetensors, b.safetensors, and no index",
    _quantised: "lm_head.weight in .* is of int8: quantised",
    _eight_bits: "^workload.weights: [^:]* has values of type F8_E4M3, which cannot be trained",
}


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__.lstrip("_"))
def test_a_folder_that_cannot_be_read_is_refused_in_a_sentence(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    saved(tmp_path, UNTIED)
    damage(tmp_path)
    with pytest.raises(SpecError, match=BROKEN[damage]) as caught:
        check(Workload(model=str(tmp_path)))
    assert caught.value.field == "workload.weights" and "\n" not in str(caught.value)
    check(Workload(model=str(tmp_path), **caught.value.fix)) if caught.value.fix else None
    check(Workload(model=str(tmp_path)), begins=False)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "there is no folder" in refusal(tmp_path / "nowhere", TIED).reason
    assert "has neither model.safetensors" in refusal(tmp_path, TIED).reason


# -- Distributed Checkpoints -------------------------------------------------------------------------------------------


def test_a_distributed_checkpoint_of_safetensors_is_read(tmp_path: Path) -> None:
    made = filled(UNTIED, 5)
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(made.state_dict(), storage_writer=writer, no_dist=True)
    found = values_of(UNTIED, tmp_path)
    assert all(torch.equal(found[name], p.detach()) for name, p in made.named_parameters())
    assert "lack 12" in refusal(tmp_path, {**UNTIED, "n_layer": 3}).reason


def of_torch(folder: Path, state: dict[str, Any], **options: Any) -> None:
    """As `torch.distributed.checkpoint.save` writes it."""
    with warnings.catch_warnings(action="ignore"):  # it is one process
        dcp.save(state, checkpoint_id=folder, no_dist=True, **options)


def test_the_model_of_torchs_own_checkpoint_is_read_and_its_optimizer_is_left_alone(tmp_path: Path) -> None:
    """Wherever it is in the saved dictionaries; what does not fit is refused as in safetensors."""
    made = saved(tmp_path / "plain", TIED)
    optimizer = torch.optim.AdamW(made.parameters())
    for p in made.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    state, held = made.state_dict(), optimizer.state_dict()
    made.save_pretrained(tmp_path / "plain")
    misfit = {**TIED, "n_layer": 3}
    usual = refusal(tmp_path / "plain", misfit)
    for place, given in {
        "model": {"model": state, "optimizer": held, "step": 3, "seen": torch.tensor(7)},
        "app": {"app": {"model": state, "optim": held}},
        "net": {"net": state, "optimizer": held, "seen": torch.tensor(7)},
        "flat": {**state, "optimizer": held},
    }.items():
        of_torch(tmp_path / place, given)
        found = values_of(TIED, tmp_path / place)
        assert all(torch.equal(found[name], p.detach()) for name, p in made.named_parameters()), place
        refused = refusal(tmp_path / place, misfit)
        shown = "lack 12 of the model's tensors (transformer.h.2."
        assert shown in refused.reason and shown in usual.reason and refused.fix == usual.fix, place
    weights, whole = Weights(tmp_path / "net"), made.get_parameter("transformer.wte.weight").detach().reshape(-1)
    assert torch.equal(weights.read("transformer.wte.weight", 31, 200), whole[31:200]) and not weights.is_plain


def test_two_models_of_one_checkpoint_are_named_and_refused(tmp_path: Path) -> None:
    state = filled(TIED, 5).state_dict()
    of_torch(tmp_path, {"net": state, "ema": state})
    assert ".metadata has 2 models (net, ema)" in refusal(tmp_path, TIED).reason


class Harm:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("harmed"),))


class Hidden:
    """A call of what an index may name, whose state would be set on what is called."""

    def __reduce__(self) -> Any:
        return (torch.Size, ((1,),), (None, {"__iter__": 1}))


@pytest.mark.parametrize(("held", "reason"), [
    (Harm(), "names pathlib.Path.touch, which no Distributed Checkpoint needs"),
    (Metadata({}, planner_data=Harm(), storage_data={}), "names pathlib.Path.touch"),
    (Metadata({}, planner_data=os.system, storage_data={}), "names posix.system"),
    (Metadata({}, planner_data=torch.nn.Linear, storage_data={}), "names torch.nn.modules.linear.Linear"),
    (Metadata({}, planner_data=Hidden(), storage_data={}), "is no index of a Distributed Checkpoint"),
    (Metadata({"a": 3}, storage_data={}), "is no index of a Distributed Checkpoint"),
    ({"a": torch.Size((1,))}, "is no index of a Distributed Checkpoint"),
    (b"\x80", "is no index of a Distributed Checkpoint"),
], ids=range(8))  # fmt: skip
def test_an_index_that_would_run_code_is_refused_and_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: Any, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(held if isinstance(held, bytes) else pickle.dumps(held))
    assert reason in refusal(tmp_path, TIED).reason
    assert not (tmp_path / "harmed").exists()


def test_a_file_of_torchs_checkpoint_that_is_damaged_is_named(tmp_path: Path) -> None:
    of_torch(tmp_path, {"model": {"w": torch.ones(8), "t": torch.ones(4, 3).t()}})
    weights, (file,) = Weights(tmp_path), tmp_path.glob("*.distcp")
    with pytest.raises(OSError, match="another tensor than the index says, or a transposed one"):
        weights.read("t", 0, 2)
    whole = file.read_bytes()
    box = weights["w"].boxes[0]
    file.write_bytes(b"".join((whole[: box.offset], bytes(box.archive_bytes), whole[box.offset + box.archive_bytes :])))
    with pytest.raises(OSError, match=f"{file.name} has at byte {box.offset:,} no tensor"):
        weights.read("w", 0, 2)
    file.write_bytes(whole[:-1])
    with pytest.raises(SpecError, match="has .* bytes and should have"):
        Weights(tmp_path)
    file.unlink()
    with pytest.raises(SpecError, match="is missing"):
        Weights(tmp_path)


class Harmful(torch.nn.Module):
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("harmed"),))


class ByGetattr:
    """Pickles as an attribute of something."""

    def __init__(self, of: object, name: str) -> None:
        self._arguments = (of, name)

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, self._arguments


def test_a_member_of_torchs_enumeration_is_read_as_each_python_pickles_it() -> None:
    """Debian's Python 3.11.2 writes getattr(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")."""
    member = pickle.dumps(ByGetattr(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    assert isinstance(_Unpickler(io.BytesIO(member)).load(), InertRecord)
    with pytest.raises(_ForeignName, match="getattr"):
        _Unpickler(io.BytesIO(pickle.dumps(ByGetattr(torch.Size, "count")))).load()


def test_an_item_that_would_run_code_is_refused_and_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index says that it is a tensor."""
    monkeypatch.chdir(tmp_path)
    of_torch(tmp_path, {"w": torch.ones(200)})
    (file,), box = tmp_path.glob("*.distcp"), Weights(tmp_path)["w"].boxes[0]
    harmful = io.BytesIO()
    torch.save(Harmful(), harmful)
    assert len(harmful.getvalue()) < box.archive_bytes
    padding = box.archive_bytes - len(harmful.getvalue())
    file.write_bytes(bytes(padding) + harmful.getvalue())
    with pytest.raises(OSError, match="no tensor"):
        Weights(tmp_path).read("w", 0, 1)
    assert not (tmp_path / "harmed").exists()
