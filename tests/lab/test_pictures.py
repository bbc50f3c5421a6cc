"""Still pictures: each can be read by Pillow, shows what it is of, and is small; what is refused; a run's card."""

import io
import math

import pytest
from PIL import Image

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.runs.comparison import Comparison
from fsdp_lab.runs.pictures import RANKS, RUNS, Picture, round_numbers, sparkline
from fsdp_lab.runs.slow_motion import film, stills
from fsdp_lab.runs.timeline import COMPUTE, Timeline
from tests.dashboard.test_holdings import moments
from tests.lab.past import past
from tests.lab.test_timeline import told


def shows(picture: Picture, *colors: str) -> list[bool]:
    """Whether it has opaque pixels of each colour, but for the rounding of a palette. It is some kilobytes, and clear
    elsewhere."""
    png = picture.png
    image = Image.open(io.BytesIO(png)).convert("RGBA")
    assert len(png) < 60_000 and image.getpixel((image.width - 1, 0))[3] == 0 and image.width == 2 * picture.width_px
    opaque = [pixel[:3] for _, pixel in image.getcolors(1 << 24) if pixel[3] > 250]
    return [any(math.dist(bytes.fromhex(c[1:]), pixel) < 5 for pixel in opaque) for c in colors]


def test_each_picture_has_the_colours_of_what_it_shows():
    a, b = past("a"), past("b", step_s=0.2, peak_mib=50, loss_off=1.0)
    for what in ("loss", "memory", "throughput", "time"):
        assert shows(a.plot(what), RUNS[0], RUNS[1]) == [True, False], what
    assert a.plot(beside=b).png != a.plot(beside={"other": b}).png, "the names are in the legend"
    assert shows(Comparison.of([a, b]).plot("B"), RUNS[0], RUNS[1], RUNS[2]) == [True, True, False]
    assert shows(film(moments()), RANKS[0], RANKS[1]) == [True, False]
    assert shows(stills(moments()[:3]), RANKS[0], RANKS[1], RANKS[2]) == [True, True, False]
    assert all(shows(Timeline.of(told(2)).plot(), RANKS[0], RANKS[1], COMPUTE["backward"]))


def test_what_cannot_be_drawn_is_refused_and_a_file_is_a_png(tmp_path):
    for refused in (
        lambda: past("a").plot("speed"),
        lambda: past("a", steps=0).plot(),
        lambda: Comparison.of([]).plot(),
    ):
        with pytest.raises(ArgumentError):
            refused()
    assert past("a").plot().save(tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_is_a_card_and_a_curve_of_characters():
    card = past("a")._repr_html_()
    assert "loss 5 to 3.55 █" in card and "ms a step" in card and "101 MiB peak a rank" in card
    assert "<br>" in past("b", steps=0)._repr_html_() and "60 events of 2 ranks" in repr(past("a").events)
    assert sparkline([0.0, 1.0, 2.0]) == "▁▅█" and sparkline([]) == "" and len(sparkline([1.0] * 99)) == 24
    assert round_numbers(0.0, 10.0, 5) == [0, 2, 4, 6, 8, 10]
