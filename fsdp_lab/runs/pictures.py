"""`Picture`: a still picture of a notebook, drawn as PNG without a browser; `curves` and `dots` draw charts.

PNG, because it is saved with the notebook and shown wherever that is read, also by a JupyterLab that does not trust it yet,
which shows no SVG, and after the kernel's end, when a widget is gone. The background is transparent and the inks are of
middle lightness, so that it is read on light and on dark pages."""

import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.files import check_file, write_whole
from fsdp_lab.base.formatting import Spread

INK, FAINT = "#7F8792", "#9AA1AB"
RANKS = ("#0072B2", "#CC79A7", "#009E73", "#56B4E9", "#9D70F7", "#5F5566", "#962C18", "#4836BD")
RUNS = ("#3F9C94", "#C07A78", "#8B85B5", "#94965F", "#B58A4C", "#6B8FB5", "#2F6F8F", "#A35C8A")  # of curves, by place
WIDTH_PX, SHOWN_PX = 760, 900  # in which it is drawn; as it is shown beside text of a notebook
SHARPNESS = 2  # pixels of the file for one of the page
SMOOTHING = 2  # drawn so much larger, and reduced
PLAIN = str.maketrans({"–": "-", "×": "x", "µ": "u", "→": ">"})  # what Pillow's own font lacks

Point = tuple[float, float]


class Picture:
    """Draws in pixels of the page, from the upper left corner. In a notebook it shows itself; `save` writes the file."""

    def __init__(self, height_px: float, words: str) -> None:
        """`words`: what is seen, where no picture can be shown."""
        from PIL import Image, ImageDraw, ImageFont

        self.width_px, self.height_px, self.words = WIDTH_PX, height_px, words
        self._each = each = SHARPNESS * SMOOTHING
        size = (WIDTH_PX * each, round(height_px * each))
        self._image = Image.new("RGBA", size, (127, 135, 146, 0))  # edges of letters mix with this, not with black
        self._draw = ImageDraw.Draw(self._image)
        self._font = cache(lambda size_px: ImageFont.load_default(size_px * each))

    def rect(self, left: float, top: float, right: float, bottom: float, color: str) -> None:
        """A colour of eight digits replaces what lies below, too."""
        box = [round(v * self._each) for v in (left, top, right, bottom)]
        if box[2] > box[0] and box[3] > box[1]:
            self._draw.rectangle((box[0], box[1], box[2] - 1, box[3] - 1), fill=color)

    def hatched(self, left: float, top: float, right: float, bottom: float, color: str) -> None:
        self.rect(left, top, right, bottom, color + "29")
        for i in range(int((right - left + bottom - top) / 5) + 1):
            x = left + top - bottom + 5 * i
            begin, end = max(x, left), min(x + bottom - top, right)
            if begin < end:
                self.line([(begin, bottom - (begin - x)), (end, bottom - (end - x))], color, 1.1)

    def line(self, points: Sequence[Point], color: str, width: float = 2.0) -> None:
        scaled = [(x * self._each, y * self._each) for x, y in points]
        self._draw.line(scaled, fill=color, width=max(1, round(width * self._each)), joint="curve")

    def dot(self, x: float, y: float, color: str, *, radius: float = 5.0, ring: bool = False) -> None:
        left, top, right, bottom = (v * self._each for v in (x - radius, y - radius, x + radius, y + radius))
        fill = None if ring else color
        self._draw.ellipse((left, top, right, bottom), fill=fill, outline=color, width=round(1.8 * self._each))

    def text(
        self, x: float, y: float, text: str, size_px: float = 11, *, anchor: str = "lm", color: str = INK
    ) -> float:
        """`anchor`: Pillow's: l, m or r of the line, and its t, m or s. Returns the right end of what begins at `x`."""
        at, font = (x * self._each, y * self._each), self._font(size_px)
        self._draw.text(at, text.translate(PLAIN), font=font, fill=color, anchor=anchor)
        return x + self.width_of(text, size_px)

    def width_of(self, text: str, size_px: float = 11) -> float:
        return self._draw.textlength(text.translate(PLAIN), font=self._font(size_px)) / self._each

    def keys(self, y: float, keys: Sequence[tuple[str, str]], left: float = 8.0) -> None:
        """A legend: (label, colour) each, in lines of 18 pixels; a colour that begins with "/" is hatched."""
        x = left
        for label, color in keys:
            if x > left and x + 19 + self.width_of(label) > self.width_px:
                x, y = left, y + 18
            draw = self.hatched if color.startswith("/") else self.rect
            draw(x, y - 5, x + 14, y + 5, color.removeprefix("/"))
            x = self.text(x + 19, y, label) + 16

    @property
    def png(self) -> bytes:
        """The file: with few colours, and so of some kilobytes."""
        from PIL import Image

        buffer = io.BytesIO()
        small = self._image.reduce(SMOOTHING)
        small.quantize(128, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
            buffer, "PNG", optimize=True
        )
        return buffer.getvalue()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes a PNG; returns its path. Raises ArgumentError: of the path."""
        return write_whole(check_file(path, (".png",), field="path"), self.png)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        return self.png, {"width": SHOWN_PX}

    def __repr__(self) -> str:
        return f"<Picture: {self.words}>"


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Two axes on a picture. `x`, `y`: the least and the greatest value; the others: the edges in pixels."""

    picture: Picture
    right: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]
    left: float = 62.0
    top: float = 30.0

    def at(self, x: float, y: float) -> Point:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def draw_axes(self, x_label: str, y_label: str = "") -> None:
        """Fine lines at round numbers; the label of the upright axis stands above it. Without it there is none."""
        picture = self.picture
        for value in round_numbers(*self.y, most=5) if y_label else ():
            _, y = self.at(self.x[0], value)
            picture.line([(self.left, y), (self.right, y)], FAINT + "50", 1)
            picture.text(self.left - 8, y, f"{value:,.10g}", anchor="rm")
        for value in round_numbers(*self.x, most=8):
            picture.text(self.at(value, 0)[0], self.bottom + 12, f"{value:,.10g}", anchor="mm")
        picture.text((self.left + self.right) / 2, self.bottom + 29, x_label, anchor="mm")
        picture.text(8, self.top - 14, y_label)


def curves(
    series: Mapping[str, Sequence[Point]], rings: Sequence[Point], marks: Mapping[int, str], *, label: str, zero: bool
) -> Picture:
    """Lines over steps, the first one thin, above broad and pale ones, so that equal ones are both seen.

    Args:
        rings: points beside the first line. marks: step -> what changed there, for the legend.
        label: of the upright axis. zero: whether it begins there.

    Raises ArgumentError where there is nothing to draw."""
    points = [p for some in (*series.values(), rings) for p in some]
    if not points:
        raise ArgumentError("plot", f"there is nothing measured yet of {label}", "train some steps first")
    steps, values = [x for x, _ in points], [y for _, y in points]
    low, high = (0.0 if zero else min(values)), max(values)
    room = 0.06 * (high - low) or abs(high) or 1.0
    picture = Picture(252 + 20 * len(marks) + 22 * (len(series) > 1 or bool(rings)), f"{label}: {', '.join(series)}")
    x, y = (min(steps), max(*steps, min(steps) + 1)), (low - room * (not zero), high + room)
    plot = Plot(picture=picture, right=picture.width_px - 14, bottom=206, x=x, y=y)
    plot.draw_axes("step", label)
    for step in marks:
        picture.line([(plot.at(step, 0)[0], y) for y in (plot.top, plot.bottom)], INK, 1)
    for place, some in reversed(list(enumerate(series.values()))):
        drawn = [plot.at(*p) for p in some]
        picture.line(drawn, RUNS[place % len(RUNS)] + ("90" if place else ""), 7 if place else 2)
        for p in drawn[:1] if len(drawn) == 1 else ():
            picture.dot(*p, RUNS[place % len(RUNS)], radius=3)
    for p in rings:
        picture.dot(*plot.at(*p), RUNS[0], radius=4, ring=True)
    keys = [(name, RUNS[i % len(RUNS)] + ("90" if i else "")) for i, name in enumerate(series)]
    keys += [("rings: held-out samples", FAINT)] if rings else []
    picture.keys(252, keys if len(keys) > 1 else [], plot.left)
    for place, (step, change) in enumerate(marks.items()):
        picture.text(plot.left, picture.height_px - 20 * (len(marks) - place), f"line at step {step:,}: {change}")
    return picture


def dots(points: Sequence[tuple[str, str, float, Spread]], chosen: str | None, x_label: str, y_label: str) -> Picture:
    """Points with letters, and a list of what they are on the right; the chosen one has a ring. Raises ArgumentError.
    `points`: label, name, x, and the spread of y."""
    if not points:
        raise ArgumentError("plot", "no run has measured its time and its memory yet", "wait for some steps of each")
    picture = Picture(max(290, 60 + 21 * len(points)), f"{y_label} against {x_label} of {len(points)} runs")
    names_px = max(picture.width_of(name, 12) for _, name, _, _ in points) + 76
    xs, ys = [x for _, _, x, _ in points], [v for *_, y in points for v in (y.p10, y.p90)]
    x_room, y_room = 0.08 * (max(xs) - min(xs)) or 1.0, 0.08 * (max(ys) - min(ys)) or 1.0
    plot = Plot(picture=picture, right=picture.width_px - names_px, bottom=picture.height_px - 46,
                x=(min(xs) - x_room, max(xs) + x_room), y=(max(0.0, min(ys) - y_room), max(ys) + y_room))  # fmt: skip
    plot.draw_axes(x_label, y_label)
    for place, (_, _, at, time) in enumerate(points):
        picture.line([plot.at(at, time.p10), plot.at(at, time.p90)], RUNS[place % len(RUNS)] + "90", 1.5)
    taken = [plot.at(x, y.median) for _, _, x, y in points]
    for place, (label, name, _, _) in enumerate(points):
        color, (x, y), row = RUNS[place % len(RUNS)], taken[place], plot.top + 21 * place
        picture.dot(x, y, color)
        around = [(x + 16 * math.cos(a), y + 16 * math.sin(a)) for a in (0, 3.14, -0.8, 0.8, -2.3, 2.3, -1.57, 1.57)]
        taken.append(max(around, key=lambda p: min(12.0, *(math.dist(p, q) for q in taken))))  # the first that is free
        picture.text(*taken[-1], label, 13, anchor="mm", color=color)
        picture.text(plot.right + 24, row, label, 13, color=color)
        end = picture.text(plot.right + 42, row, name, 12)
        if label == chosen:
            picture.dot(x, y, color, radius=9, ring=True)
            picture.dot(end + 12, row, color, ring=True)
            picture.text(plot.right + 24, plot.top + 21 * len(points) + 6, "ring: recommended", color=FAINT)
    return picture


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """A curve as characters."""
    shown = [values[i * len(values) // width] for i in range(width)] if len(values) > width else values
    low, spread = min(shown, default=0.0), max(shown, default=0.0) - min(shown, default=0.0)
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (v - low) / (spread or 1)))] for v in shown)


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Steps of 1, 2 or 5 times a power of ten between two numbers."""
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= least * 0.999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
