"""The arguments of `extend`, checked before any work and resolved for a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, InstanceOf

from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError, argument
from ropepatch.evaluation.measuring import measure_extension, prepare_tasks
from ropepatch.evaluation.suites import Suite
from ropepatch.evaluation.tasks import Measurement
from ropepatch.extension.planning import Plan, check_method, method_for
from ropepatch.extension.writing import check_savable
from ropepatch.files import is_gguf
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.pipeline.evaluation import named_suite
from ropepatch.pipeline.inputs import (
    Arguments,
    Place,
    Rise,
    Tokens,
    as_text,
    default_place,
    model_name,
    parse_settings,
)
from ropepatch.pipeline.running import Feedback, Show
from ropepatch.probing.making import why_none
from ropepatch.processes import Processes, join
from ropepatch.scaling.file import is_scaling_file, method_label
from ropepatch.settings import name_of, short_length
from ropepatch.training.preparation import Prepared, prepare
from ropepatch.training.recipe import Recipe, read_recipe
from ropepatch.training.self_taught import DISTIL, self_taught

TEXT_DEFAULTS = {
    "text": None,
    "field": "text",
    "split": None,
}  # options that need a text unless left at these defaults


class ExtendOptions(Arguments):
    """The arguments of one call of `extend`."""

    model: Annotated[InstanceOf[Plan] | str, BeforeValidator(model_name)]
    out: Place | None
    to: Tokens | None
    method: str | None
    original: Tokens | None
    layers: Literal["sliding"] | None
    settings: dict[str, Any] | tuple[str, ...] | None
    recipe: Annotated[InstanceOf[Recipe] | str | None, BeforeValidator(as_text)]
    distil: bool
    max_short_loss_increase: Rise | None
    evaluate: Annotated[InstanceOf[Suite] | str | None, BeforeValidator(as_text)]
    text: Place | None
    field: str
    split: str | None
    limit: int | None
    link_weights: bool
    reading: bool | None
    include: tuple[str, ...]
    push: str | None
    private: bool
    dry_run: bool
    revision: str | None
    record: dict[str, Any] | None
    show: Show
    parameters: dict[str, Any]

    def check(self) -> None:
        """Refuse arguments that cannot be combined."""
        if self.of_gguf:
            others = [
                *("recipe", "distil", "evaluate", "text", "limit", "max_short_loss_increase", "push"),
                *("include", "reading", "link_weights", "layers", "revision", "private"),
            ]
            if given := [argument(key) for key in others if getattr(self, key)]:
                raise RopepatchError(
                    f"{', '.join(given)} cannot be used with a GGUF file",
                    hint="leave it out, or use the checkpoint that the file was converted from",
                )
        distil, evaluate, recipe, text = map(argument, ("distil", "evaluate", "recipe", "text"))
        trains = self.recipe is not None or self.distil
        has_text, measures = self.text is not None, self.suite is not None
        given = [argument(key) for key, default in TEXT_DEFAULTS.items() if getattr(self, key) != default]
        useless = "" if measures or self.distil else ", ".join(given)
        named = self.to, self.method, self.original, self.layers, self.revision, self.settings
        of_plan = (*named, self.parameters or None)
        another = f"leave {evaluate} out, and run `ropepatch eval` on the checkpoint with another text"
        for holds, words, hint in (
            (
                self.plan and any(value is not None for value in of_plan),
                "a plan already sets target, method, parameters, original, layers and revision",
                "pass the model, or only the plan",
            ),
            (
                self.distil and self.recipe is not None,
                f"{distil} cannot be combined with {recipe}",
                "use one of them; `distil: {}` in a recipe does the same",
            ),
            (
                self.distil and measures and has_text,
                f"{distil} trains on {text}, so {evaluate} cannot measure on it",
                another,
            ),
            (
                self.max_short_loss_increase is not None and not trains,
                f"{argument('max_short_loss_increase')} needs a {recipe}",
                "see `ropepatch recipes`",
            ),
            (
                self.link_weights and trains,
                f"{argument('link_weights')} cannot be combined with {distil if self.distil else recipe}: "
                "the weights are new",
                "leave one out",
            ),
            (
                self.limit is not None and not measures,
                f"{argument('limit')} needs {evaluate}",
                f"add {argument('evaluate', 'SUITE')}, or leave it out",
            ),
            (
                self.private and not self.push,
                f"{argument('private')} needs {argument('push')}",
                f"add {argument('push', 'owner/name')}, or leave it out",
            ),
            (
                useless and trains,
                f"{useless} has no effect with {recipe}",
                "leave it out; to train on another text, set `data` in a copy of the recipe",
            ),
            (
                useless,
                f"{useless} has no effect without {evaluate}",
                f"leave it out, or add {argument('evaluate', 'SUITE')}",
            ),
            (
                given and not has_text,
                f"{' and '.join(given)} needs {text}",
                "add the text, or leave it out",
            ),
        ):
            if holds:
                raise RopepatchError(words, hint=hint)

    @cached_property
    def processes(self) -> Processes:
        """The processes that share the call."""
        return join()

    @cached_property
    def feedback(self) -> Feedback:
        """How it reports progress."""
        command = (self.record or {}).get("command")
        return Feedback(say=self.say, progress=self.progress, show=self.show, command=command)

    @property
    def plan(self) -> Plan | None:
        """The plan, if one was passed instead of a model."""
        return None if isinstance(self.model, str) else self.model

    @property
    def name(self) -> str:
        """The model, by its name."""
        return self.model if isinstance(self.model, str) else self.model.model

    @property
    def of_gguf(self) -> bool:
        """Whether a GGUF file is extended, not a checkpoint."""
        return is_gguf(self.name)

    @cached_property
    def named(self) -> Recipe | None:
        """The recipe as it was passed."""
        named = DISTIL if self.distil and self.recipe is None else self.recipe
        return read_recipe(named) if isinstance(named, str) else named

    @cached_property
    def chosen(self) -> str:
        """The method: that of the plan, the argument, the recipe, or yarn."""
        if self.plan is not None:
            return self.plan.method.name
        return self.method or (self.named.method.name if self.named else "yarn")

    @cached_property
    def asked(self) -> dict[str, Any]:
        """The parameters of the method: those of the recipe, overridden by the arguments."""
        settings = self.settings or {}
        given = dict(settings) if isinstance(settings, Mapping) else parse_settings(self.chosen, settings)
        given |= self.parameters
        if self.plan is None and self.named and self.chosen == self.named.method.name:
            given = self.named.method.parameters | given
        if self.plan is None:
            check_method(self.chosen, given, arguments=type(self).model_fields)
        return given

    @cached_property
    def source(self) -> Checkpoint:
        """The model."""
        if isinstance(self.model, Plan):
            return self.model.checkpoint
        usual = self.named.model if self.named and not self.distil else ""
        try:
            source = Checkpoint.find(self.name, self.revision, original=self.original)
            _ = source.rope
            return source
        except RopepatchError as error:
            if usual in ("", self.model) or self.original is not None:
                raise
            hint = f"the recipe is for {usual}; {error.hint}"
            raise RopepatchError(str(error), hint=hint) from error

    @cached_property
    def target(self) -> int:
        """The target length in tokens."""
        if self.plan is not None:
            return self.plan.target
        length = self.to or (self.named.to if self.named else None)
        of_method = is_scaling_file(self.chosen) or "factor" in self.asked
        if length is None and of_method:
            return method_for(self.source, self.chosen, self.asked, None)[1]
        if length is None:
            hint = f"add {argument('to', '32k')}, or a {argument('recipe')}, which sets a target"
            raise RopepatchError(f"{argument('to')} is missing", hint=hint)
        return self.source.in_tokens(length)

    @cached_property
    def taught(self) -> tuple[Recipe | None, str | None]:
        """The recipe of the training, adapted to the model by `distil`, and a note on it."""
        if not self.distil:
            return self.named, None
        own = {key: value for key, value in self._text.items() if value is not None}
        recipe, note = self_taught(self.source, self.target, Texts(**own) if self.text else None)
        return recipe.model_copy(update={"model": self.name}), note

    @property
    def training(self) -> Recipe | None:
        """The recipe of the training."""
        return self.taught[0]

    @property
    def _text(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in TEXT_DEFAULTS}

    @cached_property
    def suite(self) -> Suite | None:
        """The suite measured before and after."""
        if self.evaluate is None:
            return None
        named = named_suite(self.evaluate, text=self.text, field=self.field, split=self.split or "test")
        return named.narrowed(self.limit, None)

    @property
    def recipe_name(self) -> str:
        """The recipe in the names of folders and labels."""
        if isinstance(self.recipe, Recipe):
            return "recipe"
        return name_of(self.recipe or (DISTIL if self.distil else ""))

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint."""
        if self.out is not None:
            return Path(self.out)
        method, target = method_label(self.chosen), short_length(self.target)
        return default_place(self.name, method, target, self.recipe_name)

    @property
    def place(self) -> Path:
        """Its absolute path."""
        return self.folder.expanduser().absolute()

    @property
    def label(self) -> str:
        """The name of the extended model in tables and figures."""
        return f"{method_label(self.chosen)} + {self.recipe_name}" if self.recipe_name else "adapted"

    @cached_property
    def measurements(self) -> dict[str, Measurement]:
        """The tasks of the suite, prepared once for all measurements."""
        assert self.suite is not None
        return prepare_tasks(self.suite, self.source.complete(), self.target)

    def check_plan(self, plan: Plan) -> Prepared | None:
        """Refuse a plan that cannot be saved or trained, before weights are downloaded."""
        if self.training is None:
            check_savable(plan)
            return None
        try:
            import_module("ropepatch.training.adaptation")
        except ImportError as error:
            hint = 'pip install "ropepatch[train]"'
            raise RopepatchError(f"a recipe needs {error.name}", hint=hint) from error
        prepared = prepare(plan, self.training)
        prepared.check()
        return prepared

    def check_reading(self, plan: Plan) -> None:
        """Refuse a requested fingerprint if none is possible."""
        if not self.reading:
            return
        is_adapter = self.training is not None and self.training.save == "adapter"
        none = why_none(plan.checkpoint, plan.method.name, plan.source.window, plan.target)
        if reason := "save: adapter writes no checkpoint" if is_adapter else none:
            raise RopepatchError(f"{argument('reading')}: {reason}", hint="leave it out")

    def check_suite(self, plan: Plan) -> None:
        """Refuse a suite that could not be measured after the training."""
        if self.suite is None:
            return
        if self.training and self.training.save == "adapter":
            hint = "use save: merged, because a suite measures whole checkpoints"
            raise RopepatchError(f"{argument('evaluate')} cannot be combined with save: adapter", hint=hint)
        measure_extension(self.suite, plan, measurements=self.measurements)
