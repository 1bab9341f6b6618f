"""Results as one HTML file that opens anywhere."""

from ropepatch.report.page import write_report

__all__ = ["write_report"]
