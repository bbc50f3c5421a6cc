"""A Spec for other programs: as a torchrun script or JSON; and a checkpoint's model.

What a script cannot express raises a `SpecError` that names the field. What has no effect there is listed at the top of the
file. No field is dropped silently. Read script.py first."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.files import check_file, write_whole

if TYPE_CHECKING:
    from fsdp_lab.spec.checkpoint_format import Checkpoint
    from fsdp_lab.spec.spec import Spec

StrPath = str | os.PathLike[str]


def export_script(spec: Spec, path: StrPath, *, force: bool = False) -> Path:
    """Writes a script for torchrun that trains `spec` with torch's own FSDP2, FSDP1 or DDP and does not import the
    lab. Returns its absolute path.

    The samples and the model's initial values, which take as much room as they have, are put into a folder beside it:
    train.files of train.py. In fp32 on CPUs, with the same number of ranks, its losses equal those of the run bit for bit;
    the script's docstring lists the exceptions. `force`: whether to replace an existing file, and its folder.

    Raises ArgumentError: the files cannot be written. SpecError: torch's own backends or the script cannot express a
    field."""
    file = check_file(path, replace=force)
    from fsdp_lab.export.files import SUFFIX, write_folder
    from fsdp_lab.export.script import script

    text, files = script(spec)
    folder = file.with_suffix(SUFFIX)
    if files is not None:
        if folder.exists() and not (force and (folder / "model").is_dir()):
            hint = "name another file, or give force (--force) to replace the folder of a script"
            raise ArgumentError("path", f"{folder} exists already", hint)
        write_folder(folder, files.write)
    return write_whole(file, text.encode())


def export_spec(spec: Spec, path: StrPath, *, force: bool = False) -> Path:
    """Writes the whole Spec as JSON, for `fsdp-lab run`. Otherwise as `export_script`."""
    return write_whole(check_file(path, replace=force), f"{spec.to_json()}\n".encode())


EXPORTS: Mapping[str, Callable[..., Path]] = {"script": export_script, "spec": export_spec}


def export_model(checkpoint: Checkpoint | StrPath, path: StrPath, *, force: bool = False) -> Path:
    """Writes the model of a checkpoint, or of the newest one in a folder, as a folder for `from_pretrained`. Raises
    ArgumentError: there is no complete checkpoint, or the folder cannot be written."""
    from fsdp_lab.export.files import export_pretrained
    from fsdp_lab.spec.checkpoint_format import Checkpoint, find

    saved = checkpoint if isinstance(checkpoint, Checkpoint) else find(checkpoint)
    return export_pretrained(saved, Path(path), force=force)


__all__ = ["EXPORTS", "export_model", "export_script", "export_spec"]
