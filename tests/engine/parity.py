"""What the parity suites share: small models of every family, runs of a whole plan in the pool, and their outcomes."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.backends.base import Backend, original_name
from fsdp_lab.base.tensors import map_tensors
from fsdp_lab.models.wrapping import blocks
from fsdp_lab.spec.spec import Spec
from tests.backends.train import start, steps, whole
from tests.engine.toys import noted
from tests.pool import Place, Pool

_LLAMA = {"model_type": "llama", "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 259,
          "num_key_value_heads": 1, "intermediate_size": 37, "bos_token_id": None, "eos_token_id": 1}  # fmt: skip

# Few parameters, and sizes that neither 2, 3 nor 4 divides, so that shards cut through parameters and are padded.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_layer": 3, "n_embd": 18, "n_head": 2, "vocab_size": 259, "n_positions": 16,
             "bos_token_id": None, "eos_token_id": 1},
    "llama": {**_LLAMA, "tie_word_embeddings": False},
    "llama tied": {**_LLAMA, "tie_word_embeddings": True},
    "t5": {"model_type": "t5", "vocab_size": 259, "d_model": 18, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2,
           "d_kv": 7, "d_ff": 37, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
    "bert": {"model_type": "bert", "vocab_size": 259, "hidden_size": 18, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 37, "max_position_embeddings": 16, "pad_token_id": 0},
    "vit": {"model_type": "vit", "hidden_size": 18, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 7,
            "intermediate_size": 37, "image_size": 8, "patch_size": 4, "num_channels": 3},
    "resnet": {"model_type": "resnet", "layer_type": "basic", "embedding_size": 6, "hidden_sizes": [6, 10],
               "depths": [2, 1], "image_size": 16, "num_channels": 3, "num_labels": 7},
}  # fmt: skip


def spec(model: str, world_size: int, **changes: Any) -> Spec:
    """A Spec of one of the small models; DDP replicates, the others shard fully unless `changes` say otherwise."""
    data = "images" if model in ("vit", "resnet") else "stdlib"
    base = {"model": MODELS[model], "data": data, "seq_len": 16, "micro_batch": 2, "lr": 0.01, "backend": "fsdp2"}
    if changes.get("backend") == "ddp":
        base["sharding"] = "no_shard"
    return Spec(world_size=world_size).replace(**{**base, **changes})


@dataclass(frozen=True)
class Plan:
    """Specs to be trained one after the other, each for so many steps, the state carried from one to the next."""

    parts: tuple[tuple[Spec, int], ...]
    views: bool = False  # let blocks see their inputs through views of them: see `_as_views`

    @property
    def world_size(self) -> int:
        return self.parts[0][0].world_size

    @property
    def key(self) -> str:
        return json.dumps([self.views, [(s.to_dict(), n) for s, n in self.parts]], sort_keys=True)


@dataclass(frozen=True)
class Outcome:
    losses: list[list[float]]  # by rank, then by step
    parameters: dict[str, Tensor]  # whole, as all ranks agree they are
    buffers: list[str]  # by rank: a digest of the model's buffers, in which BatchNorm keeps the statistics of that rank


class Outcomes:
    """Runs plans, each once: what many are compared with is computed for the first of them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._known: dict[tuple[str, str], Outcome] = {}

    def of(self, *plans: Plan, reduction: str = "rank_ordered") -> list[Outcome]:
        """Their outcomes, in order; all of one world size."""
        wanted = {plan.key: plan for plan in plans if (plan.key, reduction) not in self._known}
        if wanted:
            given = plans[0].world_size, list(wanted.values())
            answers = self._pool.run(_run, *given, reduction=reduction, timeout_s=120)
            for key, by_rank in zip(wanted, zip(*answers, strict=True), strict=True):
                self._known[key, reduction] = _joined(by_rank)
        return [self._known[plan.key, reduction] for plan in plans]


def plan(*parts: tuple[Spec, int], views: bool = False) -> Plan:
    return Plan(parts, views)


def _joined(by_rank: Sequence[Any]) -> Outcome:
    assert len({digest for _, digest, _, _ in by_rank}) == 1, "the ranks do not agree on the parameters"
    parameters = {name: torch.from_numpy(values) for name, values in by_rank[0][3].items()}
    return Outcome([r[0] for r in by_rank], parameters, [r[2] for r in by_rank])


# -- in a rank -------------------------------------------------------------------------------------------------------
def _run(place: Place, plans: list[Plan]) -> list[Any]:
    """For each plan: losses, digest of the parameters, digest of the buffers, and on rank 0 the parameters' values."""
    said = []
    for p in plans:
        with noted(f"in the plan {p.key}"):
            said.append(_train(place, p))
    return said


def _train(place: Place, p: Plan) -> tuple[list[float], str, str, dict[str, Any] | None]:
    backend: Backend | None = None
    losses: list[float] = []
    for part, count in p.parts:
        backend = start(place, part, backend)
        if p.views:
            _as_views(backend.module)
        losses += steps(place, part, backend, len(losses), count)
    parameters = whole(backend)
    buffers = {original_name(name).removeprefix("module."): b for name, b in backend.module.named_buffers()}
    digests = digest(parameters.items()), digest(sorted(buffers.items()))
    backend.release()
    values = {name: t.numpy() for name, t in parameters.items()}
    return losses, *digests, values if place.rank == 0 else None


def digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Equal for equal names and equal bits."""
    sum_ = hashlib.blake2b(digest_size=16)
    for name, t in named:
        sum_.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        flat = t.detach().clone().view(-1)  # a clone: what numpy has seen cannot be freed any more
        sum_.update(flat.view(torch.uint8).numpy().tobytes())
    return sum_.hexdigest()


def _as_views(model: nn.Module) -> None:
    """Let each block see its inputs through views, as the units of FSDP2 and of ours do.

    Where a tensor goes into several blocks (T5's encoder output, its position biases), autograd adds up its gradients.
    A view in between makes it add up those of one block first, then blocks; without, it takes them one by one, and the
    sum is rounded elsewhere."""

    def through(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensors(lambda t: t.view_as(t) if t.requires_grad else t, (args, kwargs))

    for block in blocks(model):
        block.register_forward_pre_hook(through, with_kwargs=True)


# -- comparisons -----------------------------------------------------------------------------------------------------
def assert_equal(got: Outcome, wanted: Outcome) -> None:
    """Every loss of every rank, every parameter, and every rank's buffers, bit for bit."""
    assert got.losses == wanted.losses and got.parameters.keys() == wanted.parameters.keys()
    differ = [name for name, t in wanted.parameters.items() if not torch.equal(got.parameters[name], t)]
    assert not differ, f"not equal: {differ}"
    assert got.buffers == wanted.buffers


def assert_learned(outcome: Outcome, before: Outcome) -> None:
    """No comparison is of models that stood still."""
    same = [name for name, t in before.parameters.items() if torch.equal(outcome.parameters[name], t)]
    assert not same, f"not changed: {same}"
