"""`script`: a Spec as the text of a torchrun script, section by section."""

from __future__ import annotations

import platform

import torch
import transformers

from fsdp_lab import __version__
from fsdp_lab.export.data_part import data_part
from fsdp_lab.export.model_part import Model, model_of, model_part
from fsdp_lab.export.sharding_part import sharding_part
from fsdp_lab.export.source import assemble, paragraph
from fsdp_lab.export.target import TITLES, Peer, peer
from fsdp_lab.export.training_part import training_part
from fsdp_lab.spec import HYBRIDS, Spec


def script(spec: Spec) -> str:
    """Raises SpecError for what torch's own backends or the script cannot express."""
    found = peer(spec)
    model = model_of(found.spec)
    parts = [
        model_part(model, deferred=found.spec.strategy.backend == "fsdp2"),
        data_part(found.spec, model.facts),
        training_part(found.spec),
        sharding_part(model, found.spec),
    ]
    model_, data, training, sharding = parts
    return assemble(_head(model, found, spec), [model_, data, sharding, training])


def _head(model: Model, found: Peer, asked: Spec) -> str:
    s, w = found.spec.strategy, found.spec.workload
    lines = [
        f"Train {model.name} under {TITLES[s.backend]}, {s.sharding}, on {asked.world_size} rank{'s' * (asked.world_size > 1)}.",
        "",
        f"    torchrun --nproc-per-node {asked.world_size} THIS_FILE --steps 100",
        "",
        paragraph(f"Each step prints its mean loss, unrounded. In fp32 on a CPU the losses are those of the run it was written "
                  f"from, bit for bit, with the same number of ranks, torch, transformers and processor; elsewhere within "
                  f"rounding. Written by fsdp_lab {__version__} with torch {torch.__version__}, transformers "
                  f"{transformers.__version__}, Python {platform.python_version()}."),
        *(["", "Of that run:", *(_remark(r) for r in found.remarks + _of_script(found.spec))]
          if found.remarks + _of_script(found.spec) else []),
    ]  # fmt: skip
    assert w is not None
    return "\n".join(lines)


def _remark(text: str) -> str:
    return "- " + paragraph(text + ".", "  ").lstrip()


def _of_script(spec: Spec) -> tuple[str, ...]:
    """Where torch's own collectives may give other bits than the lab's wire, and no hook changes that."""
    s = spec.strategy
    if s.backend == "fsdp1" and s.sharding in HYBRIDS and spec.shard_factor > 2:
        return ("FSDP1 takes no hook under hybrid sharding: over Gloo the sums of its shard groups come in another order than "
                "in the run, so that losses agree within rounding, not to the bit",)  # fmt: skip
    return ()
