"""The work behind the commands: extend, compare, choose and evaluate."""
