"""A training script that knows nothing of fsdp_lab: a small GPT under FSDP2. test_prove.py changes a line at a time."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

VOCABULARY, WIDTH, HEADS, STEPS, SAMPLES, MICRO = 96, 32, 4, 6, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attention(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        q, k, v = self.qkv(x).view(samples, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


several = "RANK" in os.environ
if several:
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
torch.manual_seed(0)
model = GPT()
if several:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
plain = [p for name, p in model.named_parameters() if "norm" in name or "bias" in name]
matrices = [p for name, p in model.named_parameters() if not ("norm" in name or "bias" in name)]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
data = torch.randint(0, VOCABULARY, (STEPS, SAMPLES, 17), generator=torch.Generator().manual_seed(1))
for step in range(STEPS):
    own = data[step][rank * SAMPLES // world : (rank + 1) * SAMPLES // world]
    for ids in own.chunk(MICRO):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        (loss / MICRO).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
if several:
    dist.destroy_process_group()
