"""Spec: what it takes, what it refuses and how it says so, JSON both ways."""

import dataclasses
import math
import pickle
from typing import Any

import pytest
from hypothesis import given, strategies as st

from fsdp_lab.base.errors import SpecError
from fsdp_lab.runs.sweep import value_lists
from fsdp_lab.spec import spec as vocabulary
from fsdp_lab.spec.describe import describe_changes, describe_field, describe_fields, differing_fields, flat_fields
from fsdp_lab.spec.fields import ALIASES, rows_of
from fsdp_lab.spec.link import OFFERED, LinkError, LinkSpec, format_latency, format_rate, split_list
from fsdp_lab.spec.optimizer import OPTIMIZERS, LrSchedule
from fsdp_lab.spec.spec import PRECISIONS, Precision, Spec, Strategy
from fsdp_lab.spec.workload import Workload

dtypes = st.sampled_from(vocabulary.DTYPES)
roles = {"param": dtypes, "reduce": dtypes, **dict.fromkeys(("output", "buffer", "norm"), st.none() | dtypes)}
roles["keep_low_precision_gradients"] = st.booleans()
precisions = st.sampled_from(sorted(PRECISIONS)) | st.builds(Precision, **roles)
# Values that fields take, alone or beside others.
GOOD: dict[str, list[Any]] = {
    "backend": [*vocabulary.BACKENDS], "sharding": [*vocabulary.SHARDINGS], "precision": [*PRECISIONS],
    "offload": [*vocabulary.OFFLOADS],
    "wrap": ["block", "every:2", "min_params:100", "class:GPT2Block", "whole"], "shard_size": [None, 1, 2, 4],
    "forward_prefetch": [None, 0, 1], "backward_prefetch": [0, 1, 2], "limit_all_gathers": [0, 1, 2],
    "limit_reductions": [1, 2], "gather": ["copy", "mapped"],
    "recompute": ["none", "full", "every:2"], "sync": ["every", "last", 2], "world_size": [1, 2, 3, 4],
    "optimizer": ["adamw", "sgd", "RMSprop", "NAdam", "Muon"],
    "optimizer_args": [{}, {"fused": True}, {"momentum": 0.9}, {"amsgrad": True}],
    "lr_schedule": ["linear", "cosine"], "decay_steps": [9], "warmup_steps": [2], "lr_end": [0.5],
    "tokenizer": [None, "bytes"], "packing": ["packed"],
    "dropout": ["off", "config"],
    "param_groups": [[{"match": ["*.bias"], "lr": 0.1}], [{"match": ["*"], "weight_decay": 0}]],
    "freeze": [None, ["*.bias"], ["transformer.h.0.*", "transformer.w?e.*"]],
    "weights": [None, "random"], "fresh_weights": [None, ["x.*"]], "lora": [None, {"r": 2}],
    "accumulate": [1, 2, 3], "micro_batch": [1, 2], "clip_norm": [None, 1.0],
}  # fmt: skip

drawable = {name: st.sampled_from(GOOD[name]) for name in Strategy.__dataclass_fields__ if name in GOOD}
drawable |= {"precision": precisions, **dict.fromkeys(("shard_size", "reshard_size"), st.none() | st.integers(1, 8))}
drawable |= {"backward_prefetch_point": st.sampled_from(vocabulary.PREFETCH_POINTS), "compile": st.booleans()}
strategies = st.builds(Strategy, **drawable)
workloads = st.builds(Workload, optimizer=st.sampled_from(OPTIMIZERS), accumulate=st.integers(1, 4),
                      clip_norm=st.none() | st.just(1.0),
                      optimizer_args=st.fixed_dictionaries({}, optional={"fused": st.booleans()}))  # fmt: skip


def drawn(workload: Workload, strategy: Strategy, world_size: int) -> Spec | SpecError:
    try:
        return Spec(workload=workload, strategy=strategy, world_size=world_size)
    except SpecError as e:
        return e


@given(workloads, strategies, st.integers(1, 8))
def test_whatever_is_refused_says_field_and_way_out_and_the_way_out_helps(w: Workload, s: Strategy, n: int) -> None:
    """Following the fixes, one after the other, ends at a Spec that is accepted."""
    flat: dict[str, Any] = {"workload": w, "strategy": s, "world_size": n}
    for _ in range(len(Strategy.__dataclass_fields__) + 3):  # no fix undoes another
        made = drawn(flat["workload"], flat["strategy"], flat["world_size"])
        if isinstance(made, Spec):
            return
        assert made.field and made.reason and made.hint
        assert made.fix, f"no way out as a value: {made}"
        names, fix = set(Strategy.__dataclass_fields__), dict(made.fix)
        flat["world_size"] = fix.pop("world_size", flat["world_size"])
        if "optimizer_args" in fix:
            flat["workload"] = dataclasses.replace(flat["workload"], optimizer_args=fix.pop("optimizer_args"))
        assert set(fix) <= names
        flat["strategy"] = Strategy(**{**{k: getattr(flat["strategy"], k) for k in names}, **fix})
    raise AssertionError(f"still refused: {made}")


@pytest.mark.parametrize(("ranks", "enough"), [(1, 4), (2, 4), (3, 4), (5, 6), (7, 8)])
def test_hybrid_sharding_on_too_few_ranks_names_enough(ranks: int, enough: int) -> None:
    refused = Spec(world_size=ranks, devices=["cpu"] * ranks).validate(sharding="hybrid_shard")
    assert refused is not None and refused.fix == {"world_size": enough} and f"use {enough} ranks" in refused.hint
    factors = [(Spec(world_size=n).replace(sharding="hybrid_shard", shard_size=size)).shard_factor
               for n, size in ((6, None), (6, 2), (4, None))]  # fmt: skip
    assert factors == [3, 2, 2] and Spec(world_size=6).shard_factor == 6
    again = Spec(world_size=ranks, devices=["cpu"] * ranks).validate(sharding="hybrid_shard", **refused.fix)
    assert again is not None and again.fix == {"devices": ["cpu"] * enough}, "CPUs that were named stay CPUs"


@pytest.mark.parametrize(("changes", "said"), [
    ({"backend": "horovod"}, "strategy.backend"), ({"backend": "ddp"}, "strategy.sharding"),
    ({"backend": "fsdp2", "sharding": "zero1"}, "strategy.sharding"), ({"sharding": "hybrid_shard"}, "strategy.sharding"),
    ({"sharding": "hybrid_shard", "world_size": 4, "shard_size": 3}, "strategy.shard_size"),
    ({"shard_size": 1}, "strategy.shard_size"), ({"precision": "int8"}, "strategy.precision"),
    ({"reshard_size": 2}, "strategy.reshard_size"), ({"reshard_size": 3, "world_size": 4}, "strategy.reshard_size"),
    ({"reshard_size": 2, "world_size": 4, "backend": "fsdp1"}, "strategy.reshard_size"),
    ({"backend": "fsdp1", "precision": Precision(norm="fp32", param="bf16")}, "strategy.precision.norm"),
    ({"precision": {"norm": "fp8"}}, "strategy.precision"),
    ({"backend": "fsdp1", "precision": Precision(keep_low_precision_gradients=True)},
     "strategy.precision.keep_low_precision_gradients"),
    ({"backend": "fsdp2", "offload": "optimizer"}, "strategy.offload"), ({"offload": "disk"}, "strategy.offload"),
    ({"wrap": "every:0"}, "strategy.wrap"), ({"backend": "fsdp1", "wrap": "every:2"}, "strategy.wrap"),
    ({"forward_prefetch": -1}, "strategy.forward_prefetch"),
    ({"backend": "fsdp2", "backward_prefetch": 0}, "strategy.backward_prefetch"),
    ({"backward_prefetch_point": "during"}, "strategy.backward_prefetch_point"),
    ({"backend": "fsdp2", "backward_prefetch_point": "after"}, "strategy.backward_prefetch_point"),
    ({"backend": "fsdp2", "limit_all_gathers": 3}, "strategy.limit_all_gathers"),
    ({"limit_reductions": 0}, "strategy.limit_reductions"),
    ({"backend": "fsdp1", "limit_reductions": 2}, "strategy.limit_reductions"),
    ({"recompute": "some"}, "strategy.recompute"), ({"sync": "never"}, "strategy.sync"), ({"sync": 0}, "strategy.sync"),
    ({"sync": True}, "strategy.sync"),
    ({"sync": 2, "accumulate": 4, "backend": "fsdp1", "offload": "all"}, "strategy.sync"),
    ({"sync": "last", "accumulate": 2, "backend": "fsdp1", "world_size": 1, "precision": "fp16"}, "strategy.sync"),
    ({"compile": 1}, "strategy.compile"), ({"lr": float("nan")}, "workload.lr"),
    ({"micro_batch": 0}, "workload.micro_batch"), ({"clip_norm": 0}, "workload.clip_norm"),
    *(({"optimizer": name}, "workload.optimizer") for name in ("", "torch.optim.Lion", "a b", 3, None)),
    *(({"optimizer": "RMSprop", "optimizer_args": args}, "workload.optimizer_args")
      for args in ({"x": None}, {"x": {}}, {"x": float("nan")}, {"capturable": True}, {"lr": 1}, {"a b": 1})),
    *(({"freeze": patterns}, "workload.freeze") for patterns in ("transformer.wte.*", [], [""], [3], {}, 1)),
    ({"optimizer": "Rprop", "backend": "fsdp2"}, "workload.optimizer"), ({"weights": ""}, "workload.weights"),
    ({"fresh_weights": "cls.*"}, "workload.fresh_weights"), ({"optimizer_args": None}, "workload.optimizer_args"),
    ({"model": "a:b"}, "workload.loss"), ({"model": "a:b", "loss": "a:c"}, "workload.data"),
    ({"model": "a:b", "loss": "a:c", "data": "a:d", "seq_len": 64}, "workload.seq_len"),
    ({"model": "a:b", "loss": "a folder", "data": "a:d"}, "workload.loss"), ({"loss": "a:c"}, "workload.loss"),
    ({"data": "a:d"}, "workload.data"), ({"model": {"code": "b"}}, "workload.model"),
    ({"optimizer_args": [("fused", True)]}, "workload.optimizer_args"),
    ({"backend": "fsdp2", "optimizer": "sgd", "optimizer_args": {"fused": True}}, "workload.optimizer_args"),
    ({"model": ""}, "workload.model"), ({"tokenizer": ""}, "workload.tokenizer"),
    *(({"held_out": share}, "workload.held_out") for share in (-0.01, 0.51, "0.1", True, float("nan"))),
    ({"text_field": 3}, "workload.text_field"), ({"packing": "tight"}, "workload.packing"),
    ({"world_size": 0}, "world_size"), ({"world_size": 1 << 70, "sharding": "hybrid_shard"}, "world_size"),
    ({"devices": ["cpu"]}, "devices"), ({"devices": ["cpu", "cuda:0"]}, "devices"), ({"momentum": 0.9}, "momentum"),
    ({"lr_schedule": "cosine"}, "workload.decay_steps: cosine needs the step at which it ends; give one, such as 1000"),
    ({"lr_schedule": "linear", "warmup_steps": 5, "decay_steps": 5},
     "workload.decay_steps: 5 is not after the 5 steps of the warm-up; give a later step, or fewer warmup_steps"),
    ({"decay_steps": 5}, "workload.decay_steps: a constant rate has no end; leave it out, or use lr_schedule linear or"),
    ({"lr_end": 0.1}, "workload.lr_end: a constant rate has no end"),
    ({"lr_schedule": "step"}, "workload.lr_schedule: 'step' is refused; give one of constant, linear, cosine"),
    ({"lr_end": 1.5}, "workload.lr_end: 1.5 is refused; give a share of lr, from 0 to 1"),
    ({"warmup_steps": -1}, "workload.warmup_steps: -1 is refused"),
], ids=str)  # fmt: skip
def test_each_field_is_refused_by_its_name_and_after_the_way_out_another_one_or_none(changes: Any, said: str) -> None:
    refusal = Spec().validate(**changes)
    assert refusal is not None and refusal.field == said.partition(": ")[0] and str(refusal).startswith(said)
    assert str(refusal) == f"{refusal.field}: {refusal.reason}; {refusal.hint}"
    after = Spec().validate(**{**changes, **refusal.fix})
    assert not refusal.fix or after is None or after.field != refusal.field


def test_every_field_says_what_it_is_takes_and_is_by_default_in_help_repr_and_table() -> None:
    told = " ".join(str(Spec.__doc__).split())
    for name, row in (vocabulary.FIELDS | rows_of(Precision)).items():
        assert row.help and row.line(None).count("; ") >= 1 + (name != "devices"), name
        assert name in Precision.__dataclass_fields__ or f"{name}: {row.sentence}" in told, name
    for part in (Strategy, Workload):
        assert all(f" {name}: " in str(part.__doc__) for name in rows_of(part))
    changed = Spec().replace(
        lora={"r": 8}, micro_batch=2, precision=Precision(param="bf16"), freeze=["*.bias"], link="0.1 GB/s"
    )
    assert repr(Spec()) == "Spec()" and "micro_batch=2" in repr(changed) and "sharding" not in repr(changed)
    assert eval(repr(changed)) == changed
    rows = changed._repr_html_().split("<tr>")
    assert {row.split(">", 2)[1].split("<")[0] for row in rows if "bold" in row} == set(changed.difference(Spec()))
    assert len(rows) == 1 + len(vocabulary.FIELDS)


@pytest.mark.parametrize(("text", "said"), [
    ("{", "spec: is not JSON (line 1"),
    ("[]", "spec: is not a JSON object"), ('{"workloads": {}}', "workloads: there is no such field"),
    ('{"workload": {"modle": "x"}}', "workload.modle: there is no such field"),
    ('{"strategy": {"precision": {"param": "fp8"}}}', "strategy.precision.param: 'fp8' is refused"),
    ('{"strategy": 3}', "strategy: 3 is refused"),
])  # fmt: skip
def test_json_that_is_wrong_is_refused_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said.replace("(", r"\(").replace("[", r"\[")):
        Spec.from_json(text)


def test_replace_routes_flat_names_and_changes_nothing_else() -> None:
    before = Spec()
    after = before.replace(backend="ddp", sharding="no_shard", micro_batch=8, world_size=3, devices=["cpu"] * 3)
    of_strategy = {"backend": ("ddp", "lab"), "sharding": ("no_shard", "full_shard")}
    others = {"micro_batch": (8, 4), "world_size": (3, 2), "devices": (["cpu"] * 3, None)}
    assert after.difference(before) == of_strategy | others and before == Spec() and after.global_batch == 24


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_names_of_trainer_and_peft_are_taken_and_ours_are_said_once(dtype: str, caplog: Any) -> None:
    theirs = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 1e-3,
              "bf16": dtype == "bf16", "fp16": dtype == "fp16", "gradient_checkpointing": True, "max_grad_norm": 0,
              "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5, "optim": "adamw_torch", "max_seq_length": 64,
              "model_name_or_path": "gpt2-1m",
              "lora": {"r": 4, "lora_alpha": 16, "target_modules": ["c_attn"], "lora_dropout": 0.0}}  # fmt: skip
    ours = {"micro_batch": 8, "accumulate": 2, "lr": 1e-3, "precision": dtype, "recompute": "full", "clip_norm": None,
            "lr_schedule": "constant", "warmup_steps": 5, "optimizer": "adamw", "model": "gpt2-1m", "seq_len": 64,
            "lora": {"r": 4, "alpha": 16, "targets": ["c_attn"]}}  # fmt: skip
    assert Spec().replace(**theirs) == Spec().replace(**theirs) == Spec().replace(**ours, link="off")
    assert caplog.messages.count("per_device_train_batch_size is micro_batch here") <= 1
    assert value_lists({"bf16": [True, False], "lr": 1.0}) == {"precision": ["bf16", "fp32"], "lr": [1.0]}
    assert set(ALIASES.values()) <= set(vocabulary.FIELDS) and not set(ALIASES) & set(vocabulary.FIELDS)
    for wrong, said in (({"num_train_epochs": 3}, "give lab.run(steps="),
                        ({"lr": 1.0, "learning_rate": 1.0}, "means it too"),
                        ({"bf16": True, "fp16": True}, "fp16 means it too"),
                        ({"optimiser": "sgd"}, "did you mean optimizer"),
                        ({"lora": {"r": 4, "lora_dropout": 0.1}}, "leave lora_dropout out")):  # fmt: skip
        assert said in str(Spec().validate(**wrong))


@pytest.mark.parametrize(("sync", "accumulate", "communicating"), [
    ("every", 3, [0, 1, 2]), (1, 3, [0, 1, 2]), ("last", 3, [2]), (3, 3, [2]), (7, 3, [2]), (2, 4, [1, 3]),
    (2, 5, [1, 3, 4]), (3, 8, [2, 5, 7]), ("last", 1, [0]),
])  # fmt: skip
def test_the_micro_batches_that_communicate(sync: str | int, accumulate: int, communicating: list[int]) -> None:
    spec = Spec().replace(sync=sync, accumulate=accumulate)
    assert [micro for micro in range(accumulate) if spec.communicates(micro)] == communicating
    assert spec.communications == len(communicating)
    skips = len(communicating) < accumulate
    assert (spec.validate(backend="fsdp1", offload="all") is not None) is skips


@pytest.mark.parametrize(("optimizer", "args", "said", "fix"), [
    ("adamw", {"fuse": True}, "AdamW has no argument 'fuse'; its arguments are betas, eps, amsgrad, foreach, fused", {}),
    ("sgd", {"betas": (0.8, 0.9), "momentum": 0.5}, "SGD has no argument 'betas'; its", {"momentum": 0.5}),
    ("adamw", {"lr": 0.1}, "lr is a field of its own; set lr", {}),
    ("adamw", {"params": []}, "params are the model's; leave it out", {}),
    ("adamw", {"capturable": True, "eps": 0.5}, "capturable is for CUDA graphs", {"eps": 0.5}),
    ("adamw", {"fused": "yes"}, "fused='yes' is refused; give true or false", {}),
    ("adamw", {"eps": -1e-8}, "eps=-1e-08 is refused; give a finite number of 0 or more", {}),
    ("adamw", {"betas": (0.9, 1.0)}, "betas=(0.9, 1.0) is refused; give two numbers from 0 to below 1", {}),
    ("adamw", {"betas": 0.9}, "betas=0.9 is refused; give two numbers", {}),
    ("adamw", {"fused": True, "foreach": True}, "an update is fused, or it is foreach; give one", {"fused": True}),
    ("sgd", {"nesterov": True}, "nesterov needs a momentum above 0 and no dampening; give momentum=0.9", {}),
    ("sgd", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov needs", {"momentum": 0.9, "dampening": 0.1}),
], ids=str)  # fmt: skip
def test_arguments_of_an_optimizer_are_refused_in_a_sentence(optimizer: str, args: Any, said: str, fix: Any) -> None:
    refusal = Spec().validate(optimizer=optimizer, optimizer_args=args)
    assert refusal is not None and str(refusal).startswith(f"workload.optimizer_args: {said}")
    assert refusal.fix == {"optimizer_args": fix} and Spec().validate(optimizer=optimizer, **refusal.fix) is None


def test_arguments_have_one_spelling_so_that_equal_optimizers_have_equal_ids() -> None:
    betas = {"betas": [0.9, 0.95], "eps": 1e-8, "fused": False}
    spec = Spec().replace(optimizer_args=betas)
    assert spec == Spec().replace(optimizer_args={"betas": (0.9, 0.95)}) and spec.id != Spec().id
    assert spec.flat()["optimizer_args"] == {"betas": [0.9, 0.95]}
    assert Spec.from_json(spec.to_json()) == pickle.loads(pickle.dumps(spec)) == spec
    assert hash(spec) == hash(Spec.from_json(spec.to_json()))
    assert Spec().replace(optimizer_args={"foreach": True, "betas": (0.9, 0.999)}) == Spec()
    assert Spec().to_dict()["workload"]["optimizer_args"] == {}
    spelled = Spec().replace(optimizer="AdamW", freeze=["a.*", "b", "a.*"])
    assert spelled == Spec().replace(freeze=["a.*", "b"]) == Spec.from_json(spelled.to_json()) != Spec()
    nested = Spec().replace(optimizer="RMSprop", optimizer_args={"x": [1, [2]]})
    assert nested == Spec.from_json(nested.to_json()) and hash(nested)
    betas["fused"] = True
    assert spec.workload.optimizer_args == {"betas": (0.9, 0.95)}, "a copy"


def test_arguments_of_another_optimizer_are_refused_with_it_and_the_way_out_is_to_leave_them_out() -> None:
    spec = Spec().replace(optimizer_args={"fused": True, "eps": 1e-6, "amsgrad": True})
    refusal = spec.validate(optimizer="sgd")
    assert refusal is not None and refusal.fix == {"optimizer_args": {"fused": True}}
    assert spec.replace(optimizer="sgd", **refusal.fix).workload.torch_optimizer.is_fused


def test_the_default_gathers_one_ahead_under_lab_and_a_number_is_for_backends_that_have_it() -> None:
    for backend in vocabulary.BACKENDS:
        sharding = "no_shard" if backend == "ddp" else "full_shard"
        own = Spec().replace(backend=backend, sharding=sharding).strategy
        assert own.forward_depth == own.schedule_rules.forward_prefetch == (1 if backend == "lab" else 0)
        given = Strategy(backend=backend, sharding=sharding, forward_prefetch=0)
        assert given.forward_depth == given.schedule_rules.forward_prefetch == 0
    lab = Spec()  # its default can be changed to any backend's
    for backend, sharding, refused in (("fsdp2", "full_shard", ()), ("fsdp1", "full_shard", (2, 3)),
                                       ("ddp", "no_shard", (1, 2, 3))):  # fmt: skip
        other = lab.replace(backend=backend, sharding=sharding)
        assert other.replace(backend="lab", sharding="full_shard") == lab
        assert [n for n in (None, 0, 1, 2, 3) if other.validate(forward_prefetch=n) is not None] == [*refused]


@pytest.mark.parametrize(("field", "word", "value"), [
    ("lr", ".0003", 0.0003), ("lr", "+1e-3", 0.001), ("lr", "1,000", 1000.0), ("lr", "3,5", "3,5"), ("lr", "x", "x"),
    ("clip_norm", "off", None), ("seq_len", "1,024", 1024), ("seq_len", "1,5", "1,5"), ("devices", ",", None),
    ("devices", "cpu, cpu", ["cpu", "cpu"]), ("compile", "true", True), ("sharding", "zero1", "zero1"),
])  # fmt: skip
def test_a_word_is_read_as_people_write_numbers_and_lists(field: str, word: str, value: Any) -> None:
    """A word that means nothing stays as it is, and the field refuses it."""
    read = vocabulary.FIELDS[field].read(word)
    assert read == value and type(read) is type(value)


# -- the learning rate over steps --------------------------------------------------------------------------------------
def factors(steps: int, **given: Any) -> list[float]:
    return [LrSchedule(**given).factor(step) for step in range(steps)]


def test_a_rate_is_constant_or_begins_in_full_and_stays_at_its_end() -> None:
    assert factors(3) == [1.0, 1.0, 1.0] and factors(5, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors(8, kind="linear", warmup_steps=2, decay_steps=6) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert factors(4, kind="linear", decay_steps=2, end=0.5) == [1.0, 0.75, 0.5, 0.5]
    cosine = factors(7, kind="cosine", warmup_steps=2, decay_steps=6, end=0.1)
    assert cosine == pytest.approx([0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802, 0.1], abs=1e-6) and cosine[-1] == 0.1


def test_a_spec_without_a_schedule_keeps_its_id() -> None:
    before = Spec().to_dict()
    for name in ("lr_schedule", "warmup_steps", "decay_steps", "lr_end"):
        del before["workload"][name]
    assert Spec.from_dict(before) == Spec() and Spec.from_dict(before).id == Spec().id
    assert Spec().replace(warmup_steps=3).id != Spec().id


# -- a Spec as text ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "value", "text"), [
    ("offload", "all", "offload all"), ("sync", 2, "sync every 2"), ("compile", True, "compile"),
    ("compile", False, "no compile"), ("link", None, "real link"), ("forward_prefetch", None, "forward prefetch auto"),
    ("forward_prefetch", 0, "forward prefetch 0"), ("precision", {"param": "bf16", "reduce": "fp32"}, "bf16/fp32"),
    ("model", {"code": "build", "source": "", "digest": "0", "missing": []}, "build"),
    ("loss", "package.module:loss", "loss package.module:loss"),
    ("optimizer_args", {"fused": True, "betas": [0.9, 0.95]}, "fused betas=[0.9, 0.95]"),
    ("devices", ["cuda:0", "cuda:1"], "devices cuda:0, cuda:1"),
])  # fmt: skip
def test_a_field_as_text(name: str, value: object, text: str):
    assert describe_field(name, value) == text


def test_fields_that_are_off_are_left_out_unless_all_are_changes_as_text_and_a_dict_that_is_no_spec():
    flat = Spec().replace(offload="all").flat()
    assert describe_fields(flat, ("compile", "offload", "clip_norm")) == "offload all"
    assert describe_fields(flat, ("compile", "clip_norm")) == "no compile no clip norm"
    told = describe_fields({**flat, "forward_prefetch": 0}, ("offload", "forward_prefetch"))
    assert told == "offload all forward prefetch 0"
    before = Spec(link="0.25 GB/s")
    after = before.replace(sharding="shard_grad_op", compile=True, link=None, precision=Precision(param="bf16"))
    said = "sharding full_shard → shard_grad_op, precision fp32 → bf16/fp32, compile off → on, link 0.25 GB/s → off"
    assert describe_changes(before.difference(after)) == said
    flat = flat_fields({"strategy": {"backend": "ddp", "sharding": "full_shard"}, "world_size": 3})
    assert flat == Spec().flat() | {"backend": "ddp", "world_size": 3}
    assert differing_fields([flat, Spec().flat()]) == ("backend", "world_size")


# -- an emulated link --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "spelt", "bytes_per_s", "latency_s"), [
    ("0.25 GB/s", "0.25 GB/s", 0.25e9, 0.0), ("  250MB/s ", "250 MB/s", 0.25e9, 0.0),
    ("0.25GB/s,50us", "0.25 GB/s, 50 us", 0.25e9, 50e-6), ("0.25 GB/s, 0.05 µs", "0.25 GB/s, 0.05 us", 0.25e9, 0.05e-6),
    ("NVLink of A100", "nvlink of a100", 300e9, 0.0), ("pcie4 of t4, 1 ms", "pcie4 of t4, 1 ms", 31.5e9, 1e-3),
])  # fmt: skip
def test_a_link_as_it_is_asked_for(text: str, spelt: str, bytes_per_s: float, latency_s: float) -> None:
    asked = LinkSpec.parse(text)
    assert asked.text == spelt and LinkSpec.parse(spelt) == asked
    assert asked.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3) and asked.latency_s == pytest.approx(latency_s)
    assert Spec(link=text) == Spec(link=spelt) == Spec.from_json(Spec(link=text).to_json())
    assert Spec(link=text).id == Spec(link=spelt).id != Spec().id
    assert Spec(link=text).replace(lr=0.1).difference(Spec().replace(lr=0.1)) == {"link": (spelt, None)}


NO_LINKS: dict[str, tuple[Any, ...]] = {
    "is refused": ("0 GB/s", "nan GB/s", "1e308 TB/s", "1 GB/s, -1 us"),
    "is no link": ("", 0.25, "0.25", "fast", "1 GB/s, 5"), "'GiB' is no unit": ("1 GiB",),
    "use one of gb200": ("1 GB/s of rtx",), "nvlink of h100": ("nvlink",), "has no NVLink": ("nvlink of t4",),
}  # fmt: skip


@pytest.mark.parametrize(("says", "text"), [(says, text) for says, texts in NO_LINKS.items() for text in texts])
def test_what_is_no_link_is_refused(says: str, text: Any) -> None:
    with pytest.raises(SpecError, match=says) as e:
        Spec(link=text)
    assert e.value.field == "link" and Spec().replace(**e.value.fix) == Spec()


def test_scaled_to_the_same_dtype_where_the_gpu_has_it() -> None:
    h100, t4 = LinkSpec.parse("100 Gb/s of h100"), LinkSpec.parse("pcie4 of t4")
    assert h100.scale(66.9e9, "fp32") == pytest.approx(1e-3) and h100.scale(989.4e9, "bf16") == pytest.approx(1e-3)
    assert t4.reference("bf16") == (65e12, "fp16")  # it has no bf16
    assert LinkSpec.parse("0.1 GB/s").scale(None, "fp32") == 1.0
    for unknown in (None, 0.0, math.nan):
        with pytest.raises(LinkError, match="not known"):
            h100.scale(unknown, "fp32")


def test_links_are_offered_listed_and_written_for_people() -> None:
    for text in OFFERED:
        assert LinkSpec.parse(text).text == text
    assert split_list("none,0.25 GB/s, 50 us,nvlink of h100") == ["none", "0.25 GB/s, 50 us", "nvlink of h100"]
    assert [format_rate(r) for r in (0.25e9, 31.94e6, 4.5e3)] == ["0.25 GB/s", "31.9 MB/s", "4.5 kB/s"]
    assert [format_latency(t) for t in (50e-6, 2e-3, 1.5)] == ["50 µs", "2 ms", "1.5 s"]
