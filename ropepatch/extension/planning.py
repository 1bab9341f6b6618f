"""What an extension will change, decided from the configuration alone."""

from __future__ import annotations

import copy
import html
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedConfig, PreTrainedModel

from ropepatch.attention import REMAPPINGS, Remapping
from ropepatch.attention.remapped import check_mappable
from ropepatch.columns import Table, as_text
from ropepatch.errors import RopepatchError, argument, printable
from ropepatch.extension.config_changes import ACROSS_LAYERS, SavedRope, find_changes
from ropepatch.extension.engines import Engine, engine_support, remapping_support
from ropepatch.extension.queries import QueryLayers, folds_attention
from ropepatch.extension.remapping_code import remapping_changes
from ropepatch.extension.text import (
    bands_text,
    changes_table,
    distances_text,
    engines_table,
    parameters_text,
)
from ropepatch.files import json_text, read_json
from ropepatch.model.architectures import remarks, trained_on
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.checks import config_errors
from ropepatch.model.checks.case import THETA_KEYS
from ropepatch.model.config import ORIGINAL, check_dequantised, differs_by_layer, quantization_of
from ropepatch.model.gguf import GgufModel
from ropepatch.model.reading_file import LONGEST
from ropepatch.model.record_file import FILE as RECORD
from ropepatch.model.rotary import SEQUENCE, RotarySite, float32_on_cpu, stated_window, switches
from ropepatch.scaling import METHODS, Scaling, YaRN, make_scaling
from ropepatch.scaling.file import AUTO, FIT, is_scaling_file, read_scaling
from ropepatch.scaling.method import Method
from ropepatch.scaling.ramps import shared_temperature
from ropepatch.scaling.rope import Frequencies, Rope
from ropepatch.scaling.searched import CustomDivisors
from ropepatch.settings import Length, Queries, as_target, find_named, short_length, shown

WIDTH = 80  # of what a plan prints, in characters
PUBLISHED = 32  # times the window: farther no scaling of the rope is published to read without training


@dataclass(frozen=True, repr=False, eq=False)
class Plan:
    """One extension, from the command line to the saved checkpoint.

    What follows from these is computed when it is needed, and once.

    Args:
        source: The checkpoint that is extended.
        method: What extends it: a scaling of its rope, or a position remapping with all its parameters.
        target: The context to reach, in tokens.
        layers: Of a remapping, the layers that rotate by it, where not all do; known once the model has run.
    """

    source: Checkpoint
    method: Method
    target: int
    layers: tuple[int, ...] | None = None

    @property
    def model(self) -> str:
        """The name of the model as the user gave it."""
        return self.source.name

    @property
    def revision(self) -> str | None:
        """Its commit, of a model from the Hub."""
        return self.source.revision

    @property
    def model_type(self) -> str:
        """The architecture, in transformers' words."""
        return str(self.source.config.model_type)

    @property
    def rope(self) -> Rope:
        """The rope now."""
        return self.source.rope

    @property
    def site(self) -> RotarySite:
        """Where the rotary module is."""
        return self.source.site

    @property
    def remapping(self) -> Remapping | None:
        """The position remapping, of a plan by one."""
        return self.method if isinstance(self.method, Remapping) else None

    @cached_property
    def scaling(self) -> Scaling:
        """The scaling of the rope; under a position remapping `none`."""
        if isinstance(self.method, Scaling):
            return self.method
        return make_scaling("none", factor=self.target / self.source.window)

    @cached_property
    def _written(self) -> tuple[SavedRope, dict[str, Any]]:
        return find_changes(self.source, self.scaling, self.target)

    @property
    def saved(self) -> SavedRope:
        """How config.json says it."""
        return self._written[0]

    @cached_property
    def changes(self) -> dict[str, Any]:
        """What changes in config.json (or its section)."""
        changes = self._written[1]
        if self.remapping is None:
            return changes
        return changes | remapping_changes(self.source, self.remapping, self.target, self.layers)

    @cached_property
    @float32_on_cpu()
    def warnings(self) -> tuple[str, ...]:
        """What the user should know before going on, a sentence each."""
        return tuple(_warnings(self.source, self.scaling, self.target))

    @property
    def before(self) -> dict[str, Any]:
        """The values of `changes` now, of those that are set."""
        stated = self.source.stated
        kept = {key: stated[key] for key in self.changes if key in stated}
        return copy.deepcopy(kept | {"rope_parameters": self.source.config.rope_parameters})

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """The `rope_parameters` to come, of the global layers where they differ by layer type."""
        return self.site.of(self.changes["rope_parameters"])

    @property
    def queries(self) -> Queries | None:
        """What is folded into the query weights; None where no weight changes."""
        return self.method.queries if isinstance(self.method, CustomDivisors) else None

    @cached_property
    def engines(self) -> list[Engine]:
        """Who will read the extended checkpoint, and how that is known."""
        if self.remapping is not None:
            return remapping_support()
        return engine_support(
            self.rope_parameters,
            self.rope,
            self.target,
            self.model_type,
            str(self.source.whole_config.model_type),
            folds=folds_attention(self.source),
            scales_alone=self.queries is None,
        )

    @property
    def length_dependent(self) -> bool:
        """Whether what is saved has other frequencies for another length."""
        return self.scaling.length_dependent or switches(self.rope_parameters)

    @cached_property
    def patched(self) -> tuple[SavedRope, dict[str, Any]]:
        """Frequencies and config.json of a patched model; those at the target, if they depend on length."""
        if not self.length_dependent:
            return self._written
        return find_changes(self.source, self.scaling.at(self.rope, self.target), self.target, static=True)

    def apply(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The content of config.json after the extension, from its content before."""
        return self.source.changed(self.changes, raw)

    def frequencies(self) -> Frequencies:
        """The frequencies of the patched model, to the bit those of the reloaded checkpoint."""
        return self.patched[0].frequencies

    @float32_on_cpu()
    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready data: what `ropepatch.json` holds and `ropepatch plan --json` prints."""
        original = self.source.original_window
        return {
            "model": self.model,
            "revision": self.revision,
            "model_type": self.model_type,
            "method": self.method.name,
            "factor": self.scaling.factor,
            "parameters": self.method.parameters(),
            "paper": self.method.paper,
            "original_max_position_embeddings": self.source.window,
            **({"original": original} if original else {}),
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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # what it says is a dictionary

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json_text(self.to_dict())

    @float32_on_cpu()
    def __str__(self) -> str:
        method, window = self.method, self.source.window
        at = f" at {self.revision}" if self.revision else ""
        name = f"{printable(self.model)}{at} ({printable(self.model_type)})"
        lines: list[str | Table] = [
            f"{name}: {self.source.reach} -> {self.target} tokens",
            f"{method.name} ({method.paper}): factor={self.scaling.factor:g}{parameters_text(method)}",
        ]
        if self.site.layer_type:
            lines.append(f"scales the rope of the {self.site.layer_type} layers; the others keep theirs")
        frequencies = self.frequencies()
        if self.remapping:
            lines += ["", *distances_text(self.remapping, window, self.target)]
        else:
            lines += ["", *bands_text(self.rope, frequencies, self.scaling.factor)]
        old, new = self.site.of(self.before["rope_parameters"]), self.rope_parameters
        lines += ["", "config.json", changes_table(self.before, self.changes, old, new)]
        lines.append("engines, the rope type they read, and how that is known")
        lines.append(engines_table(self.engines, self.remapping, new["rope_type"]))
        lines += [f"warning: {printable(warning)}" for warning in self.warnings]
        return as_text(lines, WIDTH)

    def __repr__(self) -> str:
        return f"Plan({self.model}: {self.source.window} -> {self.target} tokens, {self.method.name})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def plan(
    model: str | os.PathLike[str] | PreTrainedModel | PreTrainedConfig,
    *,
    to: Length | None = None,
    method: str | Path | Scaling | Remapping = "yarn",
    original: Length | None = None,
    layers: Literal["sliding"] | None = None,
    revision: str | None = None,
    **parameters: Any,
) -> Plan:
    """Plan an extension. No weights are read; of a Hub model only config.json is downloaded."""
    if isinstance(model, str | os.PathLike):
        place = model if isinstance(model, str) else Path(model)
        source = Checkpoint.find(place, revision, original=original)
    else:
        source = Checkpoint.of(model, original)
    if parameters and not isinstance(method, Method):
        check_method(str(method), parameters, arguments=("to", "method", "original", "layers", "revision"))
    return check_layers(plan_method(source, method, parameters, to), layers)


def plan_method(
    source: Checkpoint, method: str | Path | Method, parameters: Mapping[str, Any], to: Length | None
) -> Plan:
    """The plan of a method or its name, or of a scaling file; see `plan`."""
    return plan_by(source, *method_for(source, method, parameters, to))


def method_for(
    source: Checkpoint | GgufModel,
    method: str | Path | Method,
    parameters: Mapping[str, Any],
    to: Length | None,
) -> tuple[Method, int]:
    """The method, or that of the name or the scaling file, for a model, and its target in tokens."""
    if isinstance(method, Method):
        if parameters:
            raise RopepatchError(
                f"{method!r} has all its parameters, got also {', '.join(parameters)}",
                hint="make the method with them, or give its name",
            )
        if to is None and isinstance(method, Scaling):
            return method, round(method.factor * source.window)
        return method, source.target(to)
    method = str(method)
    file = read_scaling(method, beside=parameters) if is_scaling_file(method) else None
    if to is None and isinstance(factor := parameters.get("factor"), int | float):
        to = f"{factor:.3f}x"
    target = file.target if file and to is None else source.target(to)
    if file:
        file.check_model(method, source.rope, source.name, target)
        return file.scaling, target
    found = find_method(method)
    if isinstance(source, Checkpoint) and (stated := source.tied_yarn) and issubclass(found, YaRN):
        parameters = {**_as_stated(stated, target / source.window), **parameters}
    return found.for_target(source.rope, target, parameters), target


def _as_stated(yarn: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The parameters of a YaRN of another factor, as its `rope_parameters` state the others."""
    kept = {key: yarn[key] for key in ("beta_fast", "beta_slow", "truncate") if key in yarn}
    if not yarn.get("mscale"):
        return kept
    return kept | {"attention_factor": shared_temperature(factor, yarn["mscale"], yarn["mscale_all_dim"])}


@float32_on_cpu()
def plan_by(source: Checkpoint, method: Method, target: int) -> Plan:
    """The plan of one method, whose missing parameters follow from the target."""
    if (stated := source.tied_yarn) and not isinstance(method, YaRN):
        raise RopepatchError(
            f"{method.name} cannot extend {source.config.model_type}: YaRN's factor, {stated['factor']:g}, "
            "also scales its softmax (mscale_all_dim)",
            hint=f"{argument('method', 'yarn')} applies YaRN anew, by the factor that reaches the target",
        )
    made = Plan(source, method.fitted(source.window, target), target)
    if made.remapping:
        check_mappable(source.skeleton, source.window)
    if made.queries:
        QueryLayers(source.skeleton, source).changes(made.queries)
    _ = made.changes
    return made


def check_layers(plan: Plan, layers: str | None) -> Plan:
    """The plan, refused where only local layers rotate, unless `layers` asks for that."""
    local, name, asked = plan.source.local_rope, argument("layers"), argument("layers", "sliding")
    alone = local is not None and not local.shared
    if layers not in (None, "sliding"):
        raise RopepatchError(f"{name} is sliding, got {shown(layers)}", hint=f"or leave {name} out")
    if layers and not alone:
        raise RopepatchError(
            f"{asked} is for models whose sliding-window layers alone rotate, and {plan.model} is not one",
            hint=f"leave {name} out",
        )
    if local and alone and not layers and plan.scaling.name != "none":
        raise RopepatchError(
            f"of {plan.model} only layers that read {local.window} tokens rotate ({local.layers} of "
            f"{local.of}): the others need no scaling to read farther",
            hint=f"{argument('method', 'none')} writes the longer context alone; {asked} scales all the same",
        )
    return plan


def find_method(name: str) -> type[Method]:
    """The scaling or the position remapping of that name; an error has the nearest name and the list."""
    if name in (FIT, AUTO):
        raise RopepatchError(
            f"{argument('method')} {name} is found by measuring a model, which `ropepatch extend` does",
            hint=f"here name what it finds: `ropepatch {'fit' if name == FIT else 'compare'}` says; "
            "a dry run of `ropepatch extend` shows its plan",
        )
    if "{" in name:
        to, meant = as_target(name)
        hint = f"here it is {argument('to', to)} and {argument('method', meant)}"
        raise RopepatchError(f"{argument('method')} is a name, got {shown(name)}", hint=hint)
    kinds: dict[str, type[Method]] = {**METHODS, **REMAPPINGS}
    return find_named(name, kinds, "method", METHODS.other_names | REMAPPINGS.other_names)


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


def _other_window(source: Checkpoint) -> int | None:
    """L by the other reading of a linear checkpoint, if its configuration leaves it open."""
    parameters = source.site.of(source.config.rope_parameters)
    factor, window = parameters.get("factor", 1), source.window
    if parameters.get("rope_type") != "linear" or source.site.layer_type or factor <= 1:
        return None  # by layer type ropes are younger than the habit
    stated = stated_window(source.config.max_position_embeddings, factor, getattr(source.config, SEQUENCE, 0))
    return None if stated else int(factor * window)


def _made_from(source: Checkpoint, to: int) -> Iterator[str]:
    """That the model from which ropepatch made a checkpoint would be scaled once, not twice."""
    if source.place is None or not (source.place / RECORD).is_file():
        return
    made = read_json(source.place / RECORD)
    base, window = made.get("model"), made.get("original_max_position_embeddings")
    if isinstance(base, str) and isinstance(window, int) and window > 0:
        yield (
            f"{RECORD} says that it was made from {base} by {made.get('method')}: to extend {base} by "
            f"{to / window:g}x instead scales the rope once"
        )


def scaling_warnings(rope: Rope, scaling: Scaling, to: int) -> Iterator[str]:
    """What to know of a scaling of this rope to so many tokens, a sentence each."""
    window = rope.original_max_position_embeddings
    if round(scaling.factor * window) != to:
        verb = "reaches" if scaling.factor * window < to else "is for"
        yield f"factor {scaling.factor:g} {verb} {scaling.factor * window:.0f} tokens, not the target of {to}"
    base = getattr(scaling, "rope_theta", None)
    if base and base <= rope.rope_theta:
        yield f"rope_theta {base:g} is not above the model's {rope.rope_theta:g}: it reads no farther"
    if to > PUBLISHED * window:
        yield (
            f"{to} tokens are {to / window:g} times the window: without training nothing published reads "
            f"beyond {PUBLISHED} times (LongRoPE 8, ChunkLlama 20); train it, or measure before you use it"
        )
    if to > LONGEST:
        yield (
            f"beyond {LONGEST} tokens neighbours have one position in float32, in which transformers "
            "computes angles: they are rotated alike"
        )
    if scaling.length_dependent:
        yield (
            "stock engines change the frequencies as the sequence grows, "
            "which contradicts keys they cached before; a static method does not"
        )
    if (factor := scaling.frequencies(rope, to).attention_factor) < 1:
        yield f"attention factor {factor:g} makes attention flatter; methods that have one are above 1"


def _warnings(source: Checkpoint, scaling: Scaling, to: int) -> Iterator[str]:
    config, rope = source.config, source.rope
    window = source.window
    doubled = _other_window(source)
    if source.original_window:
        stated = source.config.max_position_embeddings
        yield f"L = {window} is given (original); config.json says {stated}"
    elif known := trained_on(config):
        yield (
            f"published models of this type that state {config.max_position_embeddings} tokens were trained "
            f"on {known}: {argument('original', short_length(known))} scales from there, as their makers do"
        )
    if rope.is_scaled:
        yield from _made_from(source, to)
        yield (
            f"the model is already scaled: L = {window} is {'taken for ' * bool(doubled)}the window it reads "
            f"now{_on_top(scaling)}"
        )
    stated = source.site.of(config.rope_parameters)
    if source.tied_yarn:
        yield (
            f"YaRN is applied anew from L = {window}, by {scaling.factor:g} in place of "
            f"{stated['factor']:g}, and the scale of the softmax follows it (mscale_all_dim)"
        )
    if stated.get("rope_type") == "dynamic" and "alpha" not in stated:
        yield f"its dynamic scaling, which begins beyond {window} tokens, is replaced"
    if switches(stated):
        yield (
            f"texts of up to {stated[ORIGINAL]} tokens keep the frequencies of short_factor; an attention "
            "factor is for all lengths"
        )
    if doubled:
        yield (
            f"L = {window} is max_position_embeddings, which is the window after linear scaling "
            f"(deepseek-coder) or before it (Vicuna, LongChat: then L = {doubled}); say which by "
            f'"{SEQUENCE}": {window} or {doubled} in config.json'
        )
    doubtful = config_errors(source.raw, "theta-not-as-published")
    yield from (f"config.json: {error} (ropepatch doctor says more)" for error in doubtful)
    yield from scaling_warnings(rope, scaling, to)
    folder = source.place if source.revision is None else None
    if folder and not [*folder.glob("*.safetensors")] and (pickles := [*folder.glob("pytorch_model*.bin")]):
        yield f"the weights are a pickle ({pickles[0].name}), which `ropepatch extend` does not read"
    if getattr(scaling, "queries", None):
        yield "query weights change, too: config.json alone does not hold this method"
    if source.rotates_partly and scaling.frequencies(rope, to).attention_factor != 1:
        yield "only part of each head rotates: the attention factor reaches only that part of the logit"
    if source.is_part and "mrope_section" in stated:
        yield (
            "rows, columns and frames of images are positions in the same rope (mrope_section): theirs are "
            "stretched with those of text, and only text is measured here"
        )
    if scaling.name != "none" and differs_by_layer(config):
        yield (
            "heads differ by layer: stock transformers reads a longrope here by "
            f"{ACROSS_LAYERS}, and warns of the length of its lists; linear and ntk are said by proportional"
        )
    if source.raw.get("auto_map"):
        yield "config.json asks for remote code (auto_map): left out, transformers has this architecture"
    if quantisation := quantization_of(source.whole_config):
        try:
            check_dequantised(quantisation)
        except RopepatchError as error:
            yield f"{error}: the result is not compared with it"
    if (local := source.local_rope) and scaling.name != "none":
        yield (
            f"{local.layers} of {local.of} layers read {local.window} tokens at any length and "
            f"{'share' if local.shared else 'alone have'} the rope that is scaled: that gains them nothing, "
            "and cost OLMo 3 on MMLU 64.2 -> 60.5 (vllm#43419)"
        )
    yield from remarks(config)
    window_keys = {"max_position_embeddings", config.attribute_map.get("max_position_embeddings")}
    if not window_keys & source.stated.keys():
        yield f"config.json names no max_position_embeddings: transformers' default {window} is taken for L"
    written = json.dumps(source.raw, default=str)
    if not any(key in written for key in THETA_KEYS):
        yield f"config.json names no rope_theta: transformers' default {rope.rope_theta:g} is taken"
