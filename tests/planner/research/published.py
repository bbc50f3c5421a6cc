"""Published measurements as cases to predict (`PublishedCase`). What a row does not give is assumed, and listed.

The columns are those of `data/fsdp_measurements.csv`. A row is refused, with the reason, if it gives too little (no model
shape, no number of GPUs) or is of another kind of parallelism."""

import csv
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.formatting import GIB, MIB
from fsdp_lab.planner.devices import PUBLISHED, Machine, Rates, machine
from fsdp_lab.planner.memory import MemoryPlan
from fsdp_lab.planner.model_shape import ModelShape
from fsdp_lab.planner.plan import Plan
from fsdp_lab.planner.step import step_seconds
from fsdp_lab.spec.spec import Spec
from tests.planner.research.models import NamedModel, gpt_model, named_model, shape_of
from tests.planner.research.software import SoftwareComputing, planned, planned_memory
from tests.planner.research.tape import Attention, Software

Row = Mapping[str, str]
DATA = Path(__file__).parent / "data"


def published() -> list[Row]:
    """The table's rows."""
    with (DATA / "fsdp_measurements.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True, kw_only=True)
class PublishedCase:
    """A row to predict. `measured_s`: the step time that the row gives or implies, if it does."""

    id: str
    source: str
    spec: Spec
    shape: ModelShape
    machine: Machine
    software: Software
    measured_s: float | None
    assumed: Mapping[str, Any]

    @property
    def tokens_per_sample(self) -> int:
        return self.shape.tokens(self.spec.workload.seq_len)

    @property
    def tokens(self) -> int:
        """Tokens per rank and step."""
        w = self.spec.workload
        return w.micro_batch * w.accumulate * w.seq_len

    def plan(self) -> Plan:
        return planned(self.spec, self.shape, self.machine, self.software)

    def memory(self) -> MemoryPlan:
        return planned_memory(self.spec, self.shape, self.software)

    def predicted_s(self, rates: Rates = PUBLISHED) -> float:
        """Seconds of a step."""
        computing = partial(SoftwareComputing, software=self.software)
        return step_seconds(self.spec, self.shape, self.machine, rates, computing)


@dataclass
class _Reader:
    """One row, and what was assumed for its empty cells."""

    row: Row
    assumed: dict[str, Any] = field(default_factory=dict)

    def text(self, *columns: str) -> str:
        """Of several columns with an @ between them."""
        return "@".join((self.row.get(column) or "").strip() for column in columns)

    def number(self, column: str) -> float | None:
        given = self.text(column)
        if not given:
            return None
        try:
            value = float(given)
        except ValueError:
            raise ArgumentError(column, f"{given!r} is not a number", "give a number, or leave it empty") from None
        if not math.isfinite(value) or value <= 0:
            raise ArgumentError(column, f"{given!r} is refused", "give a number above 0, or leave it empty")
        return value

    def whole(self, column: str, default: Any = None) -> Any:
        """A whole number; if it is empty the default, which is noted, or an error if the default is None."""
        value = self.number(column)
        if value is not None:
            if value != int(value):
                raise ArgumentError(column, f"{value} is refused", "give a whole number")
            return int(value)
        if default is None:
            raise ArgumentError(column, "it is empty", "fill it in")
        return self.assume(column, default)

    def assume(self, column: str, value: Any) -> Any:
        self.assumed[column] = value
        return value


def _first(table: Iterable[tuple[str, str]], text: str) -> str | None:
    """The value of the first pattern in the text."""
    return next((value for pattern, value in table if re.search(pattern, text)), None)


def case(row: Row) -> PublishedCase:
    """Reads a row. Raises ArgumentError for a missing cell that cannot be assumed, or for another kind of parallelism."""
    reader = _Reader(row)
    for column, pattern, reason, hint in _REFUSED:
        if re.search(pattern, reader.text(column)):
            raise ArgumentError(column, f"{reader.text(column)} {reason}", hint)
    strategy = reader.text("strategy") or reader.assume("strategy", "FULL_SHARD")
    model = _model(reader)
    ranks = reader.whole("n_gpus")
    software, recompute = _software(reader)
    fused = "fused" in reader.text("optimizer").lower()
    # Flat parameters are of a class of their own, of which torch's foreach kernels of the time took none.
    kernels = {"foreach": False} if _before_torch_21(reader) and not fused else {"fused": fused}
    seq_len, accumulate = reader.whole("seq_len", model.seq_len), reader.whole("grad_accum", 1)
    hosts_of = re.search(r"(\d+) GPUs/node", reader.text("interconnect"))
    per_host = int(hosts_of[1]) if hosts_of else 4 if reader.text("gpu").startswith(("GB200", "GB300")) else 8
    sharding = "full_shard" if ranks == 1 else _first(_SHARDINGS, strategy)
    spec = Spec(world_size=ranks).replace(
        backend=_first(_BACKENDS, f"{strategy}@{reader.text('framework')}"), sharding=sharding,
        shard_size=_shard_size(strategy, ranks, per_host) if str(sharding).startswith("hybrid") else None,
        precision=_precision(reader), recompute=recompute, compile=reader.text("compile") == "yes", seq_len=seq_len,
        accumulate=accumulate, micro_batch=_micro_batch(reader, ranks, accumulate), held_out=0.0,
        optimizer_args=kernels,
    )  # fmt: skip
    if accumulate > 1 and spec.strategy.is_replicated:
        spec = spec.replace(sync="last")  # programs that replicate reduce gradients once a step
    if reader.text("other_metric", "other_value") == "backward_prefetch@off":
        spec = spec.replace(backward_prefetch=0)
    shape, hardware = shape_of(model), _machine(reader, ranks, per_host)
    if not reader.text("act_ckpt") and recompute == "none" and not _fits_without_recompute(spec, shape, hardware):
        reader.assume("act_ckpt", "full: with all activations it would not fit")
        spec = spec.replace(recompute="full")
    reader.assumed.update(hardware.assumed)
    one = PublishedCase(id=reader.text("id"), source=_source(reader), spec=spec, shape=shape, machine=hardware,
                        software=software, measured_s=None, assumed=reader.assumed)  # fmt: skip
    tokens_per_s, tflops = reader.number("tokens_per_s_per_gpu"), reader.number("tflops_per_gpu")
    if tokens_per_s is None and tflops is not None:
        counted = counted_flops_per_token(row, shape, seq_len, recomputed=reader.text("act_ckpt") in ("full", "yes"))
        tokens_per_s = tflops * 1e12 / counted
    return replace(one, measured_s=one.tokens / tokens_per_s if tokens_per_s else reader.number("step_time_s"))


def _fits_without_recompute(spec: Spec, shape: ModelShape, hardware: Machine) -> bool:
    """Whether fp32 parameters, gradients and AdamW's moments fit beside the activations of one micro-batch."""
    state = 16 * shape.parameters / spec.shard_factor
    tokens = shape.tokens(spec.workload.seq_len)
    activations = sum(unit.saved[spec.strategy.dtypes.param].bytes_of(1, tokens) for unit in shape.units)
    return state + activations * spec.workload.micro_batch < hardware.device.memory_bytes


# -- the model of a row ----------------------------------------------------------------------------------------------

# Columns of sizes, and the fields of `NamedModel` that they give.
_SIZES: Mapping[str, str] = {
    "n_layers": "layers", "hidden": "hidden", "n_heads": "heads", "n_kv_heads": "kv_heads", "ffn_hidden": "inner",
    "vocab": "vocabulary",
}  # fmt: skip


def _model(reader: _Reader) -> NamedModel:
    """The row's model. Raises ArgumentError if neither its name nor its sizes are enough."""
    numbers = {name: reader.number(column) for column, name in _SIZES.items()}
    given: dict[str, Any] = {name: int(number) for name, number in numbers.items() if number is not None}
    model = named_model(reader.text("model"))
    if model is None:
        if not {"layers", "hidden"} <= given.keys():
            raise ArgumentError("model", f"{reader.text('model') or 'nothing'!r} is not known, and the row gives no sizes",
                            "fill in n_layers and hidden, or name a model such as llama-3 8b")  # fmt: skip
        model = _model_of_sizes(reader, **given)
    for column, name in _SIZES.items():
        if name not in given:
            reader.assume(column, getattr(model, name))
    return replace(model, **given)


def _model_of_sizes(reader: _Reader, layers: int, hidden: int, **others: Any) -> NamedModel:
    """A decoder of these sizes, of the family whose number of parameters is nearest to the row's."""
    name, parameters = reader.text("model").lower(), reader.number("params")
    heads = others.get("heads") or int(reader.assume("n_heads", max(1, hidden // 128)))
    inner = -(-8 * hidden // 768) * 256  # two thirds of 4 x hidden, in steps of 256
    gpt = gpt_model(layers, hidden, heads)
    llama = replace(gpt, family="llama", inner=inner, vocabulary=32000, seq_len=4096, tied=False)
    is_gated = re.search("llama|mistral|qwen|gemma|yi|deepseek|olmo|smol|granite|falcon3", name) is not None
    if not is_gated and not re.search("mpt|gpt", name) and parameters is not None:
        errors = [abs(shape_of(replace(model, **others)).parameters - parameters) for model in (gpt, llama)]
        is_gated = errors[1] < errors[0]
    return llama if is_gated else gpt


# -- the Spec, the software and the machine of a row -----------------------------------------------------------------

# (column, pattern, reason, hint) of rows that are not FSDP by itself, or of a dtype that no Spec has.
_OUT, _IN_A_HOST = "leave the row out", "shards the optimizer's state inside a host, which no Spec does"
_REFUSED = (("strategy", r"x ?TP|\+ ?TP|PP|CP\d", "is more than sharded data parallelism", _OUT),
            ("strategy", r"over the \d+ ranks of a host", _IN_A_HOST, _OUT),
            ("model", "(?i)lora", "trains adapters beside frozen weights", _OUT),
            ("strategy", "(?i)offload", "copies over PCI Express, which is not calibrated", _OUT),
            ("precision", "(?i)float8|fp8", "is not one of the lab's", "use bf16, fp16 or fp32"))  # fmt: skip
# By the strategy, where parameters and gradients may be whole and the optimizer's state sharded; and by the framework.
_STATE = "(?i:zero-1|distributed optimizer)"
_SHARDINGS = (
    (_STATE, "zero1"), ("(HYBRID|HSDP).*NRAF|NRAF.*(HYBRID|HSDP)", "hybrid_shard_zero2"), ("HYBRID|HSDP", "hybrid_shard"),
    ("GRAD_OP|no reshard|NRAF|reshard_after_forward=False", "shard_grad_op"), ("NO_SHARD|DDP", "no_shard"),
    ("", "full_shard"),
)  # fmt: skip
_BACKENDS = ((f"{_STATE}.*@", "lab"), ("(NO_SHARD|DDP).*@(?!.*FSDP)", "ddp"),
             ("@.*(FSDP2|torchtitan|torchtrain|DeepSpeed)", "fsdp2"), ("", "fsdp1"))  # fmt: skip
# Gradients are reduced in the compute dtype by default, as FSDP1 and FSDP2 do without a `reduce_dtype`; torchtitan's
# configuration and Composer's DEFAULT set fp32.
_PRECISIONS = (("^fp16@", "fp16"), ("^(?!.*bf16.*@).*32.*@", "fp32"), ("(fp32 reduce|default).*@|@.*titan", "bf16"),
               ("", "bf16-pure"))  # fmt: skip
# No table gives the attention kernel; it follows from framework, model, source and date: MPT's attn_impl of 2023, and
# programs from before there was fused attention.
_ATTENTIONS = (("Composer.*@.*@", "flash1"), (r"@.*t5.*@|2304\.11277|AWS'?$|1 Trillion|SC21|2104\.04473", "plain"),
               ("^(Megatron|NeMo)", "plain"), ("", "flash2"))  # fmt: skip
_GPUS = (
    ("H100.*(HBM2|NVL)", "h100-hbm2e"), ("H100.*PCIe", "h100-pcie"), ("H100", "h100"), ("H200", "h200"),
    ("GB[23]00", "gb200"), ("B200", "b200"), ("A100.*40", "a100-40"), ("A100.*Leonardo", "a100-64"), ("A100", "a100-80"),
    ("V100", "v100"), ("A10G", "a10g"), ("L40S", "l40s"), (r"L4\b", "l4"), ("T4", "t4"),
)  # fmt: skip


def _source(reader: _Reader) -> str:
    """The source of the measurement: rows of one source share a cluster, a program and a way of counting."""
    text = reader.text("source")
    if figure := re.search(r"arXiv 2304\.11277.*?Fig (\d\(\w\))", text):
        return f"fsdp paper, fig {figure[1]}"
    name = re.match(r"(github [\w./-]+@\w+|github [\w/-]+|[^',]+( '[^']+')?)", text)
    return name[0].strip() if name else reader.text("id").split("-")[0]


def _shard_size(strategy: str, ranks: int, per_host: int) -> int:
    if replicas := re.search(r"\((\d+)x(\d+)\)", strategy):
        return ranks // int(replicas[1])
    if ranks % per_host or ranks <= per_host:
        raise ArgumentError("strategy", f"{strategy} on {ranks} GPUs in hosts of {per_host}: no shard group is known",
                        "name it as HYBRID_SHARD (replicas x shard)")  # fmt: skip
    return per_host


def _precision(reader: _Reader) -> str:
    text = reader.text("precision").lower() or str(reader.assume("precision", "bf16 mixed"))
    name = str(_first(_PRECISIONS, f"{text}@{reader.text('framework')}"))
    if name == "bf16-pure" and not re.search("pure|reduce bf16", text):
        reader.assume("reduce dtype", "bf16")
    return name


def _software(reader: _Reader) -> tuple[Software, str]:
    """The software, and the Spec's `recompute`.

    The FSDP paper does not say when it measured. Its peaks of T5 (figure 8c) are taken to be of the first step: between 8
    GPUs and 512 they differ by 4 bytes a parameter, fp32 values without gradients and moments, and 2.5 GB a sample are keys
    and values, biases and scores at the end of the forward. Those of GPT-175B differ by 16 bytes: of a later step."""
    framework, checkpoints, said = reader.text("framework"), reader.text("act_ckpt"), reader.text("kernels")
    is_t5, is_paper = "t5" in reader.text("model").lower(), "2304.11277" in reader.text("source")
    kernel = Attention.CUDNN
    if "cudnn" not in said:
        told = f"{framework}@{reader.text('model').lower()}@{reader.text('source')}"
        kernel = Attention(reader.assume("attention", _first(_ATTENTIONS, told)))
    software = Software(attention=kernel, fused_norms="fused norms" in said, half_loss="half loss" in said,
                        half_state="half state" in said)  # fmt: skip
    if not checkpoints:
        usual = "full" if "full recompute" in reader.text("tflops_kind") else "none"
        checkpoints = str(reader.assume("act_ckpt", "selective (op)" if "titan" in framework else usual))
    if "op" in checkpoints or (checkpoints == "selective" and re.search("torchtitan|torchtrain", framework)):
        return replace(software, operators=True), "full"
    if is_paper and is_t5 and reader.text("peak_mem"):
        reader.assume("peak", "of the first step")
    is_megatron = re.match("Megatron|NeMo", framework) is not None
    software = replace(software, stops_early=not _before_torch_21(reader), keeps_gradients=is_paper, drops=is_megatron,
                       fused_softmax=is_megatron, holds_scores="ATorch" in framework, returns_cache=is_t5,
                       first_step=is_paper and is_t5)  # fmt: skip
    if checkpoints.startswith("selective"):
        reader.assume("selective", "every second block")
        return software, "every:2"
    return software, "full" if checkpoints in ("full", "yes") else "none"


def _before_torch_21(reader: _Reader) -> bool:
    """The FSDP paper is of April 2023; llm-foundry's PURE rows are of its first table, of May 2023, whose script names the
    image of torch 1.13.1 (mosaicml/llm-foundry@300cc5c58 scripts/train/benchmarking)."""
    first_table = "Composer" in reader.text("framework") and "PURE" in reader.text("precision")
    return first_table or "2304.11277" in reader.text("source")


def _micro_batch(reader: _Reader, ranks: int, accumulate: int) -> int:
    whole = reader.number("global_batch")
    if not reader.text("micro_batch") and whole:
        return int(reader.assume("micro_batch", max(1, round(whole / ranks / accumulate))))
    return int(reader.whole("micro_batch", 1))


# ZeRO-3 of 2021 used one of a DGX A100's eight network cards: its published steps at small batches (arXiv 2104.04473,
# table 2) take as long as sending all parameters three times through one card.
ONE_CARD_GBIT = 200.0


def _machine(reader: _Reader, ranks: int, per_host: int) -> Machine:
    text, memory, network_text = reader.text("gpu"), reader.number("gpu_mem_gb"), reader.text("interconnect")
    gpu = _first(_GPUS, text)
    if gpu is None:
        known = ", ".join(name for _, name in _GPUS)
        raise ArgumentError("gpu", f"{text or 'nothing'!r} is not known", f"use one of {known}")
    if gpu == "a100-80" and memory is not None and memory < 60:
        gpu = "a100-40"
    elif gpu == "h100" and memory is not None and 90 <= memory <= 100:
        gpu = str(reader.assume("gpu part", "h100-hbm2e"))  # the only one with so much memory
    network = None
    for pattern, times in ((r"([\d.]+) ?([GT])b(?:/s|ps)?(?: [\w-]+)* per GPU", per_host), (r"([\d.]+) ?(G)bps usable", 1),
                           (r"([\d.]+) ?([GT])(?:b/s|bps)", 1)):  # fmt: skip
        if network is None and (given := re.search(pattern, network_text)):
            network = float(given[1]) * (1000 if given[2] == "T" else 1) * times
    if not network_text and "DeepSpeed ZeRO-3 (2021)" in reader.text("framework"):
        reader.assume("interconnect", f"{ONE_CARD_GBIT:.0f} Gb/s a host, one card of its eight")
        network = ONE_CARD_GBIT
    hosts = ranks // per_host if ranks > per_host and ranks % per_host == 0 else 1 if ranks <= per_host else None
    where = machine(gpu, ranks, hosts=hosts, network_gbit_per_s=network)
    is_less = memory is not None and memory * GIB < 0.9 * where.device.memory_bytes
    return where.limited(int(memory * GIB)) if memory is not None and is_less else where


# -- what a row measured ---------------------------------------------------------------------------------------------
def memory_kind(row: Row) -> str:
    """The kind of memory that a row counts, as of `peak_of_kind`. torchtitan reports reserved memory: the default."""
    kind = (row.get("peak_mem_kind") or "").lower()
    return str(_first((("allocated", "allocated"), ("used|smi|context", "used"), ("", "reserved")), kind))


def unit_bytes(row: Row) -> int | None:
    """Bytes of the row's unit; None if it is unknown. "MB (slope fits MiB)" is MiB."""
    unit = (row.get("peak_mem_unit") or "GiB").strip()
    return MIB if "MiB" in unit else {"GiB": GIB, "GB": 10**9, "MB": 10**6, "bytes": 1, "B": 1}.get(unit)


def counted_flops_per_token(row: Row, shape: ModelShape, seq_len: int, *, recomputed: bool) -> float:
    """FLOPs as `tflops_kind` counts them: of the model, or of the hardware, with a second forward where recomputed."""
    kind, block = (row.get("tflops_kind") or "").strip(), shape.units[-1]
    if "96*B*s*l*h^2" in kind:  # minGPT's benchmark: without attention and without the head
        return 96.0 * (len(shape.units) - 1) * block.boundary_elements**2
    flops = 3 * shape.forward_flops(seq_len) / seq_len  # causal attention counted whole
    if kind.startswith("hardware") or "2 forward passes" in kind:
        root = shape.units[0].forward_flops(seq_len) * 3 / seq_len
        return flops + (flops - root) / 3 if recomputed or "full recompute" in kind else flops
    return flops
