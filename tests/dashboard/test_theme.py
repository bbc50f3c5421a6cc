"""The claims of the palettes: what is drawn together can be told apart by colour-blind eyes, and the signal from all."""

import itertools

import numpy as np
import pytest

from fsdp_lab.dashboard import theme

LIGHT, DARK = "#FFFFFF", "#111111"  # JupyterLab's --jp-layout-color0

# Simulated dichromacy in linear RGB: Machado, Oliveira and Fernandes 2009, severity 1.
EYES = {
    "common": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(color: str) -> np.ndarray:
    c = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def luminance(color: str) -> float:
    return float(np.array([0.2126, 0.7152, 0.0722]) @ linear(color))


def contrast(a: str, b: str) -> float:
    """WCAG's ratio, 1 to 21."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """A space in which distance is about what is seen (Ottosson 2020)."""
    lms = np.array(
        [[0.41222147, 0.53633254, 0.05144599], [0.2119035, 0.6806995, 0.10739696], [0.08830246, 0.28171884, 0.6299787]]
    )
    lab = np.array(
        [[0.21045426, 0.79361779, -0.00407205], [1.9779985, -2.4285922, 0.45059371],
         [0.02590404, 0.78277177, -0.80867577]]
    )  # fmt: skip
    return lab @ np.cbrt(lms @ np.clip(rgb, 0, 1))


def distance(a: str, b: str, eyes: str) -> float:
    """Times 100: 2 is about what can just be seen side by side."""
    seen = [oklab(np.array(EYES[eyes]) @ linear(c)) for c in (a, b)]
    return 100 * float(np.linalg.norm(seen[0] - seen[1]))


@pytest.mark.parametrize("eyes", EYES)
def test_whatever_is_drawn_together_can_be_told_apart(eyes):
    """Ranks by their colour, classes by colour or hatch, other runs by colour or dashes; the signal from all of these."""
    nearest = min(itertools.combinations(theme.RANKS, 2), key=lambda pair: distance(*pair, eyes))
    assert distance(*nearest, eyes) > 7, nearest
    for mode in ("light", "dark"):
        signal = getattr(theme.COMPUTE["waiting"], mode)
        timeline = [*theme.COMMUNICATION.values(), *theme.COMPUTE.values()]
        palettes = [[(f, f.hatch) for f in fills] for fills in (theme.MEMORY.values(), timeline)]
        palettes.append(list(zip(theme.PINS.values(), theme.PIN_DASHES, strict=True)))
        for (a, pattern), (b, other) in itertools.chain(*(itertools.combinations(fills, 2) for fills in palettes)):
            apart = distance(getattr(a, mode), getattr(b, mode), eyes)
            assert apart > 9 or pattern != other, (mode, a.label, b.label, apart)
        drawn = [
            getattr(f, mode) for f in (*theme.MEMORY.values(), *timeline, *theme.PINS.values(), *theme.INK.values())
        ]
        for color in {*drawn, *theme.RANKS} - {signal}:
            assert distance(signal, color, eyes) > 7, (mode, color)


def test_lines_stand_out_from_both_backgrounds():
    assert all(contrast(color, background) > 2 for color in theme.RANKS for background in (LIGHT, DARK))
    assert all(contrast(f.light, LIGHT) > 3 and contrast(f.dark, DARK) > 3 for f in theme.PINS.values())
    signal = theme.COMPUTE["waiting"]
    assert contrast(signal.light, LIGHT) > 3 and contrast(signal.dark, DARK) > 3
