"""The live dashboard: controls and plots of a lab in a notebook. `Dashboard(lab)` is all that a user needs."""

from .dashboard import Dashboard

__all__ = ["Dashboard"]
