"""The code in README runs as it stands, as in a cell of a notebook."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.nightly
def test_the_first_code_that_a_stranger_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    names: dict[str, Any] = {}

    async def cell() -> None:
        code = eval(compile(block, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.isawaitable(code):
            await code

    try:
        asyncio.run(cell())
        spec = names["run"].spec.strategy
        assert (spec.sharding, spec.precision) == ("shard_grad_op", "bf16")
        assert [row.flat["backend"] for row in names["sweep"].comparison().rows] == ["lab", "fsdp2", "fsdp1"]
    finally:
        if "lab" in names:
            names["lab"].close()
