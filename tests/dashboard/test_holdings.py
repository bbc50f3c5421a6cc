"""The picture of slow motion: where parameters stand, and what is drawn of what each rank holds."""

import itertools

import pytest
from bokeh.document import Document
from bokeh.models import ColumnDataSource

from fsdp_lab.dashboard.panels.base import Columns
from fsdp_lab.dashboard.panels.holdings import MOST_RANKS, HoldingsPanel, ParameterAxis, short_names
from fsdp_lab.runs import StepMoment
from fsdp_lab.spec.spec import Spec
from tests.frames import Model, Step


def moments(ranks: int = 2, model: Model | None = None, **changes) -> list[StepMoment]:
    spec = Spec(world_size=ranks).replace(backend="lab", **changes)
    return [StepMoment(tuple(frames), spec) for frames in Step(spec, 3, model).frames()]


def axis_of(model: Model | None = None) -> ParameterAxis:
    frames = next(iter(Step(Spec(world_size=2).replace(backend="lab"), 3, model).frames()))
    return ParameterAxis.of(frames[0].parameters)


def at(phase: str, unit: str, direction: str = "forward", **kwargs) -> StepMoment:
    return next(m for m in moments(**kwargs) if (m.phase, m.unit, m.direction) == (phase, unit, direction))


def rows(columns: Columns) -> list[dict]:
    block = columns.all()
    numbers = [dict(zip(columns.numbers, row, strict=True)) for row in block.numbers.T.tolist()]
    return [{**row, **{name: texts[i] for name, texts in block.texts.items()}} for i, row in enumerate(numbers)]


def drawn(panel: HoldingsPanel, source: str, rank: int, *, strip: bool = False) -> list[tuple[float, float]]:
    """The stretches of the axis that a source draws in a rank's bar, or in the strip beneath it."""
    (columns,) = [s for s in panel.sources if s.name == source]
    return [(r["left"], r["right"]) for r in rows(columns)
            if round(r["bottom"]) == rank and (r["top"] > rank) == strip]  # fmt: skip


# -- the axis --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", [Model.gpt2(16, 1), Model.gpt2(768, 12)])
def test_parameters_stand_side_by_side_and_each_can_be_seen(model):
    axis = axis_of(model)
    bars = list(axis.bars.values())
    assert bars[0].left == 0 and bars[-1].right <= 1 + 1e-9
    assert all(a.right <= b.left for a, b in itertools.pairwise(bars))
    assert min(b.right - b.left for b in bars) > min(0.0025, 0.2 / len(bars))
    larger, smaller = axis.bars["transformer.h.0.mlp.c_fc.weight"], axis.bars["transformer.h.0.attn.c_proj.weight"]
    assert larger.right - larger.left > smaller.right - smaller.left
    spans = list(axis.units.values())
    assert list(axis.units)[:2] == ["root", "transformer.h.0"]
    assert all(a[1] < b[0] for a, b in itertools.pairwise(spans)), "units are together and apart from each other"
    assert larger.at(0, larger.numel) == pytest.approx((larger.left, larger.right))
    assert larger.at(larger.numel // 2, larger.numel // 2)[0] == pytest.approx((larger.left + larger.right) / 2)


def test_names_are_short():
    blocks = {"transformer.h.0": "h.0", "transformer.h.11": "h.11"}
    assert short_names(["root", *blocks]) == {"root": "root", **blocks}
    assert short_names(["encoder.block.0", "decoder.block.0"])["encoder.block.0"] == "encoder.block.0"
    assert short_names(["root", "layers"]) == {"root": "root", "layers": "layers"}


# -- what is drawn ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 20])
def test_every_source_is_drawn_and_every_moment_fits(ranks):
    told = moments(ranks)
    panel = HoldingsPanel(told[0])
    document = Document()
    document.add_root(panel.root)
    twins = {m.name: set(m.data) for m in document.models if isinstance(m, ColumnDataSource)}
    for moment in told:
        assert panel.fits(moment)
        panel.update(moment)
        for source in panel.sources:
            assert twins[source.name] == {*source.numbers, *source.texts}
            assert source.generation == 0 or source.next <= source.limit
        assert panel.captions().reading == moment.caption
    shown = min(ranks, MOST_RANKS)
    assert len(rows(panel.sources[0])) == shown * len(told[0].frames[0].parameters)
    assert ("The first 16 of 20 ranks." in panel.captions().note) == (ranks > MOST_RANKS)


def test_what_is_gathered_is_lit_up_and_every_element_is_some_ranks_own():
    moment = at("compute", "transformer.h.1")
    panel = HoldingsPanel(moment)
    lit = drawn(panel, "slow.light", 0)
    axis = ParameterAxis.of(moment.frames[0].parameters)
    whole = [p.name for p in moment.frames[0].parameters if p.unit in ("root", "transformer.h.1")]
    assert lit == [pytest.approx((axis.bars[n].left, axis.bars[n].right)) for n in whole]
    assert drawn(panel, "slow.light", 1) == lit and drawn(panel, "slow.moving", 0) == []
    owned = sum(right - left for rank in (0, 1) for left, right in drawn(panel, "slow.own", rank))
    assert owned == pytest.approx(sum(b.right - b.left for b in axis.bars.values()))
    names = panel.patches()["slow.ranks"]["major_label_overrides"]["entries"]
    assert names == [[0, "0: 676,160, 3.30 MiB"], [1, "1: 676,160, 3.30 MiB"]]
    panel = HoldingsPanel(moments()[-1])  # gradients are a strip
    assert drawn(panel, "slow.own", 0, strip=True) == drawn(panel, "slow.own", 0) != []
    early = HoldingsPanel(moments()[0])
    assert all(drawn(early, s, 0, strip=True) == [] for s in ("slow.light", "slow.moving", "slow.own"))


def test_the_unit_at_work_is_marked_and_all_of_them_by_the_optimizer():
    moment = at("unshard", "transformer.h.1")
    panel = HoldingsPanel(moment)
    left, right = ParameterAxis.of(moment.frames[0].parameters).units["transformer.h.1"]
    (mark,) = rows(panel.sources[4])
    assert mark["left"] < left < right < mark["right"] + 0.001
    panel.update(moments()[-1])
    (mark,) = rows(panel.sources[4])
    assert mark["left"] < 0 and mark["right"] > 0.99
    assert not panel.fits(moments(3)[0]) and not panel.fits(moments(model=Model.gpt2(64, 4))[0])
