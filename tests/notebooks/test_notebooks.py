"""The notebooks run on real ranks, and are saved as a page without a kernel can show them.

One kernel and one lab serve all of them, in small: fewer steps, and a calibration that is made up. 01 and 04 run in a page
(tests/browser/test_notebook.py and test_compare_notebook.py).
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
NOTEBOOKS = REPO / "notebooks"
NAMES = (
    "00_the_course.ipynb",
    "01_live_dashboard.ipynb",
    "02_first_steps_in_code.ipynb",
    "03_inside_a_step.ipynb",
    "04_compare_strategies.ipynb",
    "05_nothing_lost.ipynb",
    "06_before_you_rent.ipynb",
    "07_your_own_model.ipynb",
    "08_your_own_module_and_loop.ipynb",
    "09_on_your_cluster.ipynb",
    "10_write_your_own_fsdp.ipynb",
    "11_clinic.ipynb",
    "teacher.ipynb",
)
LONGEST_S = 180  # for a notebook on two ranks of two cores


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


def test_they_are_saved_small_and_static_and_link_to_what_is_there(nbformat: Any):
    assert sorted(p.name for p in NOTEBOOKS.glob("*.ipynb")) == sorted(NAMES)
    for name in NAMES:
        notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
        nbformat.validate(notebook)
        assert (NOTEBOOKS / name).stat().st_size < 300_000 and "widgets" not in notebook.metadata
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "saved after one clean run"
        for output in (output for cell in code for output in cell.outputs):
            assert output.output_type != "error"
            assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {})
        text = "".join(cell.source for cell in notebook.cells)
        files = [*re.findall(r"\]\((\w+\.\w+)\)", text), *re.findall(r"`((?:solutions|course)/[\w.]*)`", text)]
        assert all((NOTEBOOKS / file).exists() for file in files), name


def test_02_was_saved_with_a_plot_a_table_and_equal_losses(nbformat: Any):
    notebook = nbformat.read(NOTEBOOKS / NAMES[2], as_version=4)
    kinds = {kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})}
    assert {"image/png", "text/html"} <= kinds
    assert len(set(losses(text_of(notebook)))) == 1


# -- in a kernel -----------------------------------------------------------------------------------------------------

KEPT = f"""
import sys
from fsdp_lab.lab import Lab

labs = []
sys.path.append({str(REPO)!r})


def kept_lab(ranks, **options):
    labs[:] = labs or [Lab(ranks)]
    if labs[0].ranks != ranks or labs[0].lost:
        labs[0].resize(ranks)
    return labs[0]
"""
CALIBRATE = """from tests.planner.test_calibration import made_up

here = lab._calibration = made_up()[0]
here"""
# What a test does with less, or with what is there: a few steps are a sample of what a notebook shows.
SMALLER: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\bLab\((?=ranks=2)", '__import__("kept").kept_lab('),
    (r"\blab\.close\(\)", ""),
    (r"here = lab\.calibrate\(passes=3\)\nhere", CALIBRATE),
    (r"\bsteps=(\d+)(?!\d|, recover)", lambda m: f"steps={min(int(m[1]), 6)}"),
    (r'"steps": 80', '"steps": 24'),
    (r'model="gpt2-1m", steps=6\)\nwhile', 'model="gpt2-1m", steps=40)\nwhile'),
    (r"every=20", "every=3"),
    (r"rounds=2", "rounds=1"),
    (r"files\[:60\]", "files[:6]"),
    (r"files\[60:120\]", "files[6:12]"),
    (r"(< |\+ )8\b", r"\g<1>3"),
)


@pytest.fixture(scope="module")
def run(nbformat: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Any], str]]:
    """Runs the cells of a notebook in a fresh namespace, and returns what they print."""
    from nbclient import NotebookClient

    folder = tmp_path_factory.mktemp("notebooks")
    shutil.copytree(NOTEBOOKS / "course", folder / "course")
    (folder / "kept.py").write_text(KEPT, encoding="utf-8")
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=200, kernel_name="python3",
                            resources={"metadata": {"path": str(folder)}})  # fmt: skip

    def execute(notebook: Any) -> str:
        client.nb = notebook
        for cell in notebook.cells:
            for pattern, new in SMALLER:
                cell.source = re.sub(pattern, new, cell.source)
        notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
        for i, cell in enumerate(notebook.cells):
            client.execute_cell(cell, i)
        return text_of(notebook)

    with client.setup_kernel():
        yield execute
        execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import kept; kept.labs[0].close()")]))


def solved_loop(nbformat: Any, notebook: Any) -> list[Any]:
    """The exercise of 08 as cells: the loop with the answer of solutions/exercises.py, and its check."""
    answer = runpy.run_path(str(NOTEBOOKS / "solutions" / "exercises.py"))["LOOP"].strip("\n")
    loop, check = (
        next(c.source for c in notebook.cells if text in c.source) for text in ("four of these", "accumulates(")
    )
    begin, end = loop.index("            value = net("), loop.index("            adam.step()")
    return [nbformat.v4.new_code_cell(text) for text in (f"{loop[:begin]}{answer}\n{loop[end:]}", check)]


# Notebook -> patterns of what its cells tell; its exercise has a gap, so its check says "Not yet".
TOLD: dict[str, list[str]] = {
    NAMES[0]: [r"Ready: \d steps"],
    NAMES[2]: ["carried over: True", "is not available with ddp", "rank 0 of 2", "rank 1 of 2"],
    NAMES[3]: ["(?s)forward · unshard root.*backward · reduce.*update · optim", "unshard 2 ahead", "<Moment", "all exposed",
               "the same losses: True", "Emulated link: "],
    NAMES[5]: ["rank 1 is gone", "It resumed from a checkpoint at step", "(?m)^True$", "training stood", "parameters'"],
    NAMES[6]: ["gpt2-1m, 1.0 million parameters", "512 x h100 in 64 hosts", "bound by", "the best of"],
    NAMES[7]: ["(?s)equal bit for bit.*equal bit for bit", "the baseline", "the same text: True",
               "'adapter_config.json', 'adapter_model.safetensors'"],
    NAMES[8]: ["(?s)equal bit for bit.*equal bit for bit", "Train a Net under FSDP2", "watched: FSDP2 Sequential",
               "Passed. 4 micro-batches, and 4 reductions a step", "watched fsdp2 full_shard fp32"],
    NAMES[9]: ["finished: 3 ranks since step", "state carried: True", "'to other hosts': 0"],
    NAMES[10]: [r"Not yet\. DataParallel", r"Not yet\. Zero1", r"Not yet\. Zero2", r"Not yet\. FullyShard",
                r"Not yet\. Overlapped"],
    NAMES[11]: ["Each rank holds whole gradients"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLD)
def test_it_runs_from_top_to_bottom(nbformat: Any, run: Callable[[Any], str], name: str):
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    if name == NAMES[8]:
        notebook.cells[-2:-2] = solved_loop(nbformat, notebook)
    told = run(notebook)
    missing = [pattern for pattern in TOLD[name] if not re.search(pattern, told)]
    assert not missing, told
    assert told.count("Not yet. ") == {NAMES[0]: 0, NAMES[10]: 5}.get(name, 1), "the gaps are empty"
    if name == NAMES[2]:
        assert len(losses(told)) == 2 and len(set(losses(told))) == 1, "the same work under another sharding"
    elif name == NAMES[6]:
        rows = re.findall(r"[\d.]+ MiB  +[\d.]+ MiB$", told, re.MULTILINE)
        assert len(rows) == 5 and all(len(set(re.findall(r"[\d.]+ MiB", row))) == 1 for row in rows), "to 0.1 MiB"
    elif name == NAMES[7]:
        states = re.findall(r"optimizer state of rank 0: ([\d.]+) MiB", told)
        assert len(states) == 2 and float(states[1]) < float(states[0]) / 20


def test_binder_begins_with_the_smallest_model(nbformat: Any, tmp_path: Path):
    """What `binder/postBuild` does to the first notebook still finds the line that it changes."""
    (tmp_path / "notebooks").mkdir()
    copy = Path(shutil.copy(NOTEBOOKS / NAMES[1], tmp_path / "notebooks"))
    change = (REPO / "binder" / "postBuild").read_text().partition("\nsed ")[2]
    subprocess.run(["bash", "-euc", f"sed {change}"], cwd=tmp_path, check=True)
    code = [cell.source for cell in nbformat.read(copy, as_version=4).cells if cell.cell_type == "code"]
    assert code[1].startswith('lab = Lab(ranks=2)\nawait lab.run(model="gpt2-1m", steps=1)')
