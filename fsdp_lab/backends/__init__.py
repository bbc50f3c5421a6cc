"""Four ways to train one model, behind one Protocol: our engine, FSDP2, FSDP1, DDP. Read base.py first."""

from fsdp_lab.backends.base import Backend, Piece
from fsdp_lab.backends.build import build
from fsdp_lab.backends.carry import carry, fill

__all__ = ["Backend", "Piece", "build", "carry", "fill"]
