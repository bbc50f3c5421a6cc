"""One rank: a resident `Session`, independent of notebooks. Read session.py, trainer.py, lifecycle.py, abort.py."""

from fsdp_lab.rank.rendezvous import host_store
from fsdp_lab.rank.session import Session

__all__ = ["Session", "host_store"]
