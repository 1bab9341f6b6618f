"""All that `ropepatch extend` does, callable from Python."""
