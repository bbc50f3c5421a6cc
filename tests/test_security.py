"""What others could do to a user of this package: no code comes out of files, no door is open, no name leads elsewhere."""

import ast
import re
import tomllib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from packaging.version import Version

from fsdp_lab.cli.main import main, parser
from fsdp_lab.cluster.engines import exposure_notes
from tests.test_house import PACKAGE, REPO, Module, modules

# The user's own code goes from the kernel to the ranks, on the channel that runs what the kernel sends anyway.
SENDS_CODE = PACKAGE / "cluster" / "sent_code.py"
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
LOADERS = {"torch.load", "np.load", "numpy.load", "pandas.read_pickle"}
LOADERS |= {"yaml.load", "yaml.unsafe_load", "yaml.full_load"}


def dangers(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Import) and (found := {a.name.partition(".")[0] for a in node.names} & PICKLES):
            yield f"line {node.lineno}: imports {found}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PICKLES:
            yield f"line {node.lineno}: imports {node.module}"
        if isinstance(node, ast.Call):
            name, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            harmless = given.get("weights_only") == "True" or (name.endswith("p.load") or name == "numpy.load")
            if name in ("eval", "exec") or (name in LOADERS and not harmless) or given.get("allow_pickle") == "True":
                yield f"line {node.lineno}: {name}({given})"
            if given.get("trust_remote_code", "False") != "False" or given.get("shell", "False") != "False":
                yield f"line {node.lineno}: {name}({given})"


def test_nothing_that_a_file_says_is_run():
    """But what the kernel sends: it is unpickled by one file, whose function one action of the ranks calls."""
    found = {m.path: list(dangers(m)) for m in (*modules(), Module.of(PACKAGE / "__init__.py"))}
    assert [what.partition(": ")[2] for what in found.pop(SENDS_CODE)] == ["imports {'cloudpickle'}"]
    wrong = [f"{path.relative_to(REPO)} {what}" for path, told in found.items() for what in told]
    assert not wrong, "\n".join(wrong)
    assert {m.file for m in modules() if "unpacked(" in m.text} == {"cluster/sent_code.py", "cluster/remote.py"}


def test_no_option_of_ours_turns_jupyters_token_off(capsys: pytest.CaptureFixture[str]):
    for option in ("--no-token", "--token=", "--IdentityProvider.token=", "--ServerApp.password="):
        with pytest.raises(SystemExit) as refused:
            parser().parse_args(["lab", option])
        assert refused.value.code == 2
    capsys.readouterr()


LOCKS = {"disable_check_xsrf", "allow_origin", "allow_unauthenticated", "identityprovider", "allow_remote_access"}
LOCKS |= {"--serverapp.token", "serverapp.password", '"token"'}


def test_what_binder_and_we_configure_leaves_jupyters_locks_on():
    for path in [*(REPO / "binder").iterdir(), PACKAGE / "cli" / "jupyter.py", REPO / "environment.yml"]:
        text = path.read_text(encoding="utf-8").lower()
        assert not [lock for lock in LOCKS if lock in text], path.name


@pytest.mark.parametrize(("hosts", "registration", "curve", "words"), [
    (["here", "here"], "tcp://127.0.0.1:1", None, []),
    (["there", "there"], "tcp://10.0.0.1:1", None, ["signed and not encrypted"]),
    (["there", "there"], "tcp://10.0.0.1:1", b"key", []),
    (["here", "there"], "tcp://10.0.0.1:1", None, ["signed and not encrypted", "neither encrypted nor signed"]),
])  # fmt: skip
def test_what_crosses_a_network_in_the_open_is_said(hosts, registration, curve, words, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    told = exposure_notes(SimpleNamespace(_config={"registration": registration}, curve_serverkey=curve), hosts)
    assert len(told) == len(words) and all(word in note for word, note in zip(words, told, strict=True))


# From these versions on published holes are closed: code in files, links back into the page, text that hangs its reader
CLOSED = {"torch": "2.6", "jupyterlab": "4.4.8", "transformers": "4.53", "psutil": "5.6.6"}


def test_versions_with_known_holes_are_not_installed():
    """A short list by hand, of what we are sure of; `pip-audit` in your environment knows them all."""
    wanted = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    least = {found[1]: found[2] for line in wanted if (found := re.match(r"([\w-]+)>=([\d.]+)", line))}
    for package, closed in CLOSED.items():
        assert Version(least[package]) >= Version(closed), f"{package} {least[package]} is older than {closed}"


@pytest.mark.parametrize("name", ["..", "../x", "/etc", "", "-x", ".hidden"])
def test_a_kernels_name_is_no_path(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Jupyter would replace the folder that the name leads to."""
    monkeypatch.setattr("ipykernel.kernelspec.install", lambda **_: pytest.fail("it was registered"))
    assert main(["kernel", "install", f"--name={name}"]) == 2
    assert "is not a kernel's name" in capsys.readouterr().err
