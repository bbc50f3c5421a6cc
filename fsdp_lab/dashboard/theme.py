"""Colours: one fixed palette for ranks, others for what is stacked inside a rank, and for other runs.

Ranks are hues: six of Okabe and Ito, and two darker ones that maximise the smallest distance to them under
simulated protanopia, deuteranopia and tritanopia. Classes of memory and kinds of communication are lightness ramps of
one muted hue each, with hatching where lightness is not enough, so that none of them can be mistaken for a rank.
Other runs (pins) are four muted hues, each in two lightnesses, and always dashed: each hue in its own dashes.
`tests/dashboard/test_theme.py` measures both claims.
"""

from collections.abc import Mapping
from dataclasses import dataclass

RANKS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#962C18", "#5F5566")
RANK_DASHES = ("solid", "solid", "solid", "solid", "6 2", "6 2", "6 2", "6 2")
MOST_LINES = len(RANKS)  # above this, panels draw bands: a reader cannot tell more lines apart


def rank_color(rank: int) -> str:
    """The colour of a rank, the same in every panel; above `MOST_LINES` ranks it is not used."""
    return RANKS[rank % len(RANKS)]


@dataclass(frozen=True, kw_only=True)
class Fill:
    """The fill of one class or kind: a colour for each theme, and a hatch (a Bokeh pattern, " " for none)."""

    label: str
    light: str
    dark: str
    hatch: str = " "


# In stacking order: what stays between steps is at the bottom.
MEMORY: Mapping[str, Fill] = {
    "parameters": Fill(label="sharded parameters", light="#343061", dark="#D9D9FF"),
    "optimizer": Fill(label="optimizer state", light="#504D86", dark="#B5B6E0"),
    "unsharded": Fill(label="unsharded parameters", light="#6E6DA8", dark="#9291CB"),
    "gradients": Fill(label="gradients", light="#8F8EC7", dark="#7170A8"),
    "activations": Fill(label="activations", light="#B4B4D1", dark="#535186"),
    "communication": Fill(label="communication buffers", light="#D9DAE3", dark="#363365", hatch="/"),
    "other": Fill(label="other", light="#F1F0F6", dark="#2C2A3A", hatch="."),
    "host": Fill(label="on the host", light="#F1F0F6", dark="#2C2A3A", hatch="x"),
}

COMMUNICATION: Mapping[str, Fill] = {
    "all_gather": Fill(label="all-gather", light="#4A3A2A", dark="#EBDCC6"),
    "reduce_scatter": Fill(label="reduce-scatter", light="#8A6F52", dark="#C4A988"),
    "all_reduce": Fill(label="all-reduce", light="#BBA284", dark="#957A5B"),
    "all_to_all": Fill(label="all-to-all", light="#8A6F52", dark="#C4A988", hatch="/"),
    "broadcast": Fill(label="broadcast", light="#DDCDB8", dark="#6B5640", hatch="\\"),
    "barrier": Fill(label="barrier", light="#DDCDB8", dark="#6B5640", hatch="x"),
    "other": Fill(label="other", light="#EFE7DC", dark="#463A2D", hatch="."),
    "control": Fill(label="control", light="#EFE7DC", dark="#463A2D", hatch="-"),
}

# What a rank does beside communication: the timeline's rows.
COMPUTE: Mapping[str, Fill] = {
    "forward": Fill(label="forward", light="#B5CCC6", dark="#3C544E"),
    "backward": Fill(label="backward", light="#7C9E96", dark="#64857D"),
    "optimizer": Fill(label="optimizer", light="#48665F", dark="#93B3AB"),
    "compute": Fill(label="other computing", light="#D9E6E2", dark="#2A3B37", hatch="/"),
    "waiting": Fill(label="waiting: exposed communication", light="#1F2A37", dark="#E5E7EB"),
    "host_copy": Fill(label="host copy", light="#7D98A3", dark="#6F8A95", hatch="x"),
}

# Other runs' curves, by place. Four hues in dashes of their own, then the same hues further from the background.
PINS: Mapping[str, Fill] = {
    "0": Fill(label="A", light="#AD7575", dark="#C08786"),
    "1": Fill(label="B", light="#4F948F", dark="#62A6A2"),
    "2": Fill(label="C", light="#857FAE", dark="#9791C1"),
    "3": Fill(label="D", light="#888A58", dark="#9B9C6A"),
    "4": Fill(label="E", light="#774545", dark="#FCBFBE"),
    "5": Fill(label="F", light="#17625E", dark="#9BE0DB"),
    "6": Fill(label="G", light="#554E7A", dark="#D0CAFD"),
    "7": Fill(label="H", light="#585928", dark="#D3D6A1"),
}
PIN_DASHES = ("9 4", "2 3", "9 3 2 3", "9 3 2 3 2 3") * 2

# Colours of what is neither a rank nor a class: means, bands, peaks, markers.
INK: Mapping[str, Fill] = {
    "mean": Fill(label="all ranks", light="#1F2A37", dark="#E5E7EB"),
    "faint": Fill(label="each step", light="#9AA3AE", dark="#6B7280"),
    "band": Fill(label="least to most", light="#B8C0CC", dark="#4B5563"),
    "peak": Fill(label="peak", light="#1F2A37", dark="#F3F4F6"),
    "marker": Fill(label="change", light="#6B7280", dark="#9CA3AF"),
    "gap": Fill(label="gap", light="#FFFFFF", dark="#111111"),
}


def tokens() -> dict[str, dict[str, str]]:
    """Theme -> token -> colour, for the page: `memory.parameters`, `communication.all_gather`, `ink.mean`."""
    groups = {"memory": MEMORY, "communication": COMMUNICATION, "timeline": COMPUTE, "pin": PINS, "ink": INK}
    named = {f"{group}.{name}": fill for group, fills in groups.items() for name, fill in fills.items()}
    return {
        "light": {name: fill.light for name, fill in named.items()},
        "dark": {name: fill.dark for name, fill in named.items()},
    }
