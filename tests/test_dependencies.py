"""What is imported is declared, what is declared is used, and a missing package is named with how to install it."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name as normalized

from fsdp_lab.base import errors
from tests.test_house import JUPYTER, PACKAGE, REPO, Module, imports, modules, python, without

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Import name -> distribution, if not the same.
DISTRIBUTIONS = {"PIL": "pillow", "pynvml": "nvidia-ml-py", "yaml": "pyyaml", "xdist": "pytest-xdist", "zmq": "pyzmq"}
NOT_IMPORTED = {"build": "a command", "hatchling": "the wheel's backend", "twine": "a command",
                "jupyterlab": "`fsdp-lab lab` starts it as a program", "mypy": "a command",
                "pytest-cov": "a plugin of pytest", "pytest-timeout": "a plugin of pytest",
                "pytest-xdist": "a plugin of pytest", "ruff": "a command",
                "tensorboard": "torch.utils.tensorboard imports it", "types-psutil": "read by mypy"}  # fmt: skip


def ranges(requirements: Iterable[str]) -> dict[str, str]:
    """Distribution -> range of versions, from "name>=1,<2"."""
    parts = (re.match(r"([\w.-]+)\s*(.*)", line) for line in requirements)
    return {normalized(m[1]): m[2].replace(" ", "") for m in parts if m}


def imported(targets: Iterable[str]) -> set[str]:
    heads = {target.partition(".")[0] for target in targets}
    heads -= {*sys.stdlib_module_names, "fsdp_lab", "tests", "course", "net_parts", "<a computed name>", ""}
    return {normalized(DISTRIBUTIONS.get(head, head)) for head in heads}


DEPENDENCIES = ranges(PROJECT["dependencies"])
EXTRAS = {name: ranges(listed) for name, listed in PROJECT["optional-dependencies"].items()}
TEST_EXTRA = EXTRAS.pop("test")
EXTRA = {name: version for extra in EXTRAS.values() for name, version in extra.items()}


def test_every_third_party_import_is_declared_and_every_declared_package_is_imported_or_has_a_reason():
    here = imported(i.target for module in (*modules(), Module.of(PACKAGE / "__init__.py")) for i in imports(module))
    lines = re.compile(r"^\s*(?:from ([\w.]+) import |import ([\w.]+)(?: as \w+)?$)", re.MULTILINE)
    texts = (path.read_text(encoding="utf-8") for path in (REPO / "tests").rglob("*.py"))
    by_tests = imported(one or other for text in texts for one, other in lines.findall(text))
    assert not here - set(DEPENDENCIES) - set(EXTRA) and not by_tests - set(DEPENDENCIES) - set(TEST_EXTRA)
    unused = (set(DEPENDENCIES) | set(EXTRA)) - here | set(TEST_EXTRA) - by_tests
    assert not unused - set(NOT_IMPORTED)


@pytest.mark.parametrize(("folder", "torch"), [(".", "pytorch-gpu"), ("binder", "pytorch-cpu")])
def test_conda_environments_agree_with_pyproject(folder: str, torch: str):
    listed = yaml.safe_load(Path(REPO, folder, "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    found = ranges(line for line in listed if isinstance(line, str))
    del found["python"], found["pip"]
    found["torch"] = found.pop(torch)
    assert found == DEPENDENCIES


def test_extras_agree_with_the_dependencies_and_with_what_errors_say():
    assert ranges(PROJECT["optional-dependencies"]["page"]).items() <= DEPENDENCIES.items()
    assert {name: extra for extra, names in EXTRAS.items() for name in names} == errors.EXTRAS


def test_the_containers_run_readmes_commands_on_files_that_exist():
    dockerfile, readme = (Path(REPO, name).read_text("utf-8") for name in ("binder/gpu.Dockerfile", "README.md"))
    container = json.loads(Path(REPO, ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    copied = [name for line in re.findall(r"^COPY \S+ (.+) \S+$", dockerfile, re.MULTILINE) for name in line.split()]
    assert {"pyproject.toml", "fsdp_lab", ".ci"} <= set(copied) and all(Path(REPO, name).exists() for name in copied)
    made = [line for line in (*dockerfile.splitlines(), container["postCreateCommand"]) if "pip install" in line]
    assert len(made) == 2 and all(f"{command.removeprefix('RUN ')} && .venv/bin/" in readme for command in made)
    pythons = set(re.findall(r"\bpython(\d\.\d+)", dockerfile))
    assert pythons and all(SpecifierSet(PROJECT["requires-python"]).contains(version) for version in pythons)
    build, stages = container["build"], re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.MULTILINE)
    assert (REPO / ".devcontainer" / build["dockerfile"]).samefile(REPO / "binder/gpu.Dockerfile")
    assert build["target"] in stages and dockerfile.index("\nUSER ") < dockerfile.index(".venv")
    assert "--shm-size 8g" in dockerfile and container["runArgs"] == ["--shm-size=8g"]
    assert not Path(REPO, "binder/Dockerfile").exists(), "Binder would build it instead of environment.yml"


def test_the_hooks_use_the_same_ruff_as_the_tests():
    hooks = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    (version,) = ranges({line for hook in hooks for line in hook.get("additional_dependencies", ())}).values()
    assert SpecifierSet(TEST_EXTRA["ruff"]).contains(version.removeprefix("=="))


def required_by(package: str, seen: set[str] | None = None) -> set[str]:
    """The distribution and all that it requires here, extras left out."""
    seen = set() if seen is None else seen
    if normalized(package) not in seen:
        seen.add(normalized(package))
        for requirement in map(Requirement, importlib.metadata.requires(package) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                required_by(requirement.name, seen)
    return seen


STEP = """
import copy
import torch, torch.distributed as dist
import fsdp_lab.engine.schedule, fsdp_lab.wire
from fsdp_lab.engine import full_state, fully_shard, sharded_parameters

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
plain = copy.deepcopy(model)
fully_shard(model[0])
fully_shard(model)
for each, parameters in ((model, sharded_parameters(model)), (plain, plain.parameters())):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    each(torch.ones(2, 4)).sum().backward()
    optimizer.step()
state = dict(full_state(model))
dist.destroy_process_group()
print(*(torch.equal(state[name], value) for name, value in plain.state_dict().items()), "numpy" in sys.modules)
"""


@pytest.mark.slow
def test_engine_wire_and_schedule_need_torch_alone():
    """They import, and a sharded step runs, where only torch and what it requires can be imported."""
    found, keep = importlib.metadata.packages_distributions(), {"fsdp-lab", *required_by("torch")}
    blocked = {module for module, owners in found.items() if not keep & set(map(normalized, owners))}
    assert {"numpy", "transformers", "psutil", "bokeh"} <= blocked and "torch" not in blocked
    assert python(without(blocked) + STEP).split() == ["True"] * 4 + ["False"]


INSTALL = f"{sys.executable} -m pip install"
LACKING = "which is not installed"


@pytest.mark.parametrize(("missing", "code", "said"), [
    ({"bokeh"}, "import fsdp_lab.report", f"fsdp_lab.report needs bokeh, {LACKING}: {INSTALL} 'fsdp-lab[page]'\n"),
    ({"anywidget"}, "from fsdp_lab import Dashboard", f"Dashboard needs anywidget, {LACKING}: {INSTALL} 'fsdp-lab[page]'\n"),
    (JUPYTER, "drill", f"this command needs ipyparallel, {LACKING}"),
])  # fmt: skip
def test_a_missing_package_is_named_with_how_to_install_it(missing: set[str], code: str, said: str):
    """By an import, and by a command, which ends with 2."""
    if " " not in code:
        code = f"from fsdp_lab.cli.main import main\nsys.exit(main([{code!r}]))"
    command = [sys.executable, "-c", without(missing) + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert said in done.stderr and "pip install" in done.stderr and done.returncode == (2 if "main(" in code else 1)
