"""Weights of a folder: which files are read, under which names, and how what does not fit is refused."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.models.build import Initializer, build_skeleton
from fsdp_lab.models.cache import weights_folder
from fsdp_lab.models.check import check
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.pretrained import Pretrained, smallest_patterns
from fsdp_lab.models.weights import Weights, unwrap_names
from fsdp_lab.spec.workload import Workload
from tests.models.small import SMALL, filled, part

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
@pytest.mark.parametrize("model", [*(SMALL[name] for name in ("bert", "t5", "resnet")), TIED, UNTIED], ids=str)
def test_every_family_gets_back_what_was_saved(tmp_path: Path, model: Any) -> None:
    made = saved(tmp_path, model)
    found = values_of(model, tmp_path)
    assert all(torch.equal(found[name], p.detach()) for name, p in made.named_parameters())
    persistent = made.state_dict().keys() & dict(made.named_buffers()).keys()
    assert persistent <= found.keys() and all(torch.equal(found[n], made.get_buffer(n)) for n in persistent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_values_of_another_dtype_are_those_of_from_pretrained(tmp_path: Path, dtype: torch.dtype) -> None:
    """From several files and their index."""
    filled(TIED, 5).to(dtype).save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    alone = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    found = values_of(str(tmp_path), tmp_path)
    assert all(torch.equal(found[n], p.detach()) and p.dtype == torch.float32 for n, p in alone.named_parameters())


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
    for third in range(3):  # as three ranks share the comparison
        try:
            given.check_ties(third, 3)
        except SpecError as e:
            found.append(str(e))
    assert len(found) == 3 and "lm_head.weight and transformer.wte.weight have different values" in found[0]
    Pretrained(build_skeleton(resolve(UNTIED)), Workload(model=UNTIED), Weights(tmp_path)).check_ties(0, 1)


def test_ranges_are_those_of_the_whole(tmp_path: Path) -> None:
    made, weights = saved(tmp_path, TIED), Weights(tmp_path)
    for name in ("transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight", "transformer.ln_f.bias"):
        whole = made.get_parameter(name).detach().reshape(-1)
        for start, stop in ((0, 1), (1, 17), (31, 32), (5, len(whole)), (3, 3)):
            assert torch.equal(part(weights, name, start, stop), whole[start:stop])


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


@pytest.mark.parametrize("columns", [((0, 6),), ((0, 4), (4, 6))], ids=["rows", "boxes"])
def test_a_tensor_that_was_saved_in_rows_is_one(tmp_path: Path, columns: tuple[tuple[int, int], ...]) -> None:
    """Parts of rows, as a mesh of 2 x 2 ranks saves them, are refused."""
    whole = torch.randn(5, 6, 3)
    for i, (rows, (first, last)) in enumerate((r, c) for r in ((0, 3), (3, 5)) for c in columns):
        box = whole[rows[0] : rows[1], first:last].contiguous()
        offsets = json.dumps({"w": {"saved_offsets": [rows[0], first, 0]}})
        file = tmp_path / f"shard-{i + 1:05d}-model-00001-of-00001.safetensors"
        save_file({"w": box}, file, {"format": "pt", "DCP_SHARDING_INFO": offsets})
    if len(columns) > 1:
        with pytest.raises(SpecError, match="has w in parts that are not whole rows; .*enable_consolidation"):
            Weights(tmp_path)
        return
    weights = Weights(tmp_path)
    assert weights["w"].shape == (5, 6, 3)
    for start, stop in ((0, 90), (7, 8), (10, 61), (89, 90)):
        assert torch.equal(part(weights, "w", start, stop), whole.reshape(-1)[start:stop])
    save_file({"v": whole}, next(tmp_path.glob("shard-00001*")))
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


@pytest.mark.parametrize("model", ["gpt2-1m", TIED], ids=["preset", "dict"])
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
    assert refused.fix == {"fresh_weights": ["classifier.*", "lm_head.*", "transformer.h.1.mlp.*"]}
    check(Workload(model=str(tmp_path), **refused.fix))
    found = values_of(str(tmp_path), tmp_path, **refused.fix)
    drawn = Initializer(build_skeleton(resolve(UNTIED)), 0)
    for name, p in made.named_parameters():
        fresh = name == "lm_head.weight" or name.startswith("transformer.h.1.mlp.")
        assert torch.equal(found[name], drawn(name) if fresh else p.detach()), name
    partly = refusal(tmp_path, fresh_weights=["lm_head.*", "classifier*"])
    assert "lack 4" in partly.reason and "shape" not in partly.reason
    assert partly.fix == {"fresh_weights": ["lm_head.*", "classifier*", "transformer.h.1.mlp.*"]}


def test_a_pattern_that_matches_nothing_is_refused_and_the_smallest_have_nothing_that_is_loaded(tmp_path: Path) -> None:
    saved(tmp_path, UNTIED)
    with pytest.raises(SpecError, match=r"^workload.fresh_weights: 'head.\*' matches no tensor") as caught:
        check(Workload(model=str(tmp_path), fresh_weights=["lm_head.*", "head.*"]))
    assert caught.value.fix == {"fresh_weights": ["lm_head.*"]}
    names = ["a.b.w", "a.b.v", "a.c.w", "d.w", "e.w"]
    assert smallest_patterns(["a.b.w", "a.b.v"], names) == ["a.b.*"]
    assert smallest_patterns(["a.b.w", "d.w"], names) == ["a.b.w", "d.*"]
    assert smallest_patterns(["a.b.w", "a.b.v", "a.c.w"], names) == ["a.*"]
    assert smallest_patterns(["a[b].w", "c.w*"], ["a[b].w", "ab.w", "c.w*", "c.ww"]) == ["a[[]b].*", "c.w[*]"]


def test_a_trained_bert_lacks_a_head_and_says_how_to_begin(minilm: Path) -> None:
    refused = refusal(minilm)
    for said in ("lack 5 of the model's tensors", "pooler.dense.bias, pooler.dense.weight"):
        assert said in refused.reason
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
def _split(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    saved(folder, UNTIED, max_shard_size="40KB")
    return folder / "model.safetensors.index.json"


def _wrong_index(folder: Path) -> None:
    held = json.loads((index := _split(folder)).read_text())
    held["weight_map"]["transformer.nothing"] = next(iter(held["weight_map"].values()))
    index.write_text(json.dumps(held))


def _renamed(folder: Path, name: str) -> Path:
    return (folder / "model.safetensors").rename(folder / name)


def _of_dtype(folder: Path, dtype: torch.dtype) -> None:
    _change(folder, lambda held: held.update({"lm_head.weight": held["lm_head.weight"].to(dtype)}))


WHOLE, POINTER = "model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda f: (f / WHOLE).write_bytes((f / WHOLE).read_bytes()[:-100]), f"{WHOLE} is no whole safetensors"),
    "no header": (lambda f: (f / WHOLE).write_bytes(b"\xff" * 20), f"{WHOLE} is no whole safetensors file"),
    "empty": (lambda f: (f / WHOLE).write_bytes(b""), f"{WHOLE} is no whole safetensors file"),
    "pointer": (lambda f: (f / WHOLE).write_text(POINTER), "is no whole safetensors file .* or run git lfs pull"),
    "missing part": (lambda f: next(_split(f).parent.glob("model-00002*")).unlink(), "model-00002-of-.* is missing"),
    "bad index": (lambda f: _split(f).write_text('{"weight_map": ['), f"{WHOLE}.index.json is no index of weights"),
    "wrong index": (_wrong_index, "lacks transformer.nothing, which the index says it has"),
    "elsewhere": (lambda f: _renamed(f, "m.safetensors").with_name(f"{WHOLE}.index.json").write_text(
        '{"weight_map": {"a": "../m.safetensors"}}'), "is no index of weights .*does not lie beside it"),
    "quantised": (lambda f: _of_dtype(f, torch.int8), "lm_head.weight in .* is of int8: quantised"),
    "eight bits": (lambda f: _of_dtype(f, torch.float8_e4m3fn), "has values of type F8_E4M3, which cannot be trained"),
}  # fmt: skip


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untied")
    saved(folder, UNTIED)
    return folder


@pytest.mark.parametrize(("damage", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_folder_that_cannot_be_read_is_refused_in_a_sentence(
    tmp_path: Path, untied: Path, damage: Callable[[Path], object], reason: str
) -> None:
    shutil.copytree(untied, tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    with pytest.raises(SpecError, match=reason) as caught:
        check(Workload(model=str(tmp_path)))
    assert caught.value.field == "workload.weights" and "\n" not in str(caught.value)
    if reason == BROKEN["truncated"][1]:
        check(Workload(model=str(tmp_path), **caught.value.fix))
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


@pytest.mark.parametrize("name", ["pytorch_model.bin", ".metadata", "model.Q4_1.gguf", "a.safetensors"])
def test_another_format_is_refused_by_the_name_of_its_file(tmp_path: Path, name: str) -> None:
    """Two files without an index are one, too."""
    saved(tmp_path, TIED)
    (tmp_path / "model.safetensors").rename(tmp_path / "b.safetensors" if name[0] == "a" else tmp_path / name)
    (tmp_path / name).touch()
    refused = refusal(tmp_path)
    assert f", but {name}" in refused.reason and "then model.save_pretrained(folder)" in refused.hint


# -- names of a wrapped model -------------------------------------------------------------------------------------------
def wrapped_folder(path: Path, *files: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    weight_map = {}
    for number, tensors in enumerate(files):
        name = f"model-{number}.safetensors"
        save_file(tensors, path / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text("{}")
    return path


def test_every_file_is_written_with_the_model_s_own_names(tmp_path: Path) -> None:
    a, b = torch.randn(3, 2), torch.randn(4)
    source = wrapped_folder(tmp_path / "from", {"module._orig_mod.h.0.weight": a}, {"module.ln.weight": b})
    to = unwrap_names(source, tmp_path / "to")
    assert torch.equal(load_file(to / "model-0.safetensors")["h.0.weight"], a)
    assert torch.equal(load_file(to / "model-1.safetensors")["ln.weight"], b)
    index = json.loads((to / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {"h.0.weight": "model-0.safetensors", "ln.weight": "model-1.safetensors"}
    assert (to / "config.json").read_text() == "{}"


def test_what_cannot_be_unwrapped_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    value, to = torch.zeros(2), tmp_path / "to"
    plain = wrapped_folder(tmp_path / "plain", {"h.weight": value})
    twice = wrapped_folder(tmp_path / "twice", {"h.weight": value, "module.h.weight": value.clone()})
    wrapped = wrapped_folder(tmp_path / "wrapped", {"module.h.weight": value})
    with pytest.raises(ArgumentError, match="with and without a wrapper"):
        unwrap_names(twice, to)
    with pytest.raises(ArgumentError, match="has no safetensors"):
        unwrap_names(tmp_path, to)
    assert not to.exists()
    with pytest.raises(ArgumentError, match="exists; give a new folder"):
        unwrap_names(wrapped, plain)
