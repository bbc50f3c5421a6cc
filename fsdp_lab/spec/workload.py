"""`Workload`: what is trained. Plain values, neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from fsdp_lab.base.errors import SpecError, is_number, plain_errors
from fsdp_lab.spec.fields import NOT_NEGATIVE, POSITIVE, as_json, check_fields, one_of, text, values, whole
from fsdp_lab.spec.lora import Lora
from fsdp_lab.spec.lr_schedule import LR_SCHEDULES, LrSchedule
from fsdp_lab.spec.optimizer import Arguments, TorchOptimizer, is_class_name, one_spelling
from fsdp_lab.spec.param_groups import GroupKey, ParamGroup, are_groups, read_groups
from fsdp_lab.spec.patterns import are_patterns
from fsdp_lab.spec.user_code import UserCode, is_code

MOST_HELD_OUT = 0.5
DROPOUTS = ("off", "config")
CODE_FIELDS = ("model", "data", "loss")  # may be the user's own code: all three, or none
# Of models of transformers alone: with the user's own model they are refused.
_OF_CONFIGS = ("seq_len", "tokenizer", "text_field", "packing", "weights", "fresh_weights", "dropout", "lora")
RANDOM, OWN = "random", "own"  # initial values; other values of `weights` are folders
# A Spec that differs in one of these is a different training.
LINEAGE = ("model", "weights", "fresh_weights", "lora", "seed", "optimizer")

_MODEL = values(
    lambda v: isinstance(v, (str, Mapping)) and bool(v),
    "the name of a preset, a folder, a config as a dict, or a function that builds a module",
)
_DATA = values(
    lambda v: (isinstance(v, str) and bool(v)) or is_code(v),
    '"stdlib", "images", the path of a file or folder, or a dataset',
)
_LOSS = values(is_code, 'a function of (model, batch), or its name as "package.module:name"')
_SHARE = values(lambda v: is_number(v) and 0 <= v <= MOST_HELD_OUT, f"a number from 0 to {MOST_HELD_OUT}")
_END = values(lambda v: is_number(v) and 0 <= v <= 1, "a share of lr, from 0 to 1")
PACKINGS = ("packed", "padded")
_TOKENIZER = text('"bytes", "own" (of the model\'s folder), or a folder with a tokenizer')
_COLUMN = text("the name of a column")
_PATTERNS = as_json(values(are_patterns, 'patterns of parameter names such as ["transformer.wte.*"], or null'))
_LORA = as_json(values(lambda v: isinstance(v, (Mapping, Lora)), 'an object such as {"r": 8}, or null'))
_GROUPS = as_json(
    values(
        are_groups,
        'groups such as [{"match": ["*.bias"], "lr": 1e-4, "weight_decay": 0}], with an lr above 0, or null',
    )
)
_OPTIMIZER = values(is_class_name, "adamw, sgd, or the name of another class of torch.optim, such as RMSprop")
_ARGUMENTS = as_json(
    values(lambda v: isinstance(v, Mapping), 'arguments of its class by name, such as {"fused": true}')
)
_WEIGHTS = text('"random", "own", or the folder of the weights')


@plain_errors
@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained. A step sees micro_batch x accumulate x world_size samples."""

    # A preset, a transformers config as a dict, or its folder or file, or its name on the Hugging Face Hub ("org/name"); or
    # code that builds a module (user_code.py).
    model: str | Mapping[str, Any] = field(default="gpt2-10m", metadata=_MODEL)
    # Where values come from: RANDOM, OWN (the files beside the model's config), or a folder. None: OWN if there are any.
    weights: str | None = field(default=None, metadata=_WEIGHTS)
    # Patterns (fnmatch) of parameters that begin random where the weights lack them or have another shape; also of tensors
    # that the weights have and the model does not.
    fresh_weights: tuple[str, ...] | None = field(default=None, metadata=_PATTERNS)
    # Python's own source; a file or folder of text or of records (JSON lines, Parquet, Arrow, saved by `datasets`);
    # "org/name" on the Hugging Face Hub, of which the split "train"; "images", or a folder of images; or code: a dataset,
    # or what makes one.
    data: str | Any = field(default="stdlib", metadata=_DATA)
    # None: that of the model's folder, if it has one, else bytes.
    tokenizer: str | None = field(default=None, metadata=_TOKENIZER)
    # Of records; None: "text", or else "messages" (chat).
    text_field: str | None = field(default=None, metadata=_COLUMN)
    # packed: samples are joined and cut into windows of seq_len; padded: one sample a row.
    packing: str = field(default="packed", metadata=one_of(PACKINGS))
    held_out: float = field(default=0.05, metadata=_SHARE)  # of the samples, at the end of the data: not trained on
    seq_len: int = field(default=128, metadata=whole(2))
    micro_batch: int = field(default=4, metadata=whole(1))  # samples per rank per forward
    accumulate: int = field(default=1, metadata=whole(1))  # micro-batches per optimizer step
    optimizer: str = field(default="adamw", metadata=_OPTIMIZER)  # or another class of torch.optim, by its name
    # Of the optimizer's class in torch.optim: {"fused": True, "betas": (0.9, 0.95)}; those at its default are left out.
    optimizer_args: Mapping[str, Any] = field(default=Arguments(), metadata=_ARGUMENTS)
    lr: float = field(default=3e-4, metadata=POSITIVE)
    # The rate over steps: see `LrSchedule`.
    lr_schedule: str = field(default="constant", metadata=one_of(LR_SCHEDULES))
    warmup_steps: int = field(default=0, metadata=whole(0))
    decay_steps: int | None = field(default=None, metadata=whole(1))  # where linear and cosine end
    lr_end: float = field(default=0.0, metadata=_END)  # the rate from there on, as a share of lr
    weight_decay: float = field(default=0.1, metadata=NOT_NEGATIVE)
    clip_norm: float | None = field(default=None, metadata=POSITIVE)  # of the global gradient; None: no clipping
    dropout: str = field(default="off", metadata=one_of(DROPOUTS))  # or as the model's config says
    # Patterns of parameters that are not trained.
    freeze: tuple[str, ...] | None = field(default=None, metadata=_PATTERNS)
    # Parameters with rates of their own: lists of {"match": patterns, "lr": number, "weight_decay": number}; the first one
    # that matches counts. The rest has `lr`, and `weight_decay` on matrices only.
    param_groups: tuple[ParamGroup, ...] | None = field(default=None, metadata=_GROUPS)
    # Low-rank adapters, which alone are trained: {"r": 8}, see `Lora`.
    lora: Lora | Mapping[str, Any] | None = field(default=None, metadata=_LORA)
    seed: int = field(default=0, metadata=whole(0))
    # Code: (model, batch) -> scalar tensor, of a model that is code; None: the model of transformers computes its own.
    loss: str | Mapping[str, Any] | None = field(default=None, metadata=_LOSS)

    def __post_init__(self) -> None:
        for name in CODE_FIELDS:
            if callable(value := getattr(self, name)):
                raise SpecError(f"workload.{name}", f"{value!r} is refused: a Spec holds what JSON can",
                                f"give it to lab.run({name}=...), or its name, as \"package.module:name\"")  # fmt: skip
        check_fields("workload", self)
        for name in CODE_FIELDS:
            value = getattr(self, name)
            if isinstance(value, Mapping) and is_code(value) and not isinstance(value, UserCode):
                object.__setattr__(self, name, UserCode.of(f"workload.{name}", value))
        self._check_own()
        object.__setattr__(self, "lora", Lora.of(self.lora))
        if self.fresh_weights is not None:
            object.__setattr__(self, "fresh_weights", tuple(self.fresh_weights))
        object.__setattr__(self, "optimizer", one_spelling(self.optimizer))
        object.__setattr__(self, "optimizer_args", self.torch_optimizer.args)
        object.__setattr__(self, "freeze", None if self.freeze is None else tuple(dict.fromkeys(self.freeze)))
        object.__setattr__(self, "param_groups", read_groups(self.param_groups))
        _ = self.rates  # which refuses what has no meaning together

    @cached_property
    def torch_optimizer(self) -> TorchOptimizer:
        """The optimizer with its arguments."""
        return TorchOptimizer(name=self.optimizer, args=self.optimizer_args)

    def rates_of(self, group: GroupKey) -> tuple[float, float]:
        """The full learning rate and the weight decay of a group of parameters."""
        number, is_matrix = group
        lr, decay = self.lr, self.weight_decay if is_matrix else 0.0
        own = self.param_groups[number] if self.param_groups is not None and number >= 0 else None
        if own is not None:
            lr = lr if own.lr is None else own.lr
            decay = decay if own.weight_decay is None else own.weight_decay
        return lr, decay

    @cached_property
    def rates(self) -> LrSchedule:
        """The learning rate over steps, as factors on `lr`."""
        return LrSchedule(kind=self.lr_schedule, warmup_steps=self.warmup_steps, decay_steps=self.decay_steps,
                          end=self.lr_end)  # fmt: skip

    @property
    def adapters(self) -> Lora | None:
        """`lora`, read."""
        return Lora.of(self.lora)

    @property
    def is_own(self) -> bool:
        """Whether the model is the user's own code, and the loss and the data with it."""
        return is_code(self.model)

    def sent_code(self) -> dict[str, UserCode]:
        """Field -> code that was sent, not imported."""
        values = {name: getattr(self, name) for name in CODE_FIELDS}
        return {name: value for name, value in values.items() if isinstance(value, UserCode)}

    def _check_own(self) -> None:
        """Raises SpecError for code in one field and not in the others, and for fields that mean nothing with it."""
        if not self.is_own:
            if self.loss is not None:
                raise SpecError("workload.loss", "a model of transformers computes its own loss",
                                "leave it out, or give the model as a function too", {"loss": None})  # fmt: skip
            if is_code(self.data):
                raise SpecError("workload.data", "a dataset of your own is for a model of your own",
                                "give model and loss as functions too, or a text or images", {"data": "stdlib"})  # fmt: skip
            return
        if self.loss is None:
            raise SpecError("workload.loss", "a model of your own has none yet",
                            "give a function of (model, batch) that returns a scalar tensor")  # fmt: skip
        if not is_code(self.data):
            raise SpecError("workload.data", f"{self.data!r} is for models of transformers, and the model is your own",
                            "give a dataset, or a function that returns one")  # fmt: skip
        for f in fields(self):
            if f.name in _OF_CONFIGS and getattr(self, f.name) != f.default:
                raise SpecError(f"workload.{f.name}", "it means nothing for a model of your own", "leave it out",
                                {f.name: f.default})  # fmt: skip
