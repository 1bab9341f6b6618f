"""A bar for those who ask for one with `progress=True`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

Advance = Callable[[int, Any], None]


@contextmanager
def advancing(progress: Advance | bool | None, name: str) -> Iterator[Advance | None]:
    """What is told how much is done and how much there is: the caller's own, a bar, or nothing.

    The bar is on stderr or in the notebook, and goes when it is done.
    """
    if not isinstance(progress, bool) or not progress:
        yield progress or None
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a notebook without ipywidgets has a bar of letters
        tqdm: Any = import_module("tqdm.auto")
    with tqdm.tqdm(desc=name, leave=False) as bar:

        def advance(done: int, total: int | None) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance
