"""Colours: one fixed palette for ranks, others for what is stacked inside a rank, and for other runs.

Orange is the signal: exposed communication, in every plot, and nothing else. Ranks are hues that keep away from it. Classes
of memory, kinds of communication and parts of computing are muted hues that differ in lightness too, in the order in which
they are stacked, with hatching for what is seldom seen. Other runs (pins) are four muted hues, each in two lightnesses, and
always dashed: each hue in its own dashes. `tests/dashboard/test_theme.py` measures that eyes with protanopia, deuteranopia
and tritanopia tell apart what is drawn together."""

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_lab.runs.pictures import RANKS as RANKS

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
    "parameters": Fill(label="sharded parameters", light="#3E316D", dark="#5A4A9A"),
    "optimizer": Fill(label="optimizer state", light="#95609D", dark="#AC7AB7"),
    "unsharded": Fill(label="unsharded parameters", light="#80B5F4", dark="#93C3F2"),
    "gradients": Fill(label="gradients", light="#07654D", dark="#408066"),
    "activations": Fill(label="activations", light="#C3CD99", dark="#BDB982"),
    "communication": Fill(label="communication buffers", light="#D9DAE3", dark="#3A3B46", hatch="/"),
    "other": Fill(label="other", light="#F1F0F6", dark="#2A2A30", hatch="."),
    "host": Fill(label="on the host", light="#F1F0F6", dark="#2A2A30", hatch="x"),
}

COMMUNICATION: Mapping[str, Fill] = {
    "all_gather": Fill(label="all-gather", light="#2A62BC", dark="#4D5FBD"),
    "reduce_scatter": Fill(label="reduce-scatter", light="#A989DB", dark="#AE8AC9"),
    "all_reduce": Fill(label="all-reduce", light="#7EC7F5", dark="#9EE3FF"),
    "all_to_all": Fill(label="all-to-all", light="#A989DB", dark="#AE8AC9", hatch="/"),
    "broadcast": Fill(label="broadcast", light="#C6D3E3", dark="#44536B", hatch="\\"),
    "barrier": Fill(label="barrier", light="#C6D3E3", dark="#44536B", hatch="x"),
    "other": Fill(label="other", light="#E6ECF3", dark="#2B3442", hatch="."),
    "control": Fill(label="control", light="#E6ECF3", dark="#2B3442", hatch="-"),
}

# What a rank does beside communication: the timeline's rows.
COMPUTE: Mapping[str, Fill] = {
    "forward": Fill(label="forward", light="#BCDAC2", dark="#344940"),
    "backward": Fill(label="backward", light="#5F9489", dark="#6A8878"),
    "optimizer": Fill(label="optimizer", light="#3A5440", dark="#9BC0AA"),
    "compute": Fill(label="other computing", light="#DCE8DF", dark="#26332D", hatch="/"),
    "waiting": Fill(label="waiting: exposed communication", light="#E86A00", dark="#FF9A2E"),
    "host_copy": Fill(label="host copy", light="#8A979E", dark="#93A1A9", hatch="x"),
}

# Other runs' curves, by place. Four hues in dashes of their own, then the same hues further from the background.
PINS: Mapping[str, Fill] = {
    "0": Fill(label="A", light="#AD7575", dark="#C08786"),
    "1": Fill(label="B", light="#4F948F", dark="#62A6A2"),
    "2": Fill(label="C", light="#857FAE", dark="#9791C1"),
    "3": Fill(label="D", light="#7E8460", dark="#9B9C6A"),
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
