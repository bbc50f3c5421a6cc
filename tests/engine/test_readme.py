"""What the README of the engine says of its code is so."""

import pkgutil
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fsdp_lab import engine
from tests.engine.toys import batch, by_block, make, mean_square
from tests.pool import Place, Pool

ENGINE = Path(engine.__file__).parent
README = (ENGINE / "README.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w/]+)\.py: ([\w.]+)`")


def test_it_names_every_file_and_only_what_exists() -> None:
    named, known = set(NAMED.findall(README)), set()
    for file, name in named:
        home = "fsdp_lab" if file.startswith("base/") else "fsdp_lab.engine"
        with suppress(ImportError, AttributeError):
            pkgutil.resolve_name(f"{home}.{file.replace('/', '.')}:{name}")
            known.add((file, name))
    assert named - known == set(), "these are gone"
    files = {path.relative_to(ENGINE).as_posix() for path in ENGINE.rglob("*.py") if path.name != "__init__.py"}
    assert not [file for file in files if f"`{file}`" not in README]


def told(place: Place, words: dict[tuple[str, str], str]) -> list[str]:
    """The calls of the second step on this rank of the functions that `words` has, each a word and the unit."""
    model, calls, names = by_block(make(depth=2)), list[str](), dict[int, str]()
    optimizer = torch.optim.AdamW(engine.sharded_parameters(model))
    optimizer.register_step_pre_hook(lambda *_: calls.append("optimizer"))

    def listen(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename.rpartition("/engine/")[2].removesuffix(".py")
        word = words.get((file, frame.f_code.co_qualname)) if event == "call" else None
        if word is not None:
            near = [*frame.f_locals.values(), *vars(frame.f_locals["self"]).values()]
            calls.append(f"{word} {next((names[id(one)] for one in near if id(one) in names), '?')}")

    for step in range(2):
        calls.clear()
        sys.setprofile(listen)
        mean_square(model, batch(step, place.rank)).backward()
        optimizer.step()
        sys.setprofile(None)
        optimizer.zero_grad()
        for unit in engine.units_of(model):  # their names are known from the first forward on
            parts = (unit, *unit.flats, *(flat.gradients for flat in unit.flats))
            names.update((id(part), unit.name or "root") for part in parts)
    return calls


def test_its_walk_is_that_of_a_real_step(pool: Pool) -> None:
    section = README.partition("\n## One step\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    words = {key: word for word, _, where in rows for key in NAMED.findall(where)}
    begin = next(i for i, row in enumerate(rows) if row[0] == "the model comes to") + 2
    walk = [part for moment, does, _ in rows[begin:] for part in (moment, *filter(None, does.split(", ")))]
    assert pool.run(told, 2, words) == [walk, walk]
