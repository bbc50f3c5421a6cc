"""`script`: a Spec as the text of a torchrun script, section by section."""

from __future__ import annotations

import platform
from collections.abc import Iterator

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
    parts = (
        model_part(model, deferred=found.spec.strategy.backend == "fsdp2"),
        data_part(found.spec, model.facts),
        sharding_part(model, found.spec),
        training_part(found.spec),
    )
    return assemble(_head(model, found, spec), parts)


def _head(model: Model, found: Peer, asked: Spec) -> str:
    s, world = found.spec.strategy, asked.world_size
    remarks = [_remark(text) for text in (*found.remarks, *_of_script(found.spec))]
    lines = [
        f"Train {model.name} under {TITLES[s.backend]}, {s.sharding}, on {world} rank{'s' * (world > 1)}.",
        "",
        f"    torchrun --nproc-per-node {world} THIS_FILE --steps 100",
        "",
        paragraph("Each step prints its mean loss, unrounded. In fp32 on a CPU the losses are those of the run it was "
                  "written from, bit for bit, with the same number of ranks, torch, transformers and processor; elsewhere "
                  f"within rounding. Written by fsdp_lab {__version__} with torch {torch.__version__}, transformers "
                  f"{transformers.__version__}, Python {platform.python_version()}."),
        *(["", "Of that run:", *remarks] if remarks else []),
    ]  # fmt: skip
    return "\n".join(lines)


def _remark(text: str) -> str:
    return "- " + paragraph(text + ".", "  ").lstrip()


def _of_script(spec: Spec) -> Iterator[str]:
    """Where torch's own backend may give other bits than in the lab."""
    s = spec.strategy
    if s.backend == "fsdp1" and s.sharding in HYBRIDS and spec.shard_factor > 2:
        yield ("sharding: FSDP1 takes no hook under hybrid sharding, so over Gloo the sums of its shard groups come in "
               "another order than in the run, and losses agree within rounding, not to the bit")  # fmt: skip
    if s.backend == "fsdp1" and s.dtypes.reduce == "fp16":
        yield ("precision: FSDP1 divides by a part of the ranks before it adds up, and in the lab after, so that in fp16 "
               "another step may overflow and be skipped")  # fmt: skip
