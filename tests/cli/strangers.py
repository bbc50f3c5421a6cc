"""Training scripts with the structure of public ones, which know nothing of fsdp_lab: `python strangers.py NAME FILE` trains
and writes to FILE-RANK what each step's loss was by the script's own account, as JSON. Imports nothing of ours."""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, VOCABULARY = 6, 64
Told = Callable[[Any], None]


class GPT(nn.Module):
    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        block = partial(nn.TransformerEncoderLayer, width, 4, 64, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList(block() for _ in range(layers))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch() -> Tensor:
    return torch.randint(0, VOCABULARY, (4, 16))


def loader(batches: int = STEPS) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randint(0, VOCABULARY, (4 * batches, 16))), batch_size=4)


def group() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    assert dist.get_backend() == ("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(dist.get_rank())


def plain(tell: Told) -> None:
    """One process, and two micro-batches, of which the gradients are summed."""
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for (ids,) in loader():
        optimizer.zero_grad()
        losses = [model(part, part)[1] for part in ids.split(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        tell(sum(loss.item() for loss in losses) / 2)


def nanogpt(tell: Told) -> None:
    """DDP, gradient accumulation without a sync in between, a GradScaler, clipping, evaluation and checkpoints."""
    group()
    raw = GPT()
    model = nn.parallel.DistributedDataParallel(raw)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-3, betas=(0.9, 0.95))
    scaler, micro = torch.amp.GradScaler("cpu", enabled=True), 4
    for step in range(STEPS):
        if step == 3:
            model.eval()
            with torch.no_grad():
                losses = [model(x, x)[1].item() for x in (batch() for _ in range(2))]
            model.train()
            assert losses
            if dist.get_rank() == 0:
                torch.save({"model": raw.state_dict()}, os.devnull)
        total = 0.0
        for i in range(micro):
            model.require_backward_grad_sync = i == micro - 1
            ids = batch()
            with torch.amp.autocast("cpu", dtype=torch.bfloat16):
                _, loss = model(ids, ids)
                loss = loss / micro
            total += loss.item()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        tell(total)
    dist.destroy_process_group()


def titan(tell: Told) -> None:
    """FSDP2 with mixed precision, on meta first, a mesh, a scheduler, and the loss averaged over the ranks for the log."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    group()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model = GPT()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    for _ in range(STEPS):
        optimizer.zero_grad()
        ids = batch()
        loss = F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        schedule.step()
        own = loss.detach().clone()
        dist.all_reduce(own, op=dist.ReduceOp.AVG)
        tell(loss.item())
    dist.barrier()
    dist.destroy_process_group()


def fsdp1(tell: Told) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    group()
    policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
    model = FullyShardedDataParallel(GPT(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for (ids,) in loader():
        _, loss = model(ids, ids)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        tell(loss.item())
    dist.destroy_process_group()


def _small_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, max_position_embeddings=32))


def _texts() -> list[dict[str, list[int]]]:
    rows = torch.randint(0, VOCABULARY, (64, 16)).tolist()
    labels = [[-100] * (i % 8) + row[i % 8 :] for i, row in enumerate(rows)]
    ones = [1] * len(rows[0])
    return [{"input_ids": row, "labels": own, "attention_mask": ones} for row, own in zip(rows, labels, strict=True)]


def _log(tell: Told) -> Any:
    from transformers import TrainerCallback

    class Log(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                tell(float(logs["loss"]))

    return Log()


def trainer(tell: Told, *callbacks: Any) -> None:
    """transformers' Trainer, under DDP, with micro-batches of which the losses are parts of the step's."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, gradient_accumulation_steps=2,
        )  # fmt: skip
        Trainer(_small_llama(), arguments, train_dataset=_texts(), callbacks=[_log(tell), *callbacks]).train()


def called_back(tell: Told) -> None:
    """The same in one process, with our one line."""
    import fsdp_lab

    trainer(tell, fsdp_lab.trainer_callback())


def sft(tell: Told) -> None:
    """TRL's trainer of chats, in one process."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder, max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, gradient_accumulation_steps=2, packing=False, max_length=16,
            eos_token=None, gradient_checkpointing=False, bf16=False,
        )  # fmt: skip
        rows = Dataset.from_list([{"input_ids": row["input_ids"]} for row in _texts()])
        known = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
        tokens = PreTrainedTokenizerFast(tokenizer_object=known, unk_token="w0", pad_token="w1", eos_token="w2")
        made = SFTTrainer(_small_llama(), arguments, train_dataset=rows, processing_class=tokens)
        made.add_callback(_log(tell))
        made.train()


def accelerated(tell: Told) -> None:
    """Accelerate's example: accumulate, backward and clip through the accelerator."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, loader(4 * STEPS), schedule)
    losses = []
    for (ids,) in data:
        with accelerator.accumulate(model):
            _, loss = model(ids, ids)
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                tell(sum(losses) / len(losses))
                losses = []
    accelerator.end_training()


def fabric(tell: Told) -> None:
    """Lightning Fabric, under DDP."""
    from lightning_fabric import Fabric

    made = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), strategy="ddp")
    made.launch()
    bare = GPT()
    model, optimizer = made.setup(bare, torch.optim.AdamW(bare.parameters(), lr=1e-3))
    for (ids,) in made.setup_dataloaders(loader(2 * STEPS)):
        optimizer.zero_grad()
        _, loss = model(ids, ids)
        made.backward(loss)
        optimizer.step()
        tell(loss.item())


def gan(tell: Told) -> None:
    """Two models with an optimizer each, which are stepped in turns."""
    group()
    make, judge = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, n)) for n in (8, 1))
    make, judge = nn.parallel.DistributedDataParallel(make), nn.parallel.DistributedDataParallel(judge)
    of_make, of_judge = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (make, judge))
    for _ in range(STEPS // 2):
        real, noise = torch.randn(16, 8), torch.randn(16, 8)
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(make(noise).detach())).mean()
        of_judge.zero_grad()
        loss.backward()
        of_judge.step()
        tell(loss.item())
        loss = F.softplus(-judge(make(noise))).mean()
        of_make.zero_grad()
        loss.backward()
        of_make.step()
        tell(loss.item())
    dist.destroy_process_group()


class OwnFSDP(nn.Module):
    """As a course has one write it: parameters are broadcast, and each gradient is reduced by a hook."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for p in module.parameters():
            dist.broadcast(p.data, 0)
            p.register_post_accumulate_grad_hook(self._reduce)

    def _reduce(self, p: Tensor) -> None:
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())  # type: ignore[union-attr]

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


def course(tell: Told) -> None:
    group()
    model = OwnFSDP(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for (ids,) in loader():
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        tell(loss.item())
    dist.destroy_process_group()


def closure(tell: Told) -> None:
    """An optimizer that calls the model itself; the loss is that of its first call."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    x, y = torch.randn(16, 8), torch.randn(16, 1)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        tell(float(optimizer.step(evaluate)))  # type: ignore[arg-type]


def compiled(tell: Told) -> None:
    """A compiled model, whose optimizers step while its gradients come."""
    model = GPT(1)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    quick = torch.compile(model, backend="eager")
    for (ids,) in loader():
        _, loss = quick(ids, ids)
        loss.backward()
        tell(loss.item())


class Slow(nn.Linear):
    seconds = 0.0  # that all of them take longer

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(x).relu()


class Rows(torch.utils.data.Dataset[Tensor]):
    seconds = 0.0

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, i: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.randn(64)


class Late(float):
    def __reduce__(self) -> Any:
        time.sleep(self)  # so long it takes to be saved
        return float, ()


def late(tell: Told) -> None:
    """FSDP2 with faults in turn, each for as many steps: [{what takes longer: the seconds of each rank}]. Checkpoints and
    evaluations come with every fifth step. "gloo": no memory is shared. Tells of each step when the former one ended, when
    it began to wait for its input, and when it came to the gather and to the reduction."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    segments, steps, wire = json.loads(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    group()
    context: Any = dist.group.WORLD.context  # type: ignore[union-attr]
    context.shared_memory = wire != "gloo"
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model, rows = nn.Sequential(*(Slow(64, 64) for _ in range(3))), Rows()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data, end_s, reduced_s = iter(DataLoader(rows, batch_size=1)), 0.0, [0.0]
    model[0].register_full_backward_pre_hook(lambda *_: reduced_s.append(time.monotonic()))
    for i in range(steps * len(segments)):
        fault = {what: by_rank[dist.get_rank()] for what, by_rank in segments[i // steps].items()}
        if i % steps == 0:
            context.link = SimpleNamespace(reserve=lambda now_s, *_: now_s) if "link" in fault else None
            context.wait_link = partial(lambda seconds, _: time.sleep(seconds), fault.get("link", 0.0))
        rows.seconds = 0.003 + fault.get("input", 0.0)
        begin_s = time.monotonic()
        x = next(data)
        came_s = time.monotonic()
        if "evaluation" in fault and i % steps % 5 == 0:
            Slow.seconds = 5 * fault["evaluation"] / 3
            with torch.no_grad():
                model(x)
        Slow.seconds = (0.04 + fault.get("compute", 0.0)) / 3
        model(x).square().mean().backward()
        time.sleep(fault.get("host", 0.0))
        optimizer.step()
        optimizer.zero_grad()
        tell((end_s, begin_s, came_s, reduced_s[-1]))
        end_s = time.monotonic()
        if fault.get("checkpoint") and i % steps % 5 == 0:
            torch.save(Late(5 * fault["checkpoint"]), os.devnull)
    dist.destroy_process_group()


@contextlib.contextmanager
def account(path: str) -> Iterator[Told]:
    told: list[Any] = []
    try:
        yield told.append
    finally:
        rank = os.environ.get("RANK", "0")
        with open(f"{path}-{rank}", "w") as file:
            json.dump(told, file)


if __name__ == "__main__":
    torch.manual_seed(int(os.environ.get("RANK", 0)))
    with account(sys.argv[2]) as tell:
        globals()[sys.argv[1]](tell)
