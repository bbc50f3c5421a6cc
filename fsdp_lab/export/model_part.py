"""The model of a script: its config written out, and each parameter's first value from the seed and its name."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig

from fsdp_lab.export.source import Part, fill, literal
from fsdp_lab.models import Initializer, build_skeleton, resolve
from fsdp_lab.models.facts import Facts, facts_of
from fsdp_lab.models.initial import Draw
from fsdp_lab.models.presets import Kind
from fsdp_lab.spec import Spec, SpecError

AUTO: Mapping[Kind, str] = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
Recipe = tuple[str, ...]  # lines of code that draw a parameter


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the parts of a script ask of the model."""

    config: Any
    facts: Facts
    skeleton: nn.Module
    name: str


def model_of(spec: Spec) -> Model:
    """Raises SpecError for a model that a script cannot hold."""
    config = resolve(spec.workload.model)
    facts = facts_of(config)
    if facts.kind == "image":
        raise SpecError("workload.model", f"{facts.model_type} classifies images, and a script reads text alone",
                        "choose a language model, or export the Spec itself, which carries it")  # fmt: skip
    given = spec.workload.model
    name = given if isinstance(given, str) else f"a model of type {facts.model_type}"
    return Model(config=config, facts=facts, skeleton=build_skeleton(config), name=name)


def model_part(model: Model, *, deferred: bool) -> Part:
    """`deferred`: parameters get memory only when they are sharded, and values then (FSDP2)."""
    auto = AUTO[model.facts.kind]
    attention = getattr(model.skeleton.config, "_attn_implementation", "sdpa")
    loss = getattr(model.skeleton, "loss_type", None) != _own_loss(model)
    build = fill(
        _BUILD_DEFERRED if deferred else _BUILD,
        auto=auto,
        attention=literal(attention),
        loss='model.loss_type = "ForCausalLM"  # transformers would take it too, with a warning' if loss else "",
    )
    initial = fill(_INITIAL, rules="\n".join(_rules(model)))
    return Part(
        imports=("hashlib", "torch", "torch:nn", "transformers:AutoConfig", f"transformers:{auto}")
        + (("contextlib",) if deferred else ()),
        constants=f"CONFIG = {literal(config_of(model.config))}  # of transformers",
        functions=f"{initial}\n\n\n{build}",
    )


def config_of(config: Any) -> dict[str, Any]:
    """The fields of a transformers config that differ from its type's defaults, "model_type" first.

    Raises:
        SpecError: it cannot be made again from its fields.
    """
    fields = {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "architectures")}
    usual = type(config)().to_dict()
    model_type = fields.pop("model_type")
    few = {"model_type": model_type} | {k: v for k, v in fields.items() if k not in usual or usual[k] != v}
    for found in (few, {"model_type": model_type} | fields):
        if AutoConfig.for_model(**found).to_dict() == config.to_dict():
            return found
    raise SpecError("workload.model", f"the config of {model_type} cannot be made again from its fields",
                    "export the Spec itself, which carries it")  # fmt: skip


def _own_loss(model: Model) -> str | None:
    """What transformers itself takes for this class; see `build_skeleton`."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    name = type(model.skeleton).__name__
    found = re.search("|".join(LOSS_MAPPING), name)
    return name if name in LOSS_MAPPING else found and found[0]


# -- initial values --------------------------------------------------------------------------------------------------


def _rules(model: Model) -> list[str]:
    """An if-chain over the names of parameters, that gives each its own draws; the most frequent draw is the last."""
    initializer = Initializer(model.skeleton, 0)
    recipes = {name: _recipe(name, initializer.draws(name)) for name, _ in model.skeleton.named_parameters()}
    endings = {name: _ending(name, recipes) for name in recipes}
    usual = Counter({endings[n]: recipes[n] for n in recipes}.values()).most_common(1)[0][0]
    lines: list[str] = []
    for recipe in dict.fromkeys(recipes.values()):
        if recipe != usual:
            wanted = dict.fromkeys(endings[n] for n, r in recipes.items() if r == recipe)
            lines += [f"{'elif' if lines else 'if'} {_condition(list(wanted))}:", *(f"    {line}" for line in recipe)]
    return [*lines, "else:", *(f"    {line}" for line in usual)] if lines else list(usual)


def _recipe(name: str, draws: Iterable[Draw]) -> Recipe:
    return tuple(_call(name, draw) for draw in draws)


def _call(name: str, draw: Draw) -> str:
    """One draw as a line of code. Raises SpecError for one that no function of torch's makes."""
    known = getattr(nn.init, draw.function.__name__, None)
    if known is not draw.function or any(isinstance(v, Tensor) for v in draw.arguments.values()):
        raise SpecError("workload.model", f"{name} begins with values that its class computes, which a script cannot hold",
                        "choose another model, or export the Spec itself, which carries it")  # fmt: skip
    size, stride, offset = draw.part if draw.part is not None else ((), (), 0)
    target = "value" if draw.part is None else f"value.as_strided({tuple(size)}, {stride}, {offset})"
    given = "".join(f", {k}={float(v) if isinstance(v, float) else literal(v)}" for k, v in draw.arguments.items())
    draws = ", generator=generator" if "generator" in inspect.signature(draw.function).parameters else ""
    return f"nn.init.{draw.function.__name__}({target}{given}{draws})"


def _ending(name: str, recipes: Mapping[str, Recipe]) -> str:
    """The shortest end of a name, in whole words, whose parameters are all drawn alike; the whole name otherwise."""
    words = name.split(".")
    for count in range(1, len(words) + 1):
        ending = ".".join(words[-count:])
        if len({recipe for other, recipe in recipes.items() if other.endswith(ending)}) == 1:
            return ending
    raise SpecError("workload.model", f"its parameters cannot be told apart by their names ({name})",
                    "choose another model, or export the Spec itself, which carries it")  # fmt: skip


def _condition(endings: Sequence[str]) -> str:
    if len(endings) == 1:
        return f"name.endswith({literal(endings[0])})"
    line = f"name.endswith(({', '.join(map(literal, endings))}))"
    if len(line) < 88:
        return line
    return "name.endswith(\n    (\n" + "".join(f"        {literal(e)},\n" for e in endings) + "    )\n)"


_INITIAL = '''
    def initial_value(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
        """A parameter's first value: from the seed and its name alone, so that it is the same however it is sharded."""
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        value = torch.empty(shape)
        @rules
        return value
'''

_BUILD = '''
    @torch.no_grad()
    def build_model(seed: int) -> nn.Module:
        """The whole model, the same on every rank."""
        config = AutoConfig.for_model(**CONFIG)
        model = $auto.from_config(config, attn_implementation=$attention, dtype=torch.float32)
        @loss
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, seed))
        return model
'''

_BUILD_DEFERRED = '''
    @contextlib.contextmanager
    def parameters_on_meta():
        """Modules built inside have parameters without memory, and buffers with their values.

        (`with torch.device("meta")` would lose the buffers that a constructor computes.)
        """
        register = nn.Module.register_parameter

        def register_on_meta(module, name, parameter):
            if parameter is not None and not parameter.is_meta:
                parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            register(module, name, parameter)

        nn.Module.register_parameter = register_on_meta
        try:
            yield
        finally:
            nn.Module.register_parameter = register


    def build_model() -> nn.Module:
        """Without memory for its parameters: no rank ever holds more of them than its shards."""
        config = AutoConfig.for_model(**CONFIG)
        with parameters_on_meta():
            model = $auto.from_config(config, attn_implementation=$attention, dtype=torch.float32)
        @loss
        return model
'''
