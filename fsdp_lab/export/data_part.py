"""The batches of a script: the text as bytes, and which windows of it each rank reads in a step."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

from fsdp_lab.export.source import Part, fill, literal
from fsdp_lab.models.batches import IGNORED, MASK_ID, MASKED_SHARE
from fsdp_lab.models.check import STDLIB, check_shapes, checked_text
from fsdp_lab.models.facts import Facts
from fsdp_lab.models.presets import Kind
from fsdp_lab.models.text import BYTE_OFFSET, FOLDER_CAP_BYTES, STDLIB_CAP_BYTES
from fsdp_lab.spec import Spec

_MIB = 2**20


def data_part(spec: Spec, facts: Facts) -> Part:
    """Raises SpecError for a text that the run could not read either."""
    w = spec.workload
    check_shapes(w, facts)
    checked_text(w)
    path = None if w.data == STDLIB else Path(w.data).expanduser().absolute()
    constants = [
        *([] if path is None else [f"TEXT = {literal(str(path))}"]),
        f"SEQ_LEN = {w.seq_len}",
        f"HELD_OUT = {w.held_out}  # the share of the windows, the last ones, that is not trained on",
        f"MICRO_BATCH = {w.micro_batch}  # samples of one rank in one forward",
        *([f"ACCUMULATE = {w.accumulate}  # forwards and backwards in one step"] if w.accumulate > 1 else []),
    ]
    read = _READ_STDLIB if path is None else _READ_FOLDER if path.is_dir() else _READ_FILE
    cap_mib = str((STDLIB_CAP_BYTES if path is None else FOLDER_CAP_BYTES) // _MIB)
    micro = w.accumulate > 1
    batches = fill(
        _BATCHES,
        offset=str(BYTE_OFFSET),
        arguments="step: int, micro: int" if micro else "step: int",
        number="(step * ACCUMULATE + micro)" if micro else "step",
        collate=fill(_COLLATE[facts.kind]),
    )
    if facts.kind == "masked":
        hide = fill(_HIDE, mask=str(MASK_ID), share=str(MASKED_SHARE), ignored=str(IGNORED), offset=str(BYTE_OFFSET))
        batches += "\n\n" + textwrap.indent(hide, "    ")
    return Part(
        imports=("functools", "numpy as np", "torch", *(("os",) if read is not _READ_FILE else ()),
                 *(("sysconfig",) if path is None else ())),
        constants="\n".join(constants),
        functions=f"{fill(read, cap=cap_mib)}\n\n\n{batches}",
    )  # fmt: skip


_READ_STDLIB = '''
    def read_text() -> np.ndarray:
        """Python's own standard library, up to $cap MiB of it. Another Python has another one, hence other losses."""
        skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
        text = bytearray()
        for folder, subfolders, files in os.walk(sysconfig.get_paths()["stdlib"]):
            subfolders[:] = sorted(s for s in subfolders if s not in skipped and not s.startswith("."))
            for name in sorted(files):
                path = os.path.join(folder, name)
                if name.endswith(".py") and not name.startswith(".") and os.path.isfile(path):
                    with open(path, "rb") as file:
                        text += file.read()
                if len(text) >= $cap * 2**20:
                    return np.frombuffer(text[: $cap * 2**20], dtype=np.uint8)
        return np.frombuffer(text, dtype=np.uint8)
'''

_READ_FOLDER = '''
    def read_text() -> np.ndarray:
        """The files below a folder that look like text, up to $cap MiB of them."""
        text = bytearray()
        for folder, subfolders, files in os.walk(TEXT):
            subfolders[:] = sorted(s for s in subfolders if not s.startswith("."))
            for name in sorted(files):
                path = os.path.join(folder, name)
                if not name.startswith(".") and os.path.isfile(path):
                    with open(path, "rb") as file:
                        start = file.read(1024)
                        if start and 0 not in start:
                            text += start + file.read()
                if len(text) >= $cap * 2**20:
                    return np.frombuffer(text[: $cap * 2**20], dtype=np.uint8)
        return np.frombuffer(text, dtype=np.uint8)
'''

_READ_FILE = '''
    def read_text() -> np.ndarray:
        """One file, mapped and not read, so that its size is no matter."""
        return np.memmap(TEXT, dtype=np.uint8, mode="r")
'''

_BATCHES = '''
    class Batches:
        """The windows of a text that one rank trains on; a token is a byte plus $offset, as ByT5 has it.

        One counter numbers all samples, over all ranks, and each epoch has an order of its own by the seed. So a global
        batch is the same whatever the number of ranks.
        """

        def __init__(self, seed: int, rank: int, world_size: int) -> None:
            self.seed, self.rank, self.world_size = seed, rank, world_size
            text = read_text()
            count = len(text) // SEQ_LEN
            self.windows = text[: count * SEQ_LEN].reshape(count, SEQ_LEN)
            self.trained = count - int(HELD_OUT * count)
            self.order = functools.lru_cache(2)(
                lambda epoch: np.random.default_rng((seed, epoch)).permutation(self.trained)
            )

        def __call__(self, $arguments) -> dict[str, torch.Tensor]:
            first = ($number * self.world_size + self.rank) * MICRO_BATCH
            numbers = np.arange(first, first + MICRO_BATCH)
            epochs, places = np.divmod(numbers, self.trained)
            rows = [self.order(int(epoch))[place] for epoch, place in zip(epochs, places)]
            ids = self.windows[rows].astype(np.int64) + $offset
            @collate
'''

_COLLATE: Mapping[Kind, str] = {
    "causal": """
        tokens = torch.from_numpy(ids)
        return {"input_ids": tokens, "labels": tokens.clone()}  # the model shifts the labels itself
""",
    "seq2seq": """
        tokens, half = torch.from_numpy(ids), SEQ_LEN // 2  # the second half is to be written from the first
        return {"input_ids": tokens[:, :half].contiguous(), "labels": tokens[:, half:].contiguous()}
""",
    "masked": """
        labels = np.stack([self.hide(row, int(number)) for row, number in zip(ids, numbers)])
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
""",
}

_HIDE = '''
    def hide(self, ids: np.ndarray, number: int) -> np.ndarray:
        """Change some of a sample's ids, in place; returns the labels, which are $ignored everywhere else."""
        draw = np.random.default_rng((self.seed, number))
        chosen = draw.permutation(SEQ_LEN)[: max(1, round($share * SEQ_LEN))]
        labels = np.full_like(ids, $ignored)
        labels[chosen] = ids[chosen]
        fate = draw.random(len(chosen))
        ids[chosen[fate < 0.8]] = $mask
        replaced = chosen[fate >= 0.9]
        ids[replaced] = draw.integers(0, 256, size=len(replaced)) + $offset
        return labels
'''
