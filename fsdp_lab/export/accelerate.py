"""`config`: a Spec as a config file of Hugging Face Accelerate, for `accelerate launch --config_file`.

The file determines how to shard, not what to train, which is the user's own script: comments at the top list the
workload, and what that script must do to repeat the run. Keys are those of Accelerate 1.x
(`FullyShardedDataParallelPlugin`)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from fsdp_lab.base import __version__
from fsdp_lab.base.errors import SpecError
from fsdp_lab.export.target import SPEC_INSTEAD, gpus, paragraph, peer, refuse
from fsdp_lab.models import weights_folder
from fsdp_lab.models.check import check
from fsdp_lab.models.own import skeleton_of
from fsdp_lab.models.wrapping import block_class_names, units
from fsdp_lab.spec.optimizer import LrSchedule
from fsdp_lab.spec.spec import Precision, Spec

Values = dict[str, Any]


def config(spec: Spec) -> str:
    """The text of the file. Raises SpecError for a field that it cannot express."""
    exported, remarks = peer(spec)
    if spec.sync_interval not in (1, spec.workload.accumulate):
        reason = "Accelerate communicates gradients at every micro-batch or at the last"
        raise refuse("sync", reason, "use every or last", sync="last")
    backend = exported.strategy.backend
    if (e := exported.refused_by(f"accelerate/{backend}")) is not None:
        raise SpecError(e.field, e.reason, f"{e.first_hint}, {SPEC_INSTEAD}", e.fix)
    values = {"ddp": _ddp, "fsdp1": _fsdp1, "fsdp2": _fsdp2}[backend](exported)
    common = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": spec.world_size}
    inductor = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    compiled: Values = {"dynamo_config": inductor} if exported.strategy.compile else {}
    values = common | _devices(exported) | compiled | values
    check(spec.workload)  # last: it may build the model and run it on meta
    return f"{_head(exported, spec, (*_for_the_script(exported), *remarks))}{yaml.safe_dump(values, sort_keys=False)}"


def _fsdp2(spec: Spec) -> Values:
    s = spec.strategy
    sharding = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": s.reshards_after_forward,
        "fsdp_offload_params": s.offload == "all",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    values: Values = {"distributed_type": "FSDP", "mixed_precision": _mixed_precision(spec)}
    values["fsdp_config"] = sharding | _wrapping(spec) | _recompute(spec)
    if s.is_hybrid:
        sizes = {"replicate": spec.world_size // spec.shard_factor, "shard": spec.shard_factor}
        values["parallelism_config"] = {f"parallelism_config_dp_{name}_size": n for name, n in sizes.items()}
    return values


def _fsdp1(spec: Spec) -> Values:
    s = spec.strategy
    if s.is_hybrid:
        reason = "Accelerate gives FSDP1 no mesh, so that its shard group is a whole machine"
        raise refuse("sharding", reason, "use full_shard, or backend fsdp2", sharding="full_shard", shard_size=None)
    point = {"before": "BACKWARD_PRE", "after": "BACKWARD_POST"}[s.backward_prefetch_point]
    sharding = {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": s.sharding.upper(),
        "fsdp_offload_params": s.offload == "all",
        "fsdp_backward_prefetch": point if s.backward_prefetch else "NO_PREFETCH",
        "fsdp_forward_prefetch": s.forward_depth > 0,
        "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": True,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    values: Values = {"distributed_type": "FSDP", "mixed_precision": _mixed_precision(spec)}
    return values | {"fsdp_config": sharding | _wrapping(spec) | _recompute(spec)}


def _ddp(spec: Spec) -> Values:
    s, dtypes = spec.strategy, spec.strategy.dtypes
    if s.recompute != "none":
        hint = "use none and call model.gradient_checkpointing_enable() in your script"
        raise refuse("recompute", "Accelerate's config recomputes only with FSDP", hint, recompute="none")
    if dtypes.reduce != "fp32":
        reason = f"under DDP a config cannot reduce gradients in {dtypes.reduce}"
        raise refuse("precision", reason, "use bf16 or fp32", precision="bf16")
    return {"distributed_type": "MULTI_GPU", "mixed_precision": "no" if dtypes.param == "fp32" else dtypes.param}


def _mixed_precision(spec: Spec) -> str:
    """Accelerate has one dtype for parameters and for the reduction."""
    dtypes = spec.strategy.dtypes
    one = Precision(param=dtypes.param, reduce=dtypes.param)
    if dtypes.reduce != dtypes.param:
        token = {"fp32": "fp32", "bf16": "bf16-pure", "fp16": "fp16"}[dtypes.param]
        given, wanted = dtypes.param, dtypes.reduce
        reason = f"Accelerate reduces gradients in the dtype of the parameters, {given}, and not in {wanted}"
        hint = f"use {token}, or give your script's FullyShardedDataParallelPlugin a mixed_precision_policy"
        raise refuse("precision", reason, hint, precision=token)
    for role in ("output", "buffer"):
        asked = getattr(dtypes, role)
        if asked not in (None, dtypes.param):
            reason = f"Accelerate keeps one dtype for all, {dtypes.param}"
            raise refuse(f"precision.{role}", reason, "leave it empty", precision=dataclasses.replace(one))
    return "no" if dtypes.param == "fp32" else dtypes.param


def _wrapping(spec: Spec) -> Values:
    wrap = spec.strategy.wrap
    kind, _, argument = wrap.partition(":")
    if kind == "whole":
        return {"fsdp_auto_wrap_policy": "NO_WRAP"}
    if kind == "min_params":
        return {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": int(argument)}
    if kind == "every" and argument != "1":
        raise refuse("wrap", "Accelerate wraps single modules, not several blocks together", "use block", wrap="block")
    model = skeleton_of(spec.workload)
    wrapped = units(model, wrap)
    names = [argument] if kind == "class" else list(block_class_names(model))
    alike = [m for m in model.modules() if type(m).__name__ in names]
    if len(alike) != len(wrapped):
        classes = " and ".join(names)
        reason = f"Accelerate wraps every {classes}, and the run wrapped {len(wrapped)} of {len(alike)}"
        raise refuse("wrap", reason, "use whole", wrap="whole")
    return {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": ",".join(names)}


def _recompute(spec: Spec) -> Values:
    s = spec.strategy
    if s.recompute not in ("none", "full", "every:1"):
        raise refuse("recompute", "Accelerate recomputes every block or none", "use full or none", recompute="full")
    if s.recompute != "none" and s.wrap not in ("block", "every:1"):
        reason = f"Accelerate recomputes what it wraps, which is not the blocks under {s.wrap}"
        raise refuse("recompute", reason, "use wrap block, or recompute none", recompute="none")
    return {"fsdp_activation_checkpointing": s.recompute != "none"}


def _devices(spec: Spec) -> Values:
    if spec.devices is None:
        return {}
    if spec.devices[0] == "cpu":
        reason = "Accelerate runs FSDP only on GPUs, and launches ranks on CPUs only through MPI"
        raise SpecError("devices", reason, f"leave it empty, {SPEC_INSTEAD}", {"devices": None})
    return {"gpu_ids": ",".join(name.removeprefix("cuda:") for name in gpus(spec))}


def _head(exported: Spec, spec: Spec, remarks: Sequence[str]) -> str:
    s, sent, given = exported.strategy, spec.workload.sent_code(), spec.to_dict()["workload"].items()
    # Its fields; of code that was sent, the name.
    workload = {n: sent[n].name if n in sent else v for n, v in given if n != "loss" or v is not None}
    blocks = [
        f"{s.traits.title}, {s.sharding}, on {spec.world_size} processes:",
        "    accelerate launch --config_file THIS_FILE your_script.py",
        f"Written by fsdp_lab {__version__}. Your script determines what is trained; the run's workload was:",
        *(f"    {name}: {json.dumps(value)}" for name, value in workload.items()),
        *(f"- {text}." for text in remarks),
    ]
    lines = [line for block in blocks for line in (paragraph(block) if block[0] == "-" else block).splitlines()]
    return "".join(f"# {line}\n" for line in lines)


def _for_the_script(spec: Spec) -> Iterator[str]:
    """Yields what the run did and a config file cannot express."""
    s, w = spec.strategy, spec.workload
    if w.sent_code():
        yield "model, loss, data: code of your own, whose source is in the Spec; your script defines or imports it"
    elif not w.is_own and (folder := weights_folder(w)) is not None:
        yield f"weights: in your script, from_pretrained({json.dumps(str(folder.absolute()))})"
    if w.accumulate > 1:
        arguments = f"num_steps={w.accumulate}, sync_each_batch={spec.sync_interval == 1}"
        plugin = f"GradientAccumulationPlugin({arguments})"
        yield f"sync: in your script, Accelerator(gradient_accumulation_plugin={plugin})"
    if w.packing == "padded":
        loss = "the run's loss is the mean over all labels of the global batch"
        yield f"packing: {loss}; in your script, weight each micro-batch by its number of labels"
    if w.clip_norm is not None:
        yield f"clip_norm: in your script, accelerator.clip_grad_norm_(model.parameters(), {w.clip_norm})"
    if w.adapters is not None:
        targets = None if w.adapters.targets is None else list(w.adapters.targets)
        lora = f"LoraConfig(r={w.adapters.r}, lora_alpha={w.adapters.scale:g}, target_modules={targets})"
        call = f"peft's inject_adapter_in_model({lora}, model)"
        values = "which draws other values of A than the run had; B, and so the loss, begins alike"
        yield f"lora: in your script, before accelerator.prepare, {call}, {values}"
    if w.param_groups is not None:
        yield "param_groups: in your script, give the optimizer the groups above; the rest has lr, weight_decay on matrices"
    if w.dropout != "off":
        seeding = "the run seeded torch before each micro-batch, from the seed and the number of its first sample"
        yield f"dropout: {seeding}; in your script other masks are drawn"
    if w.freeze is not None:
        frozen = f"the parameters whose names match {json.dumps(w.freeze)} (fnmatch)"
        yield f"freeze: in your script, before accelerator.prepare, requires_grad_(False) of {frozen}"
    if w.rates.varies:
        yield f"lr_schedule: in your script, torch.optim.lr_scheduler.LambdaLR(optimizer, rate), where {_rate(w.rates)}"
        step = "step it yourself after each optimizer.step() if accelerator.sync_gradients"
        yield f"lr_schedule: do not give it to accelerator.prepare, which would step it once for each process; {step}"
    if s.backend == "fsdp2":
        yield "wrap: Accelerate also makes units of the embedding, and of the last norm with the head"
    if s.wrap.startswith("min_params"):
        yield "wrap: Accelerate counts a module's parameters in its own way, so that its units can be others"
    if s.backend != "fsdp1" and s.dtypes.buffer not in (None, "fp32"):
        yield f"precision: buffers stay in fp32, since {s.traits.title} has no dtype for them; cast them in your script"
    if s.backend != "ddp" and s.dtypes.param != "fp32":
        yield f"precision: Accelerate computes under autocast too, and returns outputs in {s.dtypes.param} or fp32"


def _rate(rates: LrSchedule) -> str:
    """The factor of each step in words."""
    warmup = rates.warmup_steps
    up = f"rate(step) is (step + 1) / {warmup} in the first {warmup} steps" if warmup > 1 else "rate(step)"
    if rates.decay_steps is None:
        return f"{up}, then 1"
    curve = "in a line" if rates.kind == "linear" else "along half a cosine"
    up += ", then" if warmup > 1 else ""
    return f"{up} falls {curve} from 1 in step {warmup} to {rates.end} in step {rates.decay_steps}"
