"""Training loops as users write them, for a cell on all ranks: each with a mistake, and without it."""

from __future__ import annotations

_BEGIN = """
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
"""

_SHARD = """
for module in [*net, net]:
    fully_shard(module)
"""

_LOOP = """
adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
torch.manual_seed(rank)
batches = [torch.randn({rows}, 64, device=device) for i in range({batches})]
with fsdp_lab.watch(net, adam, tokens=4, title="{title}", hang_s=3) as watch:
    for number, batch in enumerate(batches):
        with watch.step():
            loss = net(batch).square().mean()
            loss.backward()
            adam.step()
            adam.zero_grad()
            watch.loss(loss)
{after}"""

_LEFT_OVER = "6 if rank == 0 else 4"
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
mesh = init_device_mesh(device.type, (world := torch.distributed.get_world_size(), 1), mesh_dim_names=("replicas", "shards"))
for module in [*net, net]:
    fully_shard(module, mesh={mesh})
"""

_COMPILE = """
net[1].compile(backend="aot_eager", dynamic=False)
"""


def unequal_batches(*, cured: bool) -> str:
    """An epoch in which rank 0 has two batches more."""
    loop = _LOOP.format(batches=_LEFT_OVER, rows="4", title="clinic: batches", after="")
    begin, marker, rest = loop.partition("with fsdp_lab.watch")
    return _BEGIN + _SHARD + begin + (_AGREED if cured else "") + marker + rest


def generating(*, cured: bool) -> str:
    """Samples a text between two steps, on rank 0 or on all."""
    after = _GENERATE.format(condition="" if cured else " and rank == 0")
    return _BEGIN + _SHARD + _LOOP.format(batches=8, rows="4", title="clinic: generation", after=after)


def replicas(*, cured: bool) -> str:
    """Hybrid sharding, whose replicas are left out of the mesh or not."""
    mesh = _MESH.format(mesh="mesh" if cured else 'mesh["shards"]')
    return _BEGIN + mesh + _LOOP.format(batches=8, rows="4", title="clinic: replicas", after="")


def compiled(*, cured: bool) -> str:
    """Batches of many lengths, or padded to the longest."""
    loop = _LOOP.format(batches=8, rows="12" if cured else "4 + i", title="clinic: compilation", after="")
    return _BEGIN + _COMPILE + _SHARD + loop
