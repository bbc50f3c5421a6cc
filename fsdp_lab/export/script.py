"""`script`: a Spec as the text of a torchrun script, rendered from torchrun_script.py.jinja with values derived here."""

from __future__ import annotations

import inspect
import json
import platform
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from torch import Tensor, nn
from transformers import AutoConfig

from fsdp_lab.backends.optimizers import check_optimizer
from fsdp_lab.core import __version__
from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.optimizer import TorchOptimizer
from fsdp_lab.core.spec import Spec
from fsdp_lab.core.workload import Workload
from fsdp_lab.export.own_code import OwnCode
from fsdp_lab.export.target import TITLES, gpus, peer
from fsdp_lab.models import Initializer, Pretrained, Weights, build_skeleton, resolve, weights_folder
from fsdp_lab.models.batches import MASK_ID, open_source
from fsdp_lab.models.build import Draw
from fsdp_lab.models.check import STDLIB, check_shapes, checked_records, checked_text, is_plain
from fsdp_lab.models.data import BYTE_OFFSET, FOLDER_CAP_BYTES, STDLIB_CAP_BYTES
from fsdp_lab.models.freezing import freeze
from fsdp_lab.models.lora import adapted
from fsdp_lab.models.own import skeleton_of
from fsdp_lab.models.presets import Facts, Kind, facts_of
from fsdp_lab.models.records import PIECE_CHARS, Format
from fsdp_lab.models.sources import IGNORED, MASKED_SHARE
from fsdp_lab.models.tokenizers import tokenizer_folder
from fsdp_lab.models.wrapping import blocks, units

WIDTH = 100
TEMPLATE = "torchrun_script.py.jinja"
AUTO: Mapping[Kind, str] = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
_NOT_OF_A_MODEL = ("transformers_version", "architectures")  # fields of a config
DTYPES: Mapping[str, str] = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def script(spec: Spec) -> str:
    """The text of the script. Raises SpecError for a field that torch's own backends or the script cannot express."""
    check_optimizer(spec.workload)
    exported = peer(spec)
    own = OwnCode(exported.spec.workload) if spec.workload.is_own else None
    if own is not None:
        values, skeleton = own.values, skeleton_of(spec.workload)
    else:
        model = model_of(exported.spec)
        values = {"own": "", **_model(exported.spec, model), **_data(exported.spec, model)}
        skeleton = model.skeleton
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined,
                              trim_blocks=True, keep_trailing_newline=True)  # fmt: skip
    environment.filters.update(
        dtype=DTYPES.__getitem__,
        literal=literal,
        paragraph=paragraph,
        from_import=from_import,
        optimizer_call=optimizer_call,
    )
    text = environment.get_template(TEMPLATE).render(
        spec=exported.spec,
        title=TITLES[exported.spec.strategy.backend],
        remarks=[*exported.remarks, *_inexact(exported.spec)],
        versions=_versions(values),
        gpus=gpus(exported.spec),
        group_dicts=[
            {"match": list(g.match), **{n: v for n in ("lr", "weight_decay") if (v := getattr(g, n)) is not None}}
            for g in exported.spec.workload.param_groups or ()
        ],
        **values,
        **_modules(exported.spec, skeleton),
        **_sharding(exported.spec),
    )  # fmt: skip
    if own is not None:
        own.check_names(text)
    return text


def _versions(values: Mapping[str, Any]) -> dict[str, str]:
    """What it was written with, and needs."""
    formats = values["tokens"]["formats"] if values["tokens"] else ()
    more = {"peft": values["lora"] is not None, "datasets": "SAVED" in formats,
            "pyarrow": bool({"PARQUET", "ARROW"} & {*formats})}  # fmt: skip
    return {
        "fsdp_lab": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{name: version(name) for name, is_needed in more.items() if is_needed},
        "Python": platform.python_version(),
    }


def _inexact(spec: Spec) -> Iterator[str]:
    """Cases where torch's own backend may give other bits than in the lab."""
    s = spec.strategy
    if s.backend == "fsdp1" and s.is_hybrid and spec.shard_factor > 2:
        yield ("sharding: FSDP1 accepts no hook under hybrid sharding, so over Gloo it adds within shard groups in "
               "another order than the run, and losses agree within rounding, not to the bit")  # fmt: skip
    if s.backend == "fsdp1" and s.dtypes.reduce == "fp16":
        yield ("precision: FSDP1 divides by a part of the ranks before the sum, in the lab after it, so that in fp16 "
               "another step may overflow and be skipped")  # fmt: skip


# -- what the template is given --------------------------------------------------------------------------------------


def _model(spec: Spec, model: Model) -> dict[str, Any]:
    return {
        "model_name": model.name,
        "auto_class": AUTO[model.facts.kind],
        "config": config_of(model.config),
        "attention": getattr(model.skeleton.config, "_attn_implementation", "sdpa"),
        "sets_loss_type": loss_type_is_missing(model),
        "lora": _lora(spec.workload, model),
        **_values(spec, model),
    }


def _lora(w: Workload, model: Model) -> dict[str, Any] | None:
    """The arguments of peft's LoraConfig, with the targets that peft chose."""
    if w.adapters is None:
        return None
    injected: Any = model.skeleton
    targets = sorted(injected.peft_config["default"].target_modules)
    return {"r": w.adapters.r, "lora_alpha": w.adapters.scale, "target_modules": targets}


def _values(spec: Spec, model: Model) -> dict[str, Any]:
    """What parameters begin with. Raises SpecError for weights that do not fit, or that a script cannot read."""
    drawn = {"draws": True, "files": [], "stored_buffers": []}
    if (folder := weights_folder(spec.workload)) is None:
        return {**drawn, "initial_values": initial_values(model)}
    weights = Weights(folder)
    given = Pretrained(model.base, spec.workload, weights)
    if not weights.is_plain:
        raise SpecError("workload.weights", f"{folder} is a checkpoint with tensors in parts, and a script reads whole ones",
                        "export its model (fsdp-lab checkpoints FOLDER --export MODEL), and name that folder")  # fmt: skip
    return {
        "draws": bool(given.fresh),
        "initial_values": initial_values(model, given.fresh) if given.fresh else "",
        "weights_path": str(folder.absolute()),
        "files": weights.files,
        "stored_buffers": list(given.buffers),
        **_stored_names(given.stored_names),
    }


def _stored_names(names: Mapping[str, str]) -> dict[str, Any]:
    """The name in the files as code that is given `name`, that in the model; with a table where no prefix explains it."""
    differing = {name: stored for name, stored in names.items() if stored != name}
    name, stored = next(iter(differing.items()), ("", ""))
    cut, put = name.removesuffix(stored), stored.removesuffix(name)
    if not differing:
        return {"stored_name": "name", "stored_names": {}}
    if all(name.removeprefix(cut) == stored for name, stored in names.items()):
        return {"stored_name": f"name.removeprefix({json.dumps(cut)})", "stored_names": {}}
    if all(put + name == stored for name, stored in names.items()):
        return {"stored_name": f"{json.dumps(put)} + name", "stored_names": {}}
    return {"stored_name": "STORED.get(name, name)", "stored_names": differing}


def _data(spec: Spec, model: Model) -> dict[str, Any]:
    """The text that is trained on. Raises SpecError if it cannot be read."""
    w = spec.workload
    check_shapes(w, model.facts)
    tokens = None if is_plain(w) else _tokens(w, model)
    if tokens is None:
        checked_text(w)
    path = None if w.data == STDLIB else Path(w.data).expanduser().absolute()
    return {
        "text": "stdlib" if path is None else "folder" if path.is_dir() else "file",
        "text_path": str(path),
        "cap_mib": (STDLIB_CAP_BYTES if path is None else FOLDER_CAP_BYTES) // 2**20,
        "kind": model.facts.kind,
        "byte_offset": BYTE_OFFSET,
        "mask_id": MASK_ID,
        "masked_share": MASKED_SHARE,
        "ignored": IGNORED,
        "tokens": tokens,
        "piece_chars": PIECE_CHARS,
    }


def _tokens(w: Workload, model: Model) -> dict[str, Any]:
    """How the script makes samples into tokens. `pieces`: all text is joined, and read in pieces; `rows`: they may have
    different numbers of labels."""
    records, tokenizer = checked_records(w, model.facts)
    formats = {kind for _, kind in records.files}
    pieces = w.packing == "packed" and not records.is_chat
    is_even = pieces and (model.facts.kind != "masked" or open_source(w, model.config).is_even)
    folder = tokenizer_folder(w)
    return {
        "folder": None if folder is None else str(folder.absolute()),
        "files": [str(path.absolute()) for path, _ in records.files],
        "column": records.field,
        "formats": [kind.name for kind in (Format.PARQUET, Format.ARROW, Format.SAVED, Format.JSON) if kind in formats],
        "chat": records.is_chat,
        "marked": tokenizer.marks_answers,
        "padded": w.packing == "padded",
        "pieces": pieces,
        "rows": not is_even,
        "end_id": tokenizer.end_id,
        "pad_id": tokenizer.pad_id,
        "mask_id": tokenizer.mask_id,
        "special_ids": list(tokenizer.special_ids),
        "vocabulary": tokenizer.vocabulary,
    }


def _modules(spec: Spec, skeleton: nn.Module) -> dict[str, Any]:
    """Modules by name: units are sharded together, blocks are recomputed or compiled. Raises SpecError if there are none."""
    s = spec.strategy
    names = {id(m): name for name, m in skeleton.named_modules()}
    found = [] if s.backend == "ddp" else units(skeleton, s.wrap)
    groups = [[names[id(m)] for m in group] for group in found]
    repeated = [names[id(m)] for m in blocks(skeleton)]
    same = groups == [[name] for name in repeated]
    grouped = any(len(group) > 1 for group in groups)
    return {
        "blocks": name_list(repeated) if s.compile or s.recompute != "none" or (same and groups) else "",
        "recompute_every": int(s.recompute.partition(":")[2] or 1),
        "units": name_list(groups if grouped else [group[0] for group in groups]) if groups else "",
        "units_name": "BLOCKS" if same else "UNITS",
        "units_are_groups": grouped,
    }


def _sharding(spec: Spec) -> dict[str, Any]:
    s, dtypes = spec.strategy, spec.strategy.dtypes
    hybrid, ordered = s.is_hybrid, rank_ordered(spec)
    given = {"param": dtypes.param, "reduce": dtypes.reduce}
    if s.backend == "fsdp2":
        mixed = (dtypes.param, dtypes.reduce, dtypes.output) != ("fp32", "fp32", None)
        given = {role: dtype for role, dtype in given.items() if (role, dtype) != ("param", "fp32")}
        names = {"fully_shard": True, "MixedPrecisionPolicy": mixed, "CPUOffloadPolicy": s.offload == "all",
                 "FSDPModule": ordered}  # fmt: skip
    else:
        given |= {"buffer": dtypes.buffer} if dtypes.buffer is not None else {}
        after = s.backward_prefetch > 0 and s.backward_prefetch_point == "after"
        names = {"FullyShardedDataParallel": True, "ShardingStrategy": True, "MixedPrecision": s.precision != "fp32",
                 "CPUOffload": s.offload == "all", "BackwardPrefetch": after}  # fmt: skip
    return {
        "fsdp_names": [name for name, needed in names.items() if needed],
        "hybrid": hybrid,
        "reshard_after_forward": s.reshard_size or s.reshards_after_forward,
        "dtype_arguments": ", ".join(f"{role}_dtype={DTYPES[dtype]}" for role, dtype in given.items()),
        "rank_ordered": ordered,
        "sums_then_divides": s.backend == "ddp" and (dtypes.reduce != "fp32" or spec.world_size.bit_count() > 1),
        "communicates": communicating(spec),
        # Ranks that hold the same part of a gradient, which is to be counted once.
        "replicas": "world_size" if spec.shard_factor == 1 else "(world_size // SHARD_SIZE)" if hybrid else "",
    }


def communicating(spec: Spec) -> str:
    """Whether the micro-batch `micro` communicates gradients, as Python code."""
    interval, count = spec.sync_interval, spec.workload.accumulate
    nth, last = "(micro + 1) % SYNC == 0", "micro == ACCUMULATE - 1"
    return last if interval == count else nth if count % interval == 0 else f"{nth} or {last}"


def rank_ordered(spec: Spec) -> bool:
    """Whether a reduce-scatter of three or more ranks sums in the order of the ranks, as the lab's wire does.

    The order of two does not matter. Over NCCL the lab keeps NCCL's order.
    """
    on_gpu = spec.devices is not None and spec.devices[0] != "cpu"
    hookless = spec.strategy.backend == "fsdp1" and spec.strategy.is_hybrid
    return spec.strategy.backend != "ddp" and spec.shard_factor > 2 and not on_gpu and not hookless


# -- Python as text --------------------------------------------------------------------------------------------------


def literal(value: Any) -> str:
    """A plain value as Python code; a dict or a long list has a line for each entry."""
    flat = _flat(value)
    if isinstance(value, Mapping) and value:
        return "{\n" + "".join(f"    {_flat(k)}: {_flat(v)},\n" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)) and len(flat) > WIDTH - 20:
        return "[\n" + "".join(f"    {_flat(v)},\n" for v in value) + "]"
    return flat


def _flat(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flat(k)}: {_flat(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flat, value)) + "]"
    return repr(value)


def name_list(names: Sequence[str] | Sequence[list[str]]) -> str:
    """Names as Python code; ["h.0", "h.1", "h.2"] as a comprehension."""
    runs: list[str] = []
    rest = list(names)
    while rest:
        found = re.fullmatch(r"(.*\.)(\d+)", rest[0]) if isinstance(rest[0], str) else None
        count = 0
        while found and count < len(rest) and rest[count] == f"{found[1]}{count}":
            count += 1
        if found is None or count < 2:
            return literal(list(names))
        runs.append(f'[f"{found[1]}{{i}}" for i in range({count})]')
        rest = rest[count:]
    return " + ".join(runs)


def paragraph(text: str, indent: str = "") -> str:
    """Wrapped to the width of a script; `indent` is that of all lines but the first."""
    return textwrap.fill(
        text.strip(), WIDTH - 8, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def from_import(names: Sequence[str], module: str) -> str:
    """The import statement as isort and ruff format it."""
    ordered = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    line = f"from {module} import {', '.join(ordered)}"
    if len(line) <= 88:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in ordered) + ")"


def optimizer_call(optimizer: TorchOptimizer) -> str:
    """The call of its class as ruff formats it, behind an indented `return`."""
    given = ["groups", "lr=LR", *(f"{name}={value!r}" for name, value in optimizer.keywords.items())]
    line = ", ".join(given)
    if len(line) > 88 - len("    return torch.optim.()") - len(optimizer.class_name):
        line = f"\n    {line}\n" if len(line) <= 80 else "\n" + "".join(f"    {one},\n" for one in given)
    return f"torch.optim.{optimizer.class_name}({line})"


Recipe = tuple[str, ...]  # lines of code that draw a parameter


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model of a script. `base`: without adapters."""

    config: Any
    facts: Facts
    base: nn.Module
    skeleton: nn.Module
    name: str


def model_of(spec: Spec) -> Model:
    """The Spec's model. Raises SpecError for one that a script cannot express."""
    config = resolve(spec.workload.model, dropout=spec.workload.dropout)
    facts = facts_of(config)
    if facts.kind == "image":
        raise SpecError("workload.model", f"{facts.model_type} classifies images, and a script reads only text",
                        "choose a language model, or export the Spec itself, which contains it")  # fmt: skip
    given = spec.workload.model
    name = given if isinstance(given, str) else f"a model of type {facts.model_type}"
    skeleton = adapted(config, spec.workload.adapters)
    freeze(skeleton, spec.workload.freeze)
    return Model(config=config, facts=facts, base=build_skeleton(config), skeleton=skeleton, name=name)


def config_of(config: Any) -> dict[str, Any]:
    """The fields of a transformers config that differ from its type's defaults, "model_type" first.

    Raises:
        SpecError: it cannot be rebuilt from its fields.
    """
    own = {k: v for k, v in config.to_dict().items() if k not in _NOT_OF_A_MODEL}
    fields = dict(own)
    usual = type(config)().to_dict()
    model_type = fields.pop("model_type")
    changed = {"model_type": model_type} | {k: v for k, v in fields.items() if k not in usual or usual[k] != v}
    for found in (changed, {"model_type": model_type} | fields):
        again = AutoConfig.for_model(**found).to_dict()
        if {k: v for k, v in again.items() if k not in _NOT_OF_A_MODEL} == own:
            return found
    raise SpecError("workload.model", f"the config of {model_type} cannot be rebuilt from its fields",
                    "export the Spec itself, which contains it")  # fmt: skip


def loss_type_is_missing(model: Model) -> bool:
    """Whether transformers itself would choose another loss type for the model's class; see `build_skeleton`."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    name = type(model.skeleton).__name__
    found = re.search("|".join(LOSS_MAPPING), name)
    own = name if name in LOSS_MAPPING else found and found[0]
    return bool(getattr(model.skeleton, "loss_type", None) != own)


# -- initial values --------------------------------------------------------------------------------------------------


def initial_values(model: Model, only: Sequence[str] | None = None) -> str:
    """Code: an if-chain over the names of parameters that gives each its own draws; the most frequent one comes last.

    `only`: the parameters that are drawn; by default all.
    """
    initializer = Initializer(model.base, 0)
    drawn = [name for name, _ in model.base.named_parameters()] if only is None else only
    recipes = {name: _recipe(name, initializer.draws(name)) for name in drawn}
    endings = {name: _ending(name, recipes) for name in recipes}
    usual = Counter({endings[n]: recipes[n] for n in recipes}.values()).most_common(1)[0][0]
    lines: list[str] = []
    for recipe in dict.fromkeys(recipes.values()):
        if recipe != usual:
            wanted = dict.fromkeys(endings[n] for n, r in recipes.items() if r == recipe)
            lines += [f"{'elif' if lines else 'if'} {_condition(list(wanted))}:", *(f"    {line}" for line in recipe)]
    return "\n".join([*lines, "else:", *(f"    {line}" for line in usual)] if lines else usual)


def _recipe(name: str, draws: Iterable[Draw]) -> Recipe:
    return tuple(_call(name, draw) for draw in draws)


def _call(name: str, draw: Draw) -> str:
    """One draw as a line of code. Raises SpecError unless a function of torch.nn.init makes it."""
    known = getattr(nn.init, getattr(draw.function, "__name__", ""), None)
    if known is not draw.function or any(isinstance(v, Tensor) for v in draw.arguments.values()):
        raise SpecError("workload.model", f"{name} is initialised by code of its class, which a script cannot contain",
                        "choose another model, or export the Spec itself, which contains it")  # fmt: skip
    size, stride, offset = draw.part if draw.part is not None else ((), (), 0)
    target = "value" if draw.part is None else f"value.as_strided({tuple(size)}, {stride}, {offset})"
    given = "".join(
        f", {k}={json.dumps(v) if isinstance(v, str) else repr(float(v) if isinstance(v, float) else v)}"
        for k, v in draw.arguments.items()
    )
    draws = ", generator=generator" if "generator" in inspect.signature(draw.function).parameters else ""
    return f"nn.init.{draw.function.__name__}({target}{given}{draws})"


def _ending(name: str, recipes: Mapping[str, Recipe]) -> str:
    """The shortest end of a name, in whole words, whose parameters are all drawn alike; the whole name otherwise."""
    words = name.split(".")
    for count in range(1, len(words) + 1):
        ending = ".".join(words[-count:])
        if len({recipe for other, recipe in recipes.items() if other.endswith(ending)}) == 1:
            return ending
    raise SpecError("workload.model", f"the names of its parameters do not distinguish them ({name})",
                    "choose another model, or export the Spec itself, which contains it")  # fmt: skip


def _condition(endings: Sequence[str]) -> str:
    if len(endings) == 1:
        return f"name.endswith({json.dumps(endings[0])})"
    line = f"name.endswith(({', '.join(map(json.dumps, endings))}))"
    if len(line) < 88:
        return line
    return "name.endswith(\n    (\n" + "".join(f"        {json.dumps(e)},\n" for e in endings) + "    )\n)"
