"""Results as tables and figures: in a terminal, in Markdown, and as one HTML file that opens anywhere."""

from ropepatch.report.page import write_report as write_report
from ropepatch.report.printers import html_table as html_table
from ropepatch.report.tables import print_ranking as print_ranking
from ropepatch.report.tables import print_results as print_results
from ropepatch.report.tables import ranking_tables as ranking_tables
from ropepatch.report.tables import ranking_text as ranking_text
from ropepatch.report.tables import results_tables as results_tables
from ropepatch.report.tables import results_text as results_text
