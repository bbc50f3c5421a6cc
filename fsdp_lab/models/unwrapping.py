"""`unwrap_names`: writes a folder of weights again, with the names that its tensors had before the model was wrapped."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.models.weights import INDEX, SAFETENSORS
from fsdp_lab.models.wrapper_names import unwrapped


def unwrap_names(folder: str | os.PathLike[str], to: str | os.PathLike[str]) -> Path:
    """Writes the safetensors of `folder` into the new folder `to`, without "module.", "_orig_mod." and the like in names.
    Other files, such as config.json, are copied. One file is in memory at a time. Returns `to`.

    Raises:
        ArgumentError: there are no safetensors, no name has such a part, two become the same, or `to` exists.
    """
    source, target = Path(folder).expanduser(), Path(to).expanduser()
    files = sorted(source.glob(f"*{SAFETENSORS}"))
    if not files:
        raise ArgumentError("folder", f"{source} has no safetensors", "give a folder that save_pretrained wrote")
    names = {file: _names(file) for file in files}
    stored = [name for some in names.values() for name in some]
    if all(unwrapped(name) == name for name in stored):
        raise ArgumentError("folder", f"no name in {source} is of a wrapped model", "use it as it is")
    twice = [name for name, count in Counter(map(unwrapped, stored)).items() if count > 1]
    if twice:
        raise ArgumentError("folder", f"{source} has {twice[0]} with and without a wrapper", "take one of them out")
    if target.exists():
        raise ArgumentError("to", f"{target} exists", "give a new folder")
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file not in names and not file.name.endswith(INDEX):
            shutil.copy2(file, target)
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            renamed = {unwrapped(name): tensors.get_tensor(name) for name in names[file]}
            save_file(renamed, target / file.name, tensors.metadata())
    for file in source.glob(f"*{INDEX}"):
        index = json.loads(file.read_text())
        index["weight_map"] = {unwrapped(name): where for name, where in index["weight_map"].items()}
        (target / file.name).write_text(json.dumps(index, indent=2))
    return target


def _names(file: Path) -> list[str]:
    with safe_open(str(file), framework="pt") as tensors:
        return list(tensors.keys())
