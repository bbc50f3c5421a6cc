"""`Aside`: a training that waits on the host for its turn, while another has the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_lab.backends.carry import Parked
from fsdp_lab.engine.scaler import Scaler
from fsdp_lab.models import Batches
from fsdp_lab.rank.ledger import Found
from fsdp_lab.rank.trainer import Cost, Progress
from fsdp_lab.spec import Spec


@dataclass(frozen=True, kw_only=True)
class Aside:
    """All that a rank needs to go on with it, bit for bit."""

    spec: Spec
    batches: Batches
    cost: Cost
    progress: Progress
    scaler: Scaler
    found: Found | None  # by its ledger step: it need not be measured again
    values: Parked
