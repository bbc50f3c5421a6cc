"""What all parts share: Spec, events, schedule, links, faults, hangs, processes, files and text. No torch here."""

__version__ = "0.1.0"
