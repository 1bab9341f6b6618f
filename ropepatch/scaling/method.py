"""Scaling methods: frozen parameters and a pure function from RoPE parameters to frequencies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self, final

from torch import Tensor

from ropepatch.errors import RopepatchError, argument
from ropepatch.scaling.rope import Frequencies, Rope
from ropepatch.settings import FromOne, Named, Registry, shown


class Method(Named):
    """One published method of context extension."""

    listed_by = "ropepatch methods"
    kind: ClassVar[str]
    saved_as: ClassVar[str]
    length_dependent: ClassVar[bool] = False
    changes_frequencies: ClassVar[bool] = False

    @classmethod
    def for_target(cls, rope: Rope, target: int, parameters: Mapping[str, Any]) -> Self:
        """Make the method with these parameters for a target length N = `target`."""
        return cls(**parameters)

    def fitted(self, window: int, target: int) -> Self:
        """Return the method with all its parameters set, for L = `window` and N = `target` tokens."""
        return self

    def factor_for(self, window: int, target: int) -> float:
        """Return s, for L = `window` and N = `target` tokens."""
        return target / window

    def stated_as(self, rope_type: str) -> str:
        """Return what config.json calls the method, if its rope type is this one."""
        return self.name

    def on_top(self) -> str:
        """Say with which parameters the method is applied to RoPE that is scaled already."""
        return ""


class Scaling(Method):
    """One published method of RoPE scaling.

    A subclass implements `_inv_freq(rope)`, `_temperature(rope)` if it has one, and `_native(rope)` if a
    rope type of transformers computes bit-identical frequencies.

    Args:
        factor: s, the target length over the original context length; at least 1.
    """

    common = ("factor",)
    kind = "scaling"
    changes_frequencies = True
    saved_as = "longrope"  # the rope type in the config of an extended LLaMA
    composes: ClassVar[bool] = True  # whether it applies to RoPE that is already scaled
    composing: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {}
    )  # the defaults for such RoPE
    # A parameter and its value with which it composes
    way_out: ClassVar[tuple[str, str] | None] = None
    factor: FromOne

    @classmethod
    def for_target(cls, rope: Rope, target: int, parameters: Mapping[str, Any]) -> Self:
        """Make the scaling with target / L as factor, unless the parameters contain one."""
        composing = cls.composing if rope.is_scaled else {}
        return cls(
            **{
                "factor": target / rope.original_max_position_embeddings,
                **composing,
                **parameters,
            }
        )

    def factor_for(self, window: int, target: int) -> float:
        """Return s, which the user may have set."""
        return self.factor

    def stated_as(self, rope_type: str) -> str:
        """Return the rope type."""
        return rope_type

    def on_top(self) -> str:
        """Say with which parameters the scaling is applied to RoPE that is scaled already."""
        values = [
            f"{key}={value}"
            for key, value in self.composing.items()
            if getattr(self, key) == value
        ]
        parameters = f" ({', '.join(values)})" if values else ""
        return f"; {self.name} is applied on top of it{parameters}"

    @final
    def frequencies(self, rope: Rope, length: int | None = None) -> Frequencies:
        """Scale the frequencies of a model.

        Args:
            rope: The RoPE to scale.
            length: The planned length in tokens, for length-dependent methods; None means L.
        """
        if rope.is_scaled and not self.composes:
            others = "`linear`, `ntk`, `ntk-by-parts` or `custom`, which compose"
            use = argument(*self.way_out) if self.way_out else others
            raise RopepatchError(
                f"{self.name} is a formula of rope_theta and does not apply to RoPE that is already scaled",
                hint=f"use {use}, or start from the unscaled base model",
            )
        static = self.at(rope, length)
        inv_freq = static._inv_freq(rope)
        sound = isinstance(inv_freq, Tensor) and inv_freq.shape == (rope.num_pairs,)
        if not sound or not inv_freq.isfinite().all():
            raise RopepatchError(
                f"{type(static).__name__}._inv_freq must return {rope.num_pairs} finite numbers, got "
                f"{shown(inv_freq)}",
                hint="one for each rotary pair, radians per token",
            )
        if rope.carried is not None:
            inv_freq = inv_freq.masked_fill(rope.inv_freq() == 0, 0.0)
        return Frequencies(
            inv_freq, rope.carried_attention_factor * static._temperature(rope)
        )

    @final
    def native(self, rope: Rope) -> dict[str, Any] | None:
        """Return the RoPE parameters with which transformers computes the same frequencies.

        They lack an unchanged `rope_theta`. None if no rope type fits, or if `rope` is already scaled or
        rotates only some pairs.
        """
        return None if rope.carried else self._native(rope)

    def at(self, rope: Rope, length: int | None) -> Scaling:
        """Return the equivalent static method at a length; a static method returns itself."""
        return self

    @abstractmethod
    def _inv_freq(self, rope: Rope) -> Tensor:
        """Compute theta'_i: [d/2] float32, radians per token."""

    def _temperature(self, rope: Rope) -> float:
        """Compute a, which multiplies cos and sin, hence attention logits by its square."""
        return 1.0

    def _native(self, rope: Rope) -> dict[str, Any] | None:
        return None


METHODS: Registry[Scaling] = Registry(  # `ropepatch.scaling` fills it
    "method",
    other_names={
        "pi": "linear",
        "position-interpolation": "linear",
        "ntk-aware": "ntk",
        "dynamic-ntk": "dynamic",
        "proportional": "p-rope",
        "nope": "p-rope",
        "su": "longrope",
        "llama-3": "llama3",
    },
)
