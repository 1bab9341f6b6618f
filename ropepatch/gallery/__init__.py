"""Pictures and tables that teach position encodings, and what these are computed with."""
