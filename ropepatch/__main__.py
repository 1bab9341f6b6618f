"""`python -m ropepatch`."""

from ropepatch.cli import main

main()
