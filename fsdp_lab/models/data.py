"""What samples are made of: text as token ids (`open_text`), and images to classify (`SyntheticImages`, `FolderImages`).

A token is a byte plus 3, as in transformers' ByT5Tokenizer (whose ids 0, 1 and 2 are padding, end and unknown), so there
is no vocabulary file. But a literal "</s>" or "<extra_id_0>" in the text stays the bytes it is.

Synthetic images are waves: a class has its own direction, wavelength and colours, a sample its own phase, strength and
noise. They are the same everywhere, and a small model learns them in some tens of steps.

Neither torch nor transformers is imported."""

import hashlib
import math
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.formatting import size
from fsdp_lab.models.presets import Facts

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ids: TypeAlias = npt.NDArray[np.int64]
Pixels: TypeAlias = npt.NDArray[np.float32]

BYTE_OFFSET = 3
SMALLEST_VOCABULARY = 256 + BYTE_OFFSET

STDLIB_CAP_BYTES = 4 * 2**20
FOLDER_CAP_BYTES = 64 * 2**20
_NOT_TEXT_OF_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})
_SNIFF_BYTES = 1024

SYNTHETIC_COUNT = 50_000  # synthetic images in an epoch
NOISE = 0.5  # standard deviation of the noise; the wave's strength is about 1
_CYCLES = (2, 7)  # waves over the image: fewest, most
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # of Pillow, by channels
_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Text:
    """Bytes to train on. Ranks that read the same bytes have the same `fingerprint`."""

    data: Bytes
    description: str
    fingerprint: str


def open_text(data: str) -> Text:
    """The text that `Workload.data` names.

    "stdlib" is Python's standard library: its *.py files, sorted by path, without tests, up to `STDLIB_CAP_BYTES`. A file
    is memory-mapped and may have any size. In a folder, every file that looks like text (no zero byte at its start, not
    hidden) is read, sorted by path, up to `FOLDER_CAP_BYTES`.

    Raises SpecError: it does not exist, cannot be read, or contains no text."""
    if data == "stdlib":
        version = platform.python_version()
        return _joined(stdlib_files(), STDLIB_CAP_BYTES, f"the standard library of Python {version}")
    path = Path(data).expanduser()
    try:
        if path.is_dir():
            return _joined(text_files(path), FOLDER_CAP_BYTES, str(path))
        if not path.is_file():
            raise _refusal(data, "there is no such file or folder")
        if path.stat().st_size == 0:
            raise _refusal(data, "the file is empty")
        mapped: Bytes = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as e:
        raise _refusal(data, f"cannot be read ({e.strerror or e})") from None
    if not _looks_like_text(bytes(mapped[:_SNIFF_BYTES])):
        raise _refusal(data, "the file is not text: a zero byte is near its start")
    return Text(mapped, f"{path} ({size(len(mapped))})", _fingerprint(mapped))


def encode(window: Bytes) -> Ids:
    """Token ids of bytes, of the same shape."""
    return window.astype(np.int64) + BYTE_OFFSET


def _refusal(data: str, reason: str) -> SpecError:
    hint = 'give a text file or a folder of them, or "stdlib"'
    return SpecError("workload.data", f"{data}: {reason}", hint, {"data": "stdlib"})


def stdlib_files() -> Iterator[Path]:
    return (p for p in walk(Path(sysconfig.get_paths()["stdlib"]), _NOT_TEXT_OF_STDLIB) if p.suffix == ".py")


def text_files(folder: Path) -> Iterator[Path]:
    for path in walk(folder, frozenset()):
        with path.open("rb") as f:
            if _looks_like_text(f.read(_SNIFF_BYTES)):
                yield path


def walk(root: Path, skip: frozenset[str]) -> Iterator[Path]:
    """Files below `root`, sorted; hidden ones are left out."""

    def fail(error: OSError) -> None:
        raise error

    for folder, subfolders, files in os.walk(root, onerror=fail):
        subfolders[:] = sorted(s for s in subfolders if s not in skip and not s.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _looks_like_text(start: bytes) -> bool:
    return bool(start) and 0 not in start


def _joined(paths: Iterator[Path], cap_bytes: int, name: str) -> Text:
    parts: list[bytes] = []
    total = 0
    for path in paths:
        parts.append(path.read_bytes()[: cap_bytes - total])
        total += len(parts[-1])
        if total >= cap_bytes:
            break
    if not total:
        raise _refusal(name, "contains no text")
    data = np.frombuffer(b"".join(parts), dtype=np.uint8)
    first = "the first " if total >= cap_bytes else ""
    return Text(data, f"{name} ({first}{size(total)} in {len(parts)} files)", _fingerprint(data))


def _fingerprint(data: Bytes) -> str:
    """A hash of the length and of up to 2 MiB at either end; hashing all of a large file would take too long."""
    ends = data if len(data) <= 4 * 2**20 else np.concatenate([data[: 2**21], data[-(2**21) :]])
    return hashlib.blake2b(ends.tobytes() + str(len(data)).encode(), digest_size=8).hexdigest()


class SyntheticImages:
    """`SYNTHETIC_COUNT` images of `facts.classes` classes; image i is of class i modulo their number."""

    def __init__(self, facts: Facts) -> None:
        assert facts.image_pixels is not None
        self._facts = facts
        self.count = SYNTHETIC_COUNT
        height, width = facts.image_pixels
        self.description = f"synthetic images, {height} x {width}, {facts.classes} classes"
        self.fingerprint = hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
        self._rows = (np.arange(height, dtype=np.float32) / height)[:, None]
        self._columns = (np.arange(width, dtype=np.float32) / width)[None, :]

    def image(self, index: int) -> tuple[Pixels, int]:
        """Returns (channels, height, width) of about unit variance, and the class."""
        label = index % self._facts.classes
        of_class = np.random.default_rng((label, 0))
        of_sample = np.random.default_rng((index, 1))
        cycles_down, cycles_across = of_class.integers(*_CYCLES, size=2) * of_class.choice((-1, 1), size=2)
        colours = of_class.normal(size=self._facts.channels).astype(np.float32)
        colours *= np.sqrt(2 * len(colours)) / np.linalg.norm(colours)
        angle = 2 * np.pi * (cycles_down * self._rows + cycles_across * self._columns + of_sample.random())
        wave = np.sin(angle, dtype=np.float32) * np.float32(of_sample.uniform(0.75, 1.25))
        noise = of_sample.standard_normal((len(colours), *wave.shape), dtype=np.float32)
        return colours[:, None, None] * wave + np.float32(NOISE) * noise, label


class FolderImages:
    """Images in a folder, whose sub-folders, sorted by name, are the classes.

    An image is scaled and cropped at the center to the model's size, and normalised to -1..1. It is opened as torchvision's
    ImageFolder does, by `convert`: without what is transparent, not turned as EXIF says, the first one of an animation.
    Values of more than 8 bits, of which `convert` would cut off what is above 255, are refused.

    Raises SpecError: no such folder, no class in it, or more classes than the model has."""

    def __init__(self, folder: str, facts: Facts) -> None:
        assert facts.image_pixels is not None
        self._facts = facts
        self._entries = _entries(folder, facts)
        self._most_kept = _CACHE_BYTES // (facts.channels * math.prod(facts.image_pixels))
        self._kept: dict[int, Bytes] = {}  # as many as fit; the last ones would all be missed by who reads in order
        self.count = len(self._entries)
        names = "\n".join(str(path.relative_to(Path(folder).expanduser())) for path, _ in self._entries)
        self.fingerprint = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
        self.description = f"{folder} ({self.count} images, {max(label for _, label in self._entries) + 1} classes)"

    def image(self, index: int) -> tuple[Pixels, int]:
        """Returns (channels, height, width) between -1 and 1, and the class. Raises SpecError for an unreadable file."""
        path, label = self._entries[index]
        if (decoded := self._kept.get(index)) is None:
            decoded = self._decode(path)
            if len(self._kept) < self._most_kept:
                self._kept[index] = decoded
        return decoded.astype(np.float32) / np.float32(127.5) - np.float32(1), label

    def _decode(self, path: Path) -> Bytes:
        from PIL import Image, ImageOps

        assert self._facts.image_pixels is not None
        height, width = self._facts.image_pixels
        try:
            with Image.open(path) as opened:
                if opened.mode.startswith(("I", "F")):
                    raise ValueError("it has more than 8 bits")
                fitted = ImageOps.fit(opened.convert(_MODES[self._facts.channels]), (width, height))
        except Exception as e:  # of many classes, also of files that would take too much memory
            hint = "remove that file, or save it with 8 bits"
            raise SpecError("workload.data", f"{path} cannot be read as an image ({e})", hint) from None
        array = np.asarray(fitted, dtype=np.uint8)
        return array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))


def _entries(folder: str, facts: Facts) -> list[tuple[Path, int]]:
    root = Path(folder).expanduser()
    hint = 'give a folder with one sub-folder of images for each class, or "images"'
    try:
        if not root.is_dir():
            reason = "is a file, and this model needs images" if root.is_file() else "there is no such folder"
            raise SpecError("workload.data", f"{folder}: {reason}", hint, {"data": "images"})
        subfolders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
        files = (sorted(subfolder.rglob("*")) for subfolder in subfolders)
        images = ([p for p in some if p.suffix.lower() in SUFFIXES and p.is_file()] for some in files)
        classes = list(filter(None, images))
    except OSError as e:
        raise SpecError("workload.data", f"{folder} cannot be read ({e.strerror or e})", hint) from None
    if not classes:
        raise SpecError("workload.data", f"{folder} has no sub-folder with images", hint, {"data": "images"})
    if len(classes) > facts.classes:
        reason = f"{folder} has {len(classes)} classes and the model {facts.classes}"
        raise SpecError("workload.data", reason, "give a config with a larger num_labels")
    if facts.channels not in _MODES:
        reason = f"the model has {facts.channels} channels, and images 1, 3 or 4"
        raise SpecError("workload.data", reason, "use another", {"data": "images"})
    entries = [(path, label) for label, paths in enumerate(classes) for path in paths]
    shuffled = np.random.default_rng(0).permutation(len(entries))  # the last ones are held out: they have all classes
    return [entries[i] for i in shuffled]
