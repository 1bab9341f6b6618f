"""All that the command line does, callable from Python: extend, compare, choose and evaluate."""
