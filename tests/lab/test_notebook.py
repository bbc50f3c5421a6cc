"""What only IPython brings: `%%px` on the ranks, and cells that are run again, also in another kernel."""

import ast
import asyncio
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from tests.cluster.conftest import FAKE

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.slow
@pytest.mark.usefixtures("temporary")
def test_a_kernel_shows_how_far_it_is_and_a_restarted_one_finds_its_ranks_by_the_same_cell(tmp_path: Path):
    own = {"TMPDIR": str(tmp_path), "JPY_SESSION_NAME": "mine.ipynb", "IPYTHONDIR": str(tmp_path / "ipython")}
    manager, client = start_new_kernel(env={**os.environ, **own}, kernel_name="python3")

    errors: list[str] = []

    def cell(code: str) -> tuple[str, list[str]]:
        """What the cell printed, and what it displayed as HTML, each state of it."""
        told: list[dict[str, Any]] = []
        client.execute_interactive(code, timeout=60, output_hook=lambda m: told.append(m["content"]))
        errors.extend(content["evalue"] for content in told if "evalue" in content)
        html = (content.get("data", {}).get("text/html", "") for content in told)
        return "".join(content.get("text", "") for content in told), [text for text in html if "<span>" in text]

    try:
        make = f"from fsdp_lab.lab import Lab\nlab = Lab(2, persist=True, rank_module={FAKE!r})"
        print_ranks = "print(lab.attached, lab.cluster.pids)"
        pids, started = cell(f"{make}\n{print_ranks}")
        assert "<progress" in started[0] and "✓" in started[-1] and "ready (2 of 2)" in started[-1]
        _, (*on_the_way, end) = cell('await lab.compare(sharding=["full_shard", "no_shard"], steps=60)')
        assert on_the_way and all('<progress max="120" value=' in html for html in on_the_way)
        assert "✓" in end and "120 of 120 steps" in end and "left" not in end
        measuring = "from fsdp_lab.runs.notebook import progress_bar\nwith progress_bar('measuring'): 1 / 0"
        _, (begun, failed) = cell(measuring)
        assert "<progress>" in begun and "measuring: not ended" in failed
        cell("run = lab.run(seed=7)\nwhile run.step < 3: pass")
        for now in (False, True):
            manager.restart_kernel(now=now)
            client.wait_for_ready(60)
            assert cell(f"{make}\n{print_ranks}")[0] == pids.replace("False", "True")
        again = "run = lab.run(lab.spec, fresh=False, steps=1).wait()\nprint(run.switches[0].carried, run.step > 3)"
        assert cell(f"{again}\nprint(lab.spec.workload.seed)")[0] == "True True\n7\n"
        leave = "run = lab.run(lab.spec, fresh=False)\nwhile run.step < 9: pass\nlab.detach()"
        said = "print(lab.closed, run.state.value, run.reason)"
        assert re.match("True stopped .*left the ranks", cell(f"{leave}\n{said}")[0])
        assert cell(f"{make}\n{print_ranks}")[0] == pids.replace("False", "True")
        closed = "former = lab\n{}\nprint(former.closed)"
        assert cell(closed.format(make))[0] == "True\n" and cell(print_ranks)[0] == pids.replace("False", "True")
        one = f"from fsdp_lab.cluster.detached import detached_clusters\n{make.replace('Lab(2', 'Lab(1')}"
        left = "print(lab.attached, [c.pids for c in detached_clusters()] == [tuple(lab.cluster.pids)])"
        assert cell(f"{one}\n{left}")[0] == "False True\n", "the two were ended"
        assert cell("lab.close()") == ("", []) and list(tmp_path.glob("fsdp_lab-*")) == []

        first = make.replace("persist=True, ", "") + "\nrun = lab.run(steps=3).wait()"
        for made in (first, f"former, pids = lab, lab.cluster.pids\n{first}"):
            cell(made)
            cell("%px square = rank ** 2")
            cell("%%px\nassert model is session.model and world_size == 2")
            assert cell("print(lab.client[lab.cluster.engine_ids]['square'])")[0].endswith("[0, 1]\n")
        late = "AsyncResult.stream_output = lambda result: time.sleep(0.3) or stream(result)"  # when all has come
        cell(f"import time\nfrom ipyparallel import AsyncResult\nstream = AsyncResult.stream_output\n{late}")
        told: list[dict[str, Any]] = []
        client.execute_interactive("%%px\nprint(rank)", timeout=60, output_hook=lambda m: told.append(m["content"]))
        shown = {c["transient"]["display_id"]: c["data"]["text/plain"] for c in told if "transient" in c}
        assert {text.split()[-1] for text in shown.values()} == {"0", "1"}
        cell("%load_ext fsdp_lab")
        said, _ = cell("%%ranks\nprint(rank, 'of', world_size)\nrank + square")
        assert "[rank 0] 0 of 2\n" in said and "[rank 1] 1 of 2\n" in said and "[rank 1] 2" in said
        assert cell("%%ranks --rank 1\nprint('only', rank)")[0] == "[rank 1] only 1\n" and not errors[1:]
        for wrong in ("%%ranks --rank 2\n0", "%%ranks --all\n0", "%%ranks\n1 / rank", "%lab two"):
            cell(wrong)
        cell("before = lab\n%lab 2")
        assert cell("print(before is lab)")[0] == "True\n"
        reused = "former.cluster.token == lab.cluster.token"  # the server and the controller are the former lab's
        said, _ = cell(f"print(former.closed, lab.closed, pids != lab.cluster.pids, {reused})")
        assert said == "True False True True\n"
        cell("lab.close()")
        cell("%%ranks\n0")
        zero, unknown, other, failed, word, closed = errors
        assert zero == "division by zero" and "there is no rank 2; give 0 to 1" in unknown
        assert "--all' is refused" in other
        assert failed == "the cell failed on rank 0: ZeroDivisionError: division by zero"
        assert "give the number of ranks, as in %lab 2" in word and "start one with %lab 2" in closed
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.nightly
@pytest.mark.usefixtures("temporary")
def test_the_first_code_that_a_stranger_runs() -> None:
    """README's, as it stands."""
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
