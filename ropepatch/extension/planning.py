"""Plan an extension from the configuration only."""

from __future__ import annotations

import html
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedConfig, PreTrainedModel

from ropepatch.attention import REMAPPINGS, Remapping
from ropepatch.doctor.rules import check_agreement, explained
from ropepatch.errors import RopepatchError, argument
from ropepatch.extension.changes import Planned, Source
from ropepatch.extension.engines import Engine, support_of
from ropepatch.extension.serving import Serving, serving
from ropepatch.extension.text import plan_text
from ropepatch.extension.warnings import warnings_of
from ropepatch.files import is_gguf, json_text
from ropepatch.model.checkpoint import Checkpoint, InMemory
from ropepatch.model.config import ORIGINAL
from ropepatch.model.gguf import GgufModel
from ropepatch.scaling import METHODS, Scaling, YaRN
from ropepatch.scaling.file import is_scaling_file, read_scaling
from ropepatch.scaling.method import Method
from ropepatch.scaling.ramps import shared_temperature
from ropepatch.settings import (
    MAX_NUMBER,
    Length,
    number_of,
    refuse_unknown,
    shown,
)


@dataclass(frozen=True, repr=False, eq=False)
class Plan(Planned):
    """The plan of one extension, with what is said about it.

    Args:
        source: The checkpoint, the model in memory or the GGUF file to extend.
        method: A RoPE scaling or a position remapping, with all its parameters.
        target: The target length, in tokens.
    """

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Warnings, one sentence each."""
        return tuple(warnings_of(self))

    @cached_property
    def engines(self) -> list[Engine]:
        """The engines' support of the extended model, and the evidence for it."""
        return support_of(self.method, self)

    def serving(self, engine: str) -> Serving:
        """Return how to serve the plan with vllm, sglang, llama.cpp, ollama or mlx-lm."""
        return serving(self, engine)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data, as in `ropepatch.json` and `ropepatch plan --json`."""
        config = self.source.config
        original, rope, frequencies = (
            config.original_window,
            config.rope,
            self.frequencies(),
        )
        return {
            "model": self.source.name,
            "revision": self.source.revision,
            "model_type": config.model_type,
            "method": self.method.name,
            "factor": self.factor,
            "parameters": self.method.parameters(),
            "paper": self.method.paper,
            ORIGINAL: config.window,
            **({"original": original} if original else {}),
            "target": self.target,
            "rotary_dim": rope.rotary_dim,
            "rope_theta": rope.rope_theta,
            "already_scaled": rope.is_scaled,
            "layer_type": config.layer_type,
            "attention_factor_before": rope.carried_attention_factor,
            "attention_factor": frequencies.attention_factor,
            "inv_freq_before": rope.inv_freq().tolist(),
            "inv_freq": frequencies.inv_freq.tolist(),
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

    def __str__(self) -> str:
        return plan_text(self, self.engines, self.warnings)

    def __repr__(self) -> str:
        window = self.source.config.window
        return f"Plan({self.source.name}: {window} -> {self.target} tokens, {self.method.name})"

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
    if parameters and not isinstance(method, Method):
        check_method(
            str(method),
            parameters,
            arguments=("to", "method", "original", "layers", "revision"),
        )
    source = find_source(model, revision, original)
    return check_layers(plan_method(source, method, parameters, to), layers)


def find_source(
    model: str | os.PathLike[str] | PreTrainedModel | PreTrainedConfig,
    revision: str | None = None,
    original: Length | None = None,
) -> Source:
    """Return what a user names to be extended: a folder, a Hub id, a GGUF file, or a model in memory."""
    if not isinstance(model, str | os.PathLike):
        return InMemory.of(model, original)
    if not is_gguf(model):
        place = model if isinstance(model, str) else Path(model)
        return Checkpoint.find(place, revision, original=original)
    if revision is not None:
        name = argument("revision")
        raise RopepatchError(
            f"{name} does not apply to a GGUF file", hint=f"drop {name}"
        )
    return GgufModel.find(os.fspath(model), original)


def plan_method(
    source: Source,
    method: str | Path | Method,
    parameters: Mapping[str, Any],
    to: Length | None,
) -> Plan:
    """Plan with a method, its name, or a scaling file; see `plan`."""
    if isinstance(source, GgufModel):
        return plan_by(source, *method_for(source, method, parameters, to))
    config = source.config
    try:
        if config.custom is None:
            check_agreement(config)
        return plan_by(source, *method_for(source, method, parameters, to))
    except RopepatchError as error:
        reason = explained(config) if error.__cause__ is not None else None
        if reason is None:
            raise
        raise reason from error


def method_for(
    source: Source,
    method: str | Path | Method,
    parameters: Mapping[str, Any],
    to: Length | None,
) -> tuple[Method, int]:
    """Return the method for a model, from an object, a name or a scaling file, and the target in tokens."""
    config = source.config
    if isinstance(method, Method):
        if parameters:
            raise RopepatchError(
                f"{method!r} already has all its parameters, got also {', '.join(parameters)}",
                hint="pass them to the method itself, or give the method's name",
            )
        if to is None and isinstance(method, Scaling):
            return method, round(method.factor * config.window)
        return method, config.target(to, source.name)
    method = str(method)
    file = read_scaling(method, extra=parameters) if is_scaling_file(method) else None
    if file:
        target = file.target if to is None else config.target(to, source.name)
        file.check_model(method, config.rope, source.name, target)
        return file.scaling, target
    if to is None and "factor" in parameters:
        to = _of_factor(config.window, parameters["factor"])
    found, target = find_method(method), config.target(to, source.name)
    if (stated := config.tied_yarn) and issubclass(found, YaRN):
        parameters = {**_as_stated(stated, target / config.window), **parameters}
    return found.for_target(config.rope, target, parameters), target


def _of_factor(window: int, factor: object) -> int:
    """Return the target length that a factor gives, in tokens."""
    number = number_of(factor)
    if (
        isinstance(number, bool)
        or not isinstance(number, int | float)
        or not 1 <= number <= MAX_NUMBER
    ):
        raise RopepatchError(
            f"factor must be a number from 1 to {MAX_NUMBER:g}, got {shown(factor)}",
            hint="it is the target length over the original length",
        )
    return round(float(number) * window)


def _as_stated(yarn: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return the parameters of a YaRN with another factor, keeping those in its `rope_parameters`."""
    kept = {
        key: yarn[key] for key in ("beta_fast", "beta_slow", "truncate") if key in yarn
    }
    if not yarn.get("mscale"):
        return kept
    return kept | {
        "attention_factor": shared_temperature(
            factor, yarn["mscale"], yarn["mscale_all_dim"]
        )
    }


def plan_by(source: Source, method: Method, target: int) -> Plan:
    """Plan with one method, deriving its missing parameters from the target."""
    made = Plan(source, method.fitted(source.config.window, target), target)
    _ = made.change
    return made


def check_layers(plan: Plan, layers: str | None) -> Plan:
    """Return the plan; raise if only sliding-window layers use RoPE, unless `layers` requests that."""
    local = plan.source.config.local_rope
    if layers not in (None, "sliding"):
        name = argument("layers")
        raise RopepatchError(
            f"{name} must be sliding, got {shown(layers)}", hint=f"drop {name}"
        )
    if layers and (local is None or local.shared):
        raise RopepatchError(
            f"{argument('layers', 'sliding')} needs a model that uses RoPE in sliding-window layers only; "
            f"{plan.source.name} does not",
            hint=f"drop {argument('layers')}",
        )
    if local and plan.scales_only_local and not layers:
        raise RopepatchError(
            f"{plan.source.name} uses RoPE only in its sliding-window layers ({local.layers} of {local.of}, "
            f"{local.window} tokens): no scaling is needed for a longer context",
            hint=f"{argument('method', 'none')} only writes the longer context; "
            f"{argument('layers', 'sliding')} scales anyway",
        )
    return plan


def find_method(name: str) -> type[Method]:
    """Return the scaling or position remapping of a name; an error suggests the nearest name."""
    kinds: dict[str, type[Method]] = {**METHODS, **REMAPPINGS}
    refuse_unknown(
        [name], kinds, "method", METHODS.other_names | REMAPPINGS.other_names
    )
    return kinds[name]


def check_method(
    method: str, parameters: Collection[str], *, arguments: Collection[str] = ()
) -> None:
    """Raise if ``method`` is not a method or scaling file, or lacks one of the parameters.

    Errors suggest a name among the caller's ``arguments`` if a parameter is similar.
    """
    if is_scaling_file(method):
        read_scaling(method, extra=parameters)
        return
    unknown = [name for name in parameters if name != "factor"]
    find_method(method).refuse_unknown(unknown, arguments=arguments)
