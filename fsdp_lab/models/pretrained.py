"""`Pretrained`: the values of a model from a folder's `Weights`, under its own names, as `from_pretrained` gives them.

`initial_values` makes what a Workload says: these, or random ones by `Initializer`.

Note: names. transformers' own tables rename what is in a file: those of the model's class, old spellings (LayerNorm.gamma),
and the prefix of the base model, which is added or removed. A tied parameter has one name in a model, its first; a file may
have it under any of its names, or under several, whose values must then be equal. What a table merges or splits, such as
experts that a file has one by one, is refused."""

import glob
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from fsdp_lab.base.errors import Cause, SpecError
from fsdp_lab.models.build import Initializer
from fsdp_lab.models.weights import Weights
from fsdp_lab.spec.param_groups import matches, unmatched, unwrapped
from fsdp_lab.spec.workload import RANDOM, Workload

_FIELD = "workload.weights"
_SHOWN = 3  # names of each kind in a message
_COMPARED = 4 << 20  # elements of tied tensors at once


def initial_values(
    model: nn.Module, workload: Workload, weights: Weights | None, check: Callable[[], object] = lambda: None
) -> "Initializer | Pretrained":
    """Returns what a model begins with: random values, or those of `weights`. Raises SpecError if these do not fit.

    `check` is called between two pieces that are drawn or read; what it raises ends it."""
    if weights is None:
        return Initializer(model, workload.seed, check)
    return Pretrained(model, workload, weights, check)


class Pretrained:
    """See the module; used like an `Initializer`. Making one reads no values.

    Attributes:
        fresh: parameters that begin random.
        buffers: persistent buffers that the folder has values for; the others keep those of the model.

    Raises SpecError: a tensor is missing, has another shape, or has no place in the model, and `Workload.fresh_weights` does
    not have its name."""

    def __init__(
        self, model: nn.Module, workload: Workload, weights: Weights, check: Callable[[], object] = lambda: None
    ) -> None:
        self._weights, self._check = weights, check
        match = _Match(model, weights)
        match.refuse(workload.fresh_weights or ())
        self._sources: dict[str, list[str]] = match.sources  # name in the model -> its names in the folder, one or more
        self.fresh = tuple(name for name, _ in model.named_parameters() if name not in self._sources)
        self.buffers: Sequence[str] = tuple(name for name in match.buffers if name in self._sources)
        # Before the model is wrapped.
        self._initializer = Initializer(model, workload.seed, check) if self.fresh else None

    def read_into(self, name: str, start: int, target: Tensor) -> None:
        if name in self._sources:
            stored = name if name in self._sources[name] else self._sources[name][0]
            self._weights.read_into(stored, start, target, self._check)
        elif self._initializer is not None:
            self._initializer.read_into(name, start, target)
        else:
            raise KeyError(name)

    def check_ties(self, part: int, parts: int) -> None:
        """Compare one of `parts` equal parts of what the folder has several times for one tied parameter. Raises SpecError
        if they differ: `from_pretrained` would not tie them then."""
        for name, (first, *others) in self._sources.items():
            stored = self._weights[first]
            begin, end = (stored.numel * i // parts for i in (part, part + 1))
            for other, start in product(others, range(begin, end, _COMPARED)):
                one, two = (torch.empty(min(_COMPARED, end - start), dtype=torch.float32) for _ in range(2))
                self._weights.read_into(first, start, one, self._check)
                self._weights.read_into(other, start, two, self._check)
                if not torch.equal(one, two):
                    reason = f"{first} and {other} have different values, and are one parameter of this model, {name}"
                    hint = "set tie_word_embeddings to false in config.json, or take one of them out of the file"
                    raise SpecError(_FIELD, reason, hint, {"weights": RANDOM})


class _Match:
    """The tensors of a folder for a model: `sources`, `missing`, `misshapen` (with both shapes), `extra`."""

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        self._folder, self._count = weights.folder, len(weights.names)
        state = dict(model.state_dict(keep_vars=True))
        first = {id(p): name for name, p in model.named_parameters()}
        self.buffers = [name for name, t in state.items() if id(t) not in first]
        canonical = {name: first.get(id(t), name) for name, t in state.items()}
        shapes = {canonical[name]: tuple(t.shape) for name, t in state.items()}
        self.sources: dict[str, list[str]] = {}
        self.misshapen: dict[str, str] = {}
        self.extra: list[str] = []
        for stored, name in _renamed(model, weights.names, state).items():
            if name not in canonical:
                self.extra.append(name)
                continue
            dtype, shape = weights[stored].dtype, shapes[canonical[name]]
            if state[name].is_floating_point() and not dtype.is_floating_point:  # packed, so of another shape, too
                of = str(dtype).removeprefix("torch.")
                reason = f"{stored} in {weights.folder} is of {of}: quantised weights cannot be trained"
                raise SpecError(_FIELD, reason, "give those that were quantised", {"weights": RANDOM})
            if weights[stored].fits(shape):
                self.sources.setdefault(canonical[name], []).append(stored)
            else:
                self.misshapen[canonical[name]] = f"{list(weights[stored].shape)} instead of {list(shape)}"
        for name in self.misshapen:  # under another of its names it may fit, but which is right is not known
            self.sources.pop(name, None)
        missing = [name for name in shapes if name not in self.sources and name not in self.misshapen]
        self.missing, self.extra = _but_ignored(model, missing, self.extra)
        self._names, self._shapes = [*shapes, *self.extra], shapes

    def refuse(self, fresh: Sequence[str]) -> None:
        """Raises one SpecError that names what does not fit, but for what `fresh` accepts."""

        def others(names: Iterable[str]) -> list[str]:
            return [name for name in names if not matches(name, fresh)]

        if (wrong := unmatched(fresh, self._names)) is not None:
            reason = f"{wrong!r} matches no tensor of the model or of {self._folder}"
            hint = f"give a pattern of names such as {self._names[0]}, {self._names[-1]}, or leave it out"
            right = [p for p in fresh if p != wrong] or None
            raise SpecError("workload.fresh_weights", reason, hint, {"fresh_weights": right})
        missing, misshapen, extra = others(self.missing), others(self.misshapen), others(self.extra)
        if not (missing or misshapen or extra):
            return
        shapes = [f"{name}: {self.misshapen[name]}" for name in misshapen]
        found = {"lack {} of the model's tensors": missing, "have {} of another shape": shapes}
        found["have {} that it has no place for"] = extra
        said = [
            f"{what.format(len(names))} ({', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''})"
            for what, names in found.items()
            if names
        ]
        patterns = [*fresh, *smallest_patterns({*missing, *misshapen, *extra}, self._names)]
        hint = f"give this model's weights, or let those begin random: fresh_weights {json.dumps(patterns)}"
        fix: dict[str, Any] = {"fresh_weights": patterns}
        if wrapped := next((n for n in extra if (inner := unwrapped(n)) != n and inner in self._shapes), ""):
            said.append(f"their names are those of a wrapped model: {wrapped} is {unwrapped(wrapped)}")
            hint = "write them again by fsdp_lab.unwrap_names(folder, to), and give that folder"
            fix = {"weights": RANDOM}
        reason = f"the {self._count} tensors in {self._folder} {', and '.join(said)}"
        raise SpecError(_FIELD, reason, hint, fix, Cause.CHECKPOINT if wrapped else None)


def smallest_patterns(wanted: Collection[str], names: Iterable[str]) -> list[str]:
    """The fewest patterns "module.*", or names, that have all of `wanted` and no other of `names`."""
    others = set(names) - set(wanted)
    patterns: dict[str, None] = {}
    for name in sorted(wanted):
        words = name.split(".")
        prefixes = (".".join(words[:count]) + "." for count in range(1, len(words)))
        prefix = next((p for p in prefixes if not any(other.startswith(p) for other in others)), None)
        patterns[glob.escape(name) if prefix is None else f"{glob.escape(prefix)}*"] = None
    return list(patterns)


def _renamed(model: nn.Module, stored: Sequence[str], state: Mapping[str, Any]) -> dict[str, str]:
    """Name in the folder -> name in the model, as `convert_and_load_state_dict_in_model` of transformers finds it."""
    if not isinstance(model, PreTrainedModel):
        return {name: name for name in stored}
    table: list[Any] = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    rename: Callable[..., tuple[str, str | None]] = rename_source_key
    names: dict[str, str] = {}
    for name in sorted(stored, key=cast(Any, dot_natural_key)):
        new, converted = rename(name, renamings, converters, model.base_model_prefix, state)
        if new not in state and name in state:
            new, converted = rename(name, [], [], model.base_model_prefix, state)
        if converted is not None and new in state:
            reason = f"{name} must be merged or split to become {new}, which cannot be read by range"
            hint = "open it with from_pretrained, then model.save_pretrained(folder, save_original_format=False)"
            raise SpecError(_FIELD, reason, hint, {"weights": RANDOM})
        names[name] = new
    return names


def _but_ignored(model: nn.Module, missing: Iterable[str], extra: Iterable[str]) -> tuple[list[str], list[str]]:
    """Leaves out what the model's class says may be missing or extra, such as position ids in old files."""
    names = SimpleNamespace(missing_keys=dict.fromkeys(missing), unexpected_keys=dict.fromkeys(extra))
    if isinstance(model, PreTrainedModel):
        model._adjust_missing_and_unexpected_keys(cast(Any, names))
    kept_missing, kept_extra = set(names.missing_keys), set(names.unexpected_keys)
    return [n for n in missing if n in kept_missing], [n for n in extra if n in kept_extra]
