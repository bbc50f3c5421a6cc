"""The live dashboard: controls and plots of a lab in a notebook.

`Dashboard(lab)` is all that a user needs."""

from fsdp_lab.base.errors import not_installed

try:
    from fsdp_lab.dashboard.dashboard import Dashboard
except ModuleNotFoundError as e:
    raise not_installed(__name__, e) from None

__all__ = ["Dashboard"]
