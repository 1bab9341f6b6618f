"""A rope that files state, and the window that a user states instead."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from functools import cached_property

from ropepatch.errors import RopepatchError, argument
from ropepatch.scaling.rope import Rope
from ropepatch.settings import Length, relative_length, shown


class StatedRope(ABC):
    """A model whose files state its rope.

    Attributes:
        original: The window that its user says it was trained on, where the files say another.
    """

    original: Length | None

    @property
    @abstractmethod
    def _stated_rope(self) -> Rope:
        """The rope by the files."""

    @cached_property
    def rope(self) -> Rope:
        """The rope now, for the window that the model was trained on."""
        if (window := self.original_window) is None:
            return self._stated_rope
        return self._stated_rope.model_copy(update={"original_max_position_embeddings": window})

    @property
    def window(self) -> int:
        """L, the context in tokens that its rope is scaled from."""
        return self.rope.original_max_position_embeddings

    @property
    def reach(self) -> int:
        """The context that it reads now, in tokens; more than L where its rope is scaled anew from L."""
        return self.window

    @cached_property
    def original_window(self) -> int | None:
        """L as its user states it, in tokens; None where the files say the same.

        Raises:
            RopepatchError: If it is no length, or the rope is scaled already.
        """
        if self.original is None:
            return None
        stated = self._stated_rope.original_max_position_embeddings
        try:
            window = relative_length(self.original, stated)
        except RopepatchError as error:
            message = f"{argument('original')} must be a number of tokens, got {shown(self.original)}"
            raise RopepatchError(message, hint=error.hint) from error
        if window == stated:
            return None
        if self._stated_rope.is_scaled:
            raise RopepatchError(
                f"{argument('original')} is {window}, but this model is already scaled to {stated} tokens",
                hint=f"drop {argument('original')}, or extend the checkpoint it was made from",
            )
        return window

    def in_tokens(self, to: Length | None) -> int:
        """A target in tokens, of a multiple of the window that of the model.

        Raises:
            RopepatchError: If it is no length.
        """
        try:
            # None has no index, which is the TypeError below.
            return relative_length(to, self.reach) if isinstance(to, str) else operator.index(to)  # type: ignore[arg-type]
        except TypeError:
            message = f"to must be a whole number of tokens, got {to!r}"
            raise RopepatchError(message, hint="to=32_768") from None
