"""Plan an extension from the configuration only."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ropepatch.attention import Remapping, find_method
from ropepatch.doctor.rules import THETA_KEYS, check_agreement, plan_findings
from ropepatch.errors import RopepatchError, argument, plain
from ropepatch.extension.changes import Planned, Source
from ropepatch.extension.engines import Engine, support_of
from ropepatch.extension.text import plan_text
from ropepatch.files import is_gguf
from ropepatch.model.architectures import GGUF_GLOBAL, remarks, trained_on
from ropepatch.model.checkpoint import Checkpoint, InMemory
from ropepatch.model.config import (
    DUAL_CHUNK,
    ORIGINAL,
    Config,
    dual_chunk_original,
    switches,
)
from ropepatch.model.gguf import GgufModel
from ropepatch.scaling import Scaling, YaRN
from ropepatch.scaling.ramps import shared_temperature
from ropepatch.scaling.rope import Method, Rope
from ropepatch.settings import Length, short_length


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
        return support_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data, as in `ropepatch.json` and `ropepatch plan --json`."""
        source, config, rope = self.source, self.source.config, self.source.config.rope
        original, frequencies = config.original_window, self.frequencies()
        return {
            "model": source.name,
            "revision": source.revision,
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

    def __str__(self) -> str:
        return plan_text(self, self.engines, self.warnings)

    __repr__ = __str__


def plan(
    model: str | os.PathLike[str] | PreTrainedModel | PreTrainedConfig,
    to: Length | None = None,
    *,
    method: str | Scaling | Remapping = "yarn",
    original: Length | None = None,
    revision: str | None = None,
    **parameters: Any,
) -> Plan:
    """Show what an extension would change, from the configuration alone.

    No weights are read. For a Hub id only config.json is downloaded.

    Args:
        model: A checkpoint folder, a Hub id, tiny, or a GGUF file.
        to: The target length in tokens, e.g. 32k, or 4x the original length. Default: that of the factor.
        method: A name from `ropepatch methods`.
        original: The original context length, if config.json contains another one: 32k for Qwen3, whose
            config.json contains 40960.
        revision: The branch, tag or commit of a Hub id.
        **parameters: A parameter of the method; see `ropepatch methods NAME`. The factor of a scaling
            replaces target / original, and sets the target if `to` is not given. For a model that is already
            scaled with yarn, ramp defaults to rotations.

    Raises:
        RopepatchError: If the model, the target or the method does not allow it.
    """
    if parameters and not isinstance(method, Method):
        check_method(method, parameters)
    source: Source
    if not isinstance(model, str | os.PathLike):
        source = InMemory.of(model, original)
    elif not is_gguf(model):
        source = Checkpoint.find(model, revision, original=original)
    elif revision is None:
        source = GgufModel.find(os.fspath(model), original)
    else:
        name = argument("revision")
        raise RopepatchError(
            f"{name} does not apply to a GGUF file", hint=f"drop {name}"
        )
    planned = plan_method(source, method, parameters, to)
    check_global(planned)
    return planned


def plan_method(
    source: Source,
    method: str | Method,
    parameters: Mapping[str, Any],
    to: Length | None,
) -> Plan:
    """Plan with a method or its name; see `plan`."""
    config = source.config
    if isinstance(config, Config) and config.custom is None:
        check_agreement(config)
    if isinstance(method, Method):
        if parameters:
            raise RopepatchError(
                f"{method!r} already has all its parameters, got also {', '.join(parameters)}",
                hint="pass them to the method itself, or give the method's name",
            )
        if to is None and isinstance(method, Scaling):
            return plan_by(source, method, round(method.factor * config.window))
        return plan_by(source, method, config.target(to, source.name))
    found = find_method(method)
    if to is None and "factor" in parameters:
        factor = found(**parameters).factor_for(config.window, config.window)
        to = round(factor * config.window)
    target = config.target(to, source.name)
    if (stated := config.tied_yarn) and issubclass(found, YaRN):
        parameters = {**_as_stated(stated, target / config.window), **parameters}
    made = found.for_target(config.rope, target, parameters)
    return plan_by(source, made, target)


def _as_stated(yarn: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return the parameters of a YaRN with another factor, keeping those in its `rope_parameters`."""
    names = "beta_fast", "beta_slow", "truncate"
    kept = {key: yarn[key] for key in names if key in yarn}
    if mscale := yarn.get("mscale"):
        of_softmax = yarn["mscale_all_dim"]
        kept["attention_factor"] = shared_temperature(factor, mscale, of_softmax)
    return kept


def plan_by(source: Source, method: Method, target: int) -> Plan:
    """Plan with one method, deriving its missing parameters from the target."""
    made = Plan(source, method.fitted(source.config.window, target), target)
    _ = made.change
    return made


def check_bare(*given: object) -> None:
    """Raise a `RopepatchError` for arguments beside a plan, which already sets them."""
    if any(value not in (None, {}) for value in given):
        raise RopepatchError(
            "a plan already sets target, method, parameters, original and revision",
            hint="pass only the plan, or the model without a plan",
        )


def check_global(plan: Planned) -> None:
    """Raise if a plan scales a model in which only sliding-window layers use RoPE."""
    local = plan.source.config.local_rope
    if local and not local.shared and plan.method.changes_frequencies:
        raise RopepatchError(
            f"{plan.source.name} uses RoPE only in its sliding-window layers ({local.layers} of {local.of}, "
            f"{local.window} tokens): no scaling is needed for a longer context",
            hint=f"{argument('method', 'none')} only writes the longer context",
        )


def check_method(method: str, parameters: Collection[str]) -> None:
    """Raise if there is no such method, or it lacks one of the parameters."""
    unknown = [name for name in parameters if name != "factor"]
    find_method(method).refuse_unknown(unknown)


PUBLISHED = 32  # largest published factor of a RoPE scaling without training


def warnings_of(plan: Planned) -> Iterator[str]:
    """Yield the warnings of a plan."""
    if isinstance(plan.source, GgufModel):
        yield from _of_gguf(plan, plan.source)
        return
    config = plan.source.config
    yield from _of_original_length(plan, config)
    yield from _of_earlier_scaling(plan, config)
    for finding in plan_findings(config):
        problem = f"config.json: {finding.problem}"
        if finding.code not in ("window-raised", "linear-multiplied"):
            yield f"{problem} (details: ropepatch doctor)"
        # RoPE parameters by layer type are newer than the ambiguous ones
        elif not config.original_window and not config.layer_type:
            yield f"{problem}; this plan computes from {config.window} tokens; {finding.remedy}"
    yield from _of_target(plan, config.rope)
    yield from _of_architecture(plan, config)
    written = json.dumps(config.raw, default=str)
    if config.has_rope and not any(key in written for key in THETA_KEYS):
        yield f"config.json has no rope_theta: transformers' default is {plain(config.rope.rope_theta)}"


def _of_target(plan: Planned, rope: Rope) -> Iterator[str]:
    """Warn of what the method does for the target length."""
    method, target = plan.method, plan.target
    window = rope.original_max_position_embeddings
    factor = method.factor_for(window, target)
    if round(factor * window) != target:
        yield f"factor {factor:g} gives {factor * window:.0f} tokens, not the target of {target}"
    if target > PUBLISHED * window:
        yield (
            f"{target} tokens are {target / window:g} times the original length; no published method exceeds "
            f"{PUBLISHED} times without training (LongRoPE 8, ChunkLlama 20): train it, or measure it first"
        )
    if method.length_dependent:
        yield (
            "engines change the frequencies as the sequence grows, and cached keys keep the old ones; a "
            "static method avoids this"
        )


def _of_original_length(plan: Planned, config: Config) -> Iterator[str]:
    """Warn of an original length that may be another."""
    known = None if config.original_window else trained_on(config.text)
    if known:
        yield (
            f"published models of this type state {config.stated_length} tokens but were trained "
            f"on {known}: {argument('original', short_length(known))} scales from there, as their authors do"
        )
    if trained := dual_chunk_original(config.text):
        text = f"{trained} tokens are the {ORIGINAL} of {DUAL_CHUNK}, which transformers does not read"
        if plan.method.changes_frequencies:
            text += "; it is dropped: vLLM and SGLang would ignore the scaling"
        yield text


def _of_earlier_scaling(plan: Planned, config: Config) -> Iterator[str]:
    """Warn of a model whose RoPE is scaled already."""
    window, stated = config.window, config.rope_parameters
    if config.rope.is_scaled:
        yield f"the model is already scaled to {window} tokens{plan.method.on_top()}"
    if switches(stated):
        yield (
            f"texts of up to {stated[ORIGINAL]} tokens keep the frequencies of short_factor; the attention "
            "factor applies to all lengths"
        )


def _of_architecture(plan: Planned, config: Config) -> Iterator[str]:
    """Warn of what the architecture does with the change."""
    if plan.change.frequencies.attention_factor != 1 and config.rotates_partly:
        yield "only part of each head rotates: the attention factor scales only that part of the logit"
    if config.is_part and "mrope_section" in config.rope_parameters:
        yield (
            "image rows, columns and frames use the same RoPE (mrope_section) and are scaled with the text; "
            "ropepatch measures only text"
        )
    if other := config.stand_in:
        code = other.unloaded or "its remote code is kept, and not run"
        yield f"{code}: only config.json changes, read as {other.model_type}"
        if other.is_draft and config.original is None:
            yield (
                f"a draft runs at the positions of its target: unless that is extended from {config.window} "
                f"tokens, too, name its original length with {argument('original')}"
            )
    elif config.raw.get("auto_map"):
        yield "auto_map (remote code) is dropped from config.json: transformers has this architecture"
    local = config.local_rope
    if plan.method.changes_frequencies and local:
        yield (
            f"{local.layers} of {local.of} layers have a sliding window of {local.window} tokens and share "
            "the scaled RoPE: scaling does not help them, and cost OLMo 3 on MMLU 64.2 -> 60.5 (vllm#43419)"
        )
    yield from remarks(config.text)


def _of_gguf(plan: Planned, model: GgufModel) -> Iterator[str]:
    if model.rope.is_scaled:
        yield f"the model is already scaled: {plan.method.name} is applied on top of its frequencies"
    yield from _of_target(plan, model.rope)
    if model.sliding_window and model.architecture in GGUF_GLOBAL:
        yield "the RoPE of the sliding-window layers does not change"
    elif 0 < model.sliding_window < plan.target:
        yield (
            f"sliding_window {model.sliding_window} does not change: in layers that have it, tokens "
            "farther apart do not attend to each other"
        )
    if (rope := model.gguf_rope).switches:
        yield (
            f"a llama-server with a context of up to {rope.original} tokens a slot uses rope_factors_short, "
            "which does not change, any other rope_factors_long; the attention factor applies to both"
        )
    yield "transformers drops every RoPE scaling when it loads a GGUF file"
