"""A model made ready for a fit: the windows it learns from, those that decide, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.fitting.course import Course, screened, starts_of
from ropepatch.fitting.examples import Examples, Material, needle_examples, text_examples, with_keys
from ropepatch.fitting.learnable import LearnableRope
from ropepatch.fitting.objective import Objective
from ropepatch.fitting.problem import Problem
from ropepatch.fitting.settings import FitSettings
from ropepatch.fitting.vectors import Vector
from ropepatch.model.survey import Survey
from ropepatch.settings import seed_of

NEEDLES = 32  # passkey prompts to learn from


class FitBench:
    """A model with a learnable rope, the windows to learn from and those that decide.

    Args:
        model: The model, with `module` in it.
        tokenizer: The model's tokenizer.
        module: The learnable rotary module.
        survey: What its configuration says.
        material: The windows.
        settings: What is minimised, and by which starts key tokens are told.

    Attributes:
        train: The objective on the windows to learn from.
        held_out: The objective on the windows that decide.

    Raises:
        RopepatchError: Passkeys are asked for, and the tokenizer cannot write them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        module: LearnableRope,
        survey: Survey,
        material: Material,
        settings: FitSettings,
    ) -> None:
        self.model, self.module, self.rope = model, module, survey.rope
        self.window = survey.rope.original_max_position_embeddings
        objective, length = settings.objective, len(material.train[0])

        def problem(windows: Sequence[Tensor], number: int) -> Problem:
            examples, needles = text_examples(windows, objective, self.window), None
            if objective.needles:
                count, seed = min(NEEDLES, len(windows)), seed_of("fit", number)
                needles = needle_examples(tokenizer, length=length, count=count, seed=seed)
            return Problem(model, module, self.rope, length / self.window, examples, objective, needles)

        self.train, self.held_out = problem(material.train, 0), problem(material.held_out, 1)
        if objective.keys:
            self._weigh_keys(settings)

    def _weigh_keys(self, settings: FitSettings) -> None:
        """Give more weight to the key tokens, as the best start tells them."""
        judge = next(iter(screened(self.train, starts_of(self.train, settings), settings).values()))
        for problem in (self.train, self.held_out):
            far, near = problem.losses(judge, problem.examples), self.own_window(problem.examples)
            problem.examples = with_keys(problem.examples, far, near, settings.objective.keys)

    def own_window(self, examples: Examples) -> Tensor:
        """The losses [N, T - 1] of the unscaled model, read through its own window, half of it at a time."""
        self.module.vector = Vector.unscaled(self.rope)
        rows, half = list(examples.ids), self.window // 2
        curve = perplexity(self.model, None, rows, window=self.window, stride=half, split=True)
        return torch.stack(list(curve.nll))

    def outcome(self, course: Course, material: Material) -> dict[str, Any]:
        """How windows that decided nothing are read: before, after, and through the model's own window."""
        examples = text_examples(material.unseen, Objective(), self.window)
        before, after = (self.held_out.losses(end.point, examples) for end in (course.first, course.best))
        own = self.own_window(examples)
        gain = LossCurve(tuple(before - after), tuple(material.sources)).between(0, examples.length).loss
        return {
            "windows": len(examples),
            "documents": len(gain.clusters),
            "before": before.mean().item(),
            "after": after.mean().item(),
            "gain": gain.value,
            "gain_interval": None if gain.missing else list(gain.interval()),
            "short_before": before[:, : self.window - 1].mean().item(),
            "short_after": after[:, : self.window - 1].mean().item(),
            "own_window": own.mean().item(),
        }
