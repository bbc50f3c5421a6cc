"""What-if: a page of questions to the planner and its answers, in a notebook or as one HTML file without a kernel."""

from fsdp_lab.report.what_if.page import Axis, Product, check_size, write_what_if
from fsdp_lab.report.what_if.widget import WhatIf

__all__ = ["Axis", "Product", "WhatIf", "check_size", "write_what_if"]
