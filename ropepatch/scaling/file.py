"""Names of methods that are files, as eval/studies/pages has read them."""

from pathlib import Path


def is_scaling_file(method: str) -> bool:
    """Return whether a method is given as a file."""
    return method.endswith(".json")


def method_label(method: str) -> str:
    """Return a method's name for folders, tables and figures; for a file, its stem."""
    return Path(method).stem if is_scaling_file(method) else method
