"""Pictures and tables that explain position encodings, and their data."""
