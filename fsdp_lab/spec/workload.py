"""`Workload`: what is trained. Plain values, neither torch nor numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fsdp_lab.base.errors import SpecError, is_number, is_whole
from fsdp_lab.spec import fields
from fsdp_lab.spec.fields import NOT_NEGATIVE, POSITIVE, check_fields, knob, one_of, only, rows_of, text, values, whole
from fsdp_lab.spec.optimizer import LR_SCHEDULES, OPTIMIZERS, Arguments, LrSchedule, TorchOptimizer, one_spelling
from fsdp_lab.spec.param_groups import GroupKey, ParamGroup, are_groups, are_patterns, read_groups
from fsdp_lab.spec.user_code import UserCode, is_code

MOST_HELD_OUT = 0.5
DROPOUTS = ("off", "config")
RANDOM, OWN = "random", "own"  # initial values; other values of `weights` are folders
PACKINGS = ("packed", "padded")
LORA_FIELD = "workload.lora"
_OF_PEFT = {"lora_alpha": "alpha", "target_modules": "targets", "lora_dropout": ""}  # "": 0 alone is possible
_LORA_HINT = 'give {"r": 8}, and if you like alpha (a number above 0) and targets (a list of module names)'


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters (arXiv 2106.09685): W x + alpha / r * B A x, where W is frozen, and A and B are trained.

    `r`: the rank. `alpha`: None: 2 r. `targets`: names of the modules that get adapters, such as "q_proj"; None: those
    that peft chooses for the type of model. Raises SpecError."""

    r: int
    alpha: float | None = None
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        alpha, targets = self.alpha, self.targets
        is_accepted = {
            "r": is_whole(self.r),
            "alpha": alpha is None or (is_number(alpha) and 0 < alpha < float("inf")),
            "targets": targets is None or are_patterns(targets),
        }
        for name, is_so in is_accepted.items():
            if not is_so:
                reason = f"{name}={getattr(self, name)!r} is refused"
                raise SpecError(LORA_FIELD, reason, _LORA_HINT, {"lora": None})
        if targets is not None:
            object.__setattr__(self, "targets", tuple(dict.fromkeys(targets)))

    @classmethod
    def of(cls, given: Any) -> Lora | None:
        """Makes one from its fields as a mapping, also by peft's names, or None."""
        if given is None or isinstance(given, cls):
            return given
        names = {f.name: f.name for f in dataclasses.fields(cls)} | _OF_PEFT
        if not isinstance(given, Mapping) or not set(given) <= set(names) or "r" not in given:
            raise SpecError(LORA_FIELD, f"{given!r} is refused", _LORA_HINT, {"lora": None})
        if given.get("lora_dropout"):
            hint, fix = "leave lora_dropout out", {"lora": {n: v for n, v in given.items() if n != "lora_dropout"}}
            raise SpecError(LORA_FIELD, "adapters have no dropout here", hint, fix)
        own = {names[name]: value for name, value in given.items() if names[name]}
        return cls(**own)

    @property
    def scale(self) -> float:
        """alpha, with None resolved."""
        return 2.0 * self.r if self.alpha is None else float(self.alpha)


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
_TOKENIZER = text('"bytes", "own" (of the model\'s folder), or a folder with a tokenizer')
_COLUMN = text("the name of a column")
_PATTERNS = values(are_patterns, 'patterns of parameter names such as ["transformer.wte.*"], or null')
_LORA = values(lambda v: isinstance(v, (Mapping, Lora)), 'an object such as {"r": 8}, or null')
_GROUPS = values(
    are_groups, 'groups such as [{"match": ["*.bias"], "lr": 1e-4, "weight_decay": 0}], with an lr above 0, or null'
)
_OPTIMIZER = replace(
    fields.matching(r"[A-Za-z]\w*", "adamw, sgd, or the name of another class of torch.optim, such as RMSprop"),
    tokens=OPTIMIZERS,
)
_ARGUMENTS = values(lambda v: isinstance(v, Mapping), 'arguments of its class by name, such as {"fused": true}')
_ALL_TRAINED = "your engine is given parameters that are all trained"
_WEIGHTS = text('"random", "own", or the folder of the weights')


def _adapters(word: str) -> Any:
    """Adapters of a rank, as in a Spec's dict."""
    return {"r": int(word), "alpha": None, "targets": None} if word.isdecimal() else word


def _described(given: Any) -> str:
    """Arguments, or the parts of adapters, on one line."""
    if not isinstance(given, Mapping):
        return str(given)
    return " ".join(name if v is True else f"{name}={v}" for name, v in given.items() if v is not None) or "none"


@fields.documented()
@dataclass(frozen=True, kw_only=True)
class Workload:
    """The model, the data and the optimizer that are trained. A step sees micro_batch x accumulate x world_size samples."""

    # fmt: off
    # A preset, a transformers config as a dict, or its folder or file, or its name on the Hugging Face Hub ("org/name"); or
    # code that builds a module (user_code.py).
    model: str | Mapping[str, Any] = knob(
        "gpt2-10m", _MODEL, group="Workload", help="A preset, or the folder of a model. A change begins at step 0",
        typed="/my/model", lineage=True, code=True, bare=True, path=True,
    )
    # Where values come from: RANDOM, OWN (the files beside the model's config), or a folder. None: OWN if there are any.
    weights: str | None = knob(
        None, _WEIGHTS, group="Training", help="Where values begin. A change begins at step 0", tokens=(RANDOM, OWN),
        others="or a folder", typed="/my/weights", lineage=True, of_configs=True, path=True,
    )
    # Also of tensors that the weights have and the model does not.
    fresh_weights: tuple[str, ...] | None = knob(
        None, _PATTERNS, json=True, lineage=True, of_configs=True,
        help="Patterns (fnmatch) of parameters that begin random where the weights lack them or have another shape",
    )
    # Python's own source; a file or folder of text or of records (JSON lines, Parquet, Arrow, saved by `datasets`);
    # "org/name" on the Hugging Face Hub, of which the split "train"; "images", or a folder of images; or code: a dataset,
    # or what makes one.
    data: str | Any = knob(
        "stdlib", _DATA, group="Workload", help="Python's own source, made-up images, or a file or folder of yours",
        choices=("stdlib", "images"), typed="/my/text.jsonl", samples=True, live=True, code=True, bare=True, path=True,
    )
    # None: that of the model's folder, if it has one, else bytes.
    tokenizer: str | None = knob(
        None, _TOKENIZER, group="Training", help="What makes text into tokens", tokens=("bytes", OWN),
        others="or a folder", typed="/my/tokenizer", samples=True, live=True, of_text=True, of_configs=True, path=True,
    )
    text_field: str | None = knob(
        None, _COLUMN, help="The column of records; auto: text, else messages, else a question with its answer",
        samples=True, live=True, of_text=True, of_configs=True,
    )
    packing: str = knob(
        "packed", one_of(PACKINGS), help="Samples joined and cut into windows of seq_len, or one sample a row",
        samples=True, live=True, of_text=True, of_configs=True,
    )
    held_out: float = knob(0.05, _SHARE, help="Share of the samples, at the end, that is not trained on", live=True)
    seq_len: int = knob(
        128, whole(2), group="Workload", label="sequence length", help="Tokens of a sample",
        choices=(32, 64, 128, 256, 512, 1024), samples=True, live=True, of_configs=True,
    )
    micro_batch: int = knob(4, whole(1), group="Workload", help="Samples per rank and forward", live=True, same_work=True)
    accumulate: int = knob(1, whole(1), group="Schedule", help="Micro-batches in a step", live=True, same_work=True)
    optimizer: str = knob(
        "adamw", _OPTIMIZER, group="Training", help="Of torch.optim. A change begins at step 0",
        others="or another class of torch.optim", typed="RMSprop", lineage=True, bare=True,
    )
    # Those at their default are left out.
    optimizer_args: Mapping[str, Any] = knob(
        Arguments(), _ARGUMENTS, help="Of the optimizer's class in torch.optim", json=True, same_work=True, bare=True,
        text=_described,
    )
    lr: float = knob(3e-4, POSITIVE, group="Training", label="learning rate", help="The full rate", live=True)
    lr_schedule: str = knob(
        "constant", one_of(LR_SCHEDULES), group="Training", help="How the rate falls after the warm-up", live=True
    )
    warmup_steps: int = knob(
        0, whole(0), group="Training", label="warm-up steps", help="The rate rises to the full one", most=10**6, live=True
    )
    decay_steps: int | None = knob(
        None, whole(1), group="Training", help="Where linear and cosine end", none="none", least=None, live=True
    )
    lr_end: float = knob(0.0, _END, help="The rate from decay_steps on, as a share of lr", live=True)
    weight_decay: float = knob(0.1, NOT_NEGATIVE, help="Of matrices; vectors have none", live=True)
    clip_norm: float | None = knob(None, POSITIVE, help="Largest norm of the global gradient", none="off", live=True)
    dropout: str = knob(
        "off", one_of(DROPOUTS), group="Training", help="No dropout, or as the model's config says", of_configs=True
    )
    freeze: tuple[str, ...] | None = knob(
        None, _PATTERNS, only("yours", (None,), _ALL_TRAINED, "leave it out", other="use backend lab"), json=True,
        group="Training", help="Patterns of parameters that are not trained: *.wte.*, *.bias", none="nothing",
    )
    # The rest has `lr`, and `weight_decay` on matrices only.
    param_groups: tuple[ParamGroup, ...] | None = knob(
        None, _GROUPS, help="Parameters with rates of their own; the first that matches counts", json=True, none="off"
    )
    # Low-rank adapters, which alone are trained: {"r": 8}, see `Lora`.
    lora: Lora | Mapping[str, Any] | None = knob(
        None, _LORA, only("yours", (None,), _ALL_TRAINED, "leave it out", other="use backend lab"), json=True,
        group="Training", help="Low-rank adapters alone are trained. A change begins at step 0", none="off",
        choices=(None, *map(_adapters, ("4", "8", "16"))), typed="32", reads=_adapters, lineage=True, of_configs=True,
        text=_described,
    )
    seed: int = knob(0, whole(0), help="Of initial values, order of the samples, and dropout", lineage=True)
    loss: str | Mapping[str, Any] | None = knob(
        None, _LOSS, help="Of a model that is code: (model, batch) -> scalar tensor; auto: the model's own", code=True
    )
    # fmt: on

    def __post_init__(self) -> None:
        check_fields("workload", self)
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
        warmup_steps, decay_steps = self.warmup_steps, self.decay_steps
        return LrSchedule(kind=self.lr_schedule, warmup_steps=warmup_steps, decay_steps=decay_steps, end=self.lr_end)

    @property
    def adapters(self) -> Lora | None:
        """`lora`, read."""
        return Lora.of(self.lora)

    @property
    def is_own(self) -> bool:
        """True if the model is the user's own code, and the loss and the data with it."""
        return is_code(self.model)

    def sent_code(self) -> dict[str, UserCode]:
        """Field -> code that was sent, not imported."""
        values = {name: getattr(self, name) for name in CODE_FIELDS}
        return {name: value for name, value in values.items() if isinstance(value, UserCode)}

    def _check_own(self) -> None:
        """Raises SpecError for code in one field and not in the others, and for fields that mean nothing with it."""
        if not self.is_own:
            if self.loss is not None:
                reason = "a model of transformers computes its own loss"
                hint = "leave it out, or give the model as a function too"
                raise SpecError("workload.loss", reason, hint, {"loss": None})
            if is_code(self.data):
                reason = "a dataset of your own is for a model of your own"
                hint = "give model and loss as functions too, or a text or images"
                raise SpecError("workload.data", reason, hint, {"data": "stdlib"})
            return
        if self.loss is None:
            hint = "give a function of (model, batch) that returns a scalar tensor"
            raise SpecError("workload.loss", "a model of your own has none yet", hint)
        if not is_code(self.data):
            reason = f"{self.data!r} is for models of transformers, and the model is your own"
            raise SpecError("workload.data", reason, "give a dataset, or a function that returns one")
        for f in dataclasses.fields(self):
            if f.metadata["row"].of_configs and getattr(self, f.name) != f.default:
                fix, reason = {f.name: f.default}, "it means nothing for a model of your own"
                raise SpecError(f"workload.{f.name}", reason, "leave it out", fix)


CODE_FIELDS = tuple(name for name, row in rows_of(Workload).items() if row.code)  # all three are code, or none
# A Spec that differs in one of these is a different training.
LINEAGE = tuple(name for name, row in rows_of(Workload).items() if row.lineage)
# These decide what the samples are.
SAMPLES = tuple(name for name, row in rows_of(Workload).items() if row.samples)
