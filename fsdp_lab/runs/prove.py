"""`prove`: whether two training scripts compute the same. Both are run as they are, on equal ranks with equal seeds. What
they compute in their first steps is recorded (`fsdp_lab.rank.watch.recording`) and compared by name, step and phase; the
result is a `Receipt`.

Note: what rounding explains. Where bits differ, the old script is run once more, with the results of its modules and its
gradients moved by one unit in the last place: a perturbed run. How far that carries each tensor in each step is what
rounding does to this training. A difference of up to `FACTOR` times as much counts as rounding. Of a tensor whose own
difference is small by chance the median over the tensors of its phase is taken, and a unit in the last place at least.
Distances are Euclidean, over the kept elements; where those are equal and the digests differ, by the sum of all elements.
Two questions are sharper. An update of equal values by gradients that were equal until now is the optimizer's alone, and
only units in the last place count. And rounding has no direction: a factor that all gradients have in common is compared
with the factor that the perturbed run has.

Note: what decides. Initial values, gradients and updated parameters. The batch, outputs of modules and the loss only tell
where a difference comes from: a script may hand them on in another form."""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import platform
import secrets
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp_lab.base import __version__
from fsdp_lab.base.errors import ArgumentError, SentenceError
from fsdp_lab.base.formatting import plural
from fsdp_lab.base.process import MARK, describe_exit, end, marked, sweep
from fsdp_lab.rank.measure import device_name
from fsdp_lab.rank.watch.recording import Piece, RankStep, StepPhase
from fsdp_lab.runs.parity import Verdict

FACTOR = 6.0
LEAPS = 2.0  # of updates: Adam divides by the gradient, so that rounding near zero moves single elements far, by chance
NOISE = 0.05  # of a gradient: more than that, rounding does not explain
POLL_S = 0.05
Say = Callable[[str], None]
DECIDE = (StepPhase.BEGIN, StepPhase.GRADIENT, StepPhase.UPDATE)


class ProveError(SentenceError, RuntimeError):
    """A script failed, or recorded nothing. `str()` is a sentence."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """`given`: a Python file, or a whole command in one string. `ranks`: processes of a file, by torchrun where several."""

    given: str
    ranks: int
    arguments: Sequence[str] = ()

    @property
    def is_file(self) -> bool:
        return Path(self.given).suffix == ".py"

    @property
    def command(self) -> list[str]:
        if not self.is_file:
            return [*shlex.split(self.given), *self.arguments]
        several = ["-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks), "--standalone"]
        return [sys.executable, *(several if self.ranks > 1 else ()), self.given, *self.arguments]

    def sha256(self) -> str:
        """Of the file; "" of a command."""
        return hashlib.sha256(Path(self.given).read_bytes()).hexdigest() if self.is_file else ""


# -- what a script computed ----------------------------------------------------------------------------------------------


Key = tuple[StepPhase, str, int]


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """`batch`: a digest of the inputs of all ranks. `loss`: the mean over ranks and micro-batches; NaN: unknown."""

    batch: int
    rows: int  # of all inputs
    loss: float
    world_size: int
    values: Mapping[Key, Piece]  # whole tensors, in the order in which they were computed

    @classmethod
    def of_ranks(cls, ranks: Sequence[RankStep]) -> "RecordedStep":
        by_key: dict[Key, list[Piece]] = {}
        for piece in (piece for of_rank in ranks for piece in of_rank.pieces):
            by_key.setdefault((piece.phase, piece.name, piece.rank), []).append(piece)
        losses = [loss for of_rank in ranks for loss in of_rank.losses]
        return cls(
            batch=sum(of_rank.batch for of_rank in ranks) % (1 << 64),
            rows=sum(of_rank.rows for of_rank in ranks),
            loss=statistics.fmean(losses) if losses else math.nan,
            world_size=len(ranks),
            values={key: Piece.joined(pieces) for key, pieces in by_key.items()},
        )

    def digest(self) -> str:
        """Of all that decides."""
        those = sorted(f"{v.phase} {v.name} {v.digest}" for v in self.values.values() if v.phase in DECIDE)
        return hashlib.sha256("\n".join(those).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Of one run of a script. The first of `steps` has the initial values alone."""

    steps: Sequence[RecordedStep]
    ended_by_itself: bool = False  # before it was stopped

    @classmethod
    def read(cls, folder: Path, **fields: Any) -> "Recorded":
        names = itertools.chain(["begin"], (f"step-{number}" for number in itertools.count()))
        of_steps = itertools.takewhile(bool, (cls.files(folder, name) for name in names))
        return cls(steps=[RecordedStep.of_ranks([*map(RankStep.read, files)]) for files in of_steps], **fields)

    @staticmethod
    def files(folder: Path, name: str) -> list[Path]:
        """One for each rank, in order; none until all are there."""
        files = sorted(folder.glob(f"{name}-rank-*.pt"), key=lambda file: int(file.stem.split("-")[-3]))
        return files if files and len(files) == int(files[0].stem.split("-")[-1]) else []


def record(script: Script, steps: int, *, perturbs: bool = False, say: Say = lambda _: None) -> Recorded:
    """Runs a script until it has made so many steps, or ends. Raises ProveError."""
    token, site, last = secrets.token_hex(8), Path(__file__).with_name("site"), f"step-{steps - 1}"
    with tempfile.TemporaryDirectory(prefix="fsdp_lab_prove_") as name:
        folder = Path(name)
        asked: dict[str, Any] = {"folder": name, "listen": True, "ledger": False, "audit": False}
        asked |= {"history": str(folder / "history"), "record": {"folder": name, "steps": steps, "perturbs": perturbs}}
        path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
        own = {"PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1", **os.environ}
        own |= {"FSDP_LAB_WATCH": json.dumps(asked), "PYTHONPATH": path, MARK: token}
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(script.command, env=own, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            while process.poll() is None and not Recorded.files(folder, last):
                time.sleep(POLL_S)
            ended = process.poll()
        finally:
            end(marked(token), term_s=3.0)
            process.wait()
            sweep(token)
        printed = (folder / "output").read_text(errors="replace").strip().splitlines()
        recorded = Recorded.read(folder, ended_by_itself=not Recorded.files(folder, last))
        if not ended and len(recorded.steps) > 1:
            made, ranks = len(recorded.steps) - 1, recorded.steps[0].world_size
            say(f"{script.given}: {plural(made, 'step')} on {plural(ranks, 'rank')}")
            return recorded
        notes = [note for file in folder.glob("process-*.json") for note in json.loads(file.read_text())["notes"]]
        what = describe_exit(ended) if ended else "made no step of an optimizer of torch's"
        raise ProveError("\n".join([f"{script.given} {what}", *dict.fromkeys(notes), *printed[-8:]]))


# -- the comparison ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first one that rounding does not explain. `units`: its size in units in the last place, as a root mean square;
    `explained`: how many rounding explains. None: they have no size, as of a tensor that is missing."""

    step: int  # from 0; -1: before the first
    where: str
    units: float | None = None
    explained: float | None = None
    several: int = 0  # tensors that differ in this phase
    of: int = 0
    factor: float | None = None  # by which all of them differ
    hint: str = ""

    def sentence(self) -> str:
        when = "before the first step" if self.step < 0 else f"in step {self.step}"
        size = "" if self.units is None else f" by {self.units:.3g} units in the last place"
        explained = "" if self.explained is None else f", where rounding explains {self.explained:.3g}"
        rest = f"; {self.several} of {plural(self.of, 'tensor')} in this phase differ" if self.several else ""
        by = "" if self.factor is None else f", all gradients by the factor {self.factor:.4g}"
        return f"They differ {when}: the {self.where}{size}{explained}{rest}{by}. {self.hint}".strip()


@dataclass(frozen=True, kw_only=True)
class Proof:
    """`worst`: the greatest difference as a multiple of what one unit in the last place does. `renamed`: names in the new
    script by those in the old, of parameters with equal initial values. `alone`: parameters that only one of them has.
    `extent`: of equality, " in all 6 steps", or " in the first 10 steps" where the scripts were stopped."""

    verdict: Verdict
    reason: str
    steps: int = 0
    extent: str = ""
    tensors: int = 0
    worst: float = 0.0
    first: Difference | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    alone: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class _Pair:
    old: Piece
    new: Piece
    perturbed: Piece | None
    distance: float
    noise: float  # what one unit in the last place does

    @property
    def multiple(self) -> float:
        return self.distance / self.noise if self.noise else math.inf if self.distance else 0.0

    @property
    def differs(self) -> bool:
        return self.multiple > FACTOR


def compare(old: Recorded, new: Recorded, perturbed: Recorded | None = None) -> Proof:
    """`perturbed`: a perturbed run of the old script; without it a difference has no verdict but UNKNOWN."""
    names, alone, uncounted = _matched(old.steps[0], new.steps[0])
    runs = [run.steps for run in (old, new, perturbed) if run is not None]
    steps, made = min(map(len, runs)), (len(old.steps) - 1, len(new.steps) - 1)
    renamed = {a: b for a, b in names.items() if a != b}
    proof = Proof(verdict=Verdict.UNKNOWN, reason="", steps=steps - 1, tensors=len(names), renamed=renamed, alone=alone)
    whole = old.ended_by_itself and new.ended_by_itself
    extent = f" in {'all' if whole else 'the first'} {plural(steps - 1, 'step')}"
    rest = "" if whole else " Both scripts were stopped there: later steps are not compared (--steps)."
    say = partial(dataclasses.replace, proof)
    if uncounted or not names:
        what = f"{uncounted} elements more in one than in the other" if uncounted else "no parameter in common"
        return say(verdict=Verdict.DIFFERENT, reason=f"The models differ: {what} ({', '.join(alone[:4])}).")
    touched = set[str]()
    pairs = [_pairs(names, touched, *(run[at] for run in runs)) for at in range(steps)]
    deciding = [pair for of_step in pairs for pair in of_step if pair.old.phase in DECIDE]
    are_equal = all(pair.distance == 0 for pair in deciding)
    if not are_equal and perturbed is None:
        return say(verdict=Verdict.UNKNOWN, reason="Bits differ, and what rounding does is not known.")
    if not are_equal and perturbed is not None and (unsteady := _unsteady(old, perturbed)):
        return say(verdict=Verdict.UNKNOWN, reason=unsteady)
    for at, of_step in enumerate(pairs):
        if any(pair.differs for pair in of_step if pair.old.phase in DECIDE) or _common_factor(of_step):
            first = _first(at - 1, of_step, old.steps[at], new.steps[at])
            return say(verdict=Verdict.DIFFERENT, reason=first.sentence(), first=first)
    if made[0] != made[1] and (old.ended_by_itself or new.ended_by_itself):
        return say(verdict=Verdict.DIFFERENT, reason=f"One makes {made[0]} steps, and the other {made[1]}.")
    if are_equal:
        reason = f"All initial values, gradients and updated parameters are equal bit for bit{extent}.{rest}"
        return say(verdict=Verdict.EQUAL, reason=reason, extent=extent)
    worst = max(deciding, key=lambda pair: pair.multiple)
    by = f"No difference{extent} is more than {worst.multiple:.2g} times what one unit in the last place does"
    reason = f"{by} ({worst.old.where}); up to {FACTOR:g} times is rounding, as of sums in another order.{rest}"
    return say(verdict=Verdict.WITHIN, reason=reason, worst=worst.multiple, extent=extent)


def _matched(old: RecordedStep, new: RecordedStep) -> tuple[dict[str, str], list[str], int]:
    """Names in the new script by those in the old; what is alone; and by how many elements that differs between both."""
    mine, theirs = ({v.name: v for k, v in of.values.items() if k[0] is StepPhase.BEGIN} for of in (old, new))
    names = {name: name for name in mine if name in theirs and mine[name].numel == theirs[name].numel}
    left = {name: value for name, value in theirs.items() if name not in names}
    for name, value in mine.items():
        same = next((n for n, v in left.items() if name not in names and value.distance(v) == 0), None)
        if same is not None:
            names[name] = same
            del left[same]
    lost = {name: value for name, value in mine.items() if name not in names}
    alone = [*(f"old: {name}" for name in lost), *(f"new: {name}" for name in left)]
    return names, alone, abs(sum(v.numel for v in lost.values()) - sum(v.numel for v in left.values()))


def _pairs(
    names: Mapping[str, str],
    touched: set[str],
    old: RecordedStep,
    new: RecordedStep,
    perturbed: RecordedStep | None = None,
) -> list[_Pair]:
    """`touched`: parameters of which something differed before; those of this step are added."""
    none, values = Piece(phase=StepPhase.GRADIENT, name=""), dict[Key, tuple[Piece, Piece]]()
    back = {b: a for a, b in names.items()}
    for (phase, name, rank), value in old.values.items():
        other = new.values.get((phase, names.get(name, name), rank))
        if other is not None or (phase is StepPhase.GRADIENT and name in names):
            values[phase, name, rank] = value, other or none
    for (phase, name, rank), value in new.values.items():  # gradients that only the new one has
        if phase is StepPhase.GRADIENT and name in back:
            values.setdefault((phase, back[name], rank), (dataclasses.replace(none, name=back[name]), value))
    there = {} if perturbed is None else perturbed.values
    own = {key: value.distance(there.get(key, none)) for key, (value, _) in values.items() if there}
    relative: dict[StepPhase, list[float]] = {}
    for key, distance in own.items():
        if math.isfinite(distance) and values[key][0].norm:
            relative.setdefault(key[0], []).append(distance / values[key][0].norm)
    median = {phase: statistics.median(of) for phase, of in relative.items()}
    pairs = []
    for key in sorted(values, key=lambda key: list(StepPhase).index(key[0])):
        (value, other), (phase, name, _) = values[key], key
        distance, moves, unit = value.distance(other), own.get(key, 0.0), max(value.unit, other.unit)
        moves = max(moves if math.isfinite(moves) else 0.0, median.get(phase, 0.0) * max(value.norm, other.norm))
        noise = max(unit, moves)
        if phase is StepPhase.UPDATE:
            noise = LEAPS * noise if name in touched else unit
        pairs.append(_Pair(old=value, new=other, perturbed=there.get(key), distance=distance, noise=noise))
        if distance and phase is not StepPhase.OUTPUT:
            touched.add(name)
    return pairs


def _unsteady(old: Recorded, perturbed: Recorded) -> str:
    """Why a perturbed run of the old script tells nothing; "" if it does."""
    names = {key[1]: key[1] for key in old.steps[0].values}
    begin, first = (_pairs(names, set(), old.steps[at], perturbed.steps[at]) for at in (0, 1))
    if any(pair.distance for pair in begin) or old.steps[1].batch != perturbed.steps[1].batch:
        what = "initial values" if any(pair.distance for pair in begin) else "batches"
        return f"Two runs of the old script have other {what}: give it a seed, or a checkpoint."
    noise = [pair.distance / pair.old.norm for pair in first if pair.old.phase is StepPhase.GRADIENT and pair.old.norm]
    if noise and statistics.median(noise) > NOISE:
        return f"Gradients of two runs of the old script differ by {statistics.median(noise):.0%}: it draws random numbers."
    return ""


def _first(step: int, pairs: Sequence[_Pair], old: RecordedStep, new: RecordedStep) -> Difference:
    """What comes first in a step in which something differs."""
    if step >= 0 and old.batch != new.batch:
        where = "batch" if old.batch and new.batch else "number of updates, as one is made without a forward"
        hint = f"The old script has {old.rows:,} rows in this step, the new one {new.rows:,}."
        return Difference(step=step, where=where, hint=hint)
    differing = {phase: [pair for pair in pairs if pair.old.phase is phase and pair.differs] for phase in StepPhase}
    outputs = [pair for pair in differing[StepPhase.OUTPUT] if math.isfinite(pair.distance)]
    factor, gradients = _common_factor(pairs), differing[StepPhase.GRADIENT]
    if not gradients and not factor:
        phase = StepPhase.BEGIN if differing[StepPhase.BEGIN] else StepPhase.UPDATE
        named = max(differing[phase], key=lambda pair: pair.multiple)
        hints = {StepPhase.UPDATE: "Gradients are equal: look at the optimizer, its groups and its learning rate."}
        hint = hints.get(phase, "Give both the same seed, the same order of drawing, or a checkpoint.")
    elif outputs and old.world_size == new.world_size:
        named, factor, hint = outputs[0], None, "What this module was given is equal."
    else:  # the last is where the backward begins
        lacking = [pair for pair in gradients if math.isinf(pair.distance)]
        named = (lacking or gradients or [pair for pair in pairs if pair.old.phase is StepPhase.GRADIENT])[-1]
        same = abs(old.loss - new.loss) <= 1e-5 * abs(old.loss)
        hint = "The loss is equal: look at the backward, what is summed over ranks and micro-batches, and clipping."
        hint = hint if same else f"The losses are {old.loss:.6g} and {new.loss:.6g}: look at the loss and its division."
    unit, several = max(named.old.unit, named.new.unit), len(differing[named.old.phase])
    is_sized = math.isfinite(named.distance) and unit > 0
    if math.isinf(named.distance):
        are_there = named.old.numel and named.new.numel
        hint = "In one of them it is not finite." if are_there else "Only one of them has it."
    return Difference(
        step=step,
        where=named.old.where,
        units=named.distance / unit if is_sized else None,
        explained=FACTOR * named.noise / unit if is_sized and named.differs else None,
        several=several,
        of=sum(pair.old.phase is named.old.phase for pair in pairs),
        factor=factor,
        hint=hint,
    )


def _common_factor(pairs: Sequence[_Pair]) -> float | None:
    """That of all gradients of a step, if rounding does not explain it."""
    those = [p for p in pairs if p.old.phase is StepPhase.GRADIENT and p.perturbed is not None and p.old.numel]
    if not those or any(len(p.old.kept) != len(other.kept) for p in those for other in (p.new, p.perturbed) if other):
        return None
    by_run = zip(*((p.old.kept, p.new.kept, p.perturbed.kept) for p in those if p.perturbed is not None), strict=True)
    old, new, perturbed = (torch.cat(of).nan_to_num() for of in by_run)
    square = float(old @ old) or 1.0
    factor, by_perturbing = float(old @ new) / square, float(old @ perturbed) / square
    by_chance = float((perturbed - old).norm()) / math.sqrt(square * len(old))
    unit = torch.finfo(getattr(torch, those[0].old.dtype)).eps
    return factor if abs(factor - 1) > FACTOR * max(abs(by_perturbing - 1), by_chance, unit) else None


# -- the receipt ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What is kept of a proof. `sha256`: of both files. `digests`, `losses`: of each step of both, the first before it."""

    old: Script
    new: Script
    sha256: Sequence[str]
    proof: Proof
    ranks: Sequence[int]
    digests: Sequence[Sequence[str]]
    losses: Sequence[Sequence[float]]
    software: str

    def to_dict(self) -> dict[str, Any]:
        content = dataclasses.asdict(self)
        content["losses"] = [[None if math.isnan(loss) else loss for loss in of] for of in self.losses]
        return {"kind": "fsdp_lab parity receipt", **content}

    @classmethod
    def read(cls, file: Path) -> "Receipt":
        """Raises ArgumentError."""
        try:
            content = json.loads(file.read_text())
            proof = content.pop("proof")
            first = proof.pop("first")
            proof |= {"verdict": Verdict(proof["verdict"]), "first": first and Difference(**first)}
            content |= {name: Script(**content[name]) for name in ("old", "new")}
            del content["kind"]
            return cls(**{**content, "proof": Proof(**proof)})
        except (OSError, ValueError, TypeError, KeyError) as e:
            hint = "give the .json file that fsdp-lab prove --output wrote"
            raise ArgumentError("--receipt", f"{file} is no receipt: {type(e).__name__}: {e}", hint) from None

    def markdown(self) -> str:
        proof, marks = self.proof, {Verdict.EQUAL: "=", Verdict.WITHIN: "≈", Verdict.DIFFERENT: "≠"}
        title = f"`{self.old.given}` {marks.get(proof.verdict, '?')} `{self.new.given}`: {proof.verdict.value}{proof.extent}"
        ranks = " and ".join(map(str, dict.fromkeys(self.ranks)))
        rows = [
            ("compared", f"{plural(proof.steps, 'step')}, {plural(proof.tensors, 'parameter')}, on {ranks} ranks"),
            ("arguments", f"`{shlex.join(self.new.arguments)}`" if self.new.arguments else "none"),
            ("with", self.software),
            *((f"sha256 of {n}", f"`{s[:16]}`") for n, s in zip(("old", "new"), self.sha256, strict=True) if s),
            *((("other names", f"{len(proof.renamed)}, matched by their values"),) if proof.renamed else ()),
            *((("not compared", ", ".join(proof.alone)),) if proof.alone else ()),
        ]
        steps = zip(*self.losses, *self.digests, strict=False)
        numbers = [
            f"| {at - 1 if at else 'before'} | {a:.9g} | {b:.9g} | `{c}` | `{d}` |".replace("nan", "-")
            for at, (a, b, c, d) in enumerate(steps)
        ]
        head = "| step | loss, old | loss, new | digest, old | digest, new |\n|---|---|---|---|---|"
        table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {what} |" for name, what in rows)])
        return f"### {title}\n\n{proof.reason}\n\n{table}\n\n{head}\n" + "\n".join(numbers) + "\n"


def prove(old: Script, new: Script, steps: int, say: Say = lambda _: None) -> Receipt:
    """Runs both, and a perturbed run of the old one where bits differ. Raises ProveError."""
    first, second = runs = [record(script, steps, say=say) for script in (old, new)]
    proof = compare(first, second)
    if proof.verdict is Verdict.UNKNOWN:
        say(f"Bits differ: {old.given} runs once more, with its results moved by one unit in the last place.")
        proof = compare(first, second, record(old, steps, perturbs=True))
    device = device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return Receipt(
        old=old,
        new=new,
        sha256=[old.sha256(), new.sha256()],
        proof=proof,
        ranks=[run.steps[0].world_size for run in runs],
        digests=[[step.digest() for step in run.steps] for run in runs],
        losses=[[step.loss for step in run.steps] for run in runs],
        software=f"fsdp_lab {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {device}",
    )


def verify(receipt: Receipt, say: Say = lambda _: None) -> tuple[bool, str]:
    """Proves it again; whether the receipt holds, and a sentence. Raises ArgumentError for a file that has changed."""
    for script, sha256 in zip((receipt.old, receipt.new), receipt.sha256, strict=True):
        if script.is_file and not Path(script.given).exists():
            raise ArgumentError("--receipt", f"there is no {script.given} here", "run it in the folder of the scripts")
        if script.sha256() != sha256:
            raise ArgumentError("--receipt", f"{script.given} is not the file of the receipt", "make a new receipt")
    again = prove(receipt.old, receipt.new, max(1, len(receipt.digests[0]) - 1), say)
    proofs = (receipt.proof, again.proof)
    was, now = ((p.verdict, p.first and (p.first.step, p.first.where)) for p in proofs)
    same = "also its digests" if again.digests == receipt.digests else f"other digests, with {again.software}"
    if was == now:
        return True, f"The receipt holds: {receipt.proof.verdict.value}{receipt.proof.extent}; {same}."
    return False, f"The receipt does not hold. It says: {receipt.proof.reason} Here: {again.proof.reason}"
