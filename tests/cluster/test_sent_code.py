"""What a Spec holds of a person's code: a name that can be imported, or a whole source with a digest; the object is sent."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from fsdp_lab.base.errors import SpecError
from fsdp_lab.cluster.sent_code import code_of, unpacked, with_code
from fsdp_lab.spec.spec import Spec
from fsdp_lab.spec.user_code import UserCode, is_code, loaded
from tests.own import TEXT, cell, own, spec


def sent(names: dict[str, Any], name: str) -> UserCode:
    code = code_of(f"workload.{name}", names[name])
    assert isinstance(code, UserCode)
    return code


def test_a_source_is_whole_and_equal_code_has_equal_digests() -> None:
    """The text runs by itself, and does not depend on the cell that it was in."""
    here, there = cell(TEXT, 3), cell("\n# another cell\n" + TEXT + "\nunused = 3\n", 4)
    for name in ("build", "loss", "Samples"):
        code = sent(here, name)
        assert not code.missing and code.digest == sent(there, name).digest
        names: dict[str, Any] = {}
        exec(code.source, names)
        assert callable(names[code.name])
    source = sent(here, "build").source
    places = [source.index(part) for part in ("WIDTH = 16", "class Block", "class Net", "def build")]
    assert places == sorted(places) and "Dataset" not in source and "import math" in source
    for part, instead in (("WIDTH = 16", "WIDTH = 32"), ("range(3)", "range(4)"), ("/ 4", "/ 5")):
        after = cell(TEXT.replace(part, instead), 4)
        assert sent(here, "build").digest != sent(after, "build").digest, "what a function uses is in its digest"
        assert sent(here, "loss").digest == sent(after, "loss").digest


def test_what_is_no_code_and_no_data_is_refused() -> None:
    for given in (iter([1]), {"a": 1}, DataLoader([1])):  # type: ignore[arg-type]
        with pytest.raises(SpecError, match=r"workload\.data: .*give a map-style dataset"):
            with_code({"data": given})
    known = spec().workload.data
    assert with_code({"data": known})["data"] is known and with_code({"data": "some.txt"}) == {"data": "some.txt"}
    with pytest.raises(SpecError, match=r"give it to lab.run\(model=...\)"):
        Spec().replace(model=lambda: None)
    for forged in ({"code": "build"}, {"code": "a", "source": "", "digest": "", "missing": [], "packed": "x"}):
        with pytest.raises(SpecError, match="workload.model: this is no code that a lab has sent"):
            Spec().replace(model=forged, loss="a:b", data="a:b")


def test_large_data_is_sent_and_is_no_part_of_a_source() -> None:
    found = [sent(cell(f"DATA = {what}\ndef data():\n    return DATA\n", 7), "data")
             for what in ("['text'] * 300_000", "{'a': 'b' * 20_000}", "['text'] * 300")]  # fmt: skip
    assert [code.missing for code in found] == [("DATA",), ("DATA",), ()]
    assert len(found[0].source) < 100 and len({code.digest for code in found}) == 3
    assert unpacked("workload.data", "data", found[0].packed)() == ["text"] * 300_000


def test_values_that_text_cannot_express_are_missing_in_the_source_and_in_the_digest() -> None:
    weighed = "\n    return (model(batch['x']) * weights).sum()\n"
    text = f"{TEXT}\nweights = torch.ones(12) * SCALE\n\ndef weighed(model, batch):{weighed}"
    one, two = (sent(cell(text.replace("SCALE", scale), 5), "weighed") for scale in ("1", "2"))
    assert one.missing == two.missing == ("weights",) and one.digest != two.digest
    assert one.digest == sent(cell(text.replace("SCALE", "1"), 6), "weighed").digest
    data = TensorDataset(torch.arange(4))
    assert code_of("workload.data", data)["missing"] == ["the state of this TensorDataset"]
    assert code_of("workload.data", data) == code_of("workload.data", TensorDataset(torch.arange(4)))
    assert code_of("workload.data", data) != code_of("workload.data", TensorDataset(torch.arange(5)))


def test_closures_and_lambdas_are_sent() -> None:
    def maker(width: int) -> Any:
        def build() -> torch.nn.Module:
            return torch.nn.Linear(width, width)

        build.__module__ = "__main__"
        return build

    code = sent({"model": maker(5)}, "model")
    function = "def build() -> torch.nn.Module:\n    return torch.nn.Linear(width, width)"
    assert code.source == f"import torch\n\n\nwidth = 5\n\n\n{function}"
    assert code.digest != sent({"model": maker(6)}, "model").digest
    assert unpacked("workload.model", "build", code.packed)().in_features == 5
    code = sent({"model": cell("short = lambda: 3\n", 9)["short"]}, "model")
    assert code.source == "" and code.missing == ("<lambda>",) and unpacked("workload.model", "", code.packed)() == 3


def test_what_can_be_imported_is_a_name() -> None:
    assert code_of("workload.data", TensorDataset) == "torch.utils.data.dataset:TensorDataset"
    assert code_of("workload.loss", default_collate) == "torch.utils.data._utils.collate:default_collate"
    assert loaded("workload.loss", "math:pi") == math.pi and is_code("package.module:name.part")
    assert not any(map(is_code, ["gpt2-1m", "/a/folder", "C:/x", {"model_type": "gpt2"}]))


def test_the_object_is_beside_the_spec_and_never_in_its_json_or_a_pickle() -> None:
    made = spec()
    again = Spec.from_json(made.to_json())
    assert again == made and again.id == made.id and not again.difference(made)
    assert made.workload.model.given is not None and again.workload.model.given is None
    assert copy.deepcopy(made).workload.model is made.workload.model
    assert pickle.loads(pickle.dumps(made)).workload.model.given is None
    assert set(made.to_dict()["workload"]["model"]) == {"code", "source", "digest", "missing"}
    with pytest.raises(SpecError, match="workload.model: the code of build is not here, .*; give model=... again"):
        loaded("workload.model", again.workload.model)
    same = again.with_code({made.workload.model.digest: own()["model"]})
    assert callable(same.workload.model.given) and same.workload.loss.given is None and same == made


def test_a_module_that_a_rank_lacks_is_named() -> None:
    code = sent({"model": cell("import colorsys\n\ndef build():\n    return colorsys\n", 10)["build"]}, "model")
    with pytest.raises(SpecError, match="model: build cannot be used on this rank .*No module named 'colorsyz'"):
        unpacked("workload.model", "build", code.packed.replace(b"colorsys", b"colorsyz"))
