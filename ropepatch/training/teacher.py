"""The teacher of a self-distillation: the base model, with the weights of the student."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ropepatch.attention.remapped import Remapped, remap_positions
from ropepatch.model.head import evaluating, shadowed
from ropepatch.model.rotary import (
    RotarySubstitute,
    base_model,
    find_substitute,
    rotating_by,
)
from ropepatch.training.loss import (
    NO_INPUT,
    TeacherOutput,
    linear_distillation,
    linear_head,
    of_next,
)
from ropepatch.training.recipe import Distil, remapping_of
from ropepatch.training.run import Run


def teaching(run: Run, model: Any) -> Remapped | None:
    """Prepare the teacher's position remapping, before the model is patched; None if no sequence needs it."""
    distil, original = run.recipe.distil, run.plan.source.config.original
    if distil is None or not run.recipe.reads_beyond(run.trained):
        return None
    remapping = remapping_of(distil.remapping)
    with remap_positions(
        model, remapping, to=run.plan.target, original=original
    ) as mapped:
        return mapped


class Teacher:
    """The base model within its student, a PEFT model without a wrapper around it.

    It runs with the remapping, if there is one, on segments longer than the original length.
    """

    def __init__(
        self, model: Any, window: int, mapped: Remapped | None, distil: Distil
    ) -> None:
        self.model, self.window, self.mapped = model, window, mapped
        self._options = distil.model_dump(include={"temperature", "cross_entropy"})

    @cached_property
    def head(self) -> nn.Linear | None:
        """See `linear_head`; found while the model is its teacher."""
        return linear_head(self.model)

    def loss(self, batch: Mapping[str, Any]) -> partial[Tensor]:
        """Run the teacher on the segments of a batch, and return `linear_distillation` towards its output.

        Call it before the forward pass of the student, not within it: gradient checkpointing repeats that
        pass, which must be the student's, in the backward pass.
        """
        segments = batch["cu_seq_lens_q"]
        begins = segments[:-1].repeat_interleave(segments.diff())
        true = torch.arange(len(begins), device=begins.device) - begins
        inputs = {name: value for name, value in batch.items() if name not in NO_INPUT}
        inputs |= {"position_ids": true[None].long(), "use_cache": False}
        mapped = self.mapped if batch["max_length_q"] > self.window else None
        with self.reading(mapped):
            teacher = self._output(inputs)
        answers = of_next(batch["answers"], 0.0).flatten()
        return partial(
            linear_distillation, teacher=teacher, answers=answers, **self._options
        )

    def _output(self, inputs: dict[str, Any]) -> TeacherOutput:
        if self.head is None:
            return TeacherOutput(self.model(**inputs).logits.flatten(0, -2))
        states: list[Tensor] = []

        def keep(hidden: Tensor) -> Tensor:
            states.append(hidden.flatten(0, -2))
            return hidden.new_zeros(())

        with shadowed(self.head, keep):
            self.model(**inputs)
        return TeacherOutput(states[0], self.head.weight)

    @contextmanager
    def reading(self, mapped: Remapped | None = None) -> Iterator[None]:
        """Turn the model into its teacher within the block: the base, maybe remapped, without gradients."""
        base = base_model(self.model)
        scaled = find_substitute(base, RotarySubstitute)
        with (
            torch.no_grad(),
            evaluating(self.model),
            self.model.disable_adapter(),
            ExitStack() as stack,
        ):
            if scaled is not None:
                stack.enter_context(rotating_by(base, scaled[0], scaled[1].stock))
            if mapped is not None:
                stack.enter_context(mapped.again())
            yield
