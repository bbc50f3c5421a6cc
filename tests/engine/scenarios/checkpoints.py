"""Scripts that save, and scripts that go on from what was saved, maybe by another engine on other numbers of ranks."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_optimizer_state_dict

from tests.engine.scenarios.engines import Engine, square, step, train
from tests.engine.toys import Net

_WHOLE = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
_EVERYWHERE = state_dict.StateDictOptions(full_state_dict=True)
_FROM_RANK_0 = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


Way = Callable[[Any, torch.optim.Optimizer, Path], None]


class Format(NamedTuple):
    """How a model and its optimizer are written to a folder, and read."""

    save: Way
    load: Way


def _save_sharded(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)


def _load_sharded(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    state_dict.set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


def _save_plain(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """`model.state_dict()` as it is; of the optimizer by names."""
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def _load_plain(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optimizer"])


def _save_whole(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """One file, written by rank 0, as a single process would have it."""
    of_model = state_dict.get_model_state_dict(model, options=_WHOLE)
    of_optimizer = get_optimizer_state_dict(model, optimizer, options=_WHOLE)
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        torch.save({"model": of_model, "optimizer": of_optimizer}, folder / "whole.pt")
    dist.barrier()


def _load_whole(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Rank 0 alone reads."""
    read: Any = {"model": {}, "optimizer": {}}
    if dist.get_rank() == 0:
        read = torch.load(folder / "whole.pt", weights_only=True)
    state_dict.set_model_state_dict(model, read["model"], options=_FROM_RANK_0)
    set_optimizer_state_dict(model, optimizer, read["optimizer"], options=_FROM_RANK_0)


def _load_whole_everywhere(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Every rank reads all of it. torch then gives the optimizer whole tensors, which the next step must cut."""
    read = torch.load(folder / "whole.pt", weights_only=True)
    state_dict.set_model_state_dict(model, read["model"], options=_EVERYWHERE)
    set_optimizer_state_dict(model, optimizer, read["optimizer"], options=_EVERYWHERE)


def _save_own(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Each rank what it holds."""
    folder.mkdir(exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{dist.get_rank()}.pt")


def _load_own(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    read = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=True)
    model.load_state_dict(read["model"])
    optimizer.load_state_dict(read["optimizer"])


def _save_meanwhile(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """By `async_save`, while the model goes on."""
    group = dist.new_group(backend="gloo")
    of_model, of_optimizer = get_state_dict(model, optimizer)
    saving = dcp.async_save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder, process_group=group)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    saving.result()


FORMATS: Mapping[str, Format] = {
    "sharded": Format(_save_sharded, _load_sharded), "plain": Format(_save_plain, _load_plain),
    "whole": Format(_save_whole, _load_whole), "whole everywhere": Format(_save_whole, _load_whole_everywhere),
    "by rank": Format(_save_own, _load_own), "meanwhile": Format(_save_meanwhile, _load_sharded),
}  # fmt: skip


def _model(e: Engine) -> tuple[Any, torch.optim.Optimizer]:
    model = Net(depth=2)
    model = e.shard(model, model.blocks)
    groups = [{"params": [p for p in model.parameters() if p.ndim == n], "weight_decay": 0.1 * (n - 1)} for n in (1, 2)]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def _begun(e: Engine) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = _model(e)
    for i in range(2):
        step(optimizer, square(e, model, 100 + i))
    return model, optimizer


def _go_on(e: Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Two steps; then the optimizer's state is taken whole, as it would be saved."""
    train(e, model, optimizer, steps=2)
    state: Any = get_optimizer_state_dict(model, optimizer, options=_EVERYWHERE)["state"]
    for name, moments in sorted(state.items()):
        for key, moment in sorted(moments.items()):
            assert type(moment) is torch.Tensor
            e.record(f"{name} {key}", moment)


def unbroken(e: Engine) -> None:
    """What a run that was saved and read must equal."""
    _go_on(e, *_begun(e))


def written(e: Engine, how: str) -> None:
    FORMATS[how].save(*_begun(e), e.saved)


def read(e: Engine, how: str) -> None:
    """Into a model with other values, and an optimizer that has none."""
    torch.manual_seed(1)
    model, optimizer = _model(e)
    optimizer.param_groups[0]["lr"] = 1.0
    FORMATS[how].load(model, optimizer, e.saved)
    _go_on(e, model, optimizer)
