"""A comparison as one HTML file that opens anywhere, without the network."""

from fsdp_lab.report.report import write_report

__all__ = ["write_report"]
