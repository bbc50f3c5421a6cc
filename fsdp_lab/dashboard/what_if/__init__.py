"""The what-if page: questions to the planner, chosen field by field, and its answers as pictures."""

from fsdp_lab.dashboard.what_if.page import WhatIf

__all__ = ["WhatIf"]
