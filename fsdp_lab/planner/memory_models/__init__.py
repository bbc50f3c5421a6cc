"""What each backend holds and frees at each point of a step: one file a backend, behind one class."""

from __future__ import annotations
