"""Batches: every sample once whoever reads it, real text as bytes, and what each kind of model is given."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from PIL import Image
from transformers import ByT5Tokenizer

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models import data
from fsdp_lab.models.batches import Batches, Order, open_source
from fsdp_lab.models.check import check
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.data import STDLIB_CAP_BYTES, FolderImages, encode, open_text
from fsdp_lab.models.presets import facts_of
from fsdp_lab.models.sources import IGNORED, Batch, Indices, Source
from fsdp_lab.spec.workload import Workload

GPT2 = resolve("gpt2-1m")
byt5 = functools.cache(ByT5Tokenizer)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text of 50 windows of 16 bytes and a rest of 5."""
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_bytes(bytes(32 + i % 90 for i in range(50 * 16 + 5)))
    return str(path)


def reader(workload: Workload, rank: int, world_size: int, source: Source) -> Batches:
    return Batches(workload, GPT2, rank=rank, world_size=world_size, source=source)


@settings(max_examples=20)
@given(start=st.integers(0, 500), seed=st.integers(0, 9), split=st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3)]))
def test_the_global_batch_does_not_depend_on_the_split(book: str, start: int, seed: int, split: tuple[int, int]):
    def global_batch(world: int, micro_batch: int, micros: int) -> torch.Tensor:
        workload = Workload(data=book, seq_len=16, micro_batch=micro_batch, seed=seed)
        source = open_source(workload, GPT2)
        parts = [reader(workload, r, world, source).batch(start, m) for m in range(micros) for r in range(world)]
        return torch.cat([p["input_ids"] for p in parts])

    world, micro_batch = split
    whole = global_batch(1, 12, 1)
    assert torch.equal(global_batch(world, micro_batch, 1), whole)
    assert torch.equal(global_batch(1, micro_batch, world), whole)


@given(count=st.integers(1, 40), seed=st.integers(0, 5), first_epoch=st.integers(0, 3))
def test_an_epoch_reads_everything_once_in_an_order_of_its_own(count: int, seed: int, first_epoch: int) -> None:
    order = Order(count, seed)
    samples = np.arange(first_epoch * count, (first_epoch + 3) * count)
    epochs = order(samples).reshape(3, count)
    assert all(sorted(e.tolist()) == list(range(count)) for e in epochs)
    assert np.array_equal(Order(count, seed)(samples[::-1]), epochs.reshape(-1)[::-1])
    if count > 30:
        assert not np.array_equal(epochs[0], epochs[1])


@settings(max_examples=25)
@given(text=st.text(max_size=200).filter(lambda t: "<" not in t))
def test_ids_are_those_of_byt5(text: str) -> None:
    ours = encode(np.frombuffer(text.encode(), dtype=np.uint8))
    assert ours.tolist() == byt5()(text, add_special_tokens=False).input_ids


def test_the_standard_library_is_read_as_it_is_and_a_folder_is_its_text_files_in_order(tmp_path: Path) -> None:
    text = open_text("stdlib")
    assert len(text.data) == STDLIB_CAP_BYTES and "standard library" in text.description
    assert open_text("stdlib").fingerprint == text.fingerprint
    for name, content in {"b.txt": b"two", "a.txt": b"one ", ".hidden": b"no", "image.png": b"\x89PNG\0"}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.md").write_bytes(b" three")
    text = open_text(str(tmp_path))
    assert bytes(text.data) == b"one two three" and "3 files" in text.description


def test_bert_always_has_something_to_guess(book: str) -> None:
    workload = Workload(model="bert-1m", data=book, seq_len=2, micro_batch=4)
    batch = Batches(workload, resolve("bert-1m"), rank=0, world_size=1).batch(0)
    assert ((batch["labels"] != IGNORED).sum(dim=1) == 1).all()


def test_made_images_are_the_same_everywhere_and_of_every_class() -> None:
    workload = Workload(model="vit-1m", data="images", micro_batch=64)
    one = Batches(workload, resolve("vit-1m"), rank=0, world_size=1).batch(0)
    half = Workload(model="vit-1m", data="images", micro_batch=32)
    parts = [Batches(half, resolve("vit-1m"), rank=r, world_size=2).batch(0) for r in range(2)]
    assert torch.equal(torch.cat([p["pixel_values"] for p in parts]), one["pixel_values"])
    assert one["pixel_values"].shape == (64, 3, 32, 32) and one["pixel_values"].dtype == torch.float32
    assert set(one["labels"].tolist()) == set(range(10)) and 0.5 < one["pixel_values"].std() < 2


def test_a_folder_of_images_gives_classes_by_name(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for label, (name, colour) in enumerate({"cats": (255, 0, 0), "dogs": (0, 0, 255)}.items()):
        (tmp_path / name).mkdir()
        for i in range(2):
            image.new("RGB", (40 + 30 * label, 50), colour).save(tmp_path / name / f"{i}.png")
    workload = Workload(model="vit-1m", data=str(tmp_path), micro_batch=4)
    batch = Batches(workload, resolve("vit-1m"), rank=0, world_size=1).batch(0)
    assert sorted(batch["labels"].tolist()) == [0, 0, 1, 1]
    red = batch["pixel_values"][batch["labels"] == 0]
    assert (red[:, 0] == 1).all() and (red[:, 1:] == -1).all()


RAMP = np.linspace(0, 1, 32 * 32).reshape(32, 32)
SHADES = np.round(RAMP * 255).astype(np.uint8)


def _with_exif(path: Path) -> None:
    image = Image.fromarray(SHADES)
    image.getexif()[0x0112] = 6  # to be turned by a right angle
    image.save(path, exif=image.getexif())


IMAGES: dict[str, Callable[[Path], None]] = {
    "L.png": lambda path: Image.fromarray(SHADES).save(path),
    "LA.png": lambda path: Image.merge("LA", [Image.fromarray(SHADES), Image.new("L", (32, 32), 9)]).save(path),
    "P.png": lambda path: Image.fromarray(SHADES).convert("P").save(path, transparency=3),
    "CMYK.tif": lambda path: Image.fromarray(SHADES).convert("RGB").convert("CMYK").save(path),
    "turned.png": _with_exif,
    "two.gif": lambda path: Image.fromarray(SHADES).save(path, save_all=True, append_images=[Image.new("L", (32, 32))]),
}


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_an_image_of_any_mode_has_the_same_shades(tmp_path: Path, channels: int, monkeypatch: pytest.MonkeyPatch):
    """Read in order, twice, by a reader that has room for two."""
    (tmp_path / "class").mkdir()
    for name, save in IMAGES.items():
        save(tmp_path / "class" / name)
    facts = dataclasses.replace(facts_of(resolve("vit-1m")), channels=channels)
    monkeypatch.setattr(data, "_CACHE_BYTES", 2 * channels * SHADES.size)
    monkeypatch.setattr(Image, "open", opened := Mock(wraps=Image.open))
    images = FolderImages(str(tmp_path), facts)
    for i in [*range(images.count)] * 2:
        pixels, _ = images.image(i)
        assert pixels.shape[0] == channels and np.abs(pixels[0] + 1 - SHADES / 127.5).max() < 2.1 / 127.5
    assert opened.call_count == 2 * images.count - 2
    with pytest.raises(SpecError, match="workload.data: the model has 2 channels, and images 1, 3 or 4"):
        FolderImages(str(tmp_path), dataclasses.replace(facts, channels=2))


@pytest.mark.parametrize(("save", "said"), [
    (lambda path: Image.fromarray((RAMP * 65535).astype(np.uint16)).save(path), "more than 8 bits"),
    (lambda path: Image.fromarray(RAMP.astype(np.float32)).save(path), "more than 8 bits"),
    (lambda path: path.write_bytes(b"II no image"), "cannot identify"),
    (lambda path: Image.new("1", (20_000, 20_000)).save(path, compression="group4"), "exceeds limit of .* pixels"),
])  # fmt: skip
def test_an_image_that_cannot_be_read_is_named(tmp_path: Path, save: Callable[[Path], None], said: str) -> None:
    (tmp_path / "class").mkdir()
    save(tmp_path / "class" / "it.tif")
    with pytest.raises(SpecError, match=rf"workload.data: .*it.tif cannot be read as an image \(.*{said}.*; remove"):
        FolderImages(str(tmp_path), facts_of(resolve("vit-1m"))).image(0)


class Numbered(Source):
    """A sample is its position."""

    description = fingerprint = "numbers"

    def __init__(self, count: int) -> None:
        self.count = count

    def collate(self, positions: Indices, samples: Indices) -> Batch:
        return {"labels": torch.from_numpy(positions.copy())}


def held_out(workload: Workload, world: int, count: int, source: Source) -> list[int]:
    """The labels that count, of all ranks, in the order of rounds and ranks."""
    ranks = [list(reader(workload, r, world, source).held_out(count)) for r in range(world)]
    found: list[int] = []
    for of_round in zip(*ranks, strict=True):
        for batch, counted in of_round:
            labels = batch["labels"].tolist()
            assert len(labels) == workload.micro_batch and labels[counted:] == [IGNORED] * (len(labels) - counted)
            found += labels[:counted]
    return found


@settings(max_examples=30)
@given(st.integers(1, 60), st.floats(0, 0.5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.data())
def test_what_is_held_out_is_never_trained_on_and_the_same_for_any_split(
    count: int, share: float, micro_batch: int, world: int, seed: int, data: st.DataObject
) -> None:
    workload = Workload(held_out=share, micro_batch=micro_batch, seed=seed)
    source, held = Numbered(count), int(share * count)
    ranks = [reader(workload, r, world, source) for r in range(world)]
    starts = range(0, 2 * count, world * micro_batch)
    trained = {p for s in starts for r in ranks for p in r.batch(s)["labels"].tolist()}
    assert trained == set(range(count - held))  # two epochs: all the others
    assume(held)
    wanted = data.draw(st.integers(1, held))
    found = held_out(workload, world, wanted, source)
    assert len(set(found)) == len(found) == wanted and not trained & set(found)
    assert found == held_out(Workload(held_out=share, micro_batch=1), 1, wanted, source)


@pytest.mark.parametrize(("model", "data"), [("bert-1m", ""), ("t5-1m", ""), ("vit-1m", "images")])
def test_a_held_out_sample_is_the_same_whoever_reads_it(book: str, model: str, data: str) -> None:
    def whole(world: int, micro_batch: int) -> list[torch.Tensor]:
        workload = Workload(model=model, data=data or book, seq_len=16, held_out=0.2, micro_batch=micro_batch)
        ranks = [Batches(workload, resolve(model), rank=r, world_size=world) for r in range(world)]
        rounds = zip(*(r.held_out(5) for r in ranks), strict=True)
        parts = [(batch, counted) for of_round in rounds for batch, counted in of_round]
        return [torch.cat([batch[name][:counted] for batch, counted in parts]) for name in sorted(parts[0][0])]

    one = whole(1, 5)
    assert len(one[0]) == 5
    for other in (whole(1, 2), whole(2, 1), whole(3, 2)):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_of_few_held_out_samples_all_are_evaluated_and_none_are_refused_with_a_way_out(book: str) -> None:
    workload = Workload(model="gpt2-1m", data=book, seq_len=16)  # 2 of 50
    batches = Batches(workload, GPT2, rank=0, world_size=1)
    assert batches.check_held_out(9) == 2 == sum(counted for _, counted in batches.held_out(9))
    less = dataclasses.replace(workload, held_out=0.01)
    with pytest.raises(SpecError, match="none of 50 samples is held out to evaluate on; use held_out") as refused:
        next(Batches(less, GPT2, rank=0, world_size=1).held_out(9))
    assert refused.value.field == "workload.held_out"
    check(dataclasses.replace(less, **refused.value.fix), evaluated=9)
    with pytest.raises(SpecError, match="give more data"):
        check(dataclasses.replace(less, seq_len=800), evaluated=1)
