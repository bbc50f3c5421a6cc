"""A comparison as one HTML file that opens anywhere, without the network."""

from fsdp_lab.report.report import SUFFIXES, write_report

__all__ = ["SUFFIXES", "write_report"]
