"""RoPE parameters from files, and the original context length that a user gives instead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar

from ropepatch.errors import RopepatchError, argument
from ropepatch.model.architectures import LocalRope
from ropepatch.scaling.method import Method
from ropepatch.scaling.rope import Rope
from ropepatch.settings import Length, number_of, relative_length, shown


class StatedRope(ABC):
    """A model with RoPE parameters in its files.

    Attributes:
        name: The name that the user gave.
        revision: The commit of a model from the Hub.
        original: The original context length that the user gave instead of the files'.
        file_name: What the RoPE parameters are written into.
    """

    name: str
    revision: str | None
    original: Length | None
    file_name: ClassVar[str]

    @property
    @abstractmethod
    def model_type(self) -> str:
        """The architecture."""

    @property
    @abstractmethod
    def stated_length(self) -> int:
        """The context length in the files, in tokens."""

    @property
    def layer_type(self) -> str | None:
        """The type of the layers that are scaled, if RoPE differs by layer type."""
        return None

    @property
    def local_rope(self) -> LocalRope | None:
        """The local layers that use the one RoPE."""
        return None

    @property
    def tied_yarn(self) -> dict[str, Any] | None:
        """The parameters of a YaRN whose factor also changes the softmax scale."""
        return None

    @abstractmethod
    def held(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the current values of some keys, where set."""

    @abstractmethod
    def check_method(self, method: Method) -> None:
        """Raise a `RopepatchError` for a method that the files cannot express."""

    @property
    @abstractmethod
    def _stated_rope(self) -> Rope:
        """The RoPE parameters of the files."""

    @cached_property
    def rope(self) -> Rope:
        """The RoPE parameters, with the original context length that the user gave."""
        if (window := self.original_window) is None:
            return self._stated_rope
        return self._stated_rope.model_copy(update={"original_max_position_embeddings": window})

    @property
    def window(self) -> int:
        """L, the context length in tokens that RoPE is scaled from."""
        return self.rope.original_max_position_embeddings

    @property
    def reach(self) -> int:
        """The current context length in tokens; more than L if RoPE is scaled from L anew."""
        return self.window

    @cached_property
    def original_window(self) -> int | None:
        """The L that the user gave, in tokens; None if it equals that of the files.

        Raises:
            RopepatchError: If it is not a length, or RoPE is already scaled.
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
        """Return a target length in tokens, also for a multiple of the current length.

        Raises:
            RopepatchError: If it is not a length.
        """
        if to is None:
            raise RopepatchError(
                f"{argument('to')} is missing",
                hint=f"{argument('to', '32k')}, or {argument('to', '4x')} for four times the original length",
            )
        length = number_of(to)
        if isinstance(length, str):
            return relative_length(length, self.reach)
        if isinstance(length, int) and abs(length) < 2**63:
            return length
        message = f"{argument('to')} must be a whole number of tokens, got {shown(to)}"
        raise RopepatchError(message, hint=argument("to", 32_768))
