"""The what-if page: questions to the planner, chosen field by field, and its answers as pictures."""

from .page import WhatIf

__all__ = ["WhatIf"]
