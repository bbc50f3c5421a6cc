"""Low-rank adapters: equal bits under every backend, memory as computed, and a folder that peft opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_lab.base.errors import SpecError
from fsdp_lab.export import export_model
from fsdp_lab.models import build_skeleton, resolve
from fsdp_lab.models.build import Initializer
from fsdp_lab.models.check import check
from fsdp_lab.models.lora import adapted, base_name
from fsdp_lab.planner.questions import planned_memory
from fsdp_lab.spec.spec import Spec
from tests.export.test_pretrained import written
from tests.pool import Place, Pool
from tests.rank.test_session import DDP, SMALL, session, spec

LORA = {"r": 4, "targets": ["c_attn", "c_proj", "wte"]}  # wte is tied to the head
BACKENDS: tuple[dict[str, Any], ...] = (
    {}, {"backend": "fsdp2"}, {"backend": "fsdp1"}, DDP, {"sharding": "zero1", "recompute": "full"},
    {"offload": "optimizer", "sharding": "shard_grad_op"},
)  # fmt: skip
STEPS = 4


def _trained(place: Place, given: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    s = session(place, reduction="rank_ordered")
    found = []
    for one in given:
        s.apply("run", one, fresh=True)
        found.append(s.train(STEPS, checks=range(STEPS))["events"])
    s.close()
    return found


def _told(of_ranks: list[list[dict[str, Any]]]) -> list[Any]:
    """What each step came to."""
    return [(es[0]["mean_loss"], es[0]["grad_norm"], sum(e["checksum"] for e in es if not e["replica"]) % (1 << 64))
            for es in zip(*of_ranks, strict=True)]  # fmt: skip


def test_all_backends_train_the_same_adapters_and_begin_with_the_loss_of_the_model_alone(pool: Pool) -> None:
    specs = [spec(**kind, lora=LORA) for kind in BACKENDS] + [spec()]
    of_ranks = pool.run(_trained, 2, [s.to_dict() for s in specs], reduction=None, timeout_s=200)
    told = [_told(list(one)) for one in zip(*of_ranks, strict=True)]
    *adapters, plain = told
    assert adapters == adapters[:1] * len(BACKENDS)
    assert adapters[0][0][0] == plain[0][0] and adapters[0][1][0] != plain[1][0]
    assert adapters[0][-1][0] < adapters[0][0][0], "they learn"


@pytest.mark.slow
def test_they_are_the_same_on_any_number_of_ranks(pool: Pool) -> None:
    told = []
    for world_size in (1, 2, 4):
        given = [spec(world_size, micro_batch=4 // world_size, lora=LORA).to_dict()]
        of_ranks = pool.run(_trained, world_size, given, reduction=None)
        told.append([loss for loss, _, _ in _told([events[0] for events in of_ranks])])
    for losses in told[1:]:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(told[0]), rtol=1e-5, atol=0)


def _switched(place: Place, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    s = session(place, reduction="rank_ordered")
    events = []
    for one in given:
        s.apply("run", one)
        events += s.train(2, checks=range(len(events), len(events) + 2))["events"]
    s.close()
    return events


def test_a_live_switch_takes_them_along(pool: Pool) -> None:
    kinds: list[dict[str, Any]] = [{}, {"backend": "fsdp2"}, DDP, {"backend": "fsdp1"}]
    switched = pool.run(_switched, 2, [spec(**k, lora=LORA).to_dict() for k in kinds], reduction=None)
    stayed = pool.run(_switched, 2, [spec(lora=LORA).to_dict()] * len(kinds), reduction=None)
    assert _told(switched) == _told(stayed)


@pytest.mark.parametrize("kind", BACKENDS[:4], ids=str)
def test_memory_is_that_of_theory_and_of_the_plan(pool: Pool, kind: dict[str, Any]) -> None:
    given = spec(**kind, lora=LORA)
    of_ranks = pool.run(_trained, 2, [given.to_dict()], reduction=None)
    model = adapted(resolve(SMALL), given.workload.adapters)
    whole = 4 * sum(p.numel() for p in model.parameters())
    trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    copies = 2 if kind is DDP else 1
    for name, theory in (("parameters", whole), ("gradients", trained), ("optimizer", 2 * trained)):
        of_all = sum(events[-1]["memory"][f"{name}_bytes"] for (events,) in of_ranks)  # FSDP1 shares them unevenly
        assert of_all == pytest.approx(copies * theory, rel=0.05), name
    planned = planned_memory(given, device="cpu").at_peak
    measured = max(events[0][-1]["memory"]["peak_bytes"] for events in of_ranks)
    assert planned.total_bytes == pytest.approx(measured, rel=0.05)


def test_peft_opens_what_is_exported_and_writes_the_same(pool: Pool, tmp_path: Path) -> None:
    base = build_skeleton(resolve(SMALL))
    drawn = Initializer(base, 3)
    base.save_pretrained(tmp_path / "base", state_dict={n: drawn(n) for n, _ in base.named_parameters()})
    (tmp_path / "saved").mkdir()
    given = spec(model=str(tmp_path / "base"), lora=LORA, lr=0.05)
    by_rank = pool.run(written, 2, given.to_dict(), str(tmp_path / "saved"), ["def f(", "import"], 12, reduction=None)
    folder = export_model(tmp_path / "saved", tmp_path / "adapters")
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json"} <= {
        p.name for p in folder.iterdir()
    }
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
    for number, prompt in enumerate(["def f(", "import"]):
        asked = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        out = model.generate(**asked, max_new_tokens=12, do_sample=False, pad_token_id=0)[
            0, asked["input_ids"].shape[1] :
        ]
        assert tokenizer.decode(out, skip_special_tokens=True) == {**by_rank[0], **by_rank[1]}[str(number)]


@pytest.mark.parametrize(("given", "said"), [
    ({"r": 0}, "r=0 is refused"), ({"alpha": 3}, "is refused"), ({"r": 2, "alpha": -1}, "alpha=-1 is refused"),
    ({"r": 2, "targets": "c_attn"}, "targets='c_attn' is refused"), ({"r": 2, "targets": []}, "targets=[] is refused"),
    ({"r": 2, "dropout": 0.1}, "is refused"), (8, "give an object such as"),
])  # fmt: skip
def test_what_is_no_adapter_is_refused(given: Any, said: str) -> None:
    refusal = Spec().validate(lora=given)
    assert refusal is not None and refusal.field == "workload.lora" and said in str(refusal)


def test_targets_that_the_model_has_not_are_refused_with_those_it_has() -> None:
    with pytest.raises(SpecError, match=r"workload.lora: no adapters can be put .* give targets, some of .*c_attn"):
        check(spec(lora={"r": 2, "targets": ["q_proj"]}).workload)
    check(spec(lora={"r": 2}).workload)


def test_a_spec_with_adapters_goes_through_json_and_is_another_training() -> None:
    one = spec(lora={"r": 8, "alpha": 16, "targets": ["c_attn"]})
    assert Spec.from_json(one.to_json()) == one and hash(one.workload.lora) == hash(
        Spec.from_json(one.to_json()).workload.lora
    )
    assert one.id != spec().id and spec(lora=None).id == spec().id
    assert base_name("a.base_layer.weight") == "a.weight" and base_name("a.base_layer") == "a"
