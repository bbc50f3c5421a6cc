"""The notebooks run on real ranks, and are saved as a page without a kernel can show them.

One kernel and one lab serve all of them, in small: fewer steps, and a calibration that is made up. 01 runs in a page
(tests/browser/test_notebook.py)."""

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
NOTEBOOKS = REPO / "notebooks"
NAMES = sorted(p.name for p in NOTEBOOKS.glob("*.ipynb"))  # each at the place of its number, and the teacher's last


@pytest.fixture(scope="module")
def nbformat() -> Any:
    """Takes seconds to import, which processes that run other tests do without."""
    import nbformat

    return nbformat


def saved(file: Path) -> list[dict[str, Any]]:
    """Its cells; without nbformat, which takes seconds to import."""
    notebook = json.loads(file.read_text(encoding="utf-8"))
    assert "widgets" not in notebook["metadata"]
    return [{**cell, "source": "".join(cell["source"])} for cell in notebook["cells"]]


def text_of(cells: list[Any]) -> str:
    """All that the cells printed or returned, as text."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    parts = (text for o in outputs for text in (o.get("text", ""), o.get("data", {}).get("text/plain", "")))
    return "\n".join("".join(part) for part in parts)


def losses(text: str) -> list[str]:
    return re.findall(r"last loss (\S+)", text)


def test_they_are_saved_small_and_static_and_link_to_what_is_there() -> None:
    assert [name[:2] for name in NAMES] == [*(f"{number:02}" for number in range(13)), "te"]
    for name in NAMES:
        cells = saved(NOTEBOOKS / name)
        assert (NOTEBOOKS / name).stat().st_size < 300_000
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "saved after one clean run"
        outputs = [output for cell in code for output in cell["outputs"]]
        kinds = {kind for output in outputs for kind in output.get("data", {})}
        assert "application/vnd.jupyter.widget-view+json" not in kinds
        assert not any(output["output_type"] == "error" for output in outputs)
        text = "".join(cell["source"] for cell in cells)
        files = [*re.findall(r"\]\((\w+\.\w+)\)", text), *re.findall(r"`((?:solutions|course)/[\w.]*)`", text)]
        assert all((NOTEBOOKS / file).exists() for file in files), name
        assert ("image/png" in kinds) == (name[:2] in ("02", "03", "04", "05", "07", "08")), "pictures are saved"
        assert len(set(losses(text_of(cells)))) == (name == NAMES[2])


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
    (r"\bLab\((?=ranks=2)", '__import__("kept").kept_lab('), (r"\blab\.close\(\)", ""),
    (r"here = lab\.calibrate\(passes=3\)\nhere", CALIBRATE),
    (r"\bsteps=(\d+)(?!\d|, recover)", lambda m: f"steps={min(int(m[1]), 6)}"), (r'"steps": 80', '"steps": 24'),
    (r'model="gpt2-1m", steps=6\)\nwhile', 'model="gpt2-1m", steps=40)\nwhile'), (r"every=20", "every=3"),
    (r"rounds=2", "rounds=1"),
    (r"(< |\+ )8\b", r"\g<1>3"),
)  # fmt: skip


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
        left = {p.name for p in folder.iterdir()} - {"course", "kept.py", "__pycache__"}
        assert all(re.fullmatch(r"made_by_\d\d", name) for name in left), "a reader's files may have any other name"
        return text_of(notebook.cells)

    with client.setup_kernel():
        yield execute
        close = nbformat.v4.new_code_cell("import kept; [one.close() for one in kept.labs]")
        execute(nbformat.v4.new_notebook(cells=[close]))


def solved_loop(nbformat: Any, notebook: Any) -> list[Any]:
    """The exercise of 08 as cells: the loop with the answer of solutions/exercises.py, and its check."""
    answer = runpy.run_path(str(NOTEBOOKS / "solutions" / "exercises.py"))["LOOP"].strip("\n")
    sources = [c.source for c in notebook.cells]
    loop, check = (next(s for s in sources if text in s) for text in ("four of these", "accumulates("))
    begin, end = loop.index("            value = net("), loop.index("            adam.step()")
    return [nbformat.v4.new_code_cell(text) for text in (f"{loop[:begin]}{answer}\n{loop[end:]}", check)]


# Notebook -> patterns of what its cells tell; its exercise has a gap, so its check says "Not yet".
TOLD: dict[str, list[str]] = {
    NAMES[0]: [r"Ready: \d steps"],
    NAMES[2]: ["carried over: True", "is not available with ddp", "rank 0 of 2", "rank 1 of 2"],
    NAMES[3]: ["what rank 0 holds of 5 units in 32 phases", "every rank holds before phase 0, 2, 5, ", "unshard 2 ahead",
               "<Moment", "all exposed", "the same losses: True", "Emulated link: "],
    NAMES[4]: ["fsdp2 full_shard fp32 +equal bit for bit", "ddp no_shard fp32 +equal bit for bit", "equal within rounding",
               "The fastest that fits is", "comparison.html", "3 of ", "torchrun --nproc-per-node 2 THIS_FILE"],
    NAMES[5]: ["rank 1 is gone", "It resumed from a checkpoint at step", "(?m)^True$", "training stopped", "parameters'"],
    NAMES[6]: ["gpt2-1m, 1.0 million parameters", "512 x h100 in 64 hosts", "bound by", "the best of"],
    NAMES[7]: ["the same answers: True", "question", "'adapter_config.json', 'adapter_model.safetensors'"],
    NAMES[8]: ["(?s)equal bit for bit.*equal bit for bit", "Train a Net under FSDP2", "watched: FSDP2 Sequential",
               "Passed. 4 micro-batches, and 4 reductions a step", "watched fsdp2 full_shard fp32"],
    NAMES[9]: ["finished: 3 ranks since step", "state carried: True", "'to other hosts': 0"],
    NAMES[10]: [r"Not yet\. DataParallel", r"Not yet\. Zero1", r"Not yet\. Zero2", r"Not yet\. FullyShard",
                r"Not yet\. Overlapped", r"Passed\. TinyFSDP and fsdp2: equal bit for bit"],
    NAMES[11]: ["Each rank holds whole gradients"],
    NAMES[12]: ["all wait for rank 1, which waits for its input", "in no optimizer +4.weight, 4.bias", "same batches on all",
                "watched 30 steps of Sequential under ddp on 2 ranks", "nothing found"],
}  # fmt: skip


# The long ones: recovery, plans, hosts and diagnoses, whose parts are tested elsewhere.
JOURNEYS = [NAMES[number] for number in (5, 6, 7, 9, 11)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in JOURNEYS else pytest.mark.slow) for name in TOLD]
)
def test_it_runs_from_top_to_bottom(nbformat: Any, run: Callable[[Any], str], name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    if name == NAMES[8]:
        notebook.cells[-2:-2] = solved_loop(nbformat, notebook)
    told = run(notebook)
    missing = [pattern for pattern in TOLD[name] if not re.search(pattern, told)]
    assert not missing, told
    assert told.count("Not yet. ") == {NAMES[0]: 0, NAMES[10]: 5, NAMES[12]: 0}.get(name, 1), "the gaps are empty"
    if name == NAMES[2]:
        assert len(losses(told)) == 2 and len(set(losses(told))) == 1, "the same work under another sharding"
    elif name == NAMES[6]:
        rows = re.findall(r"[\d.]+ MiB  +[\d.]+ MiB$", told, re.MULTILINE)
        assert len(rows) == 5 and all(len(set(re.findall(r"[\d.]+ MiB", row))) == 1 for row in rows), "to 0.1 MiB"
    elif name == NAMES[7]:
        peaks = re.findall(r"(?:adapters|all parameters) +([\d,]+) MiB a rank", told)
        assert len(peaks) == 2 and int(peaks[0].replace(",", "")) < int(peaks[1].replace(",", ""))


@pytest.mark.slow
def test_the_example_of_07_leaves_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from course import own_model  # takes seconds

    (tmp_path / "model").mkdir()
    (tmp_path / "chats.jsonl").write_text("mine")
    model, chats = own_model.example(tmp_path)
    assert chats.read_text() == "mine" and not [*model.iterdir()]
    for write, path in ((own_model.write_chats, chats), (own_model.write_model, model)):
        with pytest.raises(FileExistsError):
            write(path)
    util = SimpleNamespace(find_spec=lambda name: None if name == "gguf" else name)
    monkeypatch.setattr(own_model, "importlib", SimpleNamespace(util=util))
    said = own_model.write_model(tmp_path / "new")
    assert "a small GPT-2, without gguf. " in said and "pip install --no-deps gguf, delete " in said
    assert (tmp_path / "new" / "model.safetensors").is_file()


def test_binder_begins_with_the_smallest_model(tmp_path: Path) -> None:
    """What `binder/postBuild` does to the first notebook still finds the line that it changes."""
    (tmp_path / "notebooks").mkdir()
    copy = Path(shutil.copy(NOTEBOOKS / NAMES[1], tmp_path / "notebooks"))
    change = (REPO / "binder" / "postBuild").read_text().partition("\nsed ")[2]
    subprocess.run(["bash", "-euc", f"sed {change}"], cwd=tmp_path, check=True)
    code = [cell["source"] for cell in saved(copy) if cell["cell_type"] == "code"]
    assert code[1].startswith('lab = Lab(ranks=2)\nawait lab.run(model="gpt2-1m", steps=1)')
