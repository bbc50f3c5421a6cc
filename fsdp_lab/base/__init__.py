"""What all parts share: errors, events, hangs, processes, streams, files and text."""

__version__ = "0.1.0"
