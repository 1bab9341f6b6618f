"""What decides the outcome of a fit, beside model, target and text."""

from __future__ import annotations

from typing import Annotated

from ropepatch.errors import RopepatchError
from ropepatch.fitting.objective import Objective
from ropepatch.fitting.searches import SEARCHES
from ropepatch.fitting.vectors import SHAPES
from ropepatch.settings import Count, OneOf, Settings, Text, Whole


class FitSettings(Settings):
    """How a vector is fitted; `ropepatch.fit` says what each setting means."""

    steps: Count = 100
    init: Text = "auto"
    search: Annotated[str, OneOf(("descent", *SEARCHES))] = "descent"
    objective: Objective = Objective()
    shape: Annotated[str, OneOf(SHAPES)] = "free"
    keep: Whole = 0
    seed: Whole = 0

    def check(self) -> None:
        """Refuse what a search has not."""
        if self.search != "descent" and (self.shape, self.keep) != ("free", 0):
            raise RopepatchError(
                f"shape and keep are of the descent, not of {self.search}", hint="leave them out"
            )
