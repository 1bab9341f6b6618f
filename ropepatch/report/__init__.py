"""Results as tables and figures: in a terminal, in Markdown, and as one HTML file that opens anywhere."""

from ropepatch.report.page import write_report
from ropepatch.report.printers import html_table, markdown_table, table_text
from ropepatch.report.tables import ranking_tables, results_tables
from ropepatch.report.terminal import (
    print_ranking,
    print_results,
    ranking_text,
    results_text,
)

__all__ = [
    "html_table",
    "markdown_table",
    "print_ranking",
    "print_results",
    "ranking_tables",
    "ranking_text",
    "results_tables",
    "results_text",
    "table_text",
    "write_report",
]
