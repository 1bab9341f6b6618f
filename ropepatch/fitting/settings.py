"""What decides the outcome of a fit, beside model, target and text."""

from __future__ import annotations

from dataclasses import dataclass, field

from ropepatch.errors import RopepatchError
from ropepatch.fitting.examples import Objective
from ropepatch.fitting.searches import SEARCHES
from ropepatch.fitting.shapes import SHAPES
from ropepatch.settings import is_count, refuse_unknown


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a vector is fitted.

    Args:
        steps: Of gradient descent; a search is given as many forward tokens.
        init: `auto`, or methods to start from, separated by commas.
        search: `descent`, or a name of `SEARCHES`.
        objective: What is minimised.
        shape: `free`, `monotone` or `smooth` divisors.
        keep: So many of the fastest pairs keep their frequencies.
        seed: Of the order of the windows, and of random starts.

    Raises:
        RopepatchError: One of these is not what it must be.
    """

    steps: int = 100
    init: str = "auto"
    search: str = "descent"
    objective: Objective = field(default_factory=Objective)
    shape: str = "free"
    keep: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_count(self.steps):
            raise RopepatchError(
                f"steps must be a whole number above 0, got {self.steps!r}", hint="--steps 100"
            )
        for key in ("keep", "seed"):
            value = getattr(self, key)
            if type(value) is not int or value < 0:
                raise RopepatchError(f"{key} must be a whole number from 0, got {value!r}", hint=f"--{key} 0")
        refuse_unknown([self.search], ("descent", *SEARCHES), "search")
        refuse_unknown([self.shape], SHAPES, "shape")
        if self.search != "descent" and (self.shape, self.keep) != ("free", 0):
            raise RopepatchError(
                f"shape and keep are of the descent, not of {self.search}", hint="leave them out"
            )
