"""What each command refuses: one sentence, code 2, nothing started and nothing written."""

import json
import shlex
from pathlib import Path

import pytest

from fsdp_lab.cli.main import main
from fsdp_lab.planner import questions
from fsdp_lab.spec.spec import Spec

SHORT = json.dumps({"workload": {"model": "gpt2-1m", "data": "short.txt"}})
UNKNOWN = '{"workload": {"modle": "gpt2-1m"}}'
FILES = {"good": Spec().to_json(), "broken": "{", "unknown": UNKNOWN, "short": SHORT, "short.txt": "too short"}
MANY = f"--micro-batch {','.join(map(str, range(1, 143)))} --seq-len {','.join(map(str, range(2, 143)))}"
PLAN = "plan --hardware h100"
PAGE = "plan --page page.html --hardware h100"

REFUSED = [
    ("bench step --device cpu --ranks 0", "--ranks: 0 is refused"),
    ("bench step --device cpu --seq-len 1", "--seq-len: 1 is refused; give a whole number of 2 or more"),
    ("bench step --device cpu --model gpt2-2m", "--model: gpt2-2m is refused; give one of gpt2-1m, "),
    ("bench step --device cpu --model gpt2-1m --seq-len 2000", "--seq-len: 2000 is refused; gpt2-1m takes 1024"),
    ("bench step --device cpu --only fsdp2,fsdp3", "--only: there is no form fsdp3; choose from lab"),
    ("bench step --device cpu --only ,", "--only: it names no form"),
    ("bench step --device cpu --json /nowhere/at/all.json", "cannot be written"),
    ("bench host --device cpu --rounds 0", "--rounds 0 is refused; give a whole number of 1 or more"),
    ("bench host --device cpu --only lab,plain", "--only: there is no form plain; choose from ddp-raw, "),
    ("bench gpu --device cpu --only step,stop", "--only: there is no part 'stop'; choose from nccl, nccl-step, str"),
    ("bench gpu --device cpu --only ,", "--only: there is no part ','"),
    ("bench gpu --device cpu --minutes -1", "--minutes -1 is refused"),
    ("bench gpu --device cpu --out /nowhere/at/all.txt", "--out: /nowhere/at/all.txt cannot be written"),
    ("drill --count 0", "--count 0 is refused"), ("drill --ranks 1", "--ranks 1 is refused"),
    ("drill --model gpt5", "model: 'gpt5'"),
    ("drill --kinds earthquake", "'earthquake' is refused; choose from kill"),
    ("prove good", "two scripts are wanted"), ("prove lost.py good", "there is no file lost.py"),
    ("prove good 'no-such-program x'", "starts no program"), ("prove --ranks 0 good good", "--ranks 0 is refused"),
    ("prove --receipt good", "good is no receipt"), ("watch", "no command was given; write it after --"),
    ("watch -- train.py", "train.py was not found, or is no program; give python train.py"),
    ("kernel install --prefix /dev/null", "--prefix"), ("kernel install --name a/b", "--name"),
    ("compare --backend fsdp9", "backend"), ("compare --micro-batch four", "--micro-batch"),
    ("compare --steps 0", "--steps"), ("compare --rounds 0", "--rounds"), ("compare --report report.pdf", "--report"),
    ("compare --json /no/such/folder/file.json", "--json"),
    ("compare --backend ddp --sharding full_shard", "every combination is refused"),
    ("compare --clip-norm auto", "--clip-norm 'auto' is refused"), ("compare --lr 1", "give a list to compare"),
    ("compare --optimizer-args fused", "give JSON: arguments of its class"),
    ("compare --optimizer-args 3", "arguments of its class by name"),
    ("compare --freeze a", "--freeze 'a' is refused; give JSON: patterns of parameter names such as ["),
    ("compare --ssh a --slurm 1 --ranks-per-host 1", "choose one"),
    ("compare --ssh a", "give --gpus-per-host N or --ranks-per-host N"),
    ("compare --ranks-per-host 2", "options for hosts are given and no hosts"),
    ("compare --ssh a --ranks-per-host 1 --time 10", "--time is of a Slurm job"),
    ("run good --link '0.25 GB/s, soon'", "link: 'soon' is no link"),
    ("run gpt2-1m", "give the path of a JSON file, or --model gpt2-1m"), ("run broken", "is not JSON"),
    ("run unknown", "modle: there is no such field; did you mean model"),
    ("run short", "data: "), ("run good --steps 0", "--steps"),
    ("run", "no Spec is given; say what to train, as --model gpt2-1m"),
    ("run --sharding zero1,full_shard", "--sharding has 2 values; give one, or compare them"),
    ("run good --evaluate-every 0", "evaluate.every: 0 is refused"),
    ("run good --patience 3", "give --evaluate-every too"),
    ("run --resume /nowhere", "--resume: no checkpoint in /nowhere: there is no such folder"),
    ("run good --save-every 3", "--save-every is given and no folder"),
    ("run good --save saved --save-every 0", "save.every: 0 is refused"),
    ("run good --save /proc/saved", "save: /proc/saved cannot hold checkpoints"),
    ("run good --report-to wanbd", "--report-to: 'wanbd' is refused"),
    ("run good --trace /no/such/folder/trace.json", "--trace: /no/such/folder/trace.json cannot be"),
    ("run good --trace trace.txt", "--trace: trace.txt does not end in .json or .json.gz"),
    ("plan --hardware h1000", "hardware: 'h1000' is not known; use h100"),
    ("plan", "no hardware is named; give --hardware"),
    (f"{PLAN} --model llama-7c", "model: 'llama-7c' is neither"),
    (f"{PLAN} --model llama-7b --ranks 12 --hosts 5", "use 4"),
    (f"{PLAN} --global-batch 100", "global batch: 100 samples are no multiple of micro_batch"),
    (f"{PLAN} --ranks 12 --sharding hybrid_shard", "8 is not a divisor of 12"),
    (f"{PLAN} --ranks 1000000", "world size: 1,000,000 ranks are refused"),
    (f"{PLAN} --micro-batch 99999999", "micro batch: 99,999,999 samples"),
    (f"{PLAN} --network -4", "network: -4.0 Gb/s is refused"), (f"{PLAN} --memory 0", "--memory 0 is refused"),
    ("plan --hardware t4 --precision bf16", "a t4 has no matrix products in bf16; use fp16, fp32"),
    (f"{PLAN},h200", "--hardware h100,h200 is a list, which --page and --find cheapest take; name one GPU"),
    (f"{PLAN} --tokens many", "tokens: 'many' is refused; give a number, such as 15e9 or 15B"),
    (f"{PLAN} --price -1", "price per gpu hour: -1.0 is refused"), (f"{PLAN} --price free", "'free' is refused"),
    (f"{PLAN} --price 1,2", "--price 1,2 is not one for 1 GPU"), (f"{PLAN} --days 3", "--days is of --find cheapest"),
    (f"{PLAN},t4 --find cheapest", "give --price one for each"), (f"{PLAN} --find largest", "name one of its presets"),
    ("plan --hardware 9/8", "hardware: '9/8' is refused; give TFLOPS/GIB/TBS"),
    (f"{PLAN} --link '1 GB/s'", "--link emulates a network while training"),
    (f"{PLAN} --find largest --ranks 8,16", "--find largest takes one value"),
    (f"{PLAN} --seq-len 4096 --model gpt2-124m", "over the model's 1024 positions"),
    ("plan --page page.txt", "--page: page.txt does not end in .html or .htm"),
    ("plan --page nowhere/page.html", "--page: nowhere/page.html cannot be written: there is no folder"),
    ("plan --page page.html --json", "--page and --json are different results; give one of them"),
    ("plan --page page.html --find fewest", "--page and --find are different results"),
    (f"{PAGE},h1000", "hardware: 'h1000' is not known; use h100"),
    (f"{PAGE} --model llama-7b,llama-7c", "model: 'llama-7c' is neither"),
    (f"{PAGE} --recompute none,some", "recompute: "), (f"{PAGE} --ranks 8,x", "--ranks '8,x' is refused"),
    (f"{PAGE} --ranks 8 {MANY}", "page: 20,022 combinations are more than the 20,000 of a page; shorten a list"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_is_a_sentence(
    command: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    monkeypatch.setattr("fsdp_lab.lab.Lab", None)
    if "--page" in command:
        monkeypatch.setattr(questions, "planned", lambda *_: pytest.fail("it was predicted"))
    assert main(shlex.split(command)) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error and {file.name for file in tmp_path.iterdir()} == set(FILES)
