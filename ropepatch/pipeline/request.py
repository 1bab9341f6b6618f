"""What `extend` is asked for, read and checked before any work."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.measuring import measure_extension
from ropepatch.evaluation.suites import Suite
from ropepatch.extension.planning import Plan, plan
from ropepatch.pipeline.inputs import in_tokens, model_name
from ropepatch.pipeline.learned import Learned, chosen_plan, fit_settings, fitted_plan
from ropepatch.pipeline.running import Feedback
from ropepatch.scaling.file import AUTO, FIT, check_method, is_scaling_file, method_label, read_scaling
from ropepatch.settings import Length, short_length
from ropepatch.training.recipe import Recipe, read_recipe


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call of `extend`.

    Args:
        model: A checkpoint folder, a Hub id, or `tiny`.
        revision: Of a Hub id.
        target: The context to reach, in tokens.
        method: A name from `METHODS`, a scaling file, `fit` or `auto`.
        parameters: Of the method.
        plan: The plan, where it was made before.
        recipe: How the model is trained; None where it is not.
        suite: What is measured before and after; None for nothing.
        text: What `fit` or `auto` reads, with its `field` and `split`.
        folder: The checkpoint to make.
        label: What tables and figures call the model afterwards.
    """

    model: str
    revision: str | None
    target: int
    method: str
    parameters: dict[str, Any]
    plan: Plan | None
    recipe: Recipe | None
    suite: Suite | None
    text: dict[str, Any]
    folder: Path
    label: str

    def planned(self, feedback: Feedback, *, keep: bool) -> tuple[Plan, Learned | None]:
        """The plan, with its method found if need be, and how it was found.

        Args:
            feedback: How a search speaks.
            keep: Whether a search may go on later from a work folder beside the checkpoint to make.

        Raises:
            RopepatchError: If the model, the target or the method does not allow it, or the suite could
                not be measured.
        """
        if self.plan is not None:
            return self.plan, None
        where: dict[str, Any] = {"to": self.target, "revision": self.revision}
        if self.method not in (FIT, AUTO):
            return plan(self.model, **where, method=self.method, **self.parameters), None
        self.check_suite(plan(self.model, **where, method="linear"))  # refused before the search, if at all
        if self.method == AUTO:
            learned = self._chosen(feedback, keep=keep)
        else:
            learned = self._fitted(feedback, keep=keep)
        return learned.plan, learned

    def check_suite(self, plan: Plan) -> None:
        """Refuse now what could not be measured after the training.

        Raises:
            RopepatchError: If the suite does not fit the plan or what is saved.
        """
        if self.suite is None:
            return
        if self.recipe and self.recipe.save == "adapter":
            raise RopepatchError(
                "--eval beside save: adapter", hint="a suite measures whole checkpoints: save: merged"
            )
        measure_extension(self.suite, plan)

    def _chosen(self, feedback: Feedback, *, keep: bool) -> Learned:
        if self.parameters:
            raise RopepatchError(
                "--set beside --method auto, which sets the parameters itself",
                hint="name the method, or leave it out",
            )
        if self.text["text"] and self.suite:
            raise RopepatchError(
                "--text is what --method auto chooses by, and --eval would measure on it",
                hint="leave --eval out, and `ropepatch eval` the checkpoint on another text",
            )
        text = {"split": "test"} | self.text
        return chosen_plan(self.model, self.target, self.revision, text, self.folder, feedback, keep=keep)

    def _fitted(self, feedback: Feedback, *, keep: bool) -> Learned:
        settings = fit_settings(
            self.parameters, self.text, measured=self.suite is not None, recipe=self.recipe is not None
        )
        return fitted_plan(
            self.model, self.target, self.revision, settings, self.recipe, self.folder, feedback, keep=keep
        )


def read_request(
    model: str | os.PathLike[str] | Plan,
    out: str | Path | None,
    recipe: str | Path | Recipe | None,
    *,
    to: Length | None,
    method: str | None,
    parameters: dict[str, Any],
    revision: str | None,
    suite: Suite | None,
    text: dict[str, Any],
) -> Request:
    """The request of a call of `extend`, whose arguments these are; `text` with its field and split.

    Raises:
        RopepatchError: If two arguments contradict each other, one is missing, or one is not what it must be.
    """
    training = recipe if isinstance(recipe, Recipe | None) else read_recipe(str(recipe))
    if isinstance(model, Plan):
        if to is not None or method is not None or revision is not None or parameters:
            raise RopepatchError(
                "a plan says target, method, parameters and revision itself",
                hint="give the model, or the plan alone",
            )
        name, revision, target, method = model.model, model.revision, model.target, model.scaling.name
    else:
        name = model_name(model)
        method, parameters = _method(method, training, parameters)
        target = _target(to or (training.to if training else None), method, name, revision)
    label = method_label(method)
    recipe_name = "recipe" if isinstance(recipe, Recipe) else Path(recipe or "").stem
    parts = filter(None, (Path(name).name, label, short_length(target), recipe_name))
    return Request(
        model=name,
        revision=revision,
        target=target,
        method=method,
        parameters=parameters,
        plan=model if isinstance(model, Plan) else None,
        recipe=training,
        suite=suite,
        text=text,
        folder=Path(out or "-".join(parts)),
        label=f"{label} + {recipe_name}" if recipe_name else "adapted",
    )


def method_of(method: str | None, recipe: str | Path | Recipe | None) -> str:
    """The method that a call of `extend` means: its own, that of the recipe, or yarn.

    Raises:
        RopepatchError: If there is no such recipe.
    """
    if method is not None or recipe is None:
        return method or "yarn"
    return (recipe if isinstance(recipe, Recipe) else read_recipe(str(recipe))).method.name


def _method(
    method: str | None, recipe: Recipe | None, parameters: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The method and its parameters: those of the call go before those of the recipe."""
    name = method_of(method, recipe)
    if recipe and name == recipe.method.name:
        parameters = recipe.method.parameters | parameters
    if name not in (FIT, AUTO):
        check_method(name, parameters)
    return name, parameters


def _target(to: Length | None, method: str, model: str, revision: str | None) -> int:
    """In tokens; a recipe may have a multiple of the model's context."""
    if to is not None:
        return in_tokens(to, model, revision)
    if is_scaling_file(method):
        return read_scaling(method).target
    raise RopepatchError("--to is missing", hint="--to 32k, or a --recipe, which has a target")
