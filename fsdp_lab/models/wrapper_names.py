"""`unwrapped`: the name that a parameter had before DDP, FSDP1, torch.compile or checkpointing wrapped its module."""

from __future__ import annotations

# In the reason why weights are refused, by which `fsdp_lab.runs.diagnosis` knows it again.
WRAPPED_NAMES = "their names are those of a wrapped model"

_IN_FRONT = "module."  # of DDP and DataParallel; elsewhere a module of the model may be named so
_ANYWHERE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def unwrapped(name: str) -> str:
    for part in _ANYWHERE:
        name = name.replace(part, "")
    return name.removeprefix(_IN_FRONT)
