"""Low-rank adapters in a model (`Workload.lora`), by peft: `adapted`, their initial values, and a folder in peft's format.

peft puts a layer of its own around each target, inside of the model, whose class and other names stay. What it wraps is
called "base_layer" then; `base_name` is the name without that. All parameters but those of adapters are frozen.

Note: initial values. Those of the model are drawn or read as without adapters, so that adding them changes no loss before
the first update: one of A and B begins with zeros. The other is drawn as peft draws it, from (seed, name)."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models.build import Draw, Initializer, Values, build_skeleton, parameters_on_meta
from fsdp_lab.models.configs import first_line
from fsdp_lab.models.presets import facts_of
from fsdp_lab.spec.workload import LORA_FIELD as FIELD, Lora

if TYPE_CHECKING:
    from peft import LoraConfig

_ADAPTER = "default"  # peft's name of the one adapter
_BASE = ".base_layer"
_TASKS = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}  # peft's, by the kind of model
_PARTS = re.compile(rf"\.lora_(embedding_)?([AB])\.{_ADAPTER}(?=\.|$)")


def adapted(config: PreTrainedConfig, lora: Lora | None) -> PreTrainedModel:
    """`build_skeleton`, with adapters if there are to be any. Raises SpecError, also for targets that the model has not."""
    model = build_skeleton(config)
    if lora is None:
        return model
    inject = _peft().inject_adapter_in_model
    try:
        with parameters_on_meta(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on layouts that peft then corrects by itself
            inject(peft_config(lora), model)
    except ValueError as e:
        matrices = [name for name, p in model.named_parameters() if p.ndim > 1 and name.endswith(".weight")]
        names = sorted({part for name in matrices if not (part := name.split(".")[-2]).isdecimal()})
        reason = f"no adapters can be put into this model ({first_line(e)})"
        raise SpecError(FIELD, reason, f"give targets, some of {', '.join(names[:12])}", {"lora": None}) from e
    return model


def base_name(name: str) -> str:
    """The name of a parameter, buffer or module in the model without adapters."""
    return name.replace(f"{_BASE}.", ".").removesuffix(_BASE)


def peft_config(lora: Lora) -> LoraConfig:
    targets = None if lora.targets is None else list(lora.targets)
    config: LoraConfig = _peft().LoraConfig(r=lora.r, lora_alpha=lora.scale, target_modules=targets)
    return config


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        hint = "install it with \"pip install 'fsdp-lab[lora]'\", or leave lora out"
        raise SpecError(FIELD, "adapters are peft's, which is not installed", hint, {"lora": None}) from None
    return peft


class AdaptedValues:
    """Initial values of a model with adapters: `base` has those of the model without."""

    def __init__(self, base: Values, model: nn.Module, seed: int, check: Callable[[], object] = lambda: None) -> None:
        self._base = base
        names = {base_name(name): name for name, _ in model.named_buffers()}
        self.buffers: Sequence[str] = tuple(names.get(name, name) for name in base.buffers)
        draws = {name: [_draw(name)] for name, _ in model.named_parameters() if is_adapter(name)}
        self._adapters, self._own = Initializer(model, seed, check, draws), frozenset(draws)

    def read_into(self, name: str, start: int, target: Tensor) -> None:
        if name in self._own:
            self._adapters.read_into(name, start, target)
        else:
            self._base.read_into(base_name(name), start, target)


def is_adapter(name: str) -> bool:
    """Returns whether it is the name of an adapter's parameter."""
    return _PARTS.search(name) is not None


def _draw(name: str) -> Draw:
    """Returns peft's draw. A of an embedding begins with zeros, and B of others."""
    parts = _PARTS.search(name)
    assert parts is not None
    if parts[1]:
        return Draw(nn.init.zeros_ if parts[2] == "A" else nn.init.normal_, {})
    return Draw(nn.init.kaiming_uniform_, {"a": math.sqrt(5)}) if parts[2] == "A" else Draw(nn.init.zeros_, {})


def save_adapters(model: PreTrainedModel, values: Mapping[str, Tensor], folder: Path, base: str) -> None:
    """Writes a folder for `PeftModel.from_pretrained(model, folder)`; if `base` is where the model itself is, also for
    `AutoPeftModelForCausalLM.from_pretrained(folder)` and its like."""
    from safetensors.torch import save_file

    config: Any = model.peft_config[_ADAPTER]  # with the targets that peft chose
    config.base_model_name_or_path, config.inference_mode = base, True
    config.task_type = _TASKS.get(facts_of(model.config).kind)
    config.save_pretrained(str(folder))
    tensors = {}
    for name in filter(is_adapter, values):
        saved = _PARTS.sub(lambda part: part[0].removesuffix(f".{_ADAPTER}"), name)
        tensors[f"base_model.model.{saved}"] = values[name].contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
