"""Training loops as users write them, for a cell on all ranks: each with a mistake, and without it."""

from __future__ import annotations

_LOOP = """
import torch, fsdp_lab
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

fsdp_lab.init_process_group()
device, rank = session.info.device, torch.distributed.get_rank()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return torch.tanh(self.linear(x))


torch.manual_seed(0)
net = nn.Sequential(*[Block() for _ in range(3)]).to(device)
{before}
for module in [*net, net]:
    fully_shard(module{mesh})

adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
torch.manual_seed(rank)
batches = [torch.randn({rows}, 64, device=device) for i in range({batches})]
{agreed}
with fsdp_lab.watch(net, adam, tokens=4, title="clinic: {title}", hang_s=3) as watch:
    for number, batch in enumerate(batches):
        with watch.step():
            loss = net(batch).square().mean()
            loss.backward()
            adam.step()
            adam.zero_grad()
            watch.loss(loss)
{after}"""

_AGREED = """
# as many as the rank with the fewest has
count = torch.tensor([len(batches)], device=device)
torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MIN)
batches = batches[: int(count)]
"""

_GENERATE = """
        if number == 3{condition}:
            with torch.no_grad():
                for _ in range(3):  # a token each
                    net(batch[:1])
"""

_MESH = """
world = torch.distributed.get_world_size()
mesh = init_device_mesh(device.type, (world, 1), mesh_dim_names=("replicas", "shards"))"""


def _loop(**parts: str) -> str:
    usual = {"before": "", "mesh": "", "rows": "4", "batches": "8", "agreed": "", "after": ""}
    return _LOOP.format(**{**usual, **parts})


def unequal_batches(*, cured: bool) -> str:
    """An epoch in which rank 0 has two batches more."""
    return _loop(title="batches", batches="6 if rank == 0 else 4", agreed=_AGREED if cured else "")


def generating(*, cured: bool) -> str:
    """Samples a text between two steps, on rank 0 or on all."""
    return _loop(title="generation", after=_GENERATE.format(condition="" if cured else " and rank == 0"))


def replicas(*, cured: bool) -> str:
    """Hybrid sharding, whose replicas are left out of the mesh or not."""
    return _loop(title="replicas", before=_MESH, mesh=", mesh=mesh" if cured else ', mesh=mesh["shards"]')


def compiled(*, cured: bool) -> str:
    """Batches of many lengths, or padded to the longest."""
    compiling = 'net[1].compile(backend="aot_eager", dynamic=False)'
    return _loop(title="compilation", before=compiling, rows="12" if cured else "4 + i")
