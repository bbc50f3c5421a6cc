"""Images to classify: made by a formula, or read from a folder with one sub-folder a class.

The made ones are waves: a class has its own direction, wavelength and colours, a sample its own phase,
strength and noise. They need no download, they are the same everywhere, and a small model learns them in some
tens of steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fsdp_lab.core.errors import SpecError
from fsdp_lab.models.presets import Facts

Pixels: TypeAlias = npt.NDArray[np.float32]

MADE_COUNT = 50_000  # images in an epoch of made ones
NOISE = 0.5  # standard deviation of the noise; the wave's strength is about 1
_CYCLES = (2, 7)  # waves over the image: fewest, most
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
_CACHE_BYTES = 256 * 2**20


class MadeImages:
    """`MADE_COUNT` images of `facts.classes` classes; image i is of class i modulo that."""

    def __init__(self, facts: Facts) -> None:
        assert facts.image_pixels is not None
        self._facts = facts
        self.count = MADE_COUNT
        height, width = facts.image_pixels
        self.description = f"made images, {height} x {width}, {facts.classes} classes"
        self.fingerprint = hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
        self._rows = (np.arange(height, dtype=np.float32) / height)[:, None]
        self._columns = (np.arange(width, dtype=np.float32) / width)[None, :]

    def image(self, index: int) -> tuple[Pixels, int]:
        """(channels, height, width) of about unit variance, and the class."""
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


@dataclass(frozen=True)
class _Entry:
    path: Path
    label: int


class FolderImages:
    """Images below a folder; the sub-folders, in the order of their names, are the classes.

    Each is scaled so that it covers the model's size, cut to it around the middle, and brought to -1..1.

    Raises:
        SpecError: no such folder, no class in it, more classes than the model has, or Pillow is not
    installed.
    """

    def __init__(self, folder: str, facts: Facts) -> None:
        assert facts.image_pixels is not None
        self._facts = facts
        self._entries = _entries(folder, facts)
        self._cache: dict[int, npt.NDArray[np.uint8]] = {}
        self._room_bytes = _CACHE_BYTES
        self.count = len(self._entries)
        names = "\n".join(str(e.path.relative_to(Path(folder).expanduser())) for e in self._entries)
        self.fingerprint = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
        self.description = f"{folder} ({self.count} images, {max(e.label for e in self._entries) + 1} classes)"

    def image(self, index: int) -> tuple[Pixels, int]:
        """(channels, height, width) between -1 and 1, and the class. SpecError for a file it cannot read."""
        raw = self._cache.get(index)
        if raw is None:
            raw = self._decode(self._entries[index].path)
            if raw.nbytes <= self._room_bytes:
                self._cache[index] = raw
                self._room_bytes -= raw.nbytes
        return raw.astype(np.float32) / np.float32(127.5) - np.float32(1), self._entries[index].label

    def _decode(self, path: Path) -> npt.NDArray[np.uint8]:
        from PIL import Image, ImageOps

        assert self._facts.image_pixels is not None
        height, width = self._facts.image_pixels
        try:
            with Image.open(path) as opened:
                fitted = ImageOps.fit(opened.convert("L" if self._facts.channels == 1 else "RGB"), (width, height))
        except (OSError, ValueError) as e:
            raise SpecError(
                "workload.data", f"{path} is not an image that can be read ({e})", "remove that file"
            ) from None
        array = np.asarray(fitted, dtype=np.uint8)
        return array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))


def _entries(folder: str, facts: Facts) -> list[_Entry]:
    root = Path(folder).expanduser()
    hint = 'give a folder with one sub-folder of images for each class, or "images"'
    try:
        if not root.is_dir():
            reason = "is a file, and this model wants images" if root.is_file() else "there is no such folder"
            raise SpecError("workload.data", f"{folder}: {reason}", hint, {"data": "images"})
        classes = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
        with_images = [images for c in classes if (images := list(_images(c)))]
    except OSError as e:
        raise SpecError("workload.data", f"{folder} cannot be read ({e.strerror or e})", hint) from None
    if not with_images:
        raise SpecError("workload.data", f"{folder} has no sub-folder with images", hint, {"data": "images"})
    if len(with_images) > facts.classes:
        raise SpecError(
            "workload.data",
            f"{folder} has {len(with_images)} classes and the model {facts.classes}",
            "give a config with a larger num_labels",
        )
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise SpecError(
            "workload.data",
            "image files are read with Pillow, which is not installed",
            'install it with "pip install pillow", or use "images"',
            {"data": "images"},
        ) from None
    entries = [_Entry(path, label) for label, images in enumerate(with_images) for path in images]
    mixed = np.random.default_rng(0).permutation(len(entries))  # so that the last ones, held out, are of all classes
    return [entries[i] for i in mixed]


def _images(folder: Path) -> Iterator[Path]:
    yield from sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
