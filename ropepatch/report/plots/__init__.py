"""Figures of results and of the changes that a scaling makes, in one style.

All need matplotlib; without it they raise a `RopepatchError` with the command that installs it.
"""
