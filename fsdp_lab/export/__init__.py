"""A Spec taken out of the lab: a torchrun script, an Accelerate config, or the Spec itself as JSON. Floor 5.

    export_script(spec, "train.py")            # torchrun --nproc-per-node 2 train.py
    export_accelerate(spec, "fsdp.yaml")       # accelerate launch --config_file fsdp.yaml your_script.py
    export_spec(spec, "spec.json")             # fsdp-lab run spec.json
    export_model("checkpoints", "my-model")    # transformers' from_pretrained("my-model")

What a target cannot express is refused by a `SpecError` that names the field; what has no effect there, or belongs to the
reader's own script, is said at the head of the file. Nothing is dropped in silence. Read target.py first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_lab.core.files import check_file, write_whole

if TYPE_CHECKING:
    from fsdp_lab.core.checkpoint_format import Checkpoint
    from fsdp_lab.core.spec import Spec

TARGETS = ("script", "accelerate", "spec")

StrPath = str | os.PathLike[str]


def export_script(spec: Spec, path: StrPath, *, force: bool = False) -> Path:
    """Write a script for torchrun that trains `spec` with torch's own FSDP2, FSDP1 or DDP, and does not import the lab.

    At the same world size, in fp32 on a CPU, its losses are the run's bit for bit; where not, its head says so.

    Args:
        path: of the new file.
        force: replace a file that is there.

    Returns:
        The file's absolute path.

    Raises:
        SpecError: of `path`; or what torch's own backends or the script cannot express, by field.
    """
    return export(spec, "script", path, force=force)


def export_accelerate(spec: Spec, path: StrPath, *, force: bool = False) -> Path:
    """Write a config for `accelerate launch --config_file`. As `export_script` otherwise."""
    return export(spec, "accelerate", path, force=force)


def export_spec(spec: Spec, path: StrPath, *, force: bool = False) -> Path:
    """Write the Spec as JSON, all of it, as `fsdp-lab run` takes it. As `export_script` otherwise."""
    return export(spec, "spec", path, force=force)


def export_model(checkpoint: Checkpoint | StrPath, path: StrPath, *, force: bool = False) -> Path:
    """Write the model of a checkpoint, or of the newest in a folder of them, as a folder for `from_pretrained`.

    Raises SpecError: there is none that is whole, or the path.
    """
    from fsdp_lab.core.checkpoint_format import Checkpoint, find
    from fsdp_lab.export.pretrained import export_pretrained

    saved = checkpoint if isinstance(checkpoint, Checkpoint) else find(checkpoint)
    return export_pretrained(saved, Path(path), force=force)


def export(spec: Spec, target: str, path: StrPath, *, force: bool = False) -> Path:
    """To a target by its name, one of `TARGETS`; the path is checked before anything is made."""
    file = check_file(path, replace=force)
    return write_whole(file, text_of(spec, target).encode())


def text_of(spec: Spec, target: str) -> str:
    """What `export` writes. Raises SpecError."""
    match target:
        case "script":
            from fsdp_lab.export.script import script

            return script(spec)
        case "accelerate":
            from fsdp_lab.export.accelerate import config

            return config(spec)
        case "spec":
            return spec.to_json() + "\n"
        case _:
            raise ValueError(f"target {target!r} is refused; give one of {', '.join(TARGETS)}")


__all__ = ["TARGETS", "export", "export_accelerate", "export_model", "export_script", "export_spec", "text_of"]
