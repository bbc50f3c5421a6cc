"""The clinic: known pains of FSDP, each with a run that has it and a run that is cured.

`pains.py`: the ten, to be run from code. `cells.py`: loops of a user's own, as four of them are. `clinic.py`: the widget.
"""

from fsdp_lab.dashboard.clinic.clinic import Clinic
from fsdp_lab.dashboard.clinic.pains import PAINS, Pain

__all__ = ["PAINS", "Clinic", "Pain"]
