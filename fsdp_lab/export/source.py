"""A script as parts: what each needs imported, its constants, its functions, its lines of `main`.

A part's text is a template. `$name` stands for a value; a line that is `@name` alone, for lines of their own at that
indentation, or for none, so that a script holds nothing that its Spec does not need.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import Template
from typing import Any

WIDTH = 100
_STDLIB = frozenset(
    {"argparse", "contextlib", "dataclasses", "functools", "hashlib", "math", "os", "pathlib", "sysconfig", "time"}
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Imports are "module", "module as name" or "module:name"."""

    imports: tuple[str, ...] = ()
    constants: str = ""
    functions: str = ""


def fill(template: str, /, **values: str) -> str:
    """The text of a template, dedented. Raises KeyError for a name that has no value."""
    lines: list[str] = []
    for line in textwrap.dedent(template).strip("\n").splitlines():
        found = re.fullmatch(r"( *)@(\w+)", line)
        if found is None:
            lines.append(Template(line).substitute(values))
        elif values[found[2]]:
            lines += textwrap.indent(values[found[2]], found[1]).splitlines()
    return "\n".join(lines)


def assemble(docstring: str, parts: Iterable[Part]) -> str:
    """The whole script."""
    parts = list(parts)
    imports = _imports({name for part in parts for name in part.imports})
    constants = "\n".join(part.constants for part in parts if part.constants)
    functions = [part.functions for part in parts if part.functions]
    main = 'if __name__ == "__main__":\n    main()'
    return "\n\n\n".join([f'"""{docstring}\n"""\n\n{imports}\n\n{constants}', *functions, main]) + "\n"


def _imports(names: Iterable[str]) -> str:
    """In the order that isort and ruff give them."""
    plain = sorted(name for name in names if ":" not in name)
    members: dict[str, list[str]] = {}
    for module, _, member in (name.partition(":") for name in names if ":" in name):
        members.setdefault(module, []).append(member)
    lines = [(name.partition(" ")[0], f"import {name}") for name in plain]
    lines += [(module, _from(module, members[module])) for module in sorted(members)]
    groups = [
        [line for module, line in lines if (module.partition(".")[0] in _STDLIB) is ours] for ours in (True, False)
    ]
    return "\n\n".join("\n".join(group) for group in groups if group)


def _from(module: str, members: list[str]) -> str:
    ordered = sorted(members, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    line = f"from {module} import {', '.join(ordered)}"
    if len(line) <= 88:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in ordered) + ")"


def literal(value: Any) -> str:
    """A plain value as Python; a dict or a long list takes a line for each entry."""
    flat = _flat(value)
    if isinstance(value, Mapping) and value:
        return "{\n" + "".join(f"    {_flat(k)}: {_flat(v)},\n" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)) and len(flat) > WIDTH - 20:
        return "[\n" + "".join(f"    {_flat(v)},\n" for v in value) + "]"
    return flat


def _flat(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flat(k)}: {_flat(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flat, value)) + "]"
    return repr(value)


def paragraph(text: str, indent: str = "") -> str:
    """Wrapped to the width of a script."""
    return textwrap.fill(text, WIDTH - 8, initial_indent=indent, subsequent_indent=indent, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip
