"""What `extend` is asked for, read and checked before any work."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError, argument
from ropepatch.evaluation.measuring import measure_extension
from ropepatch.evaluation.suites import Suite
from ropepatch.extension.planning import Plan, check_method
from ropepatch.extension.writing import check_savable
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.pipeline.inputs import model_name
from ropepatch.scaling.file import AUTO, FIT, is_scaling_file, method_label, read_scaling
from ropepatch.settings import Length, name_of, relative_length, short_length
from ropepatch.training.preparation import prepare
from ropepatch.training.recipe import Recipe, read_recipe
from ropepatch.training.self_taught import DISTIL, self_taught

ARGUMENTS = ("to", "method", "original", "recipe", "distil", "evaluate", "text", "link_weights", "revision")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call of `extend`, whose arguments these are once they are read.

    Args:
        target: The context to reach, in tokens.
        original: The window that the model was trained on, where the caller gave it.
        plan: The plan that the caller gave in place of a model; None where it is still to be made.
        source: The model.
        suite: What is measured before and after; None for nothing.
        text: The text that `fit` or `auto` reads, with its `field` and, if the caller gave one, its `split`.
        folder: The checkpoint to make.
        label: What tables and figures call the model afterwards.
        note: What the user is told of the recipe that was chosen.
        record: What `ropepatch.json` says beside what it says by itself.
    """

    model: str
    revision: str | None
    target: int
    original: Length | None
    method: str
    parameters: dict[str, Any]
    allow_code: bool
    plan: Plan | None
    source: Checkpoint
    recipe: Recipe | None
    suite: Suite | None
    text: dict[str, Any]
    folder: Path
    label: str
    note: str | None
    max_short_loss_increase: float | None
    link_weights: bool
    reading: bool | None
    include: Sequence[str]
    record: dict[str, Any]

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
                f"{argument('evaluate')} beside save: adapter",
                hint="a suite measures whole checkpoints: save: merged",
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
    allow_code: bool,
    revision: str | None,
    suite: Suite | None,
    text: dict[str, Any],
    distil: bool,
    max_short_loss_increase: float | None,
    link_weights: bool,
    limit: int | None,
    reading: bool | None,
    include: Sequence[str],
    record: Mapping[str, Any] | None,
) -> Request:
    """The request of a call of `extend`, whose arguments these are.

    Raises:
        RopepatchError: If two arguments contradict each other, one is missing, or one is not what it must be.
    """
    plan = model if isinstance(model, Plan) else None
    if plan is not None and (
        parameters or any(value is not None for value in (to, method, original, revision))
    ):
        raise RopepatchError(
            "a plan says target, method, parameters, original and revision itself",
            hint="give the model, or the plan alone",
        )
    named = DISTIL if distil and recipe is None else recipe
    chosen = plan.method.name if plan else method_of(method, named)
    measures, trains, searches = suite is not None, named is not None, chosen in (FIT, AUTO)
    defaults = {"text": None, "field": "text", "split": None}
    given = [argument(key) for key, default in defaults.items() if text[key] != default]
    learns_from_text = chosen == FIT and named is None and "text" not in parameters
    a = argument
    for holds, words, hint in (
        (
            distil and recipe is not None,
            f"{a('distil')} beside {a('recipe')}",
            "a recipe says it itself: `distil: {}`",
        ),
        (
            distil and measures and text["text"],
            f"{a('text')} is what {a('distil')} trains on, and {a('evaluate')} would measure on it",
            f"leave {a('evaluate')} out, and `ropepatch eval` the checkpoint on another text",
        ),
        (
            max_short_loss_increase is not None and not trains,
            f"{a('max_short_loss_increase')} needs a {a('recipe')}",
            "see `ropepatch recipes`",
        ),
        (
            link_weights and trains,
            f"{a('link_weights')} beside {a('distil' if distil else 'recipe')}, which makes new weights",
            "leave one out",
        ),
        (
            limit is not None and not measures,
            f"{a('limit')} is of what {a('evaluate')} measures",
            f"{a('evaluate', 'SUITE')}, or leave it out",
        ),
        (
            allow_code and chosen != AUTO,
            f"{a('allow_code')} beside {a('method')} {chosen}",
            f"it is of {a('method', 'auto')}, which chooses; leave it out",
        ),
        (
            allow_code and trains,
            f"{a('allow_code')} beside {a('recipe')}: nothing is trained under an attention map",
            "leave one out",
        ),
        (
            chosen == AUTO and parameters,
            f"{a('settings')} beside {a('method')} auto, which sets the parameters itself",
            "name the method, or leave it out",
        ),
        (
            chosen == AUTO and measures and text["text"],
            f"{a('text')} is what {a('method')} auto chooses by, and {a('evaluate')} would measure on it",
            f"leave {a('evaluate')} out, and `ropepatch eval` the checkpoint on another text",
        ),
        (
            learns_from_text and measures and text["text"],
            f"{a('text')} is what {a('evaluate')} measures; a fit needs another",
            f"{a('settings')} text=FILE",
        ),
        (
            given and not (measures or distil or searches),
            f"{', '.join(given)} beside {a('method')} {chosen}: nothing reads a text",
            f"{a('evaluate', 'SUITE')} measures on it, {a('method')} fit and auto read it; else leave it out",
        ),
        (
            given and text["text"] is None,
            f"{' and '.join(given)} of {a('text')}, which is missing",
            "name the text, or leave it out",
        ),
    ):
        if holds:
            raise RopepatchError(words, hint=hint)
    training = named if isinstance(named, Recipe | None) else read_recipe(str(named))
    if plan is None:
        name = model_name(model)  # type: ignore[arg-type]
        if training and chosen == training.method.name:
            parameters = training.method.parameters | parameters
        if not searches:
            check_method(chosen, parameters, arguments=ARGUMENTS)
        length = to or (training.to if training else _file_target(chosen))
        source = _found(name, revision, original, training.model if training and not distil else "")
        target = relative_length(length, source.window)
    else:
        name, revision, target = plan.model, plan.revision, plan.target
        source = plan.source
    note = None
    if distil:
        training, note = _distilled(name, source, target, text)
        if chosen != AUTO:  # a fit reads what is trained on, less what is held out
            text = defaults
    recipe_name = "recipe" if isinstance(named, Recipe) else name_of(str(named or ""))
    label = method_label(chosen)
    parts = filter(None, (Path(name).name, label, short_length(target), recipe_name))
    return Request(
        model=name,
        revision=revision,
        target=target,
        original=original,
        method=chosen,
        parameters=parameters,
        allow_code=allow_code,
        plan=plan,
        source=source,
        recipe=training,
        suite=suite,
        text={key: value for key, value in text.items() if key != "split" or value},
        folder=Path(out or "-".join(parts)),
        label=f"{label} + {recipe_name}" if recipe_name else "adapted",
        note=note,
        max_short_loss_increase=max_short_loss_increase,
        link_weights=link_weights,
        reading=reading,
        include=include,
        record=dict(record or {}),
    )


def method_of(method: str | None, recipe: str | Path | Recipe | None) -> str:
    """The method that a call of `extend` means: its own, that of the recipe, or yarn.

    Raises:
        RopepatchError: If there is no such recipe.
    """
    if method is not None or recipe is None:
        return method or "yarn"
    return (recipe if isinstance(recipe, Recipe) else read_recipe(str(recipe))).method.name


def _distilled(model: str, source: Checkpoint, target: int, text: dict[str, Any]) -> tuple[Recipe, str]:
    """The recipe of `distil`, on a text or on what the model writes itself, and which rows it reads."""
    own = {key: value for key, value in text.items() if value is not None}
    recipe, note = self_taught(source, target, Texts(**own) if text["text"] else None)
    return recipe.model_copy(update={"model": model}), note


def _found(name: str, revision: str | None, original: Length | None, usual: str) -> Checkpoint:
    """The model; if it is not there the hint names the one that the recipe is for, if there is one."""
    try:
        source = Checkpoint.find(name, revision, original=original)
        _ = source.rope
        return source
    except RopepatchError as error:
        if usual in ("", name) or original is not None:
            raise
        hint = f"the recipe is for {usual}; {error.hint}"
        raise RopepatchError(str(error), hint=hint) from error


def _file_target(method: str) -> int:
    """The target of a scaling file, in tokens."""
    if is_scaling_file(method):
        return read_scaling(method).target
    raise RopepatchError(
        f"{argument('to')} is missing",
        hint=f"{argument('to', '32k')}, or a {argument('recipe')}, which has a target",
    )
