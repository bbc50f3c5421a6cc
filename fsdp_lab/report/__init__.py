"""A comparison, or what-if, as one HTML file that opens anywhere, without a network; what-if in a notebook too."""

from fsdp_lab.base.errors import not_installed

try:
    from fsdp_lab.report.report import SUFFIXES, write_report
    from fsdp_lab.report.what_if import WhatIf
except ModuleNotFoundError as e:
    raise not_installed(__name__, e) from None

__all__ = ["SUFFIXES", "WhatIf", "write_report"]
