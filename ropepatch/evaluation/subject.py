"""A model that is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ropepatch.encodings.loading import load_checkpoint
from ropepatch.evaluation.running import distribute
from ropepatch.extension.record import context_before
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.loading import AUTO, load_tokenizer
from ropepatch.model.precision import describe_placement, prefers_float32
from ropepatch.model.source import find_source
from ropepatch.model.survey import Survey, survey_checkpoint

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Subject:
    """A model that is measured; its weights are loaded when they are needed.

    Args:
        name: As the user gave it.
        source: Where its weights are.
        survey: Of its rope before any scaling.
        device: `auto` for all devices, by accelerate.
        dtype: None for that in which the device reads it fastest.
        say: Takes a line on where it is read.
        base: What the weights were adapted from: results name it, and its tokenizer reads the texts.
    """

    name: str
    source: Checkpoint
    survey: Survey
    device: str
    dtype: torch.dtype | None = None
    say: Callable[[str], None] = lambda line: None
    base: Subject | None = None

    @property
    def trained(self) -> int:
        """The context it reads now, in tokens."""
        return self.survey.rope.original_max_position_embeddings

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer."""
        return load_tokenizer(self.source.folder) if self.base is None else self.base.tokenizer

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model on its device, in the precision asked for or that the first process finds faster."""
        spread = AUTO if self.device == AUTO else None
        model: Any = load_checkpoint(self.source, self.dtype, spread)
        if self.dtype is None and not spread:
            choose = partial(prefers_float32, device=self.device)
            (float32,) = distribute([model], choose, key=lambda model: self.name, split=True)
            model = model.float() if float32 else model
        loaded: PreTrainedModel = model if spread else model.to(self.device)
        for line in describe_placement(loaded):
            self.say(line)
        return loaded

    def forget_model(self) -> None:
        """Free its memory; the model is loaded again if it is asked for."""
        self.__dict__.pop("model", None)

    @cached_property
    def record(self) -> dict[str, Any]:
        """What results say of it."""
        weights = self.source.fingerprint
        if self.base is not None:
            return self.base.record | {"weights": weights, "adapted_from": self.base.record["weights"]}
        rope = self.survey.rope
        before = context_before(self.source.folder, weights)
        extended = {} if before is None else {"extended_from": before}
        return self.source.positions | {
            "name": self.name,
            "revision": self.source.revision,
            "weights": weights,
            "trained": self.trained,
            **extended,
            "rotary_dim": rope.rotary_dim,
            "rope_theta": rope.rope_theta,
            "inv_freq": rope.inv_freq().tolist(),
        }


def find_subject(name: str, revision: str | None, device: str, original: int | None = None) -> Subject:
    """The model of that name, whose weights are there, and its window where a user states another."""
    source = find_source(name, revision, weights=True)
    survey = survey_checkpoint(source, swapped=True).trained_on(original)
    return Subject(name, source, survey, device)
