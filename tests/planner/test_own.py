"""A module of one's own is recorded once, and its plan is what a rank measures; what cannot be planned is refused."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.events import StepEvent
from fsdp_lab.planner.questions import Target, planned, planned_memory, shape_of
from fsdp_lab.spec.spec import Spec
from tests.own import TEXT, cell, own, packed, spec
from tests.pool import Place, Pool
from tests.rank.test_own import rank_with
from tests.rank.test_session import DDP

WIDE = TEXT.replace("WIDTH = 16", "WIDTH = 96").replace("randn(8", "randn(24")
CASES: list[dict[str, Any]] = [DDP, {"recompute": "full"}, {"precision": "bf16-pure"}]


def _peaks(place: Place, sent: Any, plan: list[dict[str, Any]]) -> list[Any]:
    s, found = rank_with(place, sent), []
    for given in plan:
        s.apply("run", given, fresh=True)
        found.append(s.train(3)["events"][-1])
    s.close()
    return found


@pytest.mark.slow
def test_its_memory_is_what_ranks_measure(pool: Pool) -> None:
    made = spec(**own(cell(WIDE), micro_batch=256))
    specs = [made.replace(**case) for case in CASES]
    events = pool.run(_peaks, 2, packed(made), [s.to_dict() for s in specs], reduction=None)[0]
    for s, event in zip(specs, map(StepEvent.from_dict, events), strict=True):
        measured, planned = event.memory.at_peak, planned_memory(s, device="cpu").at_peak
        rel = 0.005 if s.strategy.recompute == "none" else 0.01
        above = 0.05 if s.strategy.precision == "bf16-pure" else rel  # copies that oneDNN makes on CPUs with AVX-512
        assert (1 - rel) * planned.total_bytes <= measured.total_bytes <= (1 + above) * planned.total_bytes, s.strategy
        assert planned.unsharded_bytes == measured.unsharded_bytes


def test_it_is_planned_in_any_units_and_for_any_machine() -> None:
    made = spec(**own(micro_batch=64, clip_norm=1.0))
    shape = shape_of(made)
    assert len(shape.units) == 4 and shape.units[1].name == "Block" and shape.unit_names[1] == "blocks.0"
    assert shape.parameters == 3 * (32 + 16 * 32 + 32 + 32 * 16 + 16) + 2 * 12 * 16 + 1
    assert shape.forward_flops(128) == 2 * (8 * 12 + 12 * 16 + 3 * 2 * 16 * 32 + 16 * 12)
    assert [len(shape_of(made.replace(wrap=wrap)).units) for wrap in ("every:2", "whole")] == [3, 1]
    plan = planned(made, Target(hardware="h100"))
    assert plan.fits and plan.tokens_per_s == pytest.approx(128 / plan.step_time_s)


def test_a_module_that_was_reloaded_is_planned_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "planned_module.py"
    file.write_text(TEXT)
    module = importlib.import_module("planned_module")
    made = Spec().replace(**{name: f"planned_module:{value}" for name, value in
                             (("model", "build"), ("loss", "loss"), ("data", "Samples"))})  # fmt: skip
    before = shape_of(made).parameters
    assert before == shape_of(spec()).parameters
    file.write_text(TEXT.replace("WIDTH = 16", "WIDTH = 8  # narrow"))
    importlib.reload(module)
    assert shape_of(made).parameters < before


REFUSED: list[tuple[str, str, str]] = [
    ('F.cross_entropy(model(batch["x"]), batch["y"])', '(model(batch["x"]) * model(batch["x"])).mean()',
     "it cannot be planned: its loss calls the model 2 times"),
    ("return self.scale * self.head(x)", "return (x @ x.T).softmax(-1) @ self.head(x)",
     "it cannot be planned: its memory may grow with the square"),
    ("WIDTH = 16", "WIDTH = 37", "it cannot be planned: the planner tells samples by the number 37"),
    ("return self.scale * self.head(x)", "return self.scale * self.head(x) * float(x.mean())",
     "a step of build cannot be recorded"),
]  # fmt: skip


@pytest.mark.parametrize(("there", "instead", "said"), REFUSED)
def test_what_cannot_be_planned_is_refused_in_a_sentence(there: str, instead: str, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        shape_of(spec(**own(cell(TEXT.replace(there, instead), 20))))
    assert str(refused.value).startswith(f"workload.model: {said}")


def test_a_stored_spec_cannot_be_planned_without_its_code() -> None:
    made = spec(**own(cell(TEXT.replace("WIDTH = 16", "WIDTH = 24"), 21)))
    with pytest.raises(SpecError, match="workload.model: the code of build is not here"):
        shape_of(Spec.from_json(made.to_json()))
