"""Results as tables and figures: in a terminal, in Markdown, and as one HTML file that opens anywhere."""
