"""What a script says of its model: the config's fields, and each parameter's initial value from the seed and its name."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig

from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.spec import Spec
from fsdp_lab.models import Initializer, build_skeleton, resolve
from fsdp_lab.models.facts import Facts, facts_of
from fsdp_lab.models.initial import Draw

Recipe = tuple[str, ...]  # lines of code that draw a parameter


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model as a script needs it."""

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


def loss_type_is_missing(model: Model) -> bool:
    """Whether transformers itself would not take the model's loss type for its class; see `build_skeleton`."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    name = type(model.skeleton).__name__
    found = re.search("|".join(LOSS_MAPPING), name)
    own = name if name in LOSS_MAPPING else found and found[0]
    return bool(getattr(model.skeleton, "loss_type", None) != own)


# -- initial values --------------------------------------------------------------------------------------------------


def initial_values(model: Model) -> str:
    """Code: an if-chain over the names of parameters that gives each its own draws; the most frequent one comes last."""
    initializer = Initializer(model.skeleton, 0)
    recipes = {name: _recipe(name, initializer.draws(name)) for name, _ in model.skeleton.named_parameters()}
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
    """One draw as a line of code. Raises SpecError for one that no function of torch's makes."""
    known = getattr(nn.init, draw.function.__name__, None)
    if known is not draw.function or any(isinstance(v, Tensor) for v in draw.arguments.values()):
        raise SpecError("workload.model", f"{name} begins with values that its class computes, which a script cannot hold",
                        "choose another model, or export the Spec itself, which carries it")  # fmt: skip
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
    raise SpecError("workload.model", f"its parameters cannot be told apart by their names ({name})",
                    "choose another model, or export the Spec itself, which carries it")  # fmt: skip


def _condition(endings: Sequence[str]) -> str:
    if len(endings) == 1:
        return f"name.endswith({json.dumps(endings[0])})"
    line = f"name.endswith(({', '.join(map(json.dumps, endings))}))"
    if len(line) < 88:
        return line
    return "name.endswith(\n    (\n" + "".join(f"        {json.dumps(e)},\n" for e in endings) + "    )\n)"
