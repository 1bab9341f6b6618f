"""The public functions: a file for each, which imports heavy modules only when it is called."""
