"""What an extension will change, decided from the configuration alone."""

from __future__ import annotations

import copy
import html
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ropepatch.attention import MAPS, AttentionMap, make_map
from ropepatch.attention.mapping import check_mappable
from ropepatch.errors import RopepatchError, argument
from ropepatch.extension.config_changes import SavedRope, changed, find_changes
from ropepatch.extension.engines import Engine, engine_support, map_support
from ropepatch.extension.map_code import map_changes
from ropepatch.extension.queries import QueryLayers
from ropepatch.extension.text import plan_text
from ropepatch.files import json_text
from ropepatch.model.architectures import remarks
from ropepatch.model.checks import config_errors
from ropepatch.model.checks.case import THETA_KEYS
from ropepatch.model.config import blueprint, load_config
from ropepatch.model.rotary import SEQUENCE, RotarySite, base_model, float32_on_cpu, stated_window
from ropepatch.model.source import find_source
from ropepatch.model.survey import Survey, survey, survey_checkpoint
from ropepatch.scaling import METHODS, Scaling, make_scaling
from ropepatch.scaling.file import AUTO, FIT, is_scaling_file, read_scaling
from ropepatch.scaling.rope import Frequencies, Rope
from ropepatch.scaling.searched import CustomDivisors
from ropepatch.settings import Length, Queries, find_named, relative_length, shown

PUBLISHED = 32  # times the window: farther no scaling of the rope is published to read without training


@dataclass(frozen=True, repr=False)
class Plan:
    """One extension, from the command line to the saved checkpoint.

    Args:
        model: The name of the model as the user gave it.
        revision: Its commit, of a model from the Hub.
        survey: What its configuration says.
        scaling: The method and its parameters; of an attention map `none`.
        target: The context to reach, in tokens.
        changes: What changes in config.json (or its section).
        saved: How config.json says it.
        warnings: What the user should know before going on, a sentence each.
        distances: The attention map with all its parameters, of a plan by one.
    """

    model: str
    revision: str | None
    survey: Survey
    scaling: Scaling
    target: int
    changes: dict[str, Any]
    saved: SavedRope = field(compare=False)  # it holds tensors, and follows from the rest
    warnings: tuple[str, ...] = ()
    distances: AttentionMap | None = None

    @property
    def method(self) -> Scaling | AttentionMap:
        """What extends the model: the attention map, or the scaling of its rope."""
        return self.distances or self.scaling

    @property
    def model_type(self) -> str:
        """The architecture, in transformers' words."""
        return str(self.survey.config.model_type)

    @property
    def rope(self) -> Rope:
        """The rope now."""
        return self.survey.rope

    @property
    def site(self) -> RotarySite:
        """Where the rotary module is."""
        return self.survey.site

    @property
    def before(self) -> dict[str, Any]:
        """The values of `changes` now, of those that are set."""
        stated = {key: self.survey.stated[key] for key in self.changes if key in self.survey.stated}
        return copy.deepcopy(stated | {"rope_parameters": self.survey.config.rope_parameters})

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """The `rope_parameters` to come, of the global layers where they differ by layer type."""
        return self.site.of(self.changes["rope_parameters"])

    @property
    def queries(self) -> Queries | None:
        """What is folded into the query weights; None where no weight changes."""
        return self.scaling.queries if isinstance(self.scaling, CustomDivisors) else None

    @property
    def engines(self) -> list[Engine]:
        """Who will read the extended checkpoint, by the engines' sources."""
        if self.distances is not None:
            return map_support()
        return engine_support(self.rope_parameters, self.rope, self.target, self.model_type)

    @cached_property
    def patched(self) -> tuple[SavedRope, dict[str, Any]]:
        """What a patched model computes and would save: a length-dependent method is fixed at the target."""
        if not self.scaling.length_dependent:
            return self.saved, self.changes
        return find_changes(self.survey, self.scaling.at(self.rope, self.target), self.target)

    def apply(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The content of config.json after the extension, from its content before."""
        return changed(raw, self.survey, self.changes)

    def frequencies(self) -> Frequencies:
        """The frequencies of the patched model, to the bit those of the reloaded checkpoint."""
        return self.patched[0].frequencies

    @float32_on_cpu()
    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready data: what `ropepatch.json` holds and `ropepatch plan --json` prints."""
        return {
            "model": self.model,
            "revision": self.revision,
            "model_type": self.model_type,
            "method": self.method.name,
            "factor": self.scaling.factor,
            "parameters": self.method.parameters(),
            "paper": self.method.paper,
            "original_max_position_embeddings": self.rope.original_max_position_embeddings,
            **({"original": self.survey.original} if self.survey.original else {}),
            "target": self.target,
            "rotary_dim": self.rope.rotary_dim,
            "rope_theta": self.rope.rope_theta,
            "already_scaled": self.rope.is_scaled,
            "layer_type": self.site.layer_type,
            "attention_factor_before": self.rope.carried_attention_factor,
            "attention_factor": self.frequencies().attention_factor,
            "inv_freq_before": self.rope.inv_freq().tolist(),
            "inv_freq": self.frequencies().inv_freq.tolist(),
            "config_before": self.before,
            "config_changes": self.changes,
            "engines": [engine.to_dict() for engine in self.engines],
            "warnings": list(self.warnings),
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json_text(self.to_dict())

    def __str__(self) -> str:
        return plan_text(self)

    def __repr__(self) -> str:
        window = self.rope.original_max_position_embeddings
        return f"Plan({self.model}: {window} -> {self.target} tokens, {self.method.name})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def plan(
    model: str | os.PathLike[str] | PreTrainedModel | PreTrainedConfig,
    *,
    to: Length | None = None,
    method: str | Path = "yarn",
    original: Length | None = None,
    revision: str | None = None,
    **parameters: Any,
) -> Plan:
    """Plan an extension. No weights are read; of a Hub model only config.json is downloaded."""
    if isinstance(model, str | os.PathLike):
        named = model if isinstance(model, str) else Path(model)
        source = find_source(named, revision, weights=False)
        surveyed, name, revision = survey_checkpoint(source), source.name, source.revision
    elif isinstance(model, nn.Module):
        base = base_model(model)
        surveyed, name = survey(base.config.to_dict(), base), name_of(base)
    else:
        surveyed, name = survey(model.to_dict()), model.name_or_path or type(model).__name__
    surveyed = trained_on(surveyed, original)
    if parameters:
        check_method(str(method), parameters, arguments=("to", "method", "original", "revision"))
    return plan_method(surveyed, name, revision, str(method), parameters, to)


def trained_on(survey: Survey, original: Length | None) -> Survey:
    """The survey of a model whose user states the window it was trained on."""
    if original is None:
        return survey
    try:
        window = relative_length(original, survey.rope.original_max_position_embeddings)
    except RopepatchError as error:
        message = f"original must be a number of tokens, got {shown(original)}"
        raise RopepatchError(message, hint=error.hint) from error
    return survey.trained_on(window)


def name_of(model: PreTrainedModel) -> str:
    """What a model in memory is called in a plan."""
    return str(model.config.name_or_path or type(model).__name__)


def plan_method(
    survey: Survey,
    name: str,
    revision: str | None,
    method: str,
    parameters: Mapping[str, Any],
    to: Length | None,
) -> Plan:
    """The plan of a method by its name, or of a scaling file, for a model that is surveyed; see `plan`."""
    file = read_scaling(method, beside=parameters) if is_scaling_file(method) else None
    target = file.target if file and to is None else survey.target(to, name)
    window = survey.rope.original_max_position_embeddings
    if file:
        file.check_model(method, survey.rope, name, target)
        return plan_scaling(survey, name, revision, file.scaling, target)
    kind = find_method(method)
    if issubclass(kind, AttentionMap):
        return plan_map(survey, name, revision, make_map(method, **parameters), target)
    composing = kind.composing if survey.rope.is_scaled else {}
    scaling = make_scaling(method, **{"factor": target / window, **composing, **parameters})
    return plan_scaling(survey, name, revision, scaling, target)


@float32_on_cpu()
def plan_scaling(survey: Survey, name: str, revision: str | None, scaling: Scaling, to: int) -> Plan:
    """The plan of one scaling; see `plan`."""
    saved, changes = find_changes(survey, scaling, to)
    warnings = tuple(_warnings(survey, scaling, to))
    made = Plan(name, revision, survey, scaling, to, changes, saved, warnings)
    if made.queries:
        QueryLayers(blueprint(load_config(survey.raw, survey.own_config)), survey).changes(made.queries)
    return made


@float32_on_cpu()
def plan_map(survey: Survey, name: str, revision: str | None, distances: AttentionMap, to: int) -> Plan:
    """The plan of one attention map, whose missing parameters follow from the target; see `plan`."""
    window = survey.rope.original_max_position_embeddings
    fitted = distances.fitted(window, to)
    check_mappable(blueprint(load_config(survey.raw, survey.own_config)), window)
    plan = plan_scaling(survey, name, revision, make_scaling("none", factor=to / window), to)
    return replace(plan, changes=plan.changes | map_changes(survey, fitted, to), distances=fitted)


def find_method(name: str) -> type[Scaling] | type[AttentionMap]:
    """The scaling or the attention map of that name; an error has the nearest name and the list."""
    if name in (FIT, AUTO):
        raise RopepatchError(
            f"{argument('method')} {name} is found by measuring a model, which `ropepatch extend` does",
            hint=f"here name what it finds: `ropepatch {'fit' if name == FIT else 'compare'}` says; "
            "a dry run of `ropepatch extend` shows its plan",
        )
    kinds: dict[str, type[Scaling] | type[AttentionMap]] = {**METHODS, **MAPS}
    return find_named(name, kinds, "method", METHODS.other_names | MAPS.other_names)


def check_method(method: str, parameters: Collection[str], *, arguments: Collection[str] = ()) -> None:
    """Refuse what is no method or scaling file, or names that are no parameters of it; a file takes none.

    The arguments of the caller are suggested where a parameter looks like one.
    """
    if is_scaling_file(method):
        read_scaling(method, beside=parameters)
        return
    unknown = [name for name in parameters if name != "factor"]
    find_method(method).refuse_unknown(unknown, arguments=arguments)


def _on_top(scaling: Scaling) -> str:
    """That a method composes, and with which parameters where it has others for that."""
    if scaling.name == "none":
        return ""
    values = [f"{key}={value}" for key, value in scaling.composing.items() if getattr(scaling, key) == value]
    parameters = f" ({', '.join(values)})" if values else ""
    return f", and {scaling.name} is applied on top of the frequencies it carries{parameters}"


def _other_window(survey: Survey) -> int | None:
    """L by the other reading of a linear checkpoint, if its configuration leaves it open."""
    parameters = survey.site.of(survey.config.rope_parameters)
    factor, window = parameters.get("factor", 1), survey.rope.original_max_position_embeddings
    if parameters.get("rope_type") != "linear" or survey.site.layer_type or factor <= 1:
        return None  # by layer type ropes are younger than the habit
    stated = stated_window(survey.config.max_position_embeddings, factor, getattr(survey.config, SEQUENCE, 0))
    return None if stated else int(factor * window)


def _warnings(survey: Survey, scaling: Scaling, to: int) -> Iterator[str]:
    config, rope = survey.config, survey.rope
    window = rope.original_max_position_embeddings
    doubled = _other_window(survey)
    if survey.original:
        stated = survey.config.max_position_embeddings
        yield f"L = {window} is given (original); config.json says {stated}"
    if rope.is_scaled:
        yield (
            f"the model is already scaled: L = {window} is {'taken for ' * bool(doubled)}the window it reads "
            f"now{_on_top(scaling)}"
        )
    if doubled:
        yield (
            f"L = {window} is max_position_embeddings, which is the window after linear scaling "
            f"(deepseek-coder) or before it (Vicuna, LongChat: then L = {doubled}); say which by "
            f'"{SEQUENCE}": {window} or {doubled} in config.json'
        )
    if round(scaling.factor * window) != to:
        verb = "reaches" if scaling.factor * window < to else "is for"
        yield f"factor {scaling.factor:g} {verb} {scaling.factor * window:.0f} tokens, not the target of {to}"
    yield from (f"config.json: {error} (ropepatch doctor says more)" for error in config_errors(survey.raw))
    base = getattr(scaling, "rope_theta", None)
    if base and base <= rope.rope_theta:
        yield f"rope_theta {base:g} is not above the model's {rope.rope_theta:g}: it reads no farther"
    if to > PUBLISHED * window:
        yield (
            f"{to} tokens are {to / window:g} times the window: without training nothing published reads "
            f"beyond {PUBLISHED} times (LongRoPE 8, ChunkLlama 20); train it, or measure before you use it"
        )
    if scaling.length_dependent:
        yield (
            "stock engines change the frequencies as the sequence grows, "
            "which contradicts keys they cached before; a static method does not"
        )
    if getattr(scaling, "queries", None):
        yield "query weights change, too: config.json alone does not hold this method"
    if survey.rotates_partly and scaling.frequencies(rope, to).attention_factor != 1:
        yield "only part of each head rotates: the attention factor reaches only that part of the logit"
    if survey.raw.get("auto_map"):
        yield "config.json asks for remote code (auto_map): left out, transformers has this architecture"
    yield from remarks(config)
    window_keys = {"max_position_embeddings", config.attribute_map.get("max_position_embeddings")}
    if not window_keys & survey.stated.keys():
        yield f"config.json names no max_position_embeddings: transformers' default {window} is taken for L"
    written = json.dumps(survey.raw, default=str)
    if not any(key in written for key in THETA_KEYS):
        yield f"config.json names no rope_theta: transformers' default {rope.rope_theta:g} is taken"
