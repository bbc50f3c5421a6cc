"""Published rows become Specs; what a row leaves out is assumed and said, what it cannot mean is refused by its column."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fsdp_lab.core.errors import ArgumentError
from fsdp_lab.planner.costs import Attention
from fsdp_lab.planner.devices import PUBLISHED
from fsdp_lab.planner.fitting import predicted_s
from fsdp_lab.planner.memory import under_pressure
from fsdp_lab.planner.published import case
from fsdp_lab.planner.step import StepModel
from fsdp_lab.planner.validate import published, usable

ROW = {
    "id": "x-1", "model": "Llama-2 7B", "n_layers": "32", "hidden": "4096", "n_heads": "32", "seq_len": "4096",
    "gpu": "A100", "gpu_mem_gb": "80", "n_gpus": "32", "micro_batch": "2", "precision": "bf16 mixed",
    "strategy": "FULL_SHARD", "framework": "FSDP2 torchtitan", "act_ckpt": "full",
    "interconnect": "400 Gb/s RDMA per GPU", "source": "here", "tokens_per_s_per_gpu": "3000",
}  # fmt: skip


def row(**changes: str) -> Mapping[str, str]:
    return {**ROW, **changes}


def test_a_row_is_read_as_it_is_meant() -> None:
    found = case(row())
    s, w = found.spec.strategy, found.spec.workload
    assert (s.backend, s.sharding, s.precision, s.recompute) == ("fsdp2", "full_shard", "bf16", "full")
    assert (found.spec.world_size, w.micro_batch, w.accumulate, w.seq_len) == (32, 2, 1, 4096)
    assert (found.machine.device.name, found.machine.hosts) == ("a100-80", 4)
    assert found.machine.network_bytes_per_s == 400e9
    assert found.shape.parameters == pytest.approx(6.738e9, rel=0.001), "Llama 2 7B"
    assert found.measured_s == pytest.approx(2 * 4096 / 3000)
    assert found.software.attention is Attention.FLASH2
    assert found.assumed["grad_accum"] == 1 and "hosts" not in found.assumed


def test_what_a_row_leaves_out_is_said() -> None:
    found = case(row(n_layers="", hidden="", seq_len="", interconnect="", act_ckpt="", precision="", gpu_mem_gb=""))
    assert found.assumed["n_layers"] == 32 and found.assumed["seq_len"] == 4096
    assert found.assumed["network"] == "800 Gb/s a host" and found.assumed["act_ckpt"] == "selective (op)"
    assert found.assumed["precision"] == "bf16 mixed" and found.software.operators


def test_a_decoder_that_no_table_knows_is_of_the_family_that_has_its_parameters() -> None:
    gpt = case(row(model="A 30B", n_layers="48", hidden="7168", n_heads="56", vocab="50368", params="29975214080"))
    assert gpt.shape.parameters == pytest.approx(29975214080, rel=0.01)
    llama = case(row(model="B 7B", vocab="32000", params="6738000000", ffn_hidden="11008"))
    assert llama.shape.parameters == pytest.approx(6.738e9, rel=0.001)


@pytest.mark.parametrize(("changes", "said"), [
    ({"n_gpus": ""}, "n_gpus: it is empty"),
    ({"n_gpus": "many"}, "n_gpus: 'many' is not a number"),
    ({"micro_batch": "-2"}, "micro_batch: '-2' is refused"),
    ({"micro_batch": "1.5"}, "micro_batch: 1.5 is refused; give a whole number"),
    ({"gpu": "TPU v4"}, "gpu: 'TPU v4' is not known"),
    ({"strategy": "FSDP8 x TP8"}, "strategy: FSDP8 x TP8 is more than sharded data parallelism"),
    ({"strategy": "DDP + ZeRO-1 (optimizer states over the 8 ranks of a host)"}, "strategy: DDP + ZeRO-1 (optimizer states"),
    ({"precision": "float8"}, "precision: float8 is not one of the lab's"),
    ({"model": "mystery", "n_layers": ""}, "model: 'mystery' is not known, and the row gives no sizes"),
    ({"strategy": "HYBRID_SHARD", "n_gpus": "12"}, "strategy: HYBRID_SHARD on 12 GPUs in hosts of 8"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_its_column(changes: dict[str, str], said: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        case(row(**changes))
    assert str(refused.value).startswith(said)


def test_every_published_row_is_predicted_or_refused_with_a_reason() -> None:
    cases, refused = usable(published())
    assert len(cases) + len(refused) == 728 and len(cases) == 552
    assert all(reason for _, reason in refused)
    errors = [predicted_s(one, PUBLISHED) / one.measured_s - 1 for one in cases if one.measured_s]
    assert sum(map(abs, errors)) / len(errors) < 0.08, "the rates in the package are those of these rows"


def test_a_step_of_some_blocks_is_as_long_as_one_of_all() -> None:
    """On few tokens too, where the host falls behind the device only after many blocks."""
    cases = [found for found in usable(published())[0] if found.tokens <= 4096]
    assert {"jz-ring-7B-8", "jz-ring-7B-64"} <= {found.id for found in cases}
    for found in cases:
        tokens, overlaps = found.tokens_per_sample, not under_pressure(found.spec, found.shape, found.machine)
        model = StepModel(
            found.spec, found.shape.units, tokens, found.machine, PUBLISHED, found.software, overlaps=overlaps
        )
        assert predicted_s(found, PUBLISHED) == pytest.approx(model.step().seconds, rel=0.03), found.id
