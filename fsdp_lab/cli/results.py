"""Files of results. That of `run` and `compare`: {"runs": [a summary, ...], "refused": [{"spec", "reason"}, ...]}; compare's
has a "comparison", too: {"baseline", "records", "recommendation"}."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_lab.cli.console import Refused


@dataclass(kw_only=True)
class Results:
    """What was measured and what was refused so far; written after every run, so that Ctrl-C loses none."""

    file: Path | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    comparison: dict[str, Any] | None = None

    def check(self) -> None:
        """Raises Refused where the file cannot be written; before anything is started, not after an hour."""
        check_file(self.file)

    def add_run(self, summary: Mapping[str, Any]) -> None:
        self.runs.append(dict(summary))
        self.write()

    def add_refused(self, spec: Mapping[str, Any], reason: str) -> None:
        self.refused.append({"spec": dict(spec), "reason": reason})

    def write(self) -> None:
        if self.file is not None:
            more = {} if self.comparison is None else {"comparison": self.comparison}
            write_file(self.file, {"runs": self.runs, "refused": self.refused, **more})


def check_file(file: Path | None) -> None:
    """Raises Refused where what `--json` names cannot be written."""
    if file is None:
        return
    folder = file.absolute().parent
    writable = os.access(file if file.exists() else folder, os.W_OK)
    if file.is_dir() or not folder.is_dir() or not writable:
        raise Refused(f"--json {file} cannot be written; name a file in a folder that exists and is yours")


def write_file(file: Path, content: Mapping[str, Any]) -> None:
    """As JSON, whole or not at all: a reader never sees half a file."""
    text = json.dumps(content, indent=1)
    if file.exists() and not file.is_file():  # /dev/stdout, a pipe
        file.write_text(text + "\n", encoding="utf-8")
        return
    with tempfile.NamedTemporaryFile(
        "w", dir=file.absolute().parent, delete=False, encoding="utf-8", suffix=".json"
    ) as part:
        part.write(text + "\n")
    os.chmod(part.name, 0o666 & ~umask())
    os.replace(part.name, file)


def umask() -> int:
    """The process's; there is no way to read it but to set it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
