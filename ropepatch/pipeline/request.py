"""What `extend` is asked for, read and checked before any work."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.measuring import measure_extension
from ropepatch.evaluation.suites import Suite
from ropepatch.extension.planning import Plan, check_method
from ropepatch.extension.writing import check_savable
from ropepatch.model.source import find_source
from ropepatch.model.survey import survey_checkpoint
from ropepatch.pipeline.inputs import in_tokens, model_name
from ropepatch.scaling.file import AUTO, FIT, is_scaling_file, method_label, read_scaling
from ropepatch.settings import Length, name_of, relative_length, short_length
from ropepatch.training.preparation import prepare
from ropepatch.training.recipe import Recipe, read_recipe

DISTIL = "distil"  # the recipe of --distil


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call of `extend`, whose arguments these are once they are read.

    Args:
        target: The context to reach, in tokens.
        original: The window that the model was trained on, where the caller gave it.
        plan: The plan that the caller gave in place of a model; None where it is still to be made.
        suite: What is measured before and after; None for nothing.
        text: The text that `fit` or `auto` reads, with its `field` and, if the caller gave one, its `split`.
        folder: The checkpoint to make.
        label: What tables and figures call the model afterwards.
    """

    model: str
    revision: str | None
    target: int
    original: Length | None
    method: str
    parameters: dict[str, Any]
    plan: Plan | None
    recipe: Recipe | None
    suite: Suite | None
    text: dict[str, Any]
    folder: Path
    label: str

    def check_plan(self, plan: Plan) -> None:
        """Refuse what cannot be saved or trained, before its weights are downloaded.

        Raises:
            RopepatchError: The plan does not allow it, or a package that trains is missing.
        """
        if self.recipe is None:
            check_savable(plan)
            return
        try:
            import_module("ropepatch.training.adaptation")
        except ImportError as error:
            hint = 'pip install "ropepatch[train]"'
            raise RopepatchError(f"a recipe needs {error.name}", hint=hint) from error
        prepare(plan, self.recipe).check()

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


def read_request(
    model: str | os.PathLike[str] | Plan,
    out: str | Path | None,
    recipe: str | Path | Recipe | None,
    *,
    to: Length | None,
    method: str | None,
    original: Length | None,
    parameters: dict[str, Any],
    revision: str | None,
    suite: Suite | None,
    text: dict[str, Any],
    distil: bool = False,
) -> Request:
    """The request of a call of `extend`, whose arguments these are.

    Raises:
        RopepatchError: If two arguments contradict each other, one is missing, or one is not what it must be.
    """
    plan = model if isinstance(model, Plan) else None
    training = recipe if isinstance(recipe, Recipe | None) else read_recipe(str(recipe))
    if distil:
        of = (plan.model, plan.revision) if plan else (model_name(model), revision)  # type: ignore[arg-type]
        training = self_taught(*of, text)
    if plan is None:
        name = model_name(model)  # type: ignore[arg-type]
        method = method_of(method, training)
        if training and method == training.method.name:
            parameters = training.method.parameters | parameters
        if method not in (FIT, AUTO):
            check_method(method, parameters)
        if training:
            _check_model(name, revision, training)
        if original is not None and method in (FIT, AUTO):
            raise RopepatchError(
                f"--original beside --method {method}, which measures within the window of config.json",
                hint="leave it out, or name another method",
            )
        target = _target(to or (training.to if training else None), method, name, revision, original)
    elif any(value is not None for value in (to, method, original, revision)) or parameters:
        raise RopepatchError(
            "a plan says target, method, parameters, original and revision itself",
            hint="give the model, or the plan alone",
        )
    else:
        name, revision, target, method = plan.model, plan.revision, plan.target, plan.method.name
    _check_text(text, method, is_read=suite is not None or distil)
    if distil and method != AUTO:  # a fit reads what is trained on, less what is held out
        text = {"text": None, "field": "text"}
    label = method_label(method)
    named = DISTIL if distil else recipe or ""
    recipe_name = "recipe" if isinstance(named, Recipe) else name_of(str(named))
    parts = filter(None, (Path(name).name, label, short_length(target), recipe_name))
    return Request(
        model=name,
        revision=revision,
        target=target,
        original=original,
        method=method,
        parameters=parameters,
        plan=plan,
        recipe=training,
        suite=suite,
        text=text,
        folder=Path(out or "-".join(parts)),
        label=f"{label} + {recipe_name}" if recipe_name else "adapted",
    )


def self_taught(model: str, revision: str | None, text: dict[str, Any]) -> Recipe:
    """The recipe `distil` for a model, on a text or, without one, on what the model writes itself.

    Raises:
        RopepatchError: There is no such model.
    """
    recipe = read_recipe(DISTIL)
    survey = survey_checkpoint(find_source(model, revision, weights=False))
    trained = survey.rope.original_max_position_embeddings
    room = relative_length(recipe.data.tokens_per_batch, trained)
    sources = (Texts(**text),) if text["text"] else recipe.data.sources
    data = recipe.data.model_copy(update={"windows": (min(trained, room),), "sources": sources})
    return recipe.model_copy(update={"model": model, "data": data})


def _check_model(name: str, revision: str | None, recipe: Recipe) -> None:
    """Refuse a model that is not there; the hint names the one that the recipe is for."""
    try:
        find_source(name, revision, weights=False)
    except RopepatchError as error:
        if not recipe.model or recipe.model == name:
            raise
        hint = f"the recipe is for {recipe.model}; {error.hint}"
        raise RopepatchError(str(error), hint=hint) from error


def _check_text(text: dict[str, Any], method: str, *, is_read: bool) -> None:
    """Refuse a text that nothing reads, and a field or split of none."""
    given = [
        f"--{key}"
        for key, unsaid in (("text", None), ("field", "text"), ("split", None))
        if text.get(key, unsaid) != unsaid
    ]
    if given and not is_read and method not in (FIT, AUTO):
        raise RopepatchError(
            f"{', '.join(given)} beside --method {method}: nothing reads a text",
            hint="--eval SUITE measures on it, --method fit and auto read it; else leave it out",
        )
    if given and text["text"] is None:
        raise RopepatchError(
            f"{' and '.join(given)} of --text, which is missing", hint="name the text, or leave it out"
        )


def check_pairs(
    recipe: object,
    evaluate: object,
    *,
    distil: bool,
    text: str | None,
    increase: float | None,
    link_weights: bool,
    limit: int | None,
) -> None:
    """Refuse arguments that are nothing without another, or beside it.

    Raises:
        RopepatchError: With the two.
    """
    if recipe is not None and distil:
        raise RopepatchError("--distil beside --recipe", hint="a recipe says it itself: `distil: {}`")
    if distil and evaluate is not None and text is not None:
        raise RopepatchError(
            "--text is what --distil trains on, and --eval would measure on it",
            hint="leave --eval out, and `ropepatch eval` the checkpoint on another text",
        )
    training = "--distil" if distil else None if recipe is None else "--recipe"
    if training is None and increase is not None:
        raise RopepatchError("--max-short-loss-increase needs a --recipe", hint="see `ropepatch recipes`")
    if training is not None and link_weights:
        raise RopepatchError(
            f"--link-weights beside {training}, which makes new weights", hint="leave one out"
        )
    if evaluate is None and limit is not None:
        raise RopepatchError("--limit is of what --eval measures", hint="--eval SUITE, or leave it out")


def method_of(method: str | None, recipe: str | Path | Recipe | None) -> str:
    """The method that a call of `extend` means: its own, that of the recipe, or yarn.

    Raises:
        RopepatchError: If there is no such recipe.
    """
    if method is not None or recipe is None:
        return method or "yarn"
    return (recipe if isinstance(recipe, Recipe) else read_recipe(str(recipe))).method.name


def _target(to: Length | None, method: str, model: str, revision: str | None, original: Length | None) -> int:
    """In tokens; a recipe may have a multiple of the model's context."""
    if to is not None:
        return in_tokens(to, model, revision, original)
    if is_scaling_file(method):
        return read_scaling(method).target
    raise RopepatchError("--to is missing", hint="--to 32k, or a --recipe, which has a target")
