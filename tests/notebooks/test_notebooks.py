"""The notebooks run from top to bottom on real ranks, and are saved as a page without a kernel can show them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
NAMES = (
    "01_live_dashboard.ipynb",
    "02_first_steps_in_code.ipynb",
    "03_inside_a_step.ipynb",
    "04_compare_strategies.ipynb",
    "05_nothing_lost.ipynb",
    "06_before_you_rent.ipynb",
    "07_your_own_model.ipynb",
    "08_your_own_module_and_loop.ipynb",
    "09_on_your_cluster.ipynb",
)


@pytest.fixture(scope="module")
def nbformat() -> Any:
    """Takes seconds to import, which processes that run other tests do without."""
    import nbformat

    return nbformat


def text_of(notebook: Any) -> str:
    """All that the cells printed or returned, as text."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(str(o.get("text", "")) + str(o.get("data", {}).get("text/plain", "")) for o in outputs)


def losses(text: str) -> list[str]:
    return re.findall(r"last loss (\S+)", text)


def test_there_is_nothing_else_to_run():
    assert sorted(p.name for p in NOTEBOOKS.glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_saved_outputs_are_small_and_static(nbformat: Any, name: str):
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(notebook)
    assert (NOTEBOOKS / name).stat().st_size < 300_000
    assert "widgets" not in notebook.metadata
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "saved after one clean run"
    for output in (output for cell in code for output in cell.outputs):
        assert output.output_type != "error"
        assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {})


def test_the_first_one_has_three_cells_and_shows_the_picture(nbformat: Any):
    notebook = nbformat.read(NOTEBOOKS / NAMES[0], as_version=4)
    assert sum(cell.cell_type == "code" for cell in notebook.cells) == 3
    (picture,) = re.findall(r"!\[.*\]\((.*)\)", "".join(cell.source for cell in notebook.cells))
    assert (NOTEBOOKS / picture).read_bytes().startswith(b"\x89PNG")


def test_the_second_one_was_saved_with_a_plot_a_table_and_equal_losses(nbformat: Any):
    notebook = nbformat.read(NOTEBOOKS / NAMES[1], as_version=4)
    kinds = {kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})}
    assert {"image/png", "text/html"} <= kinds
    assert len(set(losses(text_of(notebook)))) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)  # the calibration of the sixth alone is 50 s of two idle cores
# The first and the fourth: tests/browser/test_notebook.py and test_compare_notebook.py.
@pytest.mark.parametrize("name", [*NAMES[1:3], *NAMES[4:]])
def test_it_runs_from_top_to_bottom(nbformat: Any, name: str, tmp_path: Path):
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    for cell in notebook.cells:  # one pass, or a few steps, are a sample of what it measures
        cell.source = cell.source.replace("calibrate(passes=3)", "calibrate(passes=1)").replace("steps=12", "steps=4")
        cell.source = cell.source.replace('"steps": 80', '"steps": 50').replace("steps=100", "steps=20")
    NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    told = text_of(notebook)
    if name == NAMES[1]:
        assert "carried over: True" in told
        assert "is not available with ddp" in told
        assert len(losses(told)) == 2
        assert len(set(losses(told))) == 1, "the same work under another sharding"
        assert {"rank 0 of 2", "rank 1 of 2"} <= set(re.findall(r"rank \d of \d", told))
    elif name == NAMES[4]:
        assert "rank 1 is gone" in told and "It resumed from a checkpoint at step" in told
        assert "True" in told.splitlines(), "the losses are those of the undisturbed run"
        assert "training stood" in told and "parameters'" in told
    elif name == NAMES[6]:
        assert told.count("equal bit for bit") == 2 and told.count("the baseline") == 1
        assert "the same text: True" in told and "'adapter_config.json', 'adapter_model.safetensors'" in told
        states = re.findall(r"optimizer state of rank 0: ([\d.]+) MiB", told)
        assert len(states) == 2 and float(states[1]) < float(states[0]) / 20
    elif name == NAMES[7]:
        assert told.count("equal bit for bit") == 2 and "Train Net under FSDP2" in told
        assert "watched: FSDP2 Sequential" in told and "watched fsdp2 full_shard fp32" in told
    elif name == NAMES[8]:
        assert "finished: 3 ranks since step" in told and "state carried: True" in told
        assert "'to other hosts': 0" in told
    elif name == NAMES[5]:
        assert "gpt2-1m, 1.0 million parameters" in told and "512 x h100 in 64 hosts" in told
        rows = re.findall(r"[\d.]+ MiB  +[\d.]+ MiB$", told, re.MULTILINE)
        assert len(rows) == 5 and all(len(set(re.findall(r"[\d.]+ MiB", row))) == 1 for row in rows), (
            "to a tenth of a MiB"
        )
        assert "bound by" in told and "the best of" in told
    else:
        assert told.index("forward · unshard root") < told.index("backward · reduce") < told.index("update · optim")
        assert "unshard 2 ahead" in told and "<Moment" in told
        assert told.count("exposed communication by unit") == 2 and "all exposed" in told
        assert "the same losses: True" in told and "Emulated link: " in told


def test_binder_begins_with_the_smallest_model(nbformat: Any, tmp_path: Path):
    """What `binder/postBuild` does to the first notebook still finds the line that it changes."""
    (tmp_path / "notebooks").mkdir()
    copy = Path(shutil.copy(NOTEBOOKS / NAMES[0], tmp_path / "notebooks"))
    change = (NOTEBOOKS.parent / "binder" / "postBuild").read_text().partition("\nsed ")[2]
    subprocess.run(["bash", "-euc", f"sed {change}"], cwd=tmp_path, check=True)
    code = [cell.source for cell in nbformat.read(copy, as_version=4).cells if cell.cell_type == "code"]
    assert code[1].startswith('lab = Lab(ranks=2)\nawait lab.run(model="gpt2-1m", steps=1)')
