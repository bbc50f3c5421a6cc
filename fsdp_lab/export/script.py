"""`script`: a Spec as a torchrun script in plain torch, and the files that it reads. script.py.jinja has its functions; the
docstring, and the imports and constants that they use, come from here.

The lab's own engine is replaced by FSDP2, or by DDP if nothing is sharded (`peer`). What they cannot do is refused by the
rules of `Spec` itself. A field that has no effect under a backend, and a difference to the run, is a remark at the top."""

import ast
import json
import platform
import re
import symtable
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from torch import nn

from fsdp_lab.backends.base import check_optimizer
from fsdp_lab.base import __version__
from fsdp_lab.base.errors import SpecError
from fsdp_lab.export.files import SPEC_INSTEAD, SUFFIX, Files
from fsdp_lab.models.build import freeze
from fsdp_lab.models.own import skeleton_of
from fsdp_lab.models.sources import MASKED_SHARE
from fsdp_lab.models.tokens import open_tokenizer
from fsdp_lab.models.wrapping import blocks, units
from fsdp_lab.spec.spec import BACKEND_TRAITS, Spec
from fsdp_lab.spec.workload import CODE_FIELDS, Workload

WIDTH = 92
ROUNDING = "losses agree within rounding, not to the bit"
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
MODULES = "argparse contextlib dataclasses fnmatch functools hashlib itertools math os random time"
STANDARD = (*(f"import {name}" for name in MODULES.split()), "from pathlib import Path")
OTHERS = (
    "import numpy as np",
    "import torch",
    "import torch.distributed as dist",
    "from safetensors.torch import save_file",
    "from torch import nn",
    "from torch.distributed import fsdp",
    "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper",
    "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict",
    "from torch.distributed.device_mesh import init_device_mesh",
    "from torch.nn.parallel import DistributedDataParallel",
    "from torch.utils._pytree import tree_map",
    "from torch.utils.data import default_collate",
)


def script(spec: Spec) -> tuple[str, Files | None]:
    """The text of the script, and what it reads, which is nothing with code of the user's own. Raises SpecError."""
    check_optimizer(spec.workload)
    spec, remarks = peer(spec)
    w = spec.workload
    files, own = (None, own_code(w)) if w.is_own else (Files(w), None)
    skeleton = files.model if files is not None else skeleton_of(w)
    freeze(skeleton, w.freeze)
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["literal"] = literal
    values: dict[str, Any] = {"s": spec.strategy, "w": w, "own": own, **_model(w, files), **_units(spec, skeleton)}
    body = environment.get_template("script.py.jinja").render(values | _sharding(spec) | _training(spec))
    head = _docstring(spec, type(skeleton).__name__, (*remarks, *_inexact(spec)), files)
    constants = _used(_constants(spec, skeleton, files), body)
    standard, others = _used(STANDARD, "\n".join([*constants, body])), _used(OTHERS, body)
    if own is None:
        others.append(f"from transformers import {type(skeleton).__name__}")
    lines = [head, *standard, "", *others, "", *constants]
    text = "\n\n\n".join(["\n".join(lines), *([own] if own is not None else []), body])
    if own is not None:
        check_names(text)
    return text + "\n", files


def _used(lines: Iterable[str], body: str) -> list[str]:
    """The imports and assignments whose names occur in the body; of a module, with what it has."""
    ends = {"import": r"\.", "from": r"\b"}
    names = ((line, line.split(" = ")[0].split()[-1], ends.get(line.split()[0], r"\b")) for line in lines)
    return [line for line, name, end in names if re.search(rf"(?<![.\w]){name}{end}", body)]


def _docstring(spec: Spec, model: str, remarks: Sequence[str], files: Files | None) -> str:
    libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
    folder = f"the folder of its own name that ends in {SUFFIX}"
    reads = f"It reads samples and initial values from {folder}. " if files else ""
    codes = (code for field in CODE_FIELDS if isinstance(code := getattr(spec.workload, field), str) and ":" in code)
    if modules := ", ".join(dict.fromkeys(code.partition(":")[0] for code in codes)):
        reads += f"It imports {modules}, which must lie beside it, or be installed. "
    about = (
        "Each step prints its mean loss, unrounded. In fp32 on CPUs, with the same number of ranks, versions and processor, "
        "losses equal those of the run bit for bit, unless a note below says otherwise; elsewhere within rounding. "
        f"{reads}It neither evaluates nor writes checkpoints; --save writes what was trained. Written by fsdp_lab "
        f"{__version__} with {libraries} and Python {platform.python_version()}."
    )
    notes = ["", "Notes on that run:", *(paragraph(f"- {r}.", "  ") for r in remarks)]
    ranks = f"{spec.world_size} rank{'s' if spec.world_size > 1 else ''}"
    first = f"Train a {model} under {spec.strategy.traits.title}, {spec.strategy.sharding}, on {ranks}."
    command = f"    torchrun --nproc-per-node {spec.world_size} THIS_FILE --steps 100"
    return "\n".join([f'"""{first}', "", command, "", paragraph(about), *(notes if remarks else []), '"""', ""])


def paragraph(text: str, indent: str = "") -> str:
    """Wrapped to the width of a file's comments; `indent` is that of all lines but the first."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _inexact(spec: Spec) -> Iterator[str]:
    """Cases where torch's own backend may give other bits than in the lab."""
    s = spec.strategy
    if s.backend == "fsdp1" and s.is_hybrid and spec.shard_factor > 2:
        how = "so over Gloo it adds within shard groups in another order than the run"
        yield f"sharding: FSDP1 accepts no hook under hybrid sharding, {how}, and {ROUNDING}"
    if s.backend == "ddp" and spec.world_size > 2 and (spec.devices is None or spec.devices[0] == "cpu"):
        yield f"backend: over Gloo, DDP adds the ranks' gradients in another order than the run, so that {ROUNDING}"
    if s.backend == "fsdp1" and s.dtypes.reduce == "fp16":
        how = "FSDP1 divides by a part of the ranks before the sum, in the lab after it"
        yield f"precision: {how}, so that in fp16 another step may overflow and be skipped"


# -- the backend of torch ----------------------------------------------------------------------------------------------


def peer(spec: Spec) -> tuple[Spec, tuple[str, ...]]:
    """The Spec to export, with one of torch's backends, and remarks, sentences without a full stop. Raises SpecError for a
    field that torch's backends cannot express."""
    if spec.strategy.is_yours:
        reason = "your own engine needs the lab, which calls it"
        hint = f"use backend fsdp2, or ddp for no_shard, {SPEC_INSTEAD}"
        raise SpecError("strategy.backend", reason, hint, {"backend": "fsdp2"})
    if not spec.strategy.is_lab:
        return spec, tuple(_without_effect(spec))
    backend = "ddp" if spec.strategy.is_replicated else "fsdp2"
    changes = {"backend": backend, "gather": "copy"}
    refused = spec.validate(**changes)
    if refused is not None:
        # The lab's engine supports the field. Another way out may be named, backend lab, which the Spec has already.
        reason = f"{refused.reason}, and outside the lab {BACKEND_TRAITS[backend].title} replaces the lab's engine"
        raise SpecError(refused.field, reason, f"{refused.first_hint}, {SPEC_INSTEAD}", refused.fix)
    exported = spec.replace(**changes)
    title = exported.strategy.traits.title
    remarks = [f"It was trained by the lab's own engine; {title} does the same work here", *_differs(spec, exported)]
    return exported, (*remarks, *_without_effect(exported))


def gpus(spec: Spec) -> list[str]:
    """The GPUs that a Spec names, by rank; empty if it names none. Raises SpecError if two ranks share one."""
    named = [name for name in spec.devices or () if name != "cpu"]
    if len(set(named)) < len(named):
        reason = "two ranks share a GPU, and NCCL supports one rank per GPU"
        raise SpecError("devices", reason, f"give each rank a GPU of its own, {SPEC_INSTEAD}", {"devices": None})
    return named


def _differs(spec: Spec, exported: Spec) -> Iterator[str]:
    """Differences between the lab's engine and the backend that replaces it, under the same Spec."""
    s, traits = spec.strategy, exported.strategy.traits
    if s.dtypes.param != "fp32" and traits.autocasts:
        yield f"precision: DDP computes in {s.dtypes.param} by autocast, the lab's engine by casting the parameters"
    if spec.workload.torch_optimizer.is_fused:
        how = "the rounding of a fused update depends on how parameters are sharded"
        yield f"optimizer_args: {how}, so that {ROUNDING}"
    if s.gather != "copy":
        yield f"gather: {traits.title} copies what it gathers, which takes memory and time that {s.gather} does not"
    replicas = spec.world_size // spec.shard_factor
    if replicas > 2:
        how = f"gradients of {replicas} replicas are summed in pieces of another size, in another order"
        yield f"sharding: {how}, so that {ROUNDING}"


def _without_effect(spec: Spec) -> Iterator[str]:
    """Fields that are set and have no effect."""
    s, w = spec.strategy, spec.workload
    if spec.link is not None:
        yield f"link: {spec.link!r} was emulated; it changes times, not results; here the real link is used"
    if s.sync != "every" and w.accumulate == 1:
        yield f"sync: {s.sync} has no effect with one micro-batch a step"
    if not s.traits.has_units:
        for name, usual in (("wrap", "block"), ("backward_prefetch", 1)):
            if (value := getattr(s, name)) != usual:
                yield f"{name}: {value} has no effect under DDP, which has no units"
    if not s.backward_prefetch and s.backward_prefetch_point != "before":
        yield f"backward_prefetch_point: {s.backward_prefetch_point} has no effect without prefetching"


# -- what the template is given --------------------------------------------------------------------------------------


def _constants(spec: Spec, skeleton: nn.Module, files: Files | None) -> Iterator[str]:
    """All that a script may use, as assignments."""
    w, s = spec.workload, spec.strategy
    tokenizer = open_tokenizer(w) if files is not None and files.kind == "masked" else None
    groups = [
        {"match": list(g.match), **{n: v for n in ("lr", "weight_decay") if (v := getattr(g, n)) is not None}}
        for g in w.param_groups or ()
    ]
    unit_names = _unit_names(spec, skeleton) if s.traits.has_units else []
    for name, value, comment in (
        ("WEIGHTS", str(files.weights) if files is not None else "", ""),
        ("MASK", tokenizer and tokenizer.mask_id, "the id that is shown in place of most hidden words"),
        ("SPECIAL", tokenizer and list(tokenizer.special_ids), "ids that are never hidden"),
        ("VOCABULARY", tokenizer and tokenizer.vocabulary, ""),
        ("MASKED_SHARE", MASKED_SHARE, ""),
        ("HELD_OUT", w.held_out, "the fraction of the samples, at the end, that is not trained on"),
        ("SEED", w.seed, ""),
        ("MICRO_BATCH", w.micro_batch, "samples of one rank in one forward"),
        ("ACCUMULATE", w.accumulate, "forwards and backwards in one step"),
        ("SYNC", spec.sync_interval, "of them from one reduction of gradients to the next"),
        ("BLOCKS", _names_of(skeleton, blocks(skeleton)), "the repeated layers"),
        ("RECOMPUTE_EVERY", int(s.recompute.partition(":")[2] or 1), "the distance between two that are recomputed"),
        ("UNITS", unit_names, "modules that are sharded as one unit"),
        ("SHARD_SIZE", spec.shard_factor, "ranks that share one replica of the model"),
        ("FORWARD_PREFETCH", s.forward_depth, "units that are gathered ahead"),
        ("BACKWARD_PREFETCH", s.backward_prefetch, "units that are gathered ahead"),
        ("LR", w.lr, ""),
        ("WARMUP_STEPS", w.rates.warmup_steps, ""),
        ("DECAY_STEPS", w.rates.decay_steps, "the step from which the rate stays at its end"),
        ("LR_END", w.rates.end, "the rate there, as a share of LR"),
        ("FREEZE", list(w.freeze or ()), "patterns of parameters that are not trained"),
        ("PARAM_GROUPS", groups, "parameters with rates of their own; the first that matches counts"),
        ("WEIGHT_DECAY", w.weight_decay, "of matrices only"),
        ("CLIP_NORM", w.clip_norm, ""),
        ("DEVICES", gpus(spec), "by rank"),
    ):
        text = f"{name} = {literal(value)}"
        is_long = "\n" in text or len(text) > 60
        yield (f"# {comment}\n{text}" if is_long else f"{text}  # {comment}") if comment else text
    yield f'FILES = Path(__file__).with_suffix("{SUFFIX}")'


def _model(w: Workload, files: Files | None) -> dict[str, Any]:
    if files is None:
        return {"masked": False, "weighs": False}
    folder = 'WEIGHTS, config=FILES / "model"' if files.weights is not None else 'FILES / "model"'
    config = files.model.config
    has_experts = any("expert" in name and not name.startswith("_") for name in vars(config))
    more = f", experts_implementation={literal(config._experts_implementation)}" if has_experts else ""
    loads = {"model_class": type(files.model).__name__, "from_pretrained": f"{folder}, dtype=torch.float32{more}"}
    return {**loads, "masked": files.kind == "masked", "weighs": files.weighs}


def _names_of(skeleton: nn.Module, modules: Iterable[nn.Module]) -> list[str]:
    names = {id(m): name for name, m in skeleton.named_modules()}
    return [names[id(m)] for m in modules]


def _unit_names(spec: Spec, skeleton: nn.Module) -> list[Any]:
    """Returns the name of each unit's module, or a list where one has several. Raises SpecError if there are no units."""
    groups = [_names_of(skeleton, group) for group in units(skeleton, spec.strategy.wrap)]
    return groups if any(len(group) > 1 for group in groups) else [group[0] for group in groups]


def _units(spec: Spec, skeleton: nn.Module) -> dict[str, str]:
    """The list of units as code; "" if there are none but the root."""
    names = _unit_names(spec, skeleton) if spec.strategy.traits.has_units else []
    if not names:
        return {"units": "", "unit_heads": ""}
    constant = "BLOCKS" if names == _names_of(skeleton, blocks(skeleton)) else "UNITS"
    if isinstance(names[0], list):
        of_each = "[model.get_submodule(name) for name in names]"
        return {"units": f"[{of_each} for names in {constant}]", "unit_heads": "[unit[0] for unit in units]"}
    return {"units": f"[model.get_submodule(name) for name in {constant}]", "unit_heads": "units"}


def _sharding(spec: Spec) -> dict[str, Any]:
    """`options`: the arguments of fully_shard or FSDP1, as code."""
    s, dtypes = spec.strategy, spec.strategy.dtypes
    roles: dict[str, str | None] = {"param": dtypes.param, "reduce": dtypes.reduce}
    options: dict[str, str] = {}
    if s.backend == "fsdp2":
        options |= {"mesh": "mesh", "reshard_after_forward": str(s.reshards)}
        roles |= {"param": None} if dtypes.param == "fp32" else {}
        if (dtypes.param, dtypes.reduce, dtypes.output) != ("fp32", "fp32", None):
            options["mp_policy"] = f"fsdp.MixedPrecisionPolicy({_dtype_arguments(roles)})"
        if s.offload == "all":
            options["offload_policy"] = 'fsdp.CPUOffloadPolicy(pin_memory=device.type == "cuda")'
    elif s.backend == "fsdp1":
        hidden = "_" if s.is_hybrid and not s.reshards_after_forward else ""  # torch has no public name for it
        options |= {"device_mesh": "mesh", "device_id": "device", "use_orig_params": "True"}
        options["sharding_strategy"] = f"fsdp.ShardingStrategy.{hidden}{s.sharding.upper()}"
        precision = f"fsdp.MixedPrecision({_dtype_arguments({**roles, 'buffer': dtypes.buffer})})"
        comes_after = s.backward_prefetch > 0 and s.backward_prefetch_point == "after"
        others = (
            ("auto_wrap_policy", "fsdp.wrap.CustomPolicy(lambda module: module in units)", s.wrap != "whole"),
            ("mixed_precision", precision, s.precision != "fp32"),
            ("cpu_offload", "fsdp.CPUOffload(offload_params=True)", s.offload == "all"),
            ("forward_prefetch", "True", s.forward_depth > 0),
            ("backward_prefetch", "None", s.backward_prefetch == 0),
            ("backward_prefetch", "fsdp.BackwardPrefetch.BACKWARD_POST", comes_after),
            ("limit_all_gathers", "False", not s.limit_all_gathers),
        )
        options |= {name: code for name, code, is_set in others if is_set}
    # A reduce-scatter of three or more ranks sums in the order of the ranks, as the lab's wire does; that of two has one
    # order. Over NCCL the lab keeps NCCL's order.
    on_gpu = spec.devices is not None and spec.devices[0] != "cpu"
    hookless = s.backend == "fsdp1" and s.is_hybrid
    return {
        "options": options,
        "output_dtype": "" if dtypes.output is None else DTYPES[dtypes.output],
        "rank_ordered": s.traits.has_units and spec.shard_factor > 2 and not on_gpu and not hookless,
        "sums_then_divides": s.backend == "ddp" and (dtypes.reduce != "fp32" or spec.world_size.bit_count() > 1),
        "sent_as": "" if dtypes.reduce == "fp32" else f".to({DTYPES[dtypes.reduce]})",
        "buffer_dtype": "" if s.backend == "fsdp1" or dtypes.buffer in (None, "fp32") else DTYPES[dtypes.buffer],
    }


def _training(spec: Spec) -> dict[str, Any]:
    s, w, dtypes = spec.strategy, spec.workload, spec.strategy.dtypes
    is_fp16 = "fp16" in (dtypes.param, dtypes.reduce)
    loss = "OWN_LOSS(model, batch).reshape(())" if w.is_own else "model(**batch).loss"
    device = 'torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")'
    if spec.devices is not None:
        device = 'torch.device(DEVICES[int(os.environ["RANK"])])' if gpus(spec) else 'torch.device("cpu")'
    return {
        "is_fp16": is_fp16,
        "needs_norm": w.clip_norm is not None or is_fp16,
        "autocast": DTYPES[dtypes.param] if s.traits.autocasts and dtypes.param != "fp32" else "",
        "loss": loss + (".float()" if dtypes.param != "fp32" or dtypes.output is not None else ""),
        "skips_sync": spec.sync_interval > 1,
        "gradient": "p.grad.to_local()" if s.backend == "fsdp2" else "p.grad",
        # Ranks that hold the same part of a gradient, which is to be counted once.
        "replicas": spec.world_size // spec.shard_factor,
        "device": device,
    }


def _dtype_arguments(roles: Mapping[str, str | None]) -> str:
    return ", ".join(f"{role}_dtype={DTYPES[dtype]}" for role, dtype in roles.items() if dtype is not None)


def literal(value: Any) -> str:
    """A plain value as Python code; numbered names as a comprehension, and what is long on several lines."""
    stem = value[0][:-1] if isinstance(value, list) and len(value) > 1 and str(value[0]).endswith(".0") else ""
    if stem and value == [f"{stem}{i}" for i in range(len(value))]:
        return f'[f"{stem}{{i}}" for i in range({len(value)})]'
    if isinstance(value, list) and len(json.dumps(value)) > WIDTH - 12:
        return "[\n" + "".join(f"    {json.dumps(each)},\n" for each in value) + "]"
    return json.dumps(value) if isinstance(value, (str, list)) else repr(value)


# -- the user's own model, loss and data -----------------------------------------------------------------------------


def own_code(workload: Workload) -> str:
    """The user's code, each statement once, which ends by naming its three parts. Raises SpecError."""
    imports: dict[str, None] = {}
    parts: dict[str, None] = {}
    names: dict[str, str] = {}
    for field in CODE_FIELDS:
        code = getattr(workload, field)
        if isinstance(code, str):
            module, _, names[field] = code.partition(":")
            source = f"from {module} import {names[field].partition('.')[0]}"
        else:
            names[field], source = code.name, code.source
            if (refusal := code.refusal(f"workload.{field}")) is not None:
                raise refusal
        for node in ast.parse(source).body:
            first = min([node.lineno, *(int(d.lineno) for d in getattr(node, "decorator_list", ()))])
            kept = imports if isinstance(node, (ast.Import, ast.ImportFrom)) else parts
            kept["\n".join(source.splitlines()[first - 1 : node.end_lineno])] = None
    named = f"OWN_MODEL, OWN_LOSS, OWN_DATA = {names['model']}, {names['loss']}, {names['data']}"
    return "\n\n\n".join(filter(None, ["\n".join(imports), *parts, named]))


def check_names(script: str) -> None:
    """Raises SpecError if two statements of a script define one name in two ways, or import it from two places."""
    meant: dict[str, str] = {}
    for node in ast.parse(script).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            tops = [(a, a.name if a.asname or home else a.name.partition(".")[0]) for a in node.names]
            defined = {a.asname or top: home + top for a, top in tops}
        else:
            symbols = symtable.symtable(text := ast.unparse(node), "script", "exec").get_symbols()
            defined = {s.get_name(): text for s in symbols if s.is_assigned() or s.is_imported()}
        for name, meaning in defined.items():
            if meant.setdefault(name, meaning) != meaning:
                raise SpecError("workload.model", f"{name} has two meanings in a script", f"rename it, {SPEC_INSTEAD}")
