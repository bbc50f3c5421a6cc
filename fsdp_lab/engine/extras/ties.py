"""Parameters shared by modules of different units: they belong to the lowest unit that contains all their uses.

Inner units are sharded first, when nobody can know that a module outside holds one of their parameters too. So when an outer
module is sharded, what turns out to be shared is taken out of the inner units, which are rebuilt without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from fsdp_lab.engine.buffer import TAKEN
from fsdp_lab.engine.state import gather_one
from fsdp_lab.engine.unit import Unit


def find_ties(modules: Sequence[nn.Module], inner: Sequence[Unit]) -> set[int]:
    """Ids of original parameters that two inner units took, or that an inner unit took and `modules` still hold."""
    owners: dict[int, set[int]] = {}
    for unit in inner:
        for flat in unit.flats:
            for original in flat.originals:
                owners.setdefault(id(original), set()).add(id(unit))
    held = {id(p) for root in modules for m in root.modules() for p in m._parameters.values() if p is not None}
    return {original for original, units in owners.items() if len(units) > 1 or original in held}


def describe_ties(inner: Iterable[Unit], tied: set[int]) -> list[str]:
    """For the comparison between ranks."""
    held = [(unit, flat, i, p) for unit in inner for flat in unit.flats for i, p in enumerate(flat.originals)]
    return [f"{flat.names[i]} of {unit.name} tied" for unit, flat, i, p in held if id(p) in tied]


def untie(unit: Unit, tied: set[int]) -> bool:
    """Rebuild a unit without the tied parameters, which its modules then hold as before; collective.

    Of two units that are tied to each other the one that was sharded first has the values.

    Returns: whether it had any.
    """
    if not any(id(original) in tied for flat in unit.flats for original in flat.originals):
        return False
    flats = []
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
        flats += [flat.rebuild(kept)] if kept else []
    unit.replace_buffers(flats)
    return True
