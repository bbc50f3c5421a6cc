"""The training loop of a script: joining the ranks, the optimizer, a step, and what is printed."""

from __future__ import annotations

from fsdp_lab.export.sharding_part import DTYPES
from fsdp_lab.export.source import Part, fill, literal
from fsdp_lab.export.target import gpus
from fsdp_lab.spec import HYBRIDS, Spec

DEFAULT_STEPS = 20


def training_part(spec: Spec) -> Part:
    """Raises SpecError for devices that ranks of torch's own cannot take."""
    w = spec.workload
    functions = [_start(spec), _optimizer(spec), *_clipping(spec), _main(spec)]
    imports = ["argparse", "os", "time", "torch", "torch:nn", "torch.distributed as dist"]
    imports += ["math"] if votes(spec) else []
    imports += ["contextlib"] if _skips_sync(spec) and spec.strategy.backend != "fsdp2" else []
    constants = [
        f"LR = {w.lr}",
        f"WEIGHT_DECAY = {w.weight_decay}  # of matrices alone",
        *([f"CLIP_NORM = {w.clip_norm}"] if w.clip_norm is not None else []),
        *([f"DEVICES = {literal(gpus(spec))}  # by rank"] if gpus(spec) else []),
    ]
    return Part(imports=tuple(imports), constants="\n".join(constants), functions="\n\n\n".join(functions))


def votes(spec: Spec) -> bool:
    """Whether a step needs the norm of all gradients, so that all ranks clip, or skip the step, alike."""
    return spec.workload.clip_norm is not None or scales(spec)


def scales(spec: Spec) -> bool:
    """Small fp16 gradients would vanish: the loss is scaled up."""
    return "fp16" in (spec.strategy.dtypes.param, spec.strategy.dtypes.reduce)


# -- joining ---------------------------------------------------------------------------------------------------------


def _start(spec: Spec) -> str:
    if spec.devices is None:
        return fill(_START)
    return fill(_START_GPU if gpus(spec) else _START_CPU)


_START = '''
    def start() -> torch.device:
        """Join the other ranks: torchrun's environment says who this one is. Returns where it computes."""
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            dist.init_process_group("cpu:gloo,cuda:nccl")
            return device
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
        dist.init_process_group("gloo")
        return torch.device("cpu")
'''

_START_CPU = '''
    def start() -> torch.device:
        """Join the other ranks: torchrun's environment says who this one is. Returns where it computes."""
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
        dist.init_process_group("gloo")
        return torch.device("cpu")
'''

_START_GPU = '''
    def start() -> torch.device:
        """Join the other ranks: torchrun's environment says who this one is. Returns where it computes."""
        device = torch.device(DEVICES[int(os.environ["RANK"])])
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        return device
'''


# -- the optimizer ---------------------------------------------------------------------------------------------------


def _optimizer(spec: Spec) -> str:
    name = {"adamw": "AdamW", "sgd": "SGD"}[spec.workload.optimizer]
    return fill(_OPTIMIZER_FLAT if spec.strategy.backend == "fsdp1" else _OPTIMIZER, name=name)


_OPTIMIZER = '''
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        """Weight decay pulls at matrices, not at biases and norms. `foreach`, as fused kernels round by position."""
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.$name(groups, lr=LR, foreach=True)
'''

_OPTIMIZER_FLAT = '''
    def make_optimizer(model: nn.Module, dims: list[int]) -> torch.optim.Optimizer:
        """Weight decay pulls at matrices, not at biases and norms; `dims` are from before FSDP1 made all of them flat.

        `foreach`, as fused kernels round by position.
        """
        trained = [(p, d) for p, d in zip(model.parameters(), dims) if p.requires_grad]
        groups = [
            {"params": [p for p, d in trained if d >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p, d in trained if d < 2], "weight_decay": 0.0},
        ]
        return torch.optim.$name(groups, lr=LR, foreach=True)
'''


# -- a step ----------------------------------------------------------------------------------------------------------


def _clipping(spec: Spec) -> list[str]:
    if not votes(spec):
        return []
    shard = "p.grad.to_local()" if spec.strategy.backend == "fsdp2" else "p.grad"
    return [fill(_GRADIENTS, shard=shard)]


_GRADIENTS = '''
    def gradient_shards(model: nn.Module) -> list[torch.Tensor]:
        """This rank's part of every gradient."""
        return [$shard for p in model.parameters() if p.grad is not None and $shard.numel()]


    def sum_of_squares(tensors: list[torch.Tensor]) -> float:
        return float(torch.stack([t.norm() for t in tensors]).double().square().sum())
'''


def _replicas(spec: Spec) -> str:
    """Ranks that hold the same part of a gradient, which is to be counted once."""
    if spec.shard_factor == 1:
        return "world_size"
    return "(world_size // SHARD_SIZE)" if spec.strategy.sharding in HYBRIDS else ""


def _main(spec: Spec) -> str:
    w = spec.workload
    deferred = spec.strategy.backend == "fsdp2"
    flat = spec.strategy.backend == "fsdp1"
    model = "model = build_model()\nshard(model, device, seed)"
    if not deferred:
        dims = "dims = [p.dim() for p in model.parameters()]\n" if flat else ""
        model = f"model = build_model(seed)\n{dims}model = shard(model, device)"
    loss = "total.item() / ACCUMULATE" if w.accumulate > 1 else "loss.item()"
    return fill(
        _MAIN,
        seed=str(w.seed),
        steps=str(DEFAULT_STEPS),
        model=model,
        optimizer="make_optimizer(model, dims)" if flat else "make_optimizer(model)",
        scale="scale, good_steps = 2.0**16, 0  # of the loss" if scales(spec) else "",
        forwards=_accumulated(spec) if w.accumulate > 1 else _forward(spec, "step", micro=False),
        update=(_voted_update(spec) if votes(spec) else _UPDATE).replace("@loss", loss),
    )


def _forward(spec: Spec, arguments: str, *, micro: bool) -> str:
    """One micro-batch: forward and backward."""
    dtypes, count = spec.strategy.dtypes, spec.workload.accumulate
    loss = "loss = model(**batch).loss" + ("" if dtypes.param == "fp32" and dtypes.output is None else ".float()")
    if spec.strategy.backend == "ddp" and dtypes.param != "fp32":
        loss = f"with torch.autocast(device.type, dtype={DTYPES[dtypes.param]}):\n    {loss}"
    factor = " * (1 / ACCUMULATE)" if count > 1 else ""
    if scales(spec):
        factor = " * (scale / ACCUMULATE)" if count > 1 else " * scale"
    backward = f"({'loss' + factor}).backward()" if factor else "loss.backward()"
    body = [loss, backward]
    if _skips_sync(spec):
        body = _communicates_last(spec, body)
    lines = [f"batch = {{key: value.to(device) for key, value in batches({arguments}).items()}}", *body]
    return "\n".join([*lines, *(["total += loss.detach()"] if micro else [])])


def _skips_sync(spec: Spec) -> bool:
    return spec.workload.accumulate > 1 and spec.strategy.sync == "last"


def _communicates_last(spec: Spec, body: list[str]) -> list[str]:
    """Gradients of all micro-batches but the last stay where they are."""
    last = "micro == ACCUMULATE - 1"
    if spec.strategy.backend == "fsdp2":
        return [f"model.set_requires_gradient_sync({last})", *body]
    inner = [f"    {line}" for lines in body for line in lines.splitlines()]
    return [f"with contextlib.nullcontext() if {last} else model.no_sync():", *inner]


def _accumulated(spec: Spec) -> str:
    inner = "\n".join(f"    {line}" for line in _forward(spec, "step, micro", micro=True).splitlines())
    return f"total = torch.zeros((), device=device)\nfor micro in range(ACCUMULATE):\n{inner}"


def _voted_update(spec: Spec) -> str:
    """The same answer on every rank: clip by it, or skip a step that overflowed."""
    clips, fp16 = spec.workload.clip_norm is not None, scales(spec)
    replicas = _replicas(spec)
    square = f"sums[1].item() / {replicas}" if replicas else "sums[1].item()"
    lines = ["gradients = gradient_shards(model)",
             "sums = torch.tensor([@loss, sum_of_squares(gradients)], dtype=torch.float64)",
             "dist.all_reduce(sums)"]  # fmt: skip
    if fp16:
        lines += [f"norm = math.sqrt({square}) / scale if sums[1].isfinite() else math.inf",
                  "factor = 1 / scale"]  # fmt: skip
    else:
        lines.append(f"norm = math.sqrt({square})  # of all gradients together")
    if clips:
        lines += ["if norm > CLIP_NORM:  # torch.nn.utils.clip_grad_norm_ does it too, but for the last bit of the norm",
                  "    factor *= CLIP_NORM / (norm + 1e-6)" if fp16 else
                  "    for gradient in gradients:\n        gradient.mul_(CLIP_NORM / (norm + 1e-6))"]  # fmt: skip
    if not fp16:
        return "\n".join([*lines, "optimizer.step()"])
    return "\n".join([*lines, fill(_SCALED)])


_SCALED = """
    if math.isfinite(norm):
        for gradient in gradients:
            gradient.mul_(factor)
        optimizer.step()
        good_steps += 1
        if good_steps == 2000:
            scale, good_steps = min(2.0**24, scale * 2), 0
    else:  # too large for fp16 somewhere: all ranks skip this step
        scale, good_steps = max(1.0, scale / 2), 0
"""

_UPDATE = """sums = torch.tensor([@loss], dtype=torch.float64)
dist.all_reduce(sums)
optimizer.step()"""

_MAIN = """
    def train(device: torch.device, steps: int, seed: int) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        @model
        optimizer = $optimizer
        batches = Batches(seed, rank, world_size)
        @scale
        for step in range(steps):
            @forwards
            @update
            optimizer.zero_grad()
            if rank == 0:
                print(f"step {step} loss {sums[0].item() / world_size!r}", flush=True)


    def main() -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--steps", type=int, default=$steps)
        parser.add_argument("--seed", type=int, default=$seed)
        arguments = parser.parse_args()
        train(start(), arguments.steps, arguments.seed)
        dist.destroy_process_group()  # when the model is gone: DDP would end the group itself, which can hang
        time.sleep(0.3)  # a thread of Gloo that still holds a tensor when Python ends would abort this process
"""
