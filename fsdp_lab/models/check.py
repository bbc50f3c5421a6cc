"""`check`: validates a workload before any process is started.

Importing it, and checking a preset, needs neither torch nor transformers. A custom config is built and run on the meta
device, which takes a fraction of a second once transformers is imported."""

import math
import warnings
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from fsdp_lab.base.errors import FieldError, SpecError
from fsdp_lab.models import tokens
from fsdp_lab.models.cache import is_hub_name, weights_folder
from fsdp_lab.models.data import SMALLEST_VOCABULARY, SYNTHETIC_COUNT, FolderImages, Text, open_text
from fsdp_lab.models.presets import PRESETS, Facts, facts_of
from fsdp_lab.models.records import Format, Records, data_files, open_records
from fsdp_lab.models.tokens import Tokenizer, has_tokenizer, open_tokenizer, tokenizer_folder
from fsdp_lab.spec.fields import rows_of
from fsdp_lab.spec.workload import MOST_HELD_OUT, Workload

IMAGES = "images"
STDLIB = "stdlib"


def check(workload: Workload, *, evaluated: int = 0, begins: bool = True) -> None:
    """Raises SpecError if the workload cannot run: its model, its sequence length, its data, no held-out samples where
    some are to be `evaluated`, or, if it `begins` a training, its weights. The ranks check own code, where it runs."""
    if workload.is_own:
        return
    is_preset = isinstance(workload.model, str) and workload.model in PRESETS
    facts = model_facts(workload.model) if is_preset else _facts_of_built(workload)
    check_shapes(workload, facts)
    if facts.is_text and not is_plain(workload):
        checked_records(workload, facts)  # the ranks count the samples, when they have the tokens
    elif facts.is_text:
        check_held_out(workload, len(checked_text(workload).data) // workload.seq_len, evaluated)
    else:
        count = SYNTHETIC_COUNT if workload.data == IMAGES else FolderImages(workload.data, facts).count
        check_held_out(workload, count, evaluated)
    if workload.lora is not None:
        from fsdp_lab.models.configs import resolve
        from fsdp_lab.models.lora import adapted

        adapted(resolve(workload.model), workload.adapters)
    if begins and (folder := weights_folder(workload)) is not None:  # no values are read
        from fsdp_lab.models.build import build_skeleton
        from fsdp_lab.models.configs import resolve
        from fsdp_lab.models.pretrained import Pretrained
        from fsdp_lab.models.weights import Weights

        Pretrained(build_skeleton(resolve(workload.model)), workload, Weights(folder))


def model_facts(model: str | Mapping[str, Any]) -> Facts:
    """Facts of a `Workload.model`; those of presets need no transformers. Raises SpecError as `resolve`."""
    preset = PRESETS.get(model) if isinstance(model, str) else None
    if preset is not None:
        return facts_of(preset.config)
    from fsdp_lab.models.configs import resolve

    return facts_of(resolve(model))


def is_language(workload: Workload) -> bool:
    """Returns whether its model is a language model, so that the exponential of its loss is a perplexity."""
    try:
        return model_facts(workload.model).is_text
    except FieldError:  # the model of a stored run, whose file no longer exists
        return False


def check_shapes(workload: Workload, facts: Facts) -> None:
    """Checks what follows from the config and the fields alone. Raises SpecError."""
    if facts.is_text:
        _check_text_model(workload, facts)
        return
    for name in (n for n, row in rows_of(Workload).items() if row.of_text):
        usual = getattr(Workload, name)
        if getattr(workload, name) != usual:
            reason = f"{facts.model_type} classifies images, which have no tokens"
            raise SpecError(f"workload.{name}", reason, "leave it out", {name: usual})
    if workload.data == STDLIB:
        reason = f"{facts.model_type} classifies images, and {STDLIB} is text"
        hint = f'use "{IMAGES}", or a folder with one sub-folder per class'
        raise SpecError("workload.data", reason, hint, {"data": IMAGES})
    elif facts.classes < 2:
        reason = f"a classifier of {facts.classes} class learns nothing"
        raise SpecError("workload.model", reason, "give a config with num_labels of 2 or more")


def checked_text(workload: Workload) -> Text:
    """The workload's text. Raises SpecError if it is shorter than one sequence."""
    text = open_text(workload.data)
    if len(text.data) < workload.seq_len:
        reason = f"{text.description} is shorter than one sequence of {workload.seq_len} bytes"
        raise SpecError("workload.data", reason, f"give more text, or seq_len {len(text.data)} or less")
    return text


def is_plain(workload: Workload) -> bool:
    """Returns whether the samples are windows of the text's bytes, so that no tokens are made. Raises SpecError."""
    if workload.packing != "packed" or tokenizer_folder(workload) is not None:
        return False
    if is_hub_name(workload.data):
        return False
    if workload.data != STDLIB and not Path(workload.data).expanduser().exists():
        return True  # `open_text` refuses it
    return workload.text_field is None and all(kind is Format.TEXT for _, kind in data_files(workload.data))


def checked_records(workload: Workload, facts: Facts) -> tuple[Records, Tokenizer]:
    """The workload's samples, after a look at the first, and its tokenizer, whose ids the model knows. Raises SpecError."""
    tokenizer = open_tokenizer(workload)
    if facts.vocab_size is None or tokenizer.vocabulary > facts.vocab_size:
        raise SpecError(
            "workload.tokenizer",
            f"the ids of {tokenizer.name} go up to {tokenizer.vocabulary - 1}, and the vocabulary of the model is "
            f"{facts.vocab_size}",
            "use the tokenizer that the model was made for, or a model with a larger vocabulary",
        )
    _check_ids(workload, tokenizer)
    files = data_files(workload.data)
    if [kind for _, kind in files] == [Format.TEXT]:
        open_text(workload.data)
    records = open_records(workload, files, has_template=tokenizer.has_template)
    tokens.encoded(list(islice(records.read(), 1)), tokenizer, whole=workload.packing == "padded")
    return records, tokenizer


def _check_ids(workload: Workload, tokenizer: Tokenizer) -> None:
    """Raises SpecError if tokens have other ids than beside the weights that the model begins with."""
    if isinstance(tokenizer, tokens.ByteTokenizer) or (folder := weights_folder(workload)) is None:
        return
    if not has_tokenizer(folder) or folder == tokenizer_folder(workload):
        return
    known = tokens.FolderTokenizer(folder).ids
    if other := {token for token, id_ in known.items() if tokenizer.ids.get(token) != id_}:
        first = min(other, key=known.__getitem__)
        beside = f"beside the weights in {folder}, which learned that one"
        reason = f"{first!r} has another id in {tokenizer.name} than {beside}"
        hint = "use the tokenizer beside the weights, or random weights"
        raise SpecError("workload.tokenizer", reason, hint, {"tokenizer": str(folder)})


def notes_on(workload: Workload) -> tuple[str, ...]:
    """Notes for a run: that code of one's own cannot be exported, or a model that begins with read weights gets bytes."""
    if workload.is_own:
        refusals = [code.refusal(f"workload.{name}") for name, code in workload.sent_code().items()]
        return tuple(f"This run cannot be exported as a script: {r.words}." for r in refusals if r is not None)
    if workload.tokenizer is not None or tokenizer_folder(workload) is not None:
        return ()
    if (folder := weights_folder(workload)) is None or not model_facts(workload.model).is_text:
        return ()
    return (f"there is no tokenizer beside the weights in {folder}: the model reads bytes (give tokenizer)",)


def _check_text_model(workload: Workload, facts: Facts) -> None:
    if workload.data == IMAGES:
        hint = f'use "{STDLIB}" or a text file, or an image model such as vit-1m'
        raise SpecError("workload.data", f"{facts.model_type} reads text, not images", hint, {"data": STDLIB})
    if facts.vocab_size is None or (tokenizer_folder(workload) is None and facts.vocab_size < SMALLEST_VOCABULARY):
        reason = f"its vocabulary of {facts.vocab_size} is too small for bytes"
        raise SpecError("workload.model", reason, f"give a config with a vocab_size of {SMALLEST_VOCABULARY} or more")
    longest = facts.max_positions
    if longest is not None and workload.seq_len > longest:
        reason = f"{workload.seq_len} is over the model's {longest} positions"
        hint = f"use {longest} or less, or a model with more positions"
        raise SpecError("workload.seq_len", reason, hint, {"seq_len": longest})


def _facts_of_built(workload: Workload) -> Facts:
    """Facts of a model that is no preset, after a forward and backward on meta tensors, which show whether it works."""
    from fsdp_lab.models.configs import resolve
    from fsdp_lab.models.flops import count_flops

    config = resolve(workload.model)
    facts = facts_of(config)
    check_shapes(workload, facts)  # first, because it is faster and its messages are better
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the count may be an estimate
        count_flops(config, workload.seq_len)
    return facts


def held_out_count(workload: Workload, count: int) -> int:
    """Number of held-out samples among `count`."""
    return int(workload.held_out * count)


def check_held_out(workload: Workload, count: int, evaluated: int) -> int:
    """Returns how many can be `evaluated`: at most all that are held out of `count`. Raises SpecError if that is none."""
    held = held_out_count(workload, count)
    if evaluated and not held:
        share = (math.ceil(1000 / max(count, 1)) + 1) / 1000  # a little more than one sample needs
        fix = {"held_out": share} if share <= MOST_HELD_OUT else {}
        hint = f"use held_out {share:g}, or do not evaluate" if fix else "give more data, or do not evaluate"
        reason = f"none of {count:,} samples is held out to evaluate on"
        raise SpecError("workload.held_out", reason, hint, fix)
    return min(held, evaluated)
