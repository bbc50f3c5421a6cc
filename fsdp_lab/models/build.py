"""Building a model: `build_skeleton` (parameters on meta), `freeze`, and random values of parameters (`Initializer`).

Note: initial values depend on (seed, parameter name) alone, so that all backends start equal: every parameter has its own
generator. transformers' `_init_weights` defines the distributions: it runs once with every initialisation function
replaced by one that records the call, and the calls are replayed on real memory, parameter by parameter. Values that a
module computes (Mamba's time steps, RWKV's decays) cannot be recorded on meta: its initialisation runs again on a real
copy of that module, from the parameter's generator.

Note: pieces. A rank needs a range of each parameter, and a random generator cannot jump. So values are drawn in pieces up
to the end of the range, and only the range is kept. Functions that fill element after element give the same bits in pieces
as at once, since torch draws normal values sixteen together, and the last sixteen of a tensor anew. Others draw the whole
parameter."""

import copy
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization as hf_init
from transformers.models.auto import modeling_auto

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models.configs import first_line
from fsdp_lab.models.presets import Kind, facts_of
from fsdp_lab.spec.param_groups import matches, unmatched

_HEADS: dict[Kind, str] = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
}


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that this thread constructs in this context have parameters on the meta device and real buffers.

    Under `torch.device("meta")` the buffers that a constructor computes (rotary frequencies, position ids, BatchNorm
    statistics) would be lost, and no later call restores all of them. So parameters are replaced in
    `nn.Module.register_parameter`, through which all of them go. One that is on meta already is not replaced, so that a
    tensor registered under two names (tied) stays one tensor."""
    register = nn.Module.register_parameter
    builder = threading.get_ident()

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and threading.get_ident() == builder:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build_skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of `config` with its head, in train mode: fp32 parameters on meta, tied as in the model, and real buffers.

    Attention is PyTorch's scaled_dot_product_attention if the model supports it. `config` is the result of `resolve`, and is
    copied. Values come from `Initializer`.

    Raises SpecError: no model can be built from it (widths that do not divide, ...), with the model's own message."""
    config = copy.deepcopy(config)
    kind = facts_of(config).kind
    classes = getattr(modeling_auto, _HEADS[kind])[type(config)]
    model_class: type[PreTrainedModel] = classes[0] if isinstance(classes, tuple) else classes
    if type(text := getattr(config, "text_config", None)) is model_class.config_class:
        config = text  # of a family of several modalities whose head takes text alone
    attention = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
    try:
        with parameters_on_meta():
            make: Any = model_class._from_config
            model = make(config, attn_implementation=attention, dtype=torch.float32)
    except Exception as e:  # constructors fail with errors of any class
        reason = f"no {config.model_type} can be built from this config: {first_line(e)}"
        raise SpecError("workload.model", reason, "correct the config, or choose a preset") from e
    if computed := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        reason = f"{config.model_type} computes its buffer {computed[0]} from parameters, which have no values yet"
        raise SpecError("workload.model", reason, "choose another family")
    if kind == "causal" and getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # transformers' own default, without its warning
    return cast(PreTrainedModel, model.train())


def frozen_names(model: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """The names of the parameters that the patterns freeze; a tied one goes by its first name.

    Raises SpecError: a pattern matches nothing, or nothing is left to train."""
    if patterns is None:
        return []
    names = [name for name, _ in model.named_parameters()]
    if (wrong := unmatched(patterns, names)) is not None:
        others = [p for p in patterns if p != wrong]
        hint = f"give a pattern of names such as {names[0]}, {names[-1]}"
        raise SpecError("workload.freeze", f"{wrong!r} matches no parameter", hint, {"freeze": others or None})
    frozen = [name for name in names if matches(name, patterns)]
    if len(frozen) == len(names):
        raise SpecError("workload.freeze", "nothing is left to train", "leave a pattern out", {"freeze": None})
    return frozen


def freeze(model: nn.Module, patterns: Sequence[str] | None) -> None:
    """Clear `requires_grad` of these parameters. Raises SpecError as `frozen_names`, before any is changed."""
    for name in frozen_names(model, patterns):
        model.get_parameter(name).requires_grad_(False)


_DEFAULT_STD = 0.02
_PIECE = 4 << 20  # elements drawn at once: some 50 ms
_LAST = 16  # the least that a last piece of a larger tensor may have
_CONSTANT = (nn.init.zeros_, nn.init.ones_, nn.init.constant_)
_ELEMENTWISE = (*_CONSTANT, nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_)


@dataclass(frozen=True)
class Draw:
    """A call of an initialisation function on a parameter, or on a part of it (size, stride, offset)."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    part: tuple[torch.Size, tuple[int, ...], int] | None = None

    def run(self, values: Tensor, generator: torch.Generator) -> None:
        """Calls the function on a parameter's values, in place."""
        self.run_on(values if self.part is None else values.as_strided(*self.part), generator)

    def run_on(self, target: Tensor, generator: torch.Generator) -> None:
        """Calls the function on what it sets, or on a piece of that."""
        draws = "generator" in inspect.signature(self.function).parameters
        self.function(target, **self.arguments, **({"generator": generator} if draws else {}))

    def range(self, numel: int) -> tuple[int, int] | None:
        """Returns which elements of a parameter of `numel` it sets, if one after the other, whatever the shape; or None."""
        if self.part is None:
            return (0, numel) if self.function in _ELEMENTWISE else None
        size, stride, offset = self.part
        one_piece = torch.empty_strided(size, stride, device="meta").is_contiguous()
        return (offset, offset + size.numel()) if one_piece and self.function in _CONSTANT else None


Draws = Mapping[str, Sequence[Draw]]  # by parameter


class Values(Protocol):
    """Values by name: a model's `Initializer`, or its `Pretrained`."""

    buffers: Sequence[str]  # persistent buffers that it has values for

    def read_into(self, name: str, start: int, target: Tensor) -> None:
        """Set `target` [n], flat, on any device, to elements [start, start + n) of a flattened parameter or buffer."""


class Initializer:
    """`Initializer(model, seed)(name)` is the full initial value of one parameter, in fp32 on the CPU.

    `name` is that of `model.named_parameters()` of the unwrapped model, so a tied parameter has one name, its first. The
    model is only read and may be a skeleton. The values are equal in every process and for
    every world size on one kind of CPU (the normal distribution's last bit can differ between vector units)."""

    buffers: Sequence[str] = ()  # none is drawn: they have the values that the model's constructor computed

    def __init__(
        self, model: nn.Module, seed: int, check: Callable[[], object] = lambda: None, draws: Draws | None = None
    ) -> None:
        """`check` is called before each piece that is drawn; what it raises ends the drawing. `draws`: if they are known."""
        self.seed, self._check = seed, check
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self._draws: Draws = _recorded_draws(model) if draws is None else draws

    def __call__(self, name: str) -> Tensor:
        """The values of one parameter. Raises KeyError for a name that the model does not have."""
        values = torch.empty(self._shapes[name], dtype=torch.float32, device="cpu")
        generator = torch.Generator().manual_seed(seed_of(self.seed, name))
        with torch.no_grad():
            for draw in self._draws[name]:
                draw.run(values, generator)
        return values

    def read_into(self, name: str, start: int, target: Tensor) -> None:
        """Set `target` [n], flat, on any device, to elements [start, start + n). It takes the memory of a piece, or of the
        whole parameter where that cannot be drawn in pieces. Raises KeyError, too."""
        stop = start + target.numel()
        for at, piece in self._pieces(name, stop):
            first, last = max(start, at), min(stop, at + piece.numel())
            if first < last:
                target[first - start : last - start].copy_(piece[first - at : last - at])

    def _pieces(self, name: str, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yields (where it begins, values) of the pieces of a parameter up to `stop`."""
        numel, draws = self._shapes[name].numel(), self._draws[name]
        ranges = [draw.range(numel) for draw in draws]
        if any(r is None for r in ranges) or ranges[0] != (0, numel) or any(d.part is None for d in draws[1:]):
            self._check()
            yield 0, self(name).reshape(-1)
            return
        generator = torch.Generator().manual_seed(seed_of(self.seed, name))
        at = 0
        while at < stop:
            self._check()
            end = at + _PIECE if numel - at - _PIECE >= _LAST else numel
            piece = torch.empty(end - at, dtype=torch.float32, device="cpu")
            for draw, (first, last) in zip(draws, (r for r in ranges if r is not None), strict=True):
                if max(first, at) < min(last, end):
                    with torch.no_grad():
                        draw.run_on(piece[max(first, at) - at : min(last, end) - at], generator)
            yield at, piece
            at = end


def seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits without a sign


def _recorded_draws(model: nn.Module) -> dict[str, list[Draw]]:
    """For each parameter, the calls that set it."""
    names = {_storage_id(p): name for name, p in model.named_parameters()}
    draws: dict[str, list[Draw]] = {name: [] for name in names.values()}
    tied: set[int] = set()  # parameters that the current module has under a second name
    computed: set[str] = set()  # parameters that the current module sets to values that it computes

    def record(function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        storage = _storage_id(tensor)
        if storage in names and storage not in tied:  # the rest are buffers, which have their values
            name, whole = names[storage], tensor._base is None
            arguments = dict(inspect.signature(function).bind(tensor, *args, **kwargs).arguments)
            arguments = {k: v for i, (k, v) in enumerate(arguments.items()) if i and k != "generator"}
            part = None if whole else (tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            earlier = [] if whole else draws[name]  # a draw of the whole overwrites earlier ones
            draws[name] = [*earlier, Draw(function, arguments, part)]
            if function is _copy_:
                computed.add(name)
        return tensor

    with torch.no_grad(), _initialisation_replaced(record):
        for path, module, owner in _children_first(model, "", None):
            # A tied head must not draw the embedding again: the module of its first name does.
            tied.clear()
            own = module.named_parameters(recurse=False)
            tied.update(_storage_id(p) for n, p in own if names[_storage_id(p)] != path + n)
            if owner is None:
                continue
            before = {n: p._version for n, p in module.named_parameters() if _storage_id(p) not in tied}
            computed.clear()
            owner._init_weights(module)  # type: ignore[no-untyped-call]
            own_names = {names[_storage_id(p)]: n for n, p in module.named_parameters()}
            # What was changed in place went past the functions.
            computed |= {
                m for m, n in own_names.items() if n in before and module.get_parameter(n)._version != before[n]
            }
            kept = copy.deepcopy(module) if computed else module  # the model is wrapped later
            for name in computed:
                draws[name] = [Draw(partial(_compute_, owner, kept, own_names[name]), {})]
    for name, parameter in model.named_parameters():
        if not draws[name] or draws[name][0].part is not None:  # not initialised, or not as a whole
            if name.endswith("bias") or parameter.dim() < 2:
                default = Draw(nn.init.zeros_ if name.endswith("bias") else nn.init.ones_, {})
            else:
                default = Draw(nn.init.normal_, {"mean": 0.0, "std": _DEFAULT_STD})
            draws[name].insert(0, default)
    return draws


def _children_first(
    module: nn.Module, path: str, owner: PreTrainedModel | None
) -> Iterator[tuple[str, nn.Module, PreTrainedModel | None]]:
    """Yields (path with a final dot, module, innermost transformers model that contains it), for all modules."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}{name}.", owner)
    yield path, module, owner


def _storage_id(tensor: Tensor) -> int:
    """A number that is equal for a parameter and its views; unlike an address, different for parameters on meta."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _initialisation_replaced(record: Callable[..., Any]) -> Iterator[None]:
    """A context in which every initialisation function that a model may call is `record(function, ...)`."""
    table: dict[str, Callable[..., Any]] = hf_init.TORCH_INIT_FUNCTIONS  # type: ignore[assignment]
    functions, copy = dict(table), hf_init.copy_
    table.update({name: partial(record, function) for name, function in functions.items()})
    hf_init.copy_ = partial(record, _copy_)
    try:
        with hf_init.guard_torch_init_functions():  # torch.nn.init's names use the same table
            yield
    finally:
        table.update(functions)
        hf_init.copy_ = copy


def _compute_(owner: Any, module: nn.Module, name: str, target: Tensor, generator: torch.Generator) -> None:
    """Set `target` to what `owner` initialises a parameter of `module`, which is on meta, to."""
    made: Any = copy.deepcopy(module)
    made._apply(lambda t: torch.zeros_like(t, device="cpu") if t.is_meta else t)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.set_state(generator.get_state())
        owner._init_weights(made)
    target.copy_(made.get_parameter(name).reshape(target.shape))


def _copy_(tensor: Tensor, other: Tensor) -> Tensor:
    return tensor.copy_(other)
