"""`cached`: files that are slow to make, each made once on a machine; `hub_folder`: those of the Hugging Face Hub; and
`model_folder` and `weights_folder`: where a Workload's are. Neither torch nor transformers is imported.

Note: one process of a machine makes a file, under a lock (filelock), which is free again when that process ends, however it
ends. Others poll, so that they can be interrupted."""

import functools
import os
import re
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.spec.workload import OWN, RANDOM, Workload

VARIABLE = "FSDP_LAB_CACHE"  # the folder; else the user's cache folder of fsdp_lab
_POLL_S = 0.05
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_TIMEOUT_S = 5.0

# Called often while a file is made, with whether another process makes it; what it raises ends that.
Progress = Callable[[bool], None]


def no_progress(awaits: bool) -> None:
    """A Progress of nobody."""


def cached(name: str, make: Callable[[Path], None], progress: Progress = no_progress) -> Path:
    """The file of that name in the cache, made by `make` at a place of its own if nobody has.

    Raises SpecError: it cannot be written, as where there is no room; and what `make` raises."""
    import platformdirs
    from filelock import FileLock, Timeout

    given = os.environ.get(VARIABLE)
    root = Path(given).expanduser() if given else platformdirs.user_cache_path("fsdp_lab", appauthor=False)
    file, part = root / name, root / f"{name}.part"
    try:
        root.mkdir(parents=True, exist_ok=True)
        while not file.exists():
            try:
                with FileLock(root / f"{name}.lock", timeout=0):
                    if not file.exists():
                        try:
                            make(part)
                            part.rename(file)
                        finally:
                            part.unlink(missing_ok=True)
            except Timeout:
                progress(True)
                time.sleep(_POLL_S)
    except OSError as e:
        reason = f"its tokens cannot be kept in {root} ({e.strerror or e})"
        hint = f"make room, or name another folder in {VARIABLE} and start again"
        raise SpecError("workload.data", reason, hint) from e
    return file


def is_hub_name(name: object) -> bool:
    """Returns whether it is as "org/name", and neither a file nor a folder here."""
    return isinstance(name, str) and bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()


@functools.cache
def hub_folder(name: str, field: str, files: tuple[str, ...] | None = None, *, kind: str = "model") -> Path:
    """The folder with those files of a repository of the Hub, fetched if this machine has not, and looked for once in a
    process. `files`: patterns; None: all.

    Raises SpecError: of `field`: the Hub has no such repository, or cannot be reached."""
    from huggingface_hub import snapshot_download

    try:
        patterns = None if files is None else [*files]
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=patterns, etag_timeout=_HUB_TIMEOUT_S))
    except Exception as e:  # of many classes: of names, of access, of networks
        command = f"hf download {name}" + (" --repo-type dataset" if kind == "dataset" else "")
        said = " ".join(str(e).split())[:100]
        reason = f"{name} is no file or folder here, and the Hugging Face Hub does not give it ({said})"
        printed = f"what this prints on a machine with a network: {command}"
        hint = f"correct the name, log in (hf auth login), or give {printed}"
        raise SpecError(field, reason, hint) from None


def model_folder(model: Any, files: tuple[str, ...]) -> Path | None:
    """The folder of a `Workload.model`, of the Hub with those files; None for a name or a config. Raises SpecError."""
    if not isinstance(model, str) or model in PRESETS:
        return None
    if is_hub_name(model):
        return hub_folder(model, "workload.model", files)
    path = Path(model).expanduser()
    return path if path.is_dir() else path.parent if path.is_file() else None


WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf", ".metadata")  # the last is torch's checkpoints'


def weights_folder(workload: Workload) -> Path | None:
    """The folder of the weights that a workload begins with; None: random values.

    Raises SpecError: `weights` is "own", and its model is no folder."""
    w = workload
    if w.weights not in (None, OWN):
        return None if w.weights == RANDOM else Path(str(w.weights)).expanduser()
    folder = model_folder(w.model, ("config.json", "*.safetensors", "*.safetensors.index.json"))
    if folder is not None:
        there = chain.from_iterable(map(folder.glob, WEIGHTS))  # readable or not
        has_weights = any(not file.name.startswith("adapter_") for file in there)
        return folder if w.weights == OWN or has_weights or is_hub_name(w.model) else None
    if w.weights == OWN:
        what = f"{w.model} is a name, not a folder" if isinstance(w.model, str) else "a config has no files beside it"
        reason = f"the model has no weights of its own: {what}"
        raise SpecError("workload.weights", reason, "name the weights' folder, or use random", {"weights": RANDOM})
    return None
