"""`fsdp-lab prove`: faults in a script are named by step and tensor, and changes that do no harm are seen as such."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_lab.cli import run
from fsdp_lab.cli.main import main
from fsdp_lab.rank.watch.recording import Piece, StepPhase
from fsdp_lab.runs.parity import Verdict
from fsdp_lab.runs.prove import Proof, Recorded, RecordedStep, compare
from tests.ports import free_ports

SCRIPT = Path(__file__).with_name("proved.py")
BASE = SCRIPT.read_text()
SHARD = "    for block in model.blocks:\n        fully_shard(block)\n    fully_shard(model)\n"
POLICY = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
BF16 = BASE.replace("import fully_shard", "import MixedPrecisionPolicy, fully_shard").replace(
    SHARD, SHARD.replace("block)", f"block, mp_policy={POLICY})").replace("model)", f"model, mp_policy={POLICY})")
)
LOOP = "    for ids in own.chunk(MICRO):\n"
ATTENTION = "F.scaled_dot_product_attention(q, k, v, is_causal=True)"
MASK = "torch.ones(length, length).tril() == 0"
BY_HAND = f"((q @ k.transpose(2, 3) / (WIDTH // HEADS) ** 0.5).masked_fill({MASK}, -torch.inf).softmax(-1) @ v)"
CLIP, NORM1 = "    nn.utils.clip", "self.norm1, self.norm2 = nn.LayerNorm(WIDTH"
SPLIT, AFTER = "plain = ", "    schedule.step()"
LOSS = "F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())"
UPDATE = "value after the update"
FSDP1 = """    from torch.distributed.fsdp import FullyShardedDataParallel
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
"""
GELU = "(lambda h: h * 0.5 * (1 + torch.erf(h * 0.5**0.5)))"
PLAIN, MATRICES = '{"params": plain, "weight_decay": 0.0}', '{"params": matrices, "weight_decay": 0.1}'
EINSUM = "(torch.einsum('bth,oh->bto', x, self.qkv.weight) + self.qkv.bias)"

# What is changed, into what; the first step that differs; where.
FAULTS = {
    "not divided": ("(loss / MICRO)", "loss", 0, "gradient of head.weight"),
    "no mask": ("is_causal=True", "is_causal=False", 0, "output of blocks.0.out"),
    "epsilon": (f"{NORM1})", f"{NORM1}, 1e-4)", 0, "output of blocks.0.norm1"),
    "decay of norms": ('"weight_decay": 0.0', '"weight_decay": 0.1', 0, f"{UPDATE} of blocks.0.down.bias"),
    "schedule": ("(step + 1) / 3", "(step + 1) / 4", 0, UPDATE),
    "late schedule": ("min(1.0, (step + 1) / 3)", "min(0.7, (step + 1) / 3)", 2, UPDATE),
    "betas": ("0.95", "0.99", 1, UPDATE),
    "lost gradients": (LOOP, f"{LOOP}        optimizer.zero_grad()\n", 0, "gradient of"),
    "detached": ("self.norm2(x))", "self.norm2(x).detach())", 0, "gradient of blocks.1.norm2"),
    "targets": ("ids[:, 1:].flatten()", "ids[:, :-1].flatten()", 0, "gradient of head.weight"),
    "seed": ("torch.manual_seed(0)", "torch.manual_seed(1)", -1, "initial value"),
    "other data": ("data[step]", "data[step % 4]", 4, "batch"),
    "frozen": (SPLIT, f"model.blocks[1].up.bias.requires_grad_(False)\n{SPLIT}", 0, "gradient of blocks.1.up.bias"),
    "dropout": ("self.up(self.norm2(x))", "F.dropout(self.up(self.norm2(x)), 0.1)", 0, "output of blocks.0.down"),
    "scale": ("is_causal=True", "is_causal=True, scale=0.36", 0, "output of blocks.0.out"),
    "no residual": ("x = x + self.attention", "x = self.attention", 0, "output of blocks.0.norm2"),
    "averaged twice": (CLIP, f"    for p in model.parameters():\n        p.grad /= world\n{CLIP}", 0, "gradient of"),
    "clipping": ("10.0)", "0.5)", 0, "gradient of"),
    "epsilon of Adam": ("betas=", "eps=1e-4, betas=", 0, UPDATE),
    "bf16 logits": ("model(ids[:, :-1])", "model(ids[:, :-1]).bfloat16()", 0, "gradient of"),
    "same data": ("own = data[step][rank * ", "own = data[step][0 * ", 0, "batch"),
    "updates": (AFTER, f"    step == 3 and optimizer.step()\n{AFTER}", 4, "number of updates"),
}
HARMLESS = {
    "the same": ("several", "distributed"),
    "ddp": (SHARD, "    model = nn.parallel.DistributedDataParallel(model)\n"),
    "fsdp1": (SHARD, FSDP1),
    "lab": ("import fully_shard", "import fully_shard\nfrom fsdp_lab.engine import fully_shard"),
    "alone": ("several = ", "several = True and "),
    "four": ("6, 8, 2", "6, 8, 1"),
    "one micro-batch": ("6, 8, 2", "6, 8, 1"),
    "attention by hand": (ATTENTION, BY_HAND),
    "foreach": ("betas=", "foreach=False, betas="),
    "fused": ("betas=", "fused=True, betas="),
    "names": ("blocks", "layers"),
    "kept gathered": ("fully_shard(block)", "fully_shard(block, reshard_after_forward=False)"),
    "other units": (SHARD, "    fully_shard(model)\n"),
    "order of a sum": ("x = x + self.attention(self.norm1(x))", "x = self.attention(self.norm1(x)) + x"),
    "loss by hand": (LOSS, "-model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()"),
    "gelu by hand": ("F.gelu", GELU),
    "checkpointing": ("x = block(x)", "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"),
    "einsum": ("self.qkv(x)", EINSUM),
    "order of groups": (f"{MATRICES}, {PLAIN}", f"{PLAIN}, {MATRICES}"),
    "zeros": ("zero_grad()", "zero_grad(set_to_none=False)"),
    "flat head": ("self.head(self.norm(x))", "self.head(self.norm(x).flatten(0, 1)).view(*ids.shape, -1)"),
    "fp64": (ATTENTION, ATTENTION.replace("q, k, v", "q.double(), k.double(), v.double()") + ".float()"),
}
RANKS = {"alone": 1, "four": 4}
IN_BF16 = ("decay of norms", "betas", "clipping", "attention by hand", "one micro-batch", "gelu by hand", "einsum")


def recorded(jobs: Sequence[tuple[str, str, int, bool]], folder: Path) -> dict[str, Recorded]:
    """jobs: name, script, ranks, whether it is a perturbed run."""
    asked = []
    for name, text, ranks, perturbs in jobs:
        script = folder / name / "script.py"
        script.parent.mkdir()
        script.write_text(text)
        record = {"folder": str(folder / name), "steps": 6, "perturbs": perturbs}
        asked.append({"script": str(script), "ranks": ranks, "port": free_ports(1)[0], "record": record})
    (folder / "jobs").write_text(json.dumps(asked))
    site = str(Path(run.__file__).parents[1] / "runs" / "site")
    path = os.pathsep.join([site, *filter(None, sys.path)])
    server = [sys.executable, str(SCRIPT.with_name("prove_server.py")), str(folder / "jobs")]
    subprocess.run(server, env={**os.environ, "PYTHONPATH": path}, check=True, timeout=900)
    return {name: Recorded.read(folder / name, ended_by_itself=True) for name, *_ in jobs}


def told(old: Recorded, new: Recorded, perturbed: Recorded) -> Proof:
    proof = compare(old, new)
    return compare(old, new, perturbed) if proof.verdict is Verdict.UNKNOWN else proof


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_faults_are_named_and_rounding_is_none(tmp_path: Path) -> None:
    changes = FAULTS | HARMLESS
    cases = {name: (BASE, name) for name in changes} | {f"{name} in bf16": (BF16, name) for name in IN_BF16}
    bases = {"": BASE, " bf16": BF16}.items()
    jobs = [(f"{one}{kind}", base, 2, one != "old") for kind, base in bases for one in ("old", "perturbed")]
    for case, (base, name) in cases.items():
        assert changes[name][0] in base, name
        jobs.append((case, base.replace(*changes[name][:2]), RANKS.get(name, 2), False))
    runs, proofs, wrong = recorded(jobs, tmp_path), dict[str, Proof](), dict[str, object]()
    for case, (base, name) in cases.items():
        kind = " bf16" if base is BF16 else ""
        proof = proofs[case] = told(runs[f"old{kind}"], runs[case], runs[f"perturbed{kind}"])
        found = proof.verdict in (Verdict.EQUAL, Verdict.WITHIN)
        if name in FAULTS:
            step, where = FAULTS[name][2:]
            found = proof.first is not None and proof.first.step == step and proof.first.where.startswith(where)
        if not found:
            wrong[case] = proof.reason
    assert wrong == {}
    assert [proofs[name].first.factor for name in ("not divided", "averaged twice")] == pytest.approx([2.0, 0.5])
    equal = [name for name in HARMLESS if proofs[name].verdict is Verdict.EQUAL]
    assert {"the same", "names", "lab", "checkpointing"} <= {*equal} and len(equal) < len(HARMLESS)
    assert proofs["names"].renamed["blocks.0.up.bias"] == "layers.0.up.bias"


@pytest.mark.slow
def test_a_receipt_is_written_and_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.py").write_text(BASE)
    Path("new.py").write_text(BASE.replace("0.95", "0.99"))
    options = ["--ranks", "1", "--steps", "3", "--output", "receipt.md"]
    assert main(["prove", *options, "old.py", "new.py", "--", "--lr", "1"]) == 1
    content = json.loads(Path("receipt.json").read_text())
    assert content["proof"]["first"]["step"] == 1 and content["ranks"] == [1, 1]
    text, printed = Path("receipt.md").read_text(), capfd.readouterr().out
    assert content["proof"]["reason"] in text and text in printed and "`--lr 1`" in text
    assert main(["prove", "--receipt", "receipt.json"]) == 0
    assert "The receipt holds: different; also its digests." in capfd.readouterr().out
    Path("new.py").write_text(BASE)
    assert main(["prove", "--receipt", "receipt.json"]) == 2
    assert "new.py is not the file of the receipt" in capfd.readouterr().err


def test_a_verdict_says_of_which_steps_it_is() -> None:
    piece = Piece(phase=StepPhase.BEGIN, name="weight", digest=1, numel=1)
    step = RecordedStep(batch=8, rows=8, loss=1.0, world_size=1, values={(piece.phase, "weight", -1): piece})
    for is_whole, where in ((False, "the first 2 steps. Both scripts were stopped there"), (True, "all 2 steps.")):
        run = Recorded(steps=[step] * 3, ended_by_itself=is_whole)
        assert f"equal bit for bit in {where}" in compare(run, run).reason
    values = {key: replace(piece, digest=2, total=1.0) for key in step.values}
    other = Recorded(steps=[step, replace(step, batch=9, rows=16, values=values), step])
    assert "the batch. The old script has 8 rows in this step, the new one 16." in compare(run, other, run).reason


@pytest.mark.parametrize(("script", "sentence"), [
    ("print('hello')", "made no step of an optimizer of torch's\nhello"),
    ("raise LookupError('lost')", "old.py ended with exit code 1"),
])  # fmt: skip
def test_a_script_that_does_not_train_is_said(
    script: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.py").write_text(script)
    assert main(["prove", "--steps", "2", "--ranks", "1", "old.py", "old.py"]) in (1, 2)
    assert sentence in capfd.readouterr().err
