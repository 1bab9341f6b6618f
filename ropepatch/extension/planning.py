"""Plan an extension from the configuration only."""

from __future__ import annotations

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
from ropepatch.doctor.facts import THETA_KEYS
from ropepatch.doctor.rules import check_agreement, explained, plan_findings
from ropepatch.errors import RopepatchError, argument, plain, printable
from ropepatch.extension.config_changes import ACROSS_LAYERS, SavedRope, find_changes
from ropepatch.extension.engines import (
    Engine,
    converted,
    engine_support,
    gguf_support,
    remapping_support,
)
from ropepatch.extension.gguf import gguf_changes
from ropepatch.extension.queries import folds_attention
from ropepatch.extension.remapping_code import remapping_changes
from ropepatch.extension.text import (
    bands_text,
    changes_table,
    distances_text,
    engines_table,
    parameters_text,
)
from ropepatch.files import is_gguf, json_text, read_json
from ropepatch.model.architectures import GGUF_GLOBAL, remarks, trained_on
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import (
    DUAL_CHUNK,
    ORIGINAL,
    check_dequantised,
    differs_by_layer,
    dual_chunk_original,
    quantization_of,
)
from ropepatch.model.gguf import FREQS, GgufModel
from ropepatch.model.reading_file import LONGEST
from ropepatch.model.record_file import FILE as RECORD
from ropepatch.model.rotary import SEQUENCE, RotarySite, float32_on_cpu, stated_window, switches
from ropepatch.scaling import METHODS, Scaling, YaRN, make_scaling
from ropepatch.scaling.file import is_scaling_file, read_scaling
from ropepatch.scaling.method import Method
from ropepatch.scaling.ramps import shared_temperature
from ropepatch.scaling.rope import Frequencies, Rope
from ropepatch.settings import (
    MAX_NUMBER,
    Length,
    number_of,
    refuse_unknown,
    short_length,
    shown,
)

WIDTH = 80  # columns of a printed plan
PUBLISHED = 32  # largest published factor of a RoPE scaling without training


@dataclass(frozen=True, repr=False, eq=False)
class Plan:
    """The plan of one extension; everything else is computed from its fields on first use.

    Args:
        source: The checkpoint or GGUF file to extend.
        method: A RoPE scaling or a position remapping, with all its parameters.
        target: The target length, in tokens.
        layers: The layers that a remapping applies to, if not all; known once the model has run.
    """

    source: Checkpoint | GgufModel
    method: Method
    target: int
    layers: tuple[int, ...] | None = None

    @property
    def model(self) -> str:
        """The name of the model that the user gave."""
        return self.source.name

    @property
    def revision(self) -> str | None:
        """The commit of a model from the Hub; None for a folder."""
        return self.source.revision

    @property
    def model_type(self) -> str:
        """The architecture, as transformers names it; for a GGUF file as llama.cpp does."""
        return self.source.model_type

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint to extend.

        Raises:
            RopepatchError: If it is a GGUF file, which only `plan` and `extend` support.
        """
        if isinstance(self.source, Checkpoint):
            return self.source
        raise RopepatchError(
            f"{self.model} is a GGUF file, which only `ropepatch plan` and `ropepatch extend` support",
            hint="use the checkpoint that it was made from",
        )

    @property
    def gguf(self) -> GgufModel:
        """The model of the GGUF file to extend.

        Raises:
            RopepatchError: If it is a checkpoint.
        """
        if isinstance(self.source, GgufModel):
            return self.source
        raise RopepatchError(f"{self.model} is no GGUF file", hint="name the file")

    @property
    def rope(self) -> Rope:
        """The RoPE before the extension."""
        return self.source.rope

    @property
    def site(self) -> RotarySite:
        """The place of the rotary module in the model."""
        return self.checkpoint.site

    @property
    def remapping(self) -> Remapping | None:
        """The position remapping; None if the method is a scaling."""
        return self.method if isinstance(self.method, Remapping) else None

    @cached_property
    def scaling(self) -> Scaling:
        """The RoPE scaling; `none` under a position remapping."""
        if isinstance(self.method, Scaling):
            return self.method
        return make_scaling("none", factor=self.target / self.source.window)

    @cached_property
    def _written(self) -> tuple[SavedRope, dict[str, Any]]:
        if isinstance(self.source, GgufModel):
            return gguf_changes(self.source, self.scaling, self.target)
        return find_changes(self.source, self.scaling, self.target)

    @property
    def saved(self) -> SavedRope:
        """The `rope_parameters` to write, with the frequencies they give."""
        return self._written[0]

    @cached_property
    def changes(self) -> dict[str, Any]:
        """The keys that change in config.json (or its section for the language model), or in a GGUF file.

        The last are metadata and tables; None removes one.
        """
        changes = self._written[1]
        if self.remapping is None:
            return changes
        return changes | remapping_changes(self.checkpoint, self.remapping, self.target, self.layers)

    @cached_property
    @float32_on_cpu()
    def warnings(self) -> tuple[str, ...]:
        """Warnings, one sentence each."""
        if isinstance(self.source, GgufModel):
            return tuple(_gguf_warnings(self))
        return tuple(_warnings(self.source, self.scaling, self.target))

    @property
    def before(self) -> dict[str, Any]:
        """The current values of the keys in `changes`, where set."""
        return self.source.held(self.changes)

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """The new `rope_parameters`; those of the global layers if layer types differ; empty for GGUF."""
        return self._parameters_in(self.changes)

    def _parameters_in(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        return self.site.of(keys["rope_parameters"]) if "rope_parameters" in keys else {}

    @cached_property
    def engines(self) -> list[Engine]:
        """The engines' support of the extended checkpoint, and the evidence for it."""
        if self.remapping is not None:
            return remapping_support()
        if isinstance(self.source, GgufModel):
            return gguf_support()
        gguf = None if self.length_dependent else converted(self.source)
        return engine_support(
            self.rope_parameters,
            self.rope,
            self.target,
            self.model_type,
            str(self.source.whole_config.model_type),
            folds=folds_attention(self.source),
            in_gguf=gguf is not None and gguf.find_equivalent(self.scaling) is not None,
        )

    @property
    def length_dependent(self) -> bool:
        """Whether the saved frequencies depend on the sequence length."""
        return self.scaling.length_dependent or switches(self.rope_parameters)

    @cached_property
    def patched(self) -> tuple[SavedRope, dict[str, Any]]:
        """The frequencies and config.json of a patched model; at the target if they depend on the length."""
        if not self.length_dependent:
            return self._written
        scaling = self.scaling.at(self.rope, self.target)
        return find_changes(self.checkpoint, scaling, self.target, static=True)

    def apply(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the content of config.json after the extension."""
        return self.checkpoint.changed(self.changes, raw)

    def frequencies(self) -> Frequencies:
        """Return the frequencies of the patched model, bit-identical to those of the reloaded checkpoint."""
        return self.patched[0].frequencies

    @float32_on_cpu()
    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data, as in `ropepatch.json` and `ropepatch plan --json`."""
        original = self.source.original_window
        return {
            "model": self.model,
            "revision": self.revision,
            "model_type": self.model_type,
            "method": self.method.name,
            "factor": self.scaling.factor,
            "parameters": self.method.parameters(),
            "paper": self.method.paper,
            ORIGINAL: self.source.window,
            **({"original": original} if original else {}),
            "target": self.target,
            "rotary_dim": self.rope.rotary_dim,
            "rope_theta": self.rope.rope_theta,
            "already_scaled": self.rope.is_scaled,
            "layer_type": self.source.layer_type,
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

    __hash__ = None  # type: ignore[assignment]  # compared as a dictionary

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
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
        if self.source.original_window:
            stated = self.source.stated_length
            lines.append(f"original length {window}; {self.source.file_name} states {stated}")
        if self.source.layer_type:
            lines.append(f"scales RoPE in the {self.source.layer_type} layers only")
        frequencies = self.frequencies()
        if self.remapping:
            lines += ["", *distances_text(self.remapping, window, self.target)]
        else:
            lines += ["", *bands_text(self.rope, frequencies, self.scaling.factor)]
        old, new = self._parameters_in(self.before), self.rope_parameters
        lines += ["", self.source.file_name, changes_table(self.before, self.changes, old, new)]
        lines.append("engine support, rope_type, evidence")
        lines.append(engines_table(self.engines, self.remapping, new.get("rope_type", "GGUF")))
        lines += [f"warning: {printable(warning)}" for warning in self.warnings]
        return as_text(lines, WIDTH)

    def __repr__(self) -> str:
        return f"Plan({self.model}: {self.source.window} -> {self.target} tokens, {self.method.name})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def plan(
    model: str | os.PathLike[str] | PreTrainedModel | PreTrainedConfig,
    to: Length | None = None,
    *,
    method: str | Path | Scaling | Remapping = "yarn",
    original: Length | None = None,
    layers: Literal["sliding"] | None = None,
    revision: str | None = None,
    **parameters: Any,
) -> Plan:
    """Show what an extension would change, from the configuration alone.

    No weights are read. For a Hub id only config.json is downloaded.

    Args:
        model: A checkpoint folder, a Hub id, tiny, or a GGUF file.
        to: The target length in tokens, e.g. 32k, or 4x the original length. Default: that of the scaling
            file, or of the factor.
        method: A name from `ropepatch methods`, or a scaling file such as scaling.json.
        original: The original context length, if config.json contains another one: 32k for Qwen3, whose
            config.json contains 40960.
        layers: Pass sliding to scale a model in which only sliding-window layers use RoPE; the default
            refuses it.
        revision: The branch, tag or commit of a Hub id.
        **parameters: A parameter of the method; see `ropepatch methods NAME`. The factor of a scaling
            replaces target / original, and sets the target if `to` is not given. For a model that is already
            scaled with yarn, ramp defaults to rotations.

    Raises:
        RopepatchError: If the model, the target or the method does not allow it.
    """
    if not isinstance(model, str | os.PathLike):
        source: Checkpoint | GgufModel = Checkpoint.of(model, original)
    elif not is_gguf(model):
        place = model if isinstance(model, str) else Path(model)
        source = Checkpoint.find(place, revision, original=original)
    elif revision is None:
        source = GgufModel.find(os.fspath(model), original)
    else:
        name = argument("revision")
        raise RopepatchError(f"{name} does not apply to a GGUF file", hint=f"drop {name}")
    if parameters and not isinstance(method, Method):
        check_method(str(method), parameters, arguments=("to", "method", "original", "layers", "revision"))
    return check_layers(plan_method(source, method, parameters, to), layers)


def plan_method(
    source: Checkpoint | GgufModel,
    method: str | Path | Method,
    parameters: Mapping[str, Any],
    to: Length | None,
) -> Plan:
    """Plan with a method, its name, or a scaling file; see `plan`."""
    if isinstance(source, GgufModel):
        return plan_by(source, *method_for(source, method, parameters, to))
    with explained(source.raw):
        if source.own_config is None:
            check_agreement(source.raw)
        return plan_by(source, *method_for(source, method, parameters, to))


def method_for(
    source: Checkpoint | GgufModel,
    method: str | Path | Method,
    parameters: Mapping[str, Any],
    to: Length | None,
) -> tuple[Method, int]:
    """Return the method for a model, from an object, a name or a scaling file, and the target in tokens."""
    if isinstance(method, Method):
        if parameters:
            raise RopepatchError(
                f"{method!r} already has all its parameters, got also {', '.join(parameters)}",
                hint="pass them to the method itself, or give the method's name",
            )
        if to is None and isinstance(method, Scaling):
            return method, round(method.factor * source.window)
        return method, source.target(to)
    method = str(method)
    file = read_scaling(method, extra=parameters) if is_scaling_file(method) else None
    if file:
        target = file.target if to is None else source.target(to)
        file.check_model(method, source.rope, source.name, target)
        return file.scaling, target
    if to is None and "factor" in parameters:
        to = _of_factor(source.window, parameters["factor"])
    found, target = find_method(method), source.target(to)
    if (stated := source.tied_yarn) and issubclass(found, YaRN):
        parameters = {**_as_stated(stated, target / source.window), **parameters}
    return found.for_target(source.rope, target, parameters), target


def _of_factor(window: int, factor: object) -> int:
    """Return the target length that a factor gives, in tokens."""
    number = number_of(factor)
    if isinstance(number, bool) or not isinstance(number, int | float) or not 1 <= number <= MAX_NUMBER:
        raise RopepatchError(
            f"factor must be a number from 1 to {MAX_NUMBER:g}, got {shown(factor)}",
            hint="it is the target length over the original length",
        )
    return round(float(number) * window)


def _as_stated(yarn: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return the parameters of a YaRN with another factor, keeping those in its `rope_parameters`."""
    kept = {key: yarn[key] for key in ("beta_fast", "beta_slow", "truncate") if key in yarn}
    if not yarn.get("mscale"):
        return kept
    return kept | {"attention_factor": shared_temperature(factor, yarn["mscale"], yarn["mscale_all_dim"])}


@float32_on_cpu()
def plan_by(source: Checkpoint | GgufModel, method: Method, target: int) -> Plan:
    """Plan with one method, deriving its missing parameters from the target."""
    source.check_method(method)
    made = Plan(source, method.fitted(source.window, target), target)
    if made.remapping:
        check_mappable(made.checkpoint.skeleton, source.window)
    _ = made.changes
    return made


def check_layers(plan: Plan, layers: str | None) -> Plan:
    """Return the plan; raise if only sliding-window layers use RoPE, unless `layers` requests that."""
    name, sliding = argument("layers"), argument("layers", "sliding")
    if layers not in (None, "sliding"):
        raise RopepatchError(f"{name} must be sliding, got {shown(layers)}", hint=f"drop {name}")
    local = plan.source.local_rope
    if layers and (local is None or local.shared):
        raise RopepatchError(
            f"{sliding} needs a model that uses RoPE in sliding-window layers only; {plan.model} does not",
            hint=f"drop {name}",
        )
    if local and is_local_only(plan) and not layers:
        raise RopepatchError(
            f"{plan.model} uses RoPE only in its sliding-window layers ({local.layers} of {local.of}, "
            f"{local.window} tokens): no scaling is needed for a longer context",
            hint=f"{argument('method', 'none')} only writes the longer context; {sliding} scales anyway",
        )
    return plan


def is_local_only(plan: Plan) -> bool:
    """Return whether a plan scales a model in which only sliding-window layers use RoPE."""
    local = plan.source.local_rope
    return local is not None and not local.shared and plan.scaling.name != "none"


def find_method(name: str) -> type[Method]:
    """Return the scaling or position remapping of a name; an error suggests the nearest name."""
    kinds: dict[str, type[Method]] = {**METHODS, **REMAPPINGS}
    refuse_unknown([name], kinds, "method", METHODS.other_names | REMAPPINGS.other_names)
    return kinds[name]


def check_method(method: str, parameters: Collection[str], *, arguments: Collection[str] = ()) -> None:
    """Raise if ``method`` is not a method or scaling file, or lacks one of the parameters.

    Errors suggest a name among the caller's ``arguments`` if a parameter is similar.
    """
    if is_scaling_file(method):
        read_scaling(method, extra=parameters)
        return
    unknown = [name for name in parameters if name != "factor"]
    find_method(method).refuse_unknown(unknown, arguments=arguments)


def _on_top(scaling: Scaling) -> str:
    """Describe that a method composes with an earlier scaling, and with which parameters."""
    if scaling.name == "none":
        return ""
    values = [f"{key}={value}" for key, value in scaling.composing.items() if getattr(scaling, key) == value]
    parameters = f" ({', '.join(values)})" if values else ""
    return f"; {scaling.name} is applied on top of it{parameters}"


def _other_window(source: Checkpoint) -> int | None:
    """Return the other possible original length of a linear checkpoint, if config.json is ambiguous."""
    parameters = source.site.of(source.config.rope_parameters)
    factor, window = parameters.get("factor", 1), source.window
    if parameters.get("rope_type") != "linear" or source.site.layer_type or factor <= 1:
        return None  # parameters by layer type are newer than the ambiguous ones
    stated = stated_window(source.config.max_position_embeddings, factor, getattr(source.config, SEQUENCE, 0))
    return None if stated else int(factor * window)


def _made_from(source: Checkpoint, to: int) -> Iterator[str]:
    """Suggest extending the model that ropepatch made this checkpoint from, which scales RoPE only once."""
    if source.place is None or not (source.place / RECORD).is_file():
        return
    made = read_json(source.place / RECORD)
    base, window = made.get("model"), made.get(ORIGINAL)
    if isinstance(base, str) and isinstance(window, int) and window > 0:
        yield (
            f"ropepatch made it from {base} with {made.get('method')} ({RECORD}): extending {base} by "
            f"{to / window:g}x instead scales RoPE only once"
        )


def scaling_warnings(rope: Rope, scaling: Scaling, to: int) -> Iterator[str]:
    """Yield warnings about a scaling to a target length, one sentence each."""
    window = rope.original_max_position_embeddings
    if round(scaling.factor * window) != to:
        yield f"factor {scaling.factor:g} gives {scaling.factor * window:.0f} tokens, not the target of {to}"
    base = getattr(scaling, "rope_theta", None)
    if base and base <= rope.rope_theta:
        before = plain(rope.rope_theta)
        yield f"rope_theta {plain(base)} is not above the model's {before}: it extends nothing"
    if to > PUBLISHED * window:
        yield (
            f"{to} tokens are {to / window:g} times the original length; no published method exceeds "
            f"{PUBLISHED} times without training (LongRoPE 8, ChunkLlama 20): train it, or measure it first"
        )
    if to > LONGEST:
        yield (
            f"transformers computes angles in float32, which rounds positions beyond {LONGEST}: neighbouring "
            "tokens get the same angle"
        )
    if scaling.length_dependent:
        yield (
            "engines change the frequencies as the sequence grows, and cached keys keep the old ones; a "
            "static method avoids this"
        )
    if (factor := scaling.frequencies(rope, to).attention_factor) < 1:
        yield f"attention factor {factor:g} flattens attention; published methods have factors above 1"


def _warnings(source: Checkpoint, scaling: Scaling, to: int) -> Iterator[str]:
    config, rope = source.config, source.rope
    window = source.window
    doubled = _other_window(source)
    if not source.original_window and (known := trained_on(config)):
        yield (
            f"published models of this type state {config.max_position_embeddings} tokens but were trained "
            f"on {known}: {argument('original', short_length(known))} scales from there, as their authors do"
        )
    if rope.is_scaled:
        yield from _made_from(source, to)
        yield (
            f"the model is already scaled to {window} tokens{' (assumed)' * bool(doubled)}{_on_top(scaling)}"
        )
    stated = source.site.of(config.rope_parameters)
    if source.tied_yarn:
        yield (
            f"YaRN's factor changes from {stated['factor']:g} to {scaling.factor:g} (original length "
            f"{window}), and the softmax scale changes with it (mscale_all_dim)"
        )
    if stated.get("rope_type") == "dynamic" and "alpha" not in stated:
        yield f"this replaces its dynamic scaling, which starts beyond {window} tokens"
    if switches(stated):
        yield (
            f"texts of up to {stated[ORIGINAL]} tokens keep the frequencies of short_factor; the attention "
            "factor applies to all lengths"
        )
    if doubled:
        yield (
            f"max_position_embeddings {window} may be the length after linear scaling (deepseek-coder) or "
            f"before it (Vicuna, LongChat: {doubled} after it); state it in config.json: "
            f'"{SEQUENCE}": {window} or {doubled}'
        )
    if trained := dual_chunk_original(config):
        text = f"{trained} tokens are the {ORIGINAL} of {DUAL_CHUNK}, which transformers does not read"
        if scaling.name != "none":
            text += "; it is dropped: vLLM and SGLang would ignore the scaling"
        yield text
    for finding in plan_findings(source.raw):
        if finding.code != "window-raised":
            yield f"config.json: {finding.problem} (details: ropepatch doctor)"
        elif not source.original_window:
            yield f"config.json: {finding.problem} this plan computes from {window} tokens; {finding.remedy}"
    yield from scaling_warnings(rope, scaling, to)
    folder = source.place if source.revision is None else None
    if folder and not [*folder.glob("*.safetensors")] and (pickles := [*folder.glob("pytorch_model*.bin")]):
        yield f"the weights are a pickle ({pickles[0].name}), which `ropepatch extend` does not load"
    if source.rotates_partly and scaling.frequencies(rope, to).attention_factor != 1:
        yield "only part of each head rotates: the attention factor scales only that part of the logit"
    if source.is_part and "mrope_section" in stated:
        yield (
            "image rows, columns and frames use the same RoPE (mrope_section) and are scaled with the text; "
            "ropepatch measures only text"
        )
    if scaling.name != "none" and differs_by_layer(config):
        yield (
            f"head sizes differ by layer: transformers needs {ACROSS_LAYERS} for longrope here and warns "
            "about the length of its lists; linear and ntk are saved as proportional"
        )
    if source.raw.get("auto_map"):
        yield "auto_map (remote code) is dropped from config.json: transformers has this architecture"
    if quantisation := quantization_of(source.whole_config):
        try:
            check_dequantised(quantisation)
        except RopepatchError as error:
            yield f"{error}; the result is not compared with the source"
    if (local := source.local_rope) and scaling.name != "none":
        yield (
            f"{local.layers} of {local.of} layers have a sliding window of {local.window} tokens and "
            f"{'share the scaled RoPE' if local.shared else 'are the only ones with RoPE'}: scaling does not "
            "help them, and cost OLMo 3 on MMLU 64.2 -> 60.5 (vllm#43419)"
        )
    yield from remarks(config)
    window_keys = {"max_position_embeddings", config.attribute_map.get("max_position_embeddings")}
    if not window_keys & source.stated.keys():
        yield f"config.json has no max_position_embeddings: transformers' default is {window}"
    written = json.dumps(source.raw, default=str)
    if not any(key in written for key in THETA_KEYS):
        yield f"config.json has no rope_theta: transformers' default is {plain(rope.rope_theta)}"


def _gguf_warnings(plan: Plan) -> Iterator[str]:
    source = plan.gguf
    if plan.rope.is_scaled:
        yield f"the model is already scaled: {plan.method.name} is applied on top of its frequencies"
    yield from scaling_warnings(plan.rope, plan.scaling, plan.target)
    if source.sliding_window and source.architecture in GGUF_GLOBAL:
        yield "the RoPE of the sliding-window layers does not change"
    elif 0 < source.sliding_window < plan.target:
        yield (
            f"sliding_window {source.sliding_window} does not change: in layers that have it, tokens "
            "farther apart do not attend to each other"
        )
    if plan.changes.get(FREQS):
        yield f"forks of llama.cpp that ignore {FREQS} (ik_llama.cpp) silently run this file unscaled"
    yield "transformers drops every RoPE scaling when it loads a GGUF file"
