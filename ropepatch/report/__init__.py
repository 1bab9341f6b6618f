"""Results as tables and figures: in a terminal, in Markdown, and as one HTML file that opens anywhere."""

from ropepatch.report.html import html_table
from ropepatch.report.markdown import markdown_table
from ropepatch.report.page import write_report
from ropepatch.report.tables import ranking_table, results_tables
from ropepatch.report.terminal import print_ranking, print_results, table_text

__all__ = [
    "html_table",
    "markdown_table",
    "print_ranking",
    "print_results",
    "ranking_table",
    "results_tables",
    "table_text",
    "write_report",
]
