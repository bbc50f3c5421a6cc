"""Python imports this when it starts, in every process of a command that `fsdp-lab watch` runs: this folder is first on
PYTHONPATH there. Nothing happens until the process makes an optimizer of torch's or joins a process group; then
`fsdp_lab.runs.attach` is imported, which watches what it trains. Another `sitecustomize` is run as without this one."""

import contextlib
import functools
import importlib.util
import os
import random
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

# Of torch's modules: what is called through the attachment, with the original as its first argument.
THROUGH = {
    "torch.optim.optimizer": ("Optimizer.__init__",),
    "torch.distributed.distributed_c10d": ("init_process_group", "destroy_process_group", "get_backend"),
}


class AfterImport(MetaPathFinder):
    """Changes modules of torch when they have been imported, before others take names from them."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in THROUGH:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_change(module: Any) -> None:
                load(module)
                for attribute in THROUGH[name]:
                    owner, _, last = attribute.rpartition(".")
                    holder = getattr(module, owner) if owner else module
                    setattr(holder, last, through(last.strip("_"), getattr(holder, last)))

            loader.exec_module = load_and_change
        return spec


def through(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        from fsdp_lab.runs.attach import attachment

        return getattr(attachment(), name)(original, *args, **kwargs)

    return called


def run_other() -> None:
    """Runs the `sitecustomize` that this one hides."""
    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if Path(p or ".").resolve() != here])
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if '"record": {' in os.environ.get("FSDP_LAB_WATCH", ""):
    random.seed(0)  # in place of what the system says; torch begins with a seed of its own
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(0)
sys.meta_path.insert(0, AfterImport())
run_other()
