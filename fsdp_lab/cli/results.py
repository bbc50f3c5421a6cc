"""Files of results. That of `run` and `compare`: {"runs": [a summary, ...], "refused": [{"spec", "reason"}, ...]}; compare's
has a "comparison", too: {"baseline", "records", "recommendation"}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_lab.core import files


@dataclass(kw_only=True)
class Results:
    """What was measured and what was refused so far; written after every run, so that Ctrl-C loses none."""

    file: Path | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    comparison: dict[str, Any] | None = None

    def check(self) -> None:
        """Raises ArgumentError where the file cannot be written; before anything is started, not after an hour."""
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
    """Raises ArgumentError where what `--json` names cannot be written."""
    if file is not None:
        files.check_file(file, field="--json")


def write_file(file: Path, content: Mapping[str, Any]) -> None:
    """As JSON, whole or not at all: a reader never sees half a file."""
    files.write_whole(file, (json.dumps(content, indent=1) + "\n").encode(), field="--json")
