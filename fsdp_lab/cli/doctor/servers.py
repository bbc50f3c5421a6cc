"""JupyterLab: the extensions that our pages need, here and in servers that run from another environment."""

from __future__ import annotations

import sys
from pathlib import Path

from fsdp_lab.cli.doctor.finding import Finding, State
from fsdp_lab.cli.extensions import missing, running_servers


def findings() -> list[Finding]:
    lacking = missing(Path(sys.prefix))
    if lacking:
        needs = " ".join(f"'{extension.requirement}'" for extension in lacking)
        fix = f"{sys.executable} -m pip install {needs}"
        found = [Finding("extensions", "missing: " + ", ".join(e.folder for e in lacking), State.FAIL, fix)]
    else:
        found = [Finding("extensions", "the pages' two extensions are installed")]
    for server in running_servers():
        name, value = f"server :{server.port}", f"pid {server.pid}, runs from {server.prefix}"
        if server.ours:
            found.append(Finding(name, f"{value}, this environment"))
        elif lacking := missing(server.prefix):
            fix = f"to use it: {server.install_command(lacking)}; then fsdp-lab kernel install"
            found.append(Finding(name, f"{value}, without {', '.join(e.folder for e in lacking)}", State.WARN, fix))
        else:
            found.append(
                Finding(name, f"{value}, and has the extensions", State.OK, "to use it: fsdp-lab kernel install")
            )
    return found
