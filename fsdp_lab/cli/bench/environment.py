"""What figures were measured on: part of every bench file."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any


def environment() -> dict[str, Any]:
    """Of this machine and this Python."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
