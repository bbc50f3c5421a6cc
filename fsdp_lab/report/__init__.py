"""A comparison, or what-if, as one HTML file that opens anywhere, without a network."""

from fsdp_lab.core.errors import not_installed

try:
    from fsdp_lab.report.report import SUFFIXES, write_report
except ModuleNotFoundError as e:
    raise not_installed(__name__, e) from None

__all__ = ["SUFFIXES", "write_report"]
