"""`check`: validates a workload before any process is started.

Importing it, and checking a preset, needs neither torch nor transformers. A custom config is built and run on the meta
device, which takes a fraction of a second once transformers is imported.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_lab.core.errors import FieldError, SpecError
from fsdp_lab.core.spec import MOST_HELD_OUT, Workload
from fsdp_lab.models.data import SMALLEST_VOCABULARY, SYNTHETIC_COUNT, FolderImages, Text, open_text
from fsdp_lab.models.presets import PRESETS, Facts, facts_of

IMAGES = "images"
STDLIB = "stdlib"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  # as save_pretrained writes them


def check(workload: Workload, *, evaluated: int = 0) -> None:
    """Raises SpecError if the workload cannot run: its model, its sequence length, its data, or fewer held-out samples than
    are to be `evaluated`."""
    is_preset = isinstance(workload.model, str) and workload.model in PRESETS
    facts = model_facts(workload.model) if is_preset else _facts_of_built(workload)
    check_shapes(workload, facts)
    if facts.is_text:
        count = len(checked_text(workload).data) // workload.seq_len
    else:
        count = SYNTHETIC_COUNT if workload.data == IMAGES else FolderImages(workload.data, facts).count
    check_held_out(workload, count, evaluated)


def model_facts(model: str | Mapping[str, Any]) -> Facts:
    """Facts of a `Workload.model`; those of presets need no transformers. Raises SpecError as `resolve`."""
    preset = PRESETS.get(model) if isinstance(model, str) else None
    if preset is not None:
        return facts_of(preset.config)
    from fsdp_lab.models.configs import resolve

    return facts_of(resolve(model))


def is_language(workload: Workload) -> bool:
    """Whether its model is a language model, so that the exponential of its loss is a perplexity."""
    try:
        return model_facts(workload.model).is_text
    except FieldError:  # the model of a stored run, whose file no longer exists
        return False


def unread_weights(workload: Workload) -> str:
    """A warning if the model's folder has weights, which are not loaded; "" if it has none."""
    model = workload.model
    if not isinstance(model, str) or model in PRESETS:
        return ""
    path = Path(model).expanduser()
    folder = path if path.is_dir() else path.parent
    if not path.exists() or not any(file for pattern in WEIGHTS for file in folder.glob(pattern)):
        return ""
    return f"Weights in {folder} are not loaded: training begins from random values."


def check_shapes(workload: Workload, facts: Facts) -> None:
    """Checks what follows from the config and the fields alone. Raises SpecError."""
    if facts.is_text:
        _check_text_model(workload, facts)
    elif workload.data == STDLIB:
        raise SpecError(
            "workload.data",
            f"{facts.model_type} classifies images, and {STDLIB} is text",
            f'use "{IMAGES}", or a folder with one sub-folder per class',
            {"data": IMAGES},
        )
    elif facts.classes < 2:
        raise SpecError(
            "workload.model",
            f"a classifier of {facts.classes} class learns nothing",
            "give a config with num_labels of 2 or more",
        )


def checked_text(workload: Workload) -> Text:
    """The workload's text. Raises SpecError if it is shorter than one sequence."""
    text = open_text(workload.data)
    if len(text.data) < workload.seq_len:
        raise SpecError(
            "workload.data",
            f"{text.description} is shorter than one sequence of {workload.seq_len} bytes",
            f"give more text, or seq_len {len(text.data)} or less",
        )
    return text


def _check_text_model(workload: Workload, facts: Facts) -> None:
    if workload.data == IMAGES:
        raise SpecError(
            "workload.data",
            f"{facts.model_type} reads text, not images",
            f'use "{STDLIB}" or a text file, or an image model such as vit-1m',
            {"data": STDLIB},
        )
    if facts.vocab_size is None or facts.vocab_size < SMALLEST_VOCABULARY:
        raise SpecError(
            "workload.model",
            f"its vocabulary of {facts.vocab_size} is too small for bytes",
            f"give a config with a vocab_size of {SMALLEST_VOCABULARY} or more",
        )
    longest = facts.max_positions
    if longest is not None and workload.seq_len > longest:
        alike = sorted((p for p in PRESETS.values() if p.kind == facts.kind), key=lambda p: p.parameters)
        takers = [p.name for p in alike if (facts_of(p.config).max_positions or workload.seq_len) >= workload.seq_len]
        instead = f", or a model with more positions ({', '.join(takers[:2])})" if takers else ""
        raise SpecError(
            "workload.seq_len",
            f"{workload.seq_len} is over the model's {longest} positions",
            f"use {longest} or less{instead}",
            {"seq_len": longest},
        )


def _facts_of_built(workload: Workload) -> Facts:
    """Facts of a model that is no preset, after a forward and backward on meta tensors, which show whether it works."""
    from fsdp_lab.models.configs import resolve
    from fsdp_lab.models.flops import flops_per_sample

    config = resolve(workload.model)
    facts = facts_of(config)
    check_shapes(workload, facts)  # first, because it is faster and its messages are better
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the count may be an estimate
        flops_per_sample(config, workload.seq_len)
    return facts


def held_out_count(workload: Workload, count: int) -> int:
    """Number of held-out samples among `count`."""
    return int(workload.held_out * count)


def check_held_out(workload: Workload, count: int, evaluated: int) -> None:
    """Raises SpecError if fewer of `count` samples are held out than are to be evaluated."""
    held = held_out_count(workload, count)
    if held >= evaluated:
        return
    shares = (k / 1000 for k in range(1, int(MOST_HELD_OUT * 1000) + 1))
    enough = next((share for share in shares if int(share * count) >= evaluated), None)
    ways = [f"use held_out {enough:g}" if enough else "give more data"]
    ways += [f"evaluate {held} samples or fewer"] if held else []
    raise SpecError("workload.held_out", f"{held} of {count:,} samples are held out, and {evaluated} are to be evaluated",
                    ", or ".join(ways), {"held_out": enough} if enough else {})  # fmt: skip
