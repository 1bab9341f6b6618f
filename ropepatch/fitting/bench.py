"""A model made ready for a fit: the windows it learns from, those that decide, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ropepatch.evaluation.bootstrap import bootstrap_interval
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.evaluation.protocols import Sliding
from ropepatch.fitting.course import Course, screened, starts_of
from ropepatch.fitting.examples import Examples, Objective, needle_examples, text_examples, with_keys
from ropepatch.fitting.learnable import LearnableRope
from ropepatch.fitting.material import Material
from ropepatch.fitting.problem import Problem
from ropepatch.fitting.settings import FitSettings
from ropepatch.fitting.vectors import Vector
from ropepatch.model.survey import Survey
from ropepatch.settings import seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NEEDLES = 32  # passkey prompts to learn from


@dataclass(frozen=True, eq=False)
class Bench:
    """A model with a learnable rope, the windows to learn from and those that decide.

    Args:
        model: With `module` in it.
        module: Its rotary module.
        found: What its configuration says.
        train: To learn from.
        held_out: To decide by.
    """

    model: PreTrainedModel
    module: LearnableRope
    found: Survey
    train: Problem
    held_out: Problem

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        module: LearnableRope,
        found: Survey,
        material: Material,
        settings: FitSettings,
    ) -> Bench:
        """The windows of a material under an objective.

        Raises:
            RopepatchError: Passkeys are asked for, and the tokenizer cannot write them.
        """
        window, objective = found.rope.original_max_position_embeddings, settings.objective
        factor = len(material.train[0]) / window
        made = []
        for windows, seed in ((material.train, 0), (material.held_out, 1)):
            examples = text_examples(windows, objective, window)
            needles = None
            if objective.needles:
                count = min(NEEDLES, len(windows))
                length = examples.length
                needles = needle_examples(tokenizer, length=length, count=count, seed=seed_of("fit", seed))
            weight = objective.needles
            problem = Problem(
                model,
                module,
                found.rope,
                factor,
                examples,
                needles=needles,
                needle_weight=weight,
                text_weight=objective.text,
            )
            made.append(problem)
        bench = cls(model, module, found, *made)
        return bench._with_keys(settings) if objective.keys else bench

    def _with_keys(self, settings: FitSettings) -> Bench:
        """With more weight on the key tokens, as the best start tells them."""
        starts = screened(self.train, starts_of(self.train, settings), settings)
        judge = next(iter(starts.values()))
        for problem in (self.train, self.held_out):
            far, near = problem.losses(judge, problem.examples), self.own_window(problem.examples)
            problem.examples = with_keys(problem.examples, far, near, settings.objective.keys)
        return self

    def own_window(self, examples: Examples) -> Tensor:
        """The losses [N, T - 1] of the model as it is, read through its own window, half of it at a time."""
        window = self.found.rope.original_max_position_embeddings
        pairs = torch.zeros(self.found.rope.num_pairs)
        self.module.vector = Vector(pairs, torch.zeros(()))
        curve = perplexity(self.model, None, list(examples.ids), protocol=Sliding(window, window // 2))
        return torch.stack(list(curve.nll))

    def outcome(self, course: Course, unseen: Sequence[Tensor]) -> dict[str, Any]:
        """How windows that decided nothing are read: before, after, and through the model's own window."""
        window = self.found.rope.original_max_position_embeddings
        examples = text_examples(unseen, Objective(), window)
        before, after = (
            self.held_out.losses(Vector.from_flat(torch.tensor(one.vector)), examples)
            for one in (course.first, course.best)
        )
        own = self.own_window(examples)
        gains = (before - after).double().sum(dim=1)
        count = before.shape[1]
        return {
            "windows": len(examples),
            "before": before.mean().item(),
            "after": after.mean().item(),
            "gain": gains.mean().item() / count,
            "gain_interval": list(bootstrap_interval([(gain, count) for gain in gains.tolist()])),
            "short_before": before[:, : window - 1].mean().item(),
            "short_after": after[:, : window - 1].mean().item(),
            "own_window": own.mean().item(),
        }
