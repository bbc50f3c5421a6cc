"""Trainings that ask for much: the same bits under every backend, through switches, and whatever is looked at meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_lab.spec.spec import Spec
from tests.backends.test_param_groups import GROUPS
from tests.pool import Pool
from tests.rank.test_evaluation import SAMPLES, traffic
from tests.rank.test_generation import PROMPTS, TOKENS
from tests.rank.test_lr_schedule import COSINE
from tests.rank.test_session import DDP, Call, apply, call, play, spec, train

KINDS: list[dict[str, Any]] = [
    {"backward_prefetch": 2, "forward_prefetch": 1, "recompute": "full"},
    {"backend": "fsdp2", "forward_prefetch": 1},
    {"backend": "fsdp1", "sharding": "shard_grad_op", "recompute": "every:2"},
    DDP,
    {"sharding": "zero1", "offload": "optimizer"},
]
ASKED: list[dict[str, Any]] = [
    {"dropout": "config"},
    COSINE,
    {"param_groups": GROUPS},
]  # each of which changes the losses
SAME = ("step", "samples", "mean_loss", "grad_norm")


def asking(without: dict[str, Any] | None = None, **changes: Any) -> Spec:
    """All that is asked for, or without one of it."""
    asked = {key: value for one in ASKED if one is not without for key, value in one.items()}
    return spec(accumulate=2, sync="last", **asked, **changes)


def looked_at(given: Spec) -> list[Call]:
    """Four steps: over an emulated link, with evaluations and texts, traced in two places, and two of them in the ledger."""
    wanted = {"prompts": PROMPTS, "sampling": {"new_tokens": TOKENS}}
    return [
        apply(given.replace(link="20 MB/s, 0.2 ms"), fresh=True, evaluated=SAMPLES, **wanted),
        train(2, checks=range(2), evaluations={0: SAMPLES, 1: SAMPLES}, **wanted),
        call("generate", "run", PROMPTS, {"new_tokens": TOKENS}),
        train(2, checks=range(2, 4), ledgers=[3]),
    ]


def summed(of_ranks: list[list[dict[str, Any]]]) -> list[Any]:
    """What each step came to, with the checksum of the first replica's parameters."""
    return [([events[0][name] for name in SAME], sum(e["checksum"] for e in events if e["replica"] == 0) % (1 << 64))
            for events in zip(*of_ranks, strict=True)]  # fmt: skip


@pytest.mark.slow
def test_backends_switches_evaluations_texts_ledgers_and_links_change_no_bit(pool: Pool) -> None:
    calls: list[Call] = []
    for kind in KINDS:
        calls += [apply(asking(**kind), fresh=True), train(4, checks=range(4)), *looked_at(asking(**kind))]
    for i, kind in enumerate(KINDS[:4]):
        calls += [apply(asking(**kind), fresh=i == 0), train(1, checks=[i])]
    for without in ASKED:
        calls += [apply(asking(without), fresh=True), train(2)]
    of_ranks = play(pool, 2, *calls, reduction="rank_ordered")
    steady = summed([told[1]["events"] for told in of_ranks])
    for i, kind in enumerate(KINDS):
        runs = [told[6 * i : 6 * i + 6] for told in of_ranks]
        assert summed([plain["events"] for _, plain, *_ in runs]) == steady, kind
        for _, plain, _, first, _, second in runs:
            seen = [*first["events"], *second["events"]]
            assert [[e[n] for n in (*SAME, "checksum")] for e in seen] == [
                [e[n] for n in (*SAME, "checksum")] for e in plain["events"]
            ], kind
            assert traffic(seen[:2]) == traffic(plain["events"][:2]), kind
            assert [e["ledger"] for e in seen] == [False, False, True, True], kind
    looked = [[told[6 * i + 3 : 6 * i + 5] for i in range(len(KINDS))] for told in of_ranks]
    for by_kind in looked:
        for step in range(2):
            losses = [first["events"][step]["eval_loss"] for first, _ in by_kind]
            assert losses == pytest.approx(losses[:1] * len(KINDS), rel=1e-6)
        assert all(texts == by_kind[0][1] for _, texts in by_kind), "every backend writes the same"
    assert sorted(int(n) for by_kind in looked for n in by_kind[0][1]["texts"]) == [*range(len(PROMPTS))]
    rates = asking().workload.rates
    assert [e["lr"] for e in of_ranks[0][1]["events"]] == [0.01 * rates.factor(step) for step in range(4)]
    switched = [told[6 * len(KINDS) + 1 : 6 * len(KINDS) + 8 : 2] for told in of_ranks]
    assert summed([[e for a in told for e in a["events"]] for told in switched]) == steady, "through switches"
    for _, less in zip(ASKED, of_ranks[0][-5::2], strict=True):
        assert [e["mean_loss"] for e in less["events"]] != [one[2] for one, _ in steady[:2]]
