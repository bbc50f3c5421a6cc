"""`LearnersKernels`: in JupyterLab of a class, gives each kernel the variables of the learner whose folder it is in.

JupyterLab imports it by name; nothing of ours does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager

from fsdp_lab.cli.classroom import learner_variables


class LearnersKernels(AsyncMappingKernelManager):
    """A kernel's learner is the first folder of its path below the server's."""

    async def start_kernel(self, *, path: str | None = None, **options: Any) -> str:  # type: ignore[override]
        learner = (path or "").strip("/").partition("/")[0]
        env = {**(options.pop("env", None) or os.environ), **learner_variables(Path(self.root_dir), learner)}
        return str(await super().start_kernel(path=path, env=env, **options))  # type: ignore[arg-type]
