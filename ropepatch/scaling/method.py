"""What every scaling method is: a frozen set of parameters and a pure function from a rope to frequencies."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar

from ropepatch.errors import RopepatchError
from ropepatch.scaling.rope import Frequencies, Rope
from ropepatch.settings.parameters import Checked, FromOne, find_kind


class _Kind(ABCMeta):
    """A class of scalings whose `repr` is its formula: what a list of `METHODS` shows."""

    formula: str
    paper: str

    def __repr__(cls) -> str:
        return f"<{cls.__name__}: {cls.formula}; {cls.paper}>" if cls.formula else super().__repr__()


@dataclass(frozen=True, kw_only=True)
class Scaling(Checked, metaclass=_Kind):
    """One published way to stretch a rope.

    Args:
        factor: s, the target length over the original window; at least 1.

    Raises:
        RopepatchError: On parameters outside the method's domain.
    """

    listed_by = "ropepatch methods"
    kind: ClassVar[str] = "scaling"
    formula: ClassVar[str] = ""  # one line, for tables
    paper: ClassVar[str] = "–"
    saved_as: ClassVar[str] = "longrope"  # the rope type of an extended LLaMA; – where none can hold it
    length_dependent: ClassVar[bool] = False
    composing: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # defaults on a rope that is already scaled
    factor: FromOne

    @abstractmethod
    def frequencies(self, rope: Rope, length: int | None = None) -> Frequencies:
        """The scaled frequencies.

        Args:
            rope: The rope to scale.
            length: The planned length in tokens; only length-dependent methods look at it; None means L.

        Raises:
            RopepatchError: Where the method is undefined on this rope.
        """

    def at(self, rope: Rope, length: int | None) -> Scaling:
        """The static method that a length-dependent one is at a length; a static one is itself."""
        return self

    def native(self, rope: Rope) -> dict[str, Any] | None:
        """The `rope_parameters`, less an unchanged `rope_theta`, that give transformers the same table.

        None where it has no such rope type, or where `rope` already is scaled.
        """
        return None

    def parameters(self) -> dict[str, Any]:
        """The method's own parameters by name, without the factor."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "factor"}

    def _refuse_scaled(self, rope: Rope, way_out: str) -> None:
        if rope.is_scaled:
            raise RopepatchError(
                f"{self.name} is a formula of rope_theta and does not apply to a rope that is already scaled",
                hint=way_out,
            )


class LengthDependent(Scaling):
    """A method that is another, static one at every length."""

    length_dependent = True

    @abstractmethod
    def at(self, rope: Rope, length: int | None) -> Scaling:
        """The static method at a length."""

    def frequencies(self, rope: Rope, length: int | None = None) -> Frequencies:
        """Those of the static method at `length`."""
        return self.at(rope, length).frequencies(rope)


METHODS: dict[str, type[Scaling]] = {}  # by the name the user types; `ropepatch.scaling.named` lists them

OTHER_NAMES = {
    "pi": "linear",
    "ntk-aware": "ntk",
    "dynamic-ntk": "dynamic",
    "proportional": "p-rope",
    "nope": "p-rope",
    "su": "longrope",
    "llama-3": "llama3",
}


def find_method(name: str) -> type[Scaling]:
    """The method of that name.

    Raises:
        RopepatchError: If there is none; with the nearest name and the list.
    """
    return find_kind(name, METHODS, "method", OTHER_NAMES)
