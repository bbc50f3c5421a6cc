"""The live dashboard: controls and plots of a lab in a notebook. `Dashboard(lab)` is all that a user needs; `WhatIf()` asks
the planner, and needs no lab."""

from .dashboard import Dashboard
from .what_if import WhatIf

__all__ = ["Dashboard", "WhatIf"]
