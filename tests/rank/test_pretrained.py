"""Trained weights on the ranks: the values of a folder, whatever the backend and the number of ranks, and what they cost.
Low-rank adapters: equal bits under every backend, memory as computed, and a folder that peft opens."""

import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors import safe_open
from transformers import AutoModelForMaskedLM, AutoTokenizer

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.events import StepEvent
from fsdp_lab.export import export_model
from fsdp_lab.models.batches import Batches
from fsdp_lab.models.build import Initializer, build_skeleton
from fsdp_lab.models.check import check
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.lora import adapted
from fsdp_lab.planner.memory import loading_bytes
from fsdp_lab.planner.questions import planned_memory
from fsdp_lab.planner.shapes import shape_for
from fsdp_lab.rank import lifecycle
from fsdp_lab.rank.measure import HostPeak
from fsdp_lab.spec.spec import Spec
from tests.export.test_pretrained import continued, written
from tests.models.small import filled
from tests.pool import Place, Pool
from tests.pretrained import MINILM_FRESH
from tests.rank.test_labels import BERT
from tests.rank.test_same_bits import summed
from tests.rank.test_session import BACKENDS, DDP, SMALL, apply, play, running, session, spec, train, trainer_of


def minilm_spec(folder: Path, ranks: int = 2, **changes: Any) -> Spec:
    spec = Spec(world_size=ranks).replace(model=str(folder), fresh_weights=MINILM_FRESH, seq_len=32, micro_batch=2)
    return spec.replace(lr=1e-3, weight_decay=0.0, **changes)


def _shards(place: Place, given: dict[str, Any]) -> dict[str, tuple[int, Any]]:
    """This rank's ranges of all parameters."""
    with running(place, given) as s:
        shards = trainer_of(s).backend.param_shards()
        return {p.name: (p.start, p.local.clone().numpy()) for p in shards if p.numel}


@pytest.mark.slow
def test_a_trained_bert_begins_with_the_loss_of_transformers_alone(pool: Pool, minilm: Path) -> None:
    """Which loads the folder; what that lacks is drawn as in the lab."""
    model, info = AutoModelForMaskedLM.from_pretrained(
        minilm, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    initial, parameters = Initializer(build_skeleton(resolve(str(minilm))), 0), dict(model.named_parameters())
    given = minilm_spec(minilm)
    batches = [Batches(given.workload, resolve(str(minilm)), rank=rank, world_size=2) for rank in range(2)]
    with torch.no_grad():
        for name in info["missing_keys"] & parameters.keys():
            parameters[name].copy_(initial(name))
        alone = sum(float(model.eval()(**b.batch(0))["loss"]) for b in batches) / 2
    (_, told), _ = play(pool, 2, apply(given), train(1))
    assert told["events"][0]["mean_loss"] == pytest.approx(alone, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "backend"), [(3, "lab"), (2, "fsdp1"), (2, "ddp")])
def test_every_rank_has_the_bits_of_the_file(pool: Pool, tmp_path: Path, ranks: int, backend: str) -> None:
    """The file is read by the library of safetensors. All parameters are there, none with a gap."""
    model: Any = filled(BERT, 3)
    model.bert.save_pretrained(tmp_path)
    with safe_open(next(tmp_path.glob("*.safetensors")), framework="pt") as file:
        held = {f"bert.{name}": file.get_tensor(name).reshape(-1) for name in file.keys()}  # noqa: SIM118
    skeleton = build_skeleton(resolve(str(tmp_path)))
    fresh, found = Initializer(skeleton, 0), dict.fromkeys((n for n, _ in skeleton.named_parameters()), 0)
    spec = minilm_spec(tmp_path, ranks, **BACKENDS[backend]).replace(fresh_weights=["cls.*"])
    for shards in pool.run(_shards, ranks, spec.to_dict(), reduction=None):
        for name, (start, values) in shards.items():
            whole = held[name] if name in held else fresh(name).reshape(-1)
            assert torch.equal(whole[start : start + len(values)], torch.from_numpy(values)), name
            found[name] += len(values)
    copies = ranks if backend == "ddp" else 1
    assert len(held) > 10 and found == {name: copies * p.numel() for name, p in skeleton.named_parameters()}


def _life(place: Place, given: dict[str, Any], misfit: dict[str, Any], other: dict[str, Any], root: str) -> list[Any]:
    """A refusal between two steps, a switch, a checkpoint; that resumed without the folder; and one as another's weights."""
    s = session(place)
    first = s.apply("run", given)
    s.train(2)
    with pytest.raises(SpecError) as refused:
        s.apply("run", misfit)
    switched = s.apply("run", {**given, "strategy": {**given["strategy"], "backend": "fsdp2"}})
    s.save(root)
    s.saves(30.0)
    s.world.barrier().wait()
    held = _values(s)
    (path,) = (str(p) for p in Path(root).iterdir() if p.is_dir())
    if place.rank == 0:
        shutil.rmtree(given["workload"]["model"] + "/weights")
    s.world.barrier().wait()
    s.unload()
    with pytest.raises(SpecError, match="there is no folder"):
        s.apply("run", given, fresh=True)
    s.restore("run", given, path)
    resumed = _values(s)
    begun = s.apply("run", {**other, "workload": {**other["workload"], "weights": path}})
    answers = [(answer["carried"], answer["step"]) for answer in (first, switched, begun)]
    taken = _values(s)
    s.close()
    same = resumed.keys() == taken.keys() and all(torch.equal(resumed[n], taken[n]) for n in resumed)
    return [answers, str(refused.value), bool(held) and same]


def _values(s: Any) -> dict[str, torch.Tensor]:
    return {p.name: p.local.clone() for p in trainer_of(s).backend.param_shards() if p.numel}


@pytest.mark.slow
def test_a_misfit_is_refused_by_all_ranks_and_a_checkpoint_needs_no_folder_and_is_one(pool: Pool, tmp_path: Path):
    folder = tmp_path / "model"
    filled("gpt2-1m", 3).save_pretrained(folder / "weights")  # type: ignore[operator]
    shutil.copy(folder / "weights" / "config.json", folder)
    given = Spec(world_size=2).replace(model=str(folder), weights=str(folder / "weights"), seq_len=32, micro_batch=2)
    misfit = given.replace(model="gpt2-10m")
    (tmp_path / "saved").mkdir()
    dicts = [given.to_dict(), misfit.to_dict(), given.replace(weights=None).to_dict()]
    for answers, said, same in pool.run(_life, 2, *dicts, str(tmp_path / "saved"), reduction=None):
        assert answers == [(False, 0), (True, 2), (False, 0)] and "of another shape" in said, "the training went on"
        assert same


# -- memory ------------------------------------------------------------------------------------------------------------
class KernelPeak(HostPeak):
    """Begins the kernel's own peak of resident memory anew, where the rank begins to look."""

    began: list[int] = []  # noqa: RUF012

    def restart(self) -> None:
        super().restart()
        Path("/proc/self/clear_refs").write_text("5")
        self.began.append(_resident("VmRSS"))


def _loaded(place: Place, given: dict[str, Any]) -> tuple[int, int, int, int]:
    """(the kernel's peak of resident memory beyond that before, what the rank says of it, bytes of shards, of buckets)."""
    with closing(session(place)) as s:
        s.apply("run", Spec.from_dict(given).replace(model={**DEEP, "n_layer": 1}).to_dict())  # what a process has once
        with mock.patch.object(lifecycle, "HostPeak", KernelPeak):
            s.apply("run", given)
        peak = _resident("VmHWM") - KernelPeak.began.pop()
        own = sum(p.local.nbytes for p in trainer_of(s).backend.param_shards())
        event = StepEvent.from_dict(s.train(1)["events"][0])
        return peak, event.memory.loading_bytes, own, trainer_of(s).backend.resident_bytes()


def _resident(line: str) -> int:
    (found,) = re.findall(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) * 1024


LAYERS, UNIT_BYTES = 8, 4 * 12 * 512 * 512  # of a block
DEEP = {"model_type": "gpt2", "n_layer": LAYERS, "n_embd": 512, "n_head": 8, "vocab_size": 384, "n_positions": 32,
        "bos_token_id": None, "eos_token_id": None}  # fmt: skip


@pytest.mark.parametrize(
    "backend", [pytest.param("lab", marks=pytest.mark.slow), pytest.param("fsdp1", marks=pytest.mark.nightly)]
)
def test_loading_takes_the_memory_of_shards_and_about_one_unit(pool: Pool, tmp_path: Path, backend: str) -> None:
    """Resident memory while a rank loads, beside what the planner says."""
    model = filled(DEEP)
    model.save_pretrained(tmp_path, max_shard_size="40MB")  # type: ignore[operator]
    whole = sum(p.nbytes for p in model.parameters())
    spec = Spec(world_size=2).replace(model=str(tmp_path), seq_len=16, micro_batch=1, **BACKENDS[backend])
    planned = loading_bytes(spec, shape_for(DEEP), device="cpu")
    pool.renew()
    for peak, said, own, buckets in pool.run(_loaded, 2, spec.to_dict(), reduction=None):
        assert own <= planned < own + UNIT_BYTES + buckets and own == pytest.approx(whole / 2, rel=0.01)
        assert 0.9 * own < peak < own + 1.5 * UNIT_BYTES, (peak, own)
        assert 0.9 * own < said <= peak + (1 << 20), (said, peak)


# -- adapters --------------------------------------------------------------------------------------------------------
LORA = {"r": 4, "targets": ["c_attn", "c_proj", "wte"]}  # wte is tied to the head
ADAPTED: tuple[dict[str, Any], ...] = (
    {"sharding": "shard_grad_op", "recompute": "full", "offload": "optimizer"}, {"backend": "fsdp2"}, {"backend": "fsdp1"},
    DDP,
)  # fmt: skip
STEPS = 4


@pytest.mark.slow
def test_all_backends_and_a_live_switch_train_the_same_adapters_in_the_memory_of_theory_and_of_the_plan(pool: Pool):
    """They begin with the loss of the model alone."""
    steps = train(STEPS, checks=range(STEPS))
    calls = [c for kind in ADAPTED for c in (apply(spec(**kind, lora=LORA), fresh=True), steps)]
    for i, kind in enumerate(ADAPTED):
        calls += [apply(spec(**kind, lora=LORA), fresh=i == 0), train(1, checks=[i])]
    by_rank = play(pool, 2, *calls, apply(spec(), fresh=True), train(2, checks=range(2)), reduction="rank_ordered")
    found = [[a["events"] for a in answers[1::2]] for answers in by_rank]
    n = len(ADAPTED)
    # by rank the events of each backend with adapters, of a switch through all of them, and last of the model alone
    of_ranks = [[*told[:n], [e for one in told[n:-1] for e in one], told[-1]] for told in found]
    adapters = [summed(list(one)) for one in zip(*of_ranks, strict=True)][:-1]
    assert adapters == adapters[:1] * (len(ADAPTED) + 1)
    with_adapters, alone = ([e["mean_loss"] for e in of_ranks[0][i]] for i in (0, -1))
    assert with_adapters[0] == alone[0] and with_adapters[1] != alone[1]
    assert with_adapters[-1] < with_adapters[0], "they learn"
    for kind in (2, 3):  # fsdp1 and ddp
        given, told = spec(**ADAPTED[kind], lora=LORA), [events[kind] for events in of_ranks]
        model = adapted(resolve(SMALL), given.workload.adapters)
        whole = 4 * sum(p.numel() for p in model.parameters())
        trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
        copies = 2 if ADAPTED[kind] is DDP else 1
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
    model = AutoPeftModelForCausalLM.from_pretrained(folder).eval()
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
    with pytest.raises(
        SpecError, match=r"workload.lora: no adapters can be put .* give targets, some of c_attn, c_fc, c"
    ):
        check(spec(lora={"r": 2, "targets": ["q_proj"]}).workload)
    check(spec(lora={"r": 2}).workload)
