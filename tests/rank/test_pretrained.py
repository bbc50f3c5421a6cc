"""Trained weights on the ranks: the values of a folder, whatever the backend and the number of ranks, and what they cost."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.events import StepEvent
from fsdp_lab.models import Batches, Initializer, build_skeleton, resolve
from fsdp_lab.planner.memory import loading_bytes
from fsdp_lab.planner.shapes import shape_for
from fsdp_lab.rank import lifecycle
from fsdp_lab.rank.measure import HostPeak
from fsdp_lab.spec.spec import Spec
from tests.covering import tiered
from tests.models.small import filled
from tests.pool import Place, Pool
from tests.pretrained import MINILM_FRESH
from tests.rank.test_session import BACKENDS, session

MIB = 1 << 20


def minilm_spec(folder: Path, ranks: int = 2, **changes: Any) -> Spec:
    spec = Spec(world_size=ranks).replace(model=str(folder), fresh_weights=MINILM_FRESH, seq_len=32, micro_batch=2)
    return spec.replace(lr=1e-3, weight_decay=0.0, **changes)


def _losses(place: Place, plan: Sequence[dict[str, Any]], steps: int) -> list[list[float]]:
    """Of each Spec, from its initial values, the mean losses of some steps."""
    s, found = session(place), []
    for given in plan:
        s.apply("run", given, fresh=True)
        found.append([StepEvent.from_dict(e).mean_loss for e in s.train(steps)["events"]])
    s.close()
    return found


def _shards(place: Place, given: dict[str, Any]) -> dict[str, tuple[int, Any]]:
    """This rank's ranges of all parameters."""
    s = session(place)
    s.apply("run", given)
    assert s.trainer is not None
    shards = s.trainer.backend.param_shards()
    found = {p.name: (p.start, p.local.clone().numpy()) for p in shards if p.numel}
    s.close()
    return found


def reference(model: Any, folder: Path, seed: int = 0) -> nn.Module:
    """The model as transformers alone loads it; what the folder lacks is drawn as in the lab."""
    loaded, info = model.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    initial = Initializer(build_skeleton(resolve(str(folder))), seed)
    own = dict(loaded.named_parameters())
    with torch.no_grad():
        for name in info["missing_keys"] & own.keys():
            own[name].copy_(initial(name))
    return loaded.eval()  # type: ignore[no-any-return]


def loss_alone(model: nn.Module, spec: Spec) -> float:
    """The mean over the ranks of the loss on the first micro-batches."""
    config = resolve(spec.workload.model)
    batches = [Batches(spec.workload, config, rank=r, world_size=spec.world_size) for r in range(spec.world_size)]
    with torch.no_grad():
        return sum(float(model(**b.batch(0))["loss"]) for b in batches) / len(batches)


def test_a_trained_bert_begins_with_the_loss_of_transformers_alone(pool: Pool, minilm: Path) -> None:
    spec = minilm_spec(minilm)
    (losses,) = pool.run(_losses, 2, [spec.to_dict()], 1, reduction=None)[0]
    assert losses[0] == pytest.approx(loss_alone(reference(AutoModelForMaskedLM, minilm), spec), rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trained_bert_learns_alike_in_every_backend(pool: Pool, minilm: Path) -> None:
    plan = [minilm_spec(minilm, **changes).to_dict() for changes in BACKENDS.values()]
    lab, *others = pool.run(_losses, 2, plan, 3, reduction=None, timeout_s=600)[0]
    assert all(other[0] == lab[0] for other in others), "equal bits at the start"
    assert all(other == pytest.approx(lab, rel=1e-5) for other in others)
    assert min(lab[1:]) < lab[0]


@pytest.mark.parametrize(("ranks", "backend"), tiered(
    [(2, "fsdp2"), (2, "ddp"), (3, "lab"), (3, "fsdp1")],
    lambda ranks, backend: (ranks, backend) in ((2, "fsdp2"), (3, "lab")),
))  # fmt: skip
def test_every_rank_has_the_bits_of_the_file(pool: Pool, minilm: Path, ranks: int, backend: str) -> None:
    """The file is read by the library of safetensors. All parameters are there, none with a gap."""
    with safe_open(next(minilm.glob("*.safetensors")), framework="pt") as file:
        held = {f"bert.{name}": file.get_tensor(name).reshape(-1) for name in file.keys()}  # noqa: SIM118
    skeleton = build_skeleton(resolve(str(minilm)))
    fresh, found = Initializer(skeleton, 0), dict.fromkeys((n for n, _ in skeleton.named_parameters()), 0)
    spec = minilm_spec(minilm, ranks, **BACKENDS[backend])
    for shards in pool.run(_shards, ranks, spec.to_dict(), reduction=None):
        for name, (start, values) in shards.items():
            whole = held[name] if name in held else fresh(name).reshape(-1)
            assert torch.equal(whole[start : start + len(values)], torch.from_numpy(values)), name
            found[name] += len(values)
    copies = ranks if backend == "ddp" else 1
    assert found == {name: copies * p.numel() for name, p in skeleton.named_parameters()}


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
    found = [
        first["carried"],
        switched["carried"],
        switched["step"],
        str(refused.value),
        begun["carried"],
        begun["step"],
    ]
    taken = _values(s)
    s.close()
    return [*found, resumed.keys() == taken.keys(), all(torch.equal(resumed[n], taken[n]) for n in resumed), bool(held)]


def _values(s: Any) -> dict[str, torch.Tensor]:
    return {p.name: p.local.clone() for p in s.trainer.backend.param_shards() if p.numel}


def test_a_misfit_is_refused_by_all_ranks_and_a_checkpoint_needs_no_folder_and_is_one(
    pool: Pool, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    filled("gpt2-1m", 3).save_pretrained(folder / "weights")  # type: ignore[operator]
    shutil.copy(folder / "weights" / "config.json", folder)
    given = Spec(world_size=2).replace(model=str(folder), weights=str(folder / "weights"), seq_len=32, micro_batch=2)
    misfit = given.replace(model="gpt2-10m")
    (tmp_path / "saved").mkdir()
    dicts = [given.to_dict(), misfit.to_dict(), given.replace(weights=None).to_dict()]
    for first, carried, step, said, again, begun, same, equal, held in pool.run(
        _life, 2, *dicts, str(tmp_path / "saved"), reduction=None
    ):
        assert not first and carried and step == 2 and "of another shape" in said, "the training went on"
        assert not again and begun == 0 and held and same and equal


# -- memory ------------------------------------------------------------------------------------------------------------


class KernelPeak(HostPeak):
    """Begins the kernel's own peak of resident memory anew, where the rank begins to look."""

    began: list[int] = []  # noqa: RUF012

    def restart(self) -> None:
        super().restart()
        Path("/proc/self/clear_refs").write_text("5")
        self.began.append(_resident("VmRSS"))


def _loaded(place: Place, given: dict[str, Any]) -> tuple[int, int, int, int]:
    """(the kernel's peak beyond what was held before, what the rank says, bytes of its shards, bytes of buckets, which no
    value has touched)."""
    s = session(place)
    s.apply("run", Spec.from_dict(given).replace(model={**DEEP, "n_layer": 1}).to_dict())  # what a process has once
    with mock.patch.object(lifecycle, "HostPeak", KernelPeak):
        s.apply("run", given)
    peak = _resident("VmHWM") - KernelPeak.began.pop()
    assert s.trainer is not None
    own = sum(p.local.nbytes for p in s.trainer.backend.param_shards())
    event = StepEvent.from_dict(s.train(1)["events"][0])
    buckets = s.trainer.backend.resident_bytes()
    s.close()
    return peak, event.memory.loading_bytes, own, buckets


def _resident(line: str) -> int:
    text = re.search(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert text is not None
    return int(text[1]) * 1024


LAYERS, UNIT_BYTES = 12, 4 * 12 * 512 * 512  # of a block
DEEP = {
    "model_type": "gpt2",
    "n_layer": LAYERS,
    "n_embd": 512,
    "n_head": 8,
    "vocab_size": 384,
    "n_positions": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_language_model_in_several_files_begins_as_transformers_alone_and_learns(
    pool: Pool, smollm2: Path, tmp_path: Path
) -> None:
    assert len(list(smollm2.glob("*.safetensors"))) > 1
    text = tmp_path / "one-batch.txt"  # each step sees the same two samples
    text.write_text("A rank keeps its shard, gathers a unit before it computes, and lets it go again. " * 4)
    spec = Spec(world_size=2).replace(model=str(smollm2), data=str(text), held_out=0.0, seq_len=32, micro_batch=1)
    spec = spec.replace(optimizer="sgd", lr=1e-3)
    plan = [spec.to_dict(), spec.replace(backend="fsdp2").to_dict()]
    lab, fsdp2 = pool.run(_losses, 2, plan, 2, reduction=None, timeout_s=400)[0]
    alone = loss_alone(reference(AutoModelForCausalLM, smollm2), spec)
    assert lab[0] == fsdp2[0] == pytest.approx(alone, rel=1e-6)
    assert lab == pytest.approx(fsdp2, rel=1e-5) and min(lab[1:]) < lab[0]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "backend"), [(3, "lab"), (4, "fsdp1"), (2, "ddp")])
def test_loading_takes_the_memory_of_shards_and_about_one_unit(
    pool: Pool, tmp_path: Path, ranks: int, backend: str
) -> None:
    """Resident memory while a rank loads, beside what the planner says."""
    model = filled(DEEP)
    model.save_pretrained(tmp_path, max_shard_size="40MB")  # type: ignore[operator]
    whole = sum(p.nbytes for p in model.parameters())
    spec = Spec(world_size=ranks).replace(model=str(tmp_path), seq_len=16, micro_batch=1, **BACKENDS[backend])
    planned = loading_bytes(spec, shape_for(DEEP), device="cpu")
    pool.renew()
    for peak, said, own, buckets in pool.run(_loaded, ranks, spec.to_dict(), reduction=None):
        assert own <= planned < own + UNIT_BYTES + buckets
        assert own == pytest.approx(whole / (1 if backend == "ddp" else ranks), rel=0.01)
        assert 0.9 * own < peak < own + 1.5 * UNIT_BYTES, (peak / MIB, own / MIB)
        assert 0.9 * own < said <= peak + MIB, (said / MIB, peak / MIB)
