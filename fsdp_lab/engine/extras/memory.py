"""`free`, which gives back all memory of a sharded model. README.md has what a rank holds of one, as formulas."""

from collections.abc import Collection

from torch import nn

from fsdp_lab.engine.hooks import check_module, unit_hooks


def free(module: nn.Module, *, busy: Collection[int] = ()) -> None:
    """Remove the hooks and free all storage at once, even if it is still referenced. The model cannot be used afterwards.

    `busy`: addresses of storage that a collective may still use, as after an abort; it is freed with its last reference.
    """
    check_module(module)
    hooks = {h.unit: h for h in map(unit_hooks, module.modules()) if h is not None}
    for unit, h in hooks.items():
        h.remove()
        for flat in unit.flats:
            g, gathered = flat.gradients, flat.full if flat.is_gathered else None
            optional = (gathered, g.unsharded, g.reduced, flat.device_shard, flat.post_forward_shard)
            tensors = (flat.master, *(t for t in optional if t is not None), *g.pieces.values())
            for storage in [t.untyped_storage() for t in tensors]:
                if storage.resizable() and storage.size() and storage.data_ptr() not in busy:
                    storage.resize_(0)
            flat.free_gathered(busy)
            flat.gradients.drop()
            flat.gradients.clear()  # what is in memory that ranks share is free when nobody has it
