"""Runs variants of a script as `fsdp-lab watch` would, in processes that are forked after the imports: `python
prove_server.py JOBS`, with runs/site on PYTHONPATH. JOBS: JSON, a list of {"script", "ranks", "record"}."""

import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

import torch

import fsdp_lab.engine
import fsdp_lab.runs.attach

assert fsdp_lab.engine and fsdp_lab.runs.attach
for job in json.loads(Path(sys.argv[1]).read_text()):
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(job["ranks"]):
            if pid := os.fork():
                pids.append(pid)
                continue
            code = 1
            try:
                torch.set_num_threads(1)
                asked = {"folder": folder, "listen": True, "ledger": False, "audit": False, "history": f"{folder}/h"}
                os.environ["FSDP_LAB_WATCH"] = json.dumps(asked | {"record": job["record"]})
                if job["ranks"] > 1:
                    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"]), "RANK": str(rank)}
                    os.environ |= place | {"WORLD_SIZE": str(job["ranks"]), "LOCAL_WORLD_SIZE": str(job["ranks"])}
                sys.argv = [job["script"]]
                runpy.run_path(job["script"], run_name="__main__")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        print(job["script"], job["ranks"], codes, flush=True)
