"""Parameters shared by modules of different units: they belong to the lowest unit that contains all their uses.

Inner units are sharded first, when nobody can know that a module outside holds one of their parameters too. So when an outer
module is sharded, what turns out to be shared is taken out of the inner units, which are rebuilt without it.
"""

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from fsdp_lab.engine.buffer import TAKEN
from fsdp_lab.engine.hooks import UnitHooks
from fsdp_lab.engine.state import gather_one
from fsdp_lab.engine.unit import Unit


def find_ties(modules: Sequence[nn.Module], inner: Iterable[Unit]) -> dict[int, list[str]]:
    """The original parameters that two inner units took, or that one took and `modules` still hold: id -> its names, each
    with its unit."""
    owners: dict[int, list[str]] = {}
    for unit in inner:
        for flat in unit.flats:
            for original, name in zip(flat.originals, flat.names, strict=True):
                owners.setdefault(id(original), []).append(f"{name} of {unit.name}")
    held = {id(p) for root in modules for m in root.modules() for p in m._parameters.values() if p is not None}
    return {p: names for p, names in owners.items() if len(names) > 1 or p in held}


def untie(hooks: UnitHooks, tied: Collection[int]) -> None:
    """Rebuild a unit without the tied parameters, if it has any; its modules then hold these as before. Collective.

    Of two units that are tied to each other the one that was sharded first has the values.
    """
    flats, unit = [], hooks.unit
    if not any(id(original) in tied for flat in unit.flats for original in flat.originals):
        return
    for flat in unit.flats:
        kept = []
        for i, original in enumerate(flat.originals):
            if flat.has_values[i]:
                original.data = gather_one(flat, i)
                delattr(original, TAKEN)
            if id(original) not in tied:
                kept.append(i)
                continue
            for module, attribute in flat.uses[i]:
                setattr(module, attribute, original)
        entries = [(flat.originals[i], flat.uses[i], flat.names[i], flat.layout.slots[i].group) for i in kept]
        if entries:
            flats.append(type(flat)(entries, mesh=flat.mesh, policy=flat.policy, dtype=flat.dtype))
    unit.flats = tuple(flats)
    hooks.install()
