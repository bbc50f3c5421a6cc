"""Scripts that save, and scripts that go on from what was saved, maybe by another engine on other numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from tests.engine.scenarios.engines import Engine, drawn, step
from tests.engine.toys import WIDTH, Net

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_EVERYWHERE = StateDictOptions(full_state_dict=True)
_FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a model and its optimizer are written to a folder, and read."""

    save: Callable[[Any, torch.optim.Optimizer, Path], None]
    load: Callable[[Any, torch.optim.Optimizer, Path], None]


def _save_sharded(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)


def _load_sharded(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


def _save_plain(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """`model.state_dict()` as it is; of the optimizer by names."""
    state = {"model": _unwrapped(model).state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def _load_plain(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = {"model": _unwrapped(model).state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    _unwrapped(model).load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optimizer"])


def _unwrapped(model: Any) -> Any:
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def _save_whole(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """One file, written by rank 0, as a single process would have it."""
    of_model = get_model_state_dict(model, options=_WHOLE)
    of_optimizer = get_optimizer_state_dict(model, optimizer, options=_WHOLE)
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        torch.save({"model": of_model, "optimizer": of_optimizer}, folder / "whole.pt")
    dist.barrier()


def _load_whole(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Rank 0 alone reads."""
    read = (
        torch.load(folder / "whole.pt", weights_only=True) if dist.get_rank() == 0 else {"model": {}, "optimizer": {}}
    )
    set_model_state_dict(model, read["model"], options=_FROM_RANK_0)
    set_optimizer_state_dict(model, optimizer, read["optimizer"], options=_FROM_RANK_0)


def _load_whole_everywhere(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Every rank reads all of it. torch then gives the optimizer whole tensors, which the next step must cut."""
    read = torch.load(folder / "whole.pt", weights_only=True)
    set_model_state_dict(model, read["model"], options=_EVERYWHERE)
    set_optimizer_state_dict(model, optimizer, read["optimizer"], options=_EVERYWHERE)


def _save_own(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Each rank what it holds."""
    folder.mkdir(exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{_rank()}.pt")


def _load_own(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    read = torch.load(folder / f"{_rank()}.pt", weights_only=True)
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


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


BY_RANK, MEANWHILE = "by rank", "meanwhile"
FORMATS: Mapping[str, Format] = {
    "sharded": Format(save=_save_sharded, load=_load_sharded),
    "plain": Format(save=_save_plain, load=_load_plain),
    "whole": Format(save=_save_whole, load=_load_whole),
    "whole everywhere": Format(save=_save_whole, load=_load_whole_everywhere),
    BY_RANK: Format(save=_save_own, load=_load_own),
    MEANWHILE: Format(save=_save_meanwhile, load=_load_sharded),
}


def _model(e: Engine) -> tuple[Any, torch.optim.Optimizer]:
    model = Net(depth=2)
    model = e.shard(model, model.blocks)
    groups = [{"params": [p for p in model.parameters() if p.ndim == n], "weight_decay": 0.1 * (n - 1)} for n in (1, 2)]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def _go_on(e: Engine, model: Any, optimizer: torch.optim.Optimizer, first: int) -> None:
    for i in range(first, first + 2):
        loss = model(e.rows(drawn(3, WIDTH, seed=i))).square().mean()
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(model)


def unbroken(e: Engine) -> None:
    """What a run that was saved and read must equal."""
    model, optimizer = _model(e)
    for i in range(2):
        step(optimizer, model(e.rows(drawn(3, WIDTH, seed=i))).square().mean())
    _go_on(e, model, optimizer, 2)


def written(e: Engine, how: str) -> None:
    model, optimizer = _model(e)
    for i in range(2):
        step(optimizer, model(e.rows(drawn(3, WIDTH, seed=i))).square().mean())
    FORMATS[how].save(model, optimizer, e.saved)


def read(e: Engine, how: str) -> None:
    """Into a model with other values, and an optimizer that has none."""
    torch.manual_seed(1)
    model, optimizer = _model(e)
    optimizer.param_groups[0]["lr"] = 1.0
    FORMATS[how].load(model, optimizer, e.saved)
    _go_on(e, model, optimizer, 2)


def writing(how: str) -> Callable[[Engine], None]:
    return partial(written, how=how)


def reading(how: str) -> Callable[[Engine], None]:
    return partial(read, how=how)
