"""Low-rank adapters: equal bits under every backend, memory as computed, and a folder that peft opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_lab.base.errors import SpecError
from fsdp_lab.export import export_model
from fsdp_lab.models.build import Initializer, build_skeleton
from fsdp_lab.models.check import check
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.lora import adapted
from fsdp_lab.planner.questions import planned_memory
from fsdp_lab.spec.spec import Spec
from tests.export.test_pretrained import continued, written
from tests.pool import Pool
from tests.rank.test_session import DDP, SMALL, apply, play, spec, train

LORA = {"r": 4, "targets": ["c_attn", "c_proj", "wte"]}  # wte is tied to the head
BACKENDS: tuple[dict[str, Any], ...] = (
    {"sharding": "shard_grad_op", "recompute": "full", "offload": "optimizer"}, {"backend": "fsdp2"}, {"backend": "fsdp1"},
    DDP,
)  # fmt: skip
STEPS = 4


@pytest.fixture(scope="module")
def of_ranks(pool: Pool) -> list[list[list[dict[str, Any]]]]:
    """By rank the events of each backend with adapters, of a switch through all of them, and last of the model alone."""
    calls = [
        c for kind in BACKENDS for c in (apply(spec(**kind, lora=LORA), fresh=True), train(STEPS, checks=range(STEPS)))
    ]
    for i, kind in enumerate(BACKENDS):
        calls += [apply(spec(**kind, lora=LORA), fresh=i == 0), train(1, checks=[i])]
    by_rank = play(pool, 2, *calls, apply(spec(), fresh=True), train(2, checks=range(2)), reduction="rank_ordered")
    found = [[a["events"] for a in answers[1::2]] for answers in by_rank]
    n = len(BACKENDS)
    return [[*told[:n], [e for one in told[n:-1] for e in one], told[-1]] for told in found]


def _told(of_ranks: list[list[dict[str, Any]]]) -> list[Any]:
    """What each step came to."""
    return [(es[0]["mean_loss"], es[0]["grad_norm"], sum(e["checksum"] for e in es if not e["replica"]) % (1 << 64))
            for es in zip(*of_ranks, strict=True)]  # fmt: skip


@pytest.mark.slow
def test_all_backends_and_a_live_switch_train_the_same_adapters_and_begin_with_the_loss_of_the_model_alone(
    of_ranks: list[list[list[dict[str, Any]]]],
) -> None:
    *adapters, plain = [_told(list(one)) for one in zip(*of_ranks, strict=True)]
    assert adapters == adapters[:1] * (len(BACKENDS) + 1)
    assert adapters[0][0][0] == plain[0][0] and adapters[0][1][0] != plain[1][0]
    assert adapters[0][-1][0] < adapters[0][0][0], "they learn"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [2, 3], ids=["fsdp1", "ddp"])
def test_memory_is_that_of_theory_and_of_the_plan(of_ranks: list[list[list[dict[str, Any]]]], kind: int) -> None:
    given, told = spec(**BACKENDS[kind], lora=LORA), [events[kind] for events in of_ranks]
    model = adapted(resolve(SMALL), given.workload.adapters)
    whole = 4 * sum(p.numel() for p in model.parameters())
    trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    copies = 2 if BACKENDS[kind] is DDP else 1
    for name, theory in (("parameters", whole), ("gradients", trained), ("optimizer", 2 * trained)):
        of_all = sum(events[-1]["memory"][f"{name}_bytes"] for events in told)  # FSDP1 shares them unevenly
        assert of_all == pytest.approx(copies * theory, rel=0.05), name
    planned = planned_memory(given, device="cpu").at_peak
    assert planned.total_bytes == pytest.approx(max(e[-1]["memory"]["peak_bytes"] for e in told), rel=0.05)


@pytest.mark.slow
def test_peft_opens_what_is_exported_and_writes_the_same(pool: Pool, tmp_path: Path) -> None:
    base = build_skeleton(resolve(SMALL))
    drawn = Initializer(base, 3)
    base.save_pretrained(tmp_path / "base", state_dict={n: drawn(n) for n, _ in base.named_parameters()})
    (tmp_path / "saved").mkdir()
    given = spec(model=str(tmp_path / "base"), lora=LORA, lr=0.05)
    prompts = ["def f(", "import"]
    one, other = pool.run(written, 2, given.to_dict(), str(tmp_path / "saved"), prompts, 12, reduction=None)
    folder = export_model(tmp_path / "saved", tmp_path / "adapters")
    files = {p.name for p in folder.iterdir()}
    assert files >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json"}
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
    assert continued(model, tokenizer, prompts, 12) == {**one, **other}


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
