"""`free`, which gives back all memory of a sharded model; and what a rank holds of one.

These are the formulas of ZeRO (arXiv 1910.02054, section 5) and FSDP (arXiv 2304.11277, section 3.2). For Psi parameters in
all and Psi(u) in a unit, F ranks that share a copy, and element sizes s of the master, g of gathered parameters, r of
reduced gradients:

    parameters            s * Psi / F                     always
    unsharded             g * sum of Psi(u)               of the units that are gathered: limit + 1 at most, or as many as
                                                          calls are nested; ZeRO-2: all, from the forward to their backward;
                                                          ZeRO-1: all, always
    copies                g * Psi(u) / F                  offload: what is sent, while a gather is in flight, or, with
                                                          "optimizer", of all units, always
                          g * Psi(u) / F'                 what F' ranks share between forward and backward
    unsharded gradients   g * Psi(u)                      of the units whose backward is under way, as far as they have come
                          r * Psi(u)                      of one whose reduction is; without communication: of all
    gradients             s * Psi / F                     of the units whose reduction is over; ZeRO-1: r * Psi, whole
    optimizer             2 s * Psi / F                   AdamW, from its first step on

With F = 1 and g = s nothing is gathered, and a whole gradient is the shard. Activations and the few bytes of padding come on
top. A reduce-scatter runs in place, over Gloo with room for one part (r / F). FSDP2 holds as much as the engine.
"""

from __future__ import annotations

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
            for storage in [t.untyped_storage() for t in flat.tensors()]:
                if storage.resizable() and storage.size() and storage.data_ptr() not in busy:
                    storage.resize_(0)
            flat.free_gathered(busy)
            flat.gradients.drop()
            flat.gradients.clear()  # what is in memory that ranks share is free when nobody has it
