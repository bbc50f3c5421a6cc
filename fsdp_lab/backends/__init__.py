"""Four ways to train a model, behind one Protocol: our engine ("lab"), FSDP2, FSDP1, DDP. Read base.py first."""

from fsdp_lab.backends.base import Backend
from fsdp_lab.backends.build import build
from fsdp_lab.backends.transfer import fill, transfer_state
from fsdp_lab.engine import ParamShard

__all__ = ["Backend", "ParamShard", "build", "fill", "transfer_state"]
