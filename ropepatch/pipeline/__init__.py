"""The work behind the commands: extend, compare and evaluate."""
