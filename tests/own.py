"""A module, a loss and a dataset as a person writes them into a cell of a notebook: `cell` runs such a text.

What it defines is of `__main__`, so that no other process can import it, and its source is found as in IPython."""

import linecache
from typing import Any

from fsdp_lab.cluster.sent_code import with_code
from fsdp_lab.runs.evaluation import EvalConfig
from fsdp_lab.spec.spec import Spec
from fsdp_lab.spec.workload import CODE_FIELDS

TEXT = '''
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)
        nn.init.normal_(self.out.weight, std=0.1 / math.sqrt(WIDTH))

    def forward(self, x):
        return x + self.out(F.relu(self.fc(self.norm(x))))


class Net(nn.Module):
    """Random features, blocks, and a head that is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(12, WIDTH, bias=False)
        self.register_buffer("features", torch.randn(8, 12), persistent=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = nn.Parameter(torch.randn(12, WIDTH) / 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = self.embed(torch.cos(x @ self.features))
        for block in self.blocks:
            x = block(x)
        return self.scale * self.head(x)


def build():
    return Net()


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


class Samples(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return {"x": x + 0.01 * torch.randn(8), "y": i % 12}
'''


def cell(text: str = TEXT, number: int = 1) -> dict[str, Any]:
    """The names that a cell with this text defines."""
    name, names = f"<cell {number}>", {"__name__": "__main__"}
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), names)
    return names


def own(names: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The fields of the cell's code, and others, as `lab.run` takes them."""
    names = names or cell()
    given = {"model": names["build"], "loss": names["loss"], "data": names["Samples"]}
    return {**given, "micro_batch": 2, "lr": 0.01, **changes}


def spec(world_size: int = 2, **fields: Any) -> Spec:
    """A Spec of code that can be sent."""
    return Spec(world_size=world_size).replace(**with_code(fields or own()))


def packed(made: Spec | EvalConfig) -> dict[str, tuple[str, bytes]]:
    """By digest, what is sent for a Spec, or for metrics: a name, and the object as bytes."""
    if isinstance(made, EvalConfig):
        return {made.code.digest: (made.code.name, made.code.packed)} if made.code else {}
    sent = made.workload.sent_code()
    return {sent[name].digest: (sent[name].name, sent[name].packed) for name in CODE_FIELDS if name in sent}
