"""`torchrun several.py STEPS a.py=PORT b.py=PORT ...`: exported scripts as they are, one after another.

Importing torch takes seconds, a script a fraction of one: so it is imported once a rank, and a process forked for each
script. torchrun's own store outlives them and remembers the last, so each makes one at its port. Rank 0 prints the name
of each script before what it prints. One that can save adapters, a.py, does so in a.saved."""

import faulthandler
import os
import runpy
import sys
from pathlib import Path

import torch.distributed.fsdp  # noqa: F401
import transformers.models.auto.modeling_auto
import transformers.models.gpt2.modeling_gpt2  # noqa: F401

LONGEST_S = 120  # one script: where it hangs, its stacks are printed


def run(script: str, steps: str) -> None:
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    sys.argv = [script, "--steps", steps]
    if '"--save"' in Path(script).read_text():
        sys.argv += ["--save", str(Path(script).with_suffix(".saved"))]
    runpy.run_path(script, run_name="__main__")
    assert not any(name.partition(".")[0] == "fsdp_lab" for name in sys.modules), f"{script} imports fsdp_lab"


def main() -> None:
    _, steps, *scripts = sys.argv
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for script, _, port in (word.rpartition("=") for word in scripts):
        os.environ["MASTER_PORT"] = port
        if os.environ["RANK"] == "0":
            print(f"script {script}", flush=True)
        child = os.fork()
        if not child:
            run(script, steps)
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"{script} ended with status {status}")


if __name__ == "__main__":
    main()
