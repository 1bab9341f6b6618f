"""Warnings about a plan, one sentence each."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ropepatch.doctor.rules import THETA_KEYS, plan_findings
from ropepatch.errors import RopepatchError, argument, plain
from ropepatch.extension.changes import ACROSS_LAYERS, Planned
from ropepatch.files import read_json
from ropepatch.model.architectures import GGUF_GLOBAL, remarks, trained_on
from ropepatch.model.checkpoint import Checkpoint, InMemory
from ropepatch.model.config import (
    DUAL_CHUNK,
    ORIGINAL,
    SEQUENCE,
    Config,
    check_dequantised,
    differs_by_layer,
    dual_chunk_original,
    quantization_of,
    stated_window,
    switches,
)
from ropepatch.model.gguf import FREQS, GgufModel
from ropepatch.model.record_file import FILE as RECORD
from ropepatch.scaling.rope import LONGEST, Rope
from ropepatch.settings import short_length

PUBLISHED = 32  # largest published factor of a RoPE scaling without training


def warnings_of(plan: Planned) -> Iterator[str]:
    """Yield the warnings of a plan."""
    if isinstance(plan.source, GgufModel):
        yield from _of_gguf(plan, plan.source)
        return
    config = plan.source.config
    doubled = _other_window(config)
    yield from _of_lengths(plan, config, doubled)
    yield from _of_earlier_scaling(plan, config, doubled)
    yield from _of_config(config)
    yield from _length_warnings(plan, config.rope)
    yield from _of_weights(plan.source)
    yield from _of_architecture(plan, config)
    yield from _of_defaults(config)


def _length_warnings(plan: Planned, rope: Rope) -> Iterator[str]:
    """Yield warnings about a method and its target length."""
    method, target, window = (
        plan.method,
        plan.target,
        rope.original_max_position_embeddings,
    )
    factor = method.factor_for(window, target)
    if round(factor * window) != target:
        yield f"factor {factor:g} gives {factor * window:.0f} tokens, not the target of {target}"
    base = getattr(method, "rope_theta", None)
    if base and base <= rope.rope_theta:
        before = plain(rope.rope_theta)
        yield f"rope_theta {plain(base)} is not above the model's {before}: it extends nothing"
    if target > PUBLISHED * window:
        yield (
            f"{target} tokens are {target / window:g} times the original length; no published method exceeds "
            f"{PUBLISHED} times without training (LongRoPE 8, ChunkLlama 20): train it, or measure it first"
        )
    if target > LONGEST:
        yield (
            f"transformers computes angles in float32, which rounds positions beyond {LONGEST}: neighbouring "
            "tokens get the same angle"
        )
    if method.length_dependent:
        yield (
            "engines change the frequencies as the sequence grows, and cached keys keep the old ones; a "
            "static method avoids this"
        )
    attention_factor = plan.change.frequencies.attention_factor
    if attention_factor < 1:
        yield (
            f"attention factor {attention_factor:g} flattens attention; published methods have factors "
            "above 1"
        )


def _of_lengths(plan: Planned, config: Config, doubled: int | None) -> Iterator[str]:
    """Warn of an original length that may be another."""
    known = None if config.original_window else trained_on(config.text)
    if known:
        yield (
            f"published models of this type state {config.stated_length} tokens but were trained "
            f"on {known}: {argument('original', short_length(known))} scales from there, as their authors do"
        )
    if doubled:
        window = config.window
        yield (
            f"max_position_embeddings {window} may be the length after linear scaling (deepseek-coder) or "
            f"before it (Vicuna, LongChat: {doubled} after it); state it in config.json: "
            f'"{SEQUENCE}": {window} or {doubled}'
        )
    if trained := dual_chunk_original(config.text):
        text = f"{trained} tokens are the {ORIGINAL} of {DUAL_CHUNK}, which transformers does not read"
        if plan.method.changes_frequencies:
            text += "; it is dropped: vLLM and SGLang would ignore the scaling"
        yield text


def _other_window(config: Config) -> int | None:
    """Return the other possible original length of a linear checkpoint, if config.json is ambiguous."""
    parameters = config.rope_parameters
    factor, window = parameters.get("factor", 1), config.window
    if parameters.get("rope_type") != "linear" or config.layer_type or factor <= 1:
        return None  # parameters by layer type are newer than the ambiguous ones
    stated = stated_window(
        config.stated_length, factor, getattr(config.text, SEQUENCE, 0)
    )
    return None if stated else int(factor * window)


def _of_earlier_scaling(
    plan: Planned, config: Config, doubled: int | None
) -> Iterator[str]:
    """Warn of a model whose RoPE is scaled already."""
    window, stated = config.window, config.rope_parameters
    if config.rope.is_scaled:
        yield from _made_from(plan)
        assumed = " (assumed)" if doubled else ""
        yield f"the model is already scaled to {window} tokens{assumed}{plan.method.on_top()}"
    if config.tied_yarn:
        factor = plan.method.factor_for(window, plan.target)
        yield (
            f"YaRN's factor changes from {stated['factor']:g} to {factor:g} (original length "
            f"{window}), and the softmax scale changes with it (mscale_all_dim)"
        )
    if stated.get("rope_type") == "dynamic" and "alpha" not in stated:
        yield f"this replaces its dynamic scaling, which starts beyond {window} tokens"
    if switches(stated):
        yield (
            f"texts of up to {stated[ORIGINAL]} tokens keep the frequencies of short_factor; the attention "
            "factor applies to all lengths"
        )


def _made_from(plan: Planned) -> Iterator[str]:
    """Suggest extending the model that ropepatch made this checkpoint from, which scales RoPE only once."""
    source = plan.source
    if not isinstance(source, Checkpoint) or not (source.folder / RECORD).is_file():
        return
    made = read_json(source.folder / RECORD)
    base, window = made.get("model"), made.get(ORIGINAL)
    if isinstance(base, str) and isinstance(window, int) and window > 0:
        yield (
            f"ropepatch made it from {base} with {made.get('method')} ({RECORD}): extending {base} by "
            f"{plan.target / window:g}x instead scales RoPE only once"
        )


def _of_config(config: Config) -> Iterator[str]:
    """Warn of what the rules of `ropepatch doctor` find."""
    for finding in plan_findings(config):
        if finding.code != "window-raised":
            yield f"config.json: {finding.problem} (details: ropepatch doctor)"
        elif not config.original_window:
            yield (
                f"config.json: {finding.problem} this plan computes from {config.window} tokens; "
                f"{finding.remedy}"
            )


def _of_weights(source: Checkpoint | InMemory) -> Iterator[str]:
    """Warn of weights that cannot be loaded or compared."""
    if isinstance(source, Checkpoint) and source.revision is None:
        pickles = sorted(source.folder.glob("pytorch_model*.bin"))
        if pickles and not any(source.folder.glob("*.safetensors")):
            yield f"the weights are a pickle ({pickles[0].name}), which `ropepatch extend` does not load"
    if quantisation := quantization_of(source.config.whole):
        try:
            check_dequantised(quantisation)
        except RopepatchError as error:
            yield f"{error}; the result is not compared with the source"


def _of_architecture(plan: Planned, config: Config) -> Iterator[str]:
    """Warn of what the architecture does with the change."""
    if plan.change.frequencies.attention_factor != 1 and config.rotates_partly:
        yield "only part of each head rotates: the attention factor scales only that part of the logit"
    if config.is_part and "mrope_section" in config.rope_parameters:
        yield (
            "image rows, columns and frames use the same RoPE (mrope_section) and are scaled with the text; "
            "ropepatch measures only text"
        )
    if config.raw.get("auto_map"):
        yield "auto_map (remote code) is dropped from config.json: transformers has this architecture"
    local = config.local_rope
    if plan.method.changes_frequencies and differs_by_layer(config.text):
        yield (
            f"head sizes differ by layer: transformers needs {ACROSS_LAYERS} for longrope here and warns "
            "about the length of its lists; linear and ntk are saved as proportional"
        )
    if plan.method.changes_frequencies and local:
        shared = (
            "share the scaled RoPE" if local.shared else "are the only ones with RoPE"
        )
        yield (
            f"{local.layers} of {local.of} layers have a sliding window of {local.window} tokens and "
            f"{shared}: scaling does not help them, and cost OLMo 3 on MMLU 64.2 -> 60.5 (vllm#43419)"
        )
    yield from remarks(config.text)


def _of_defaults(config: Config) -> Iterator[str]:
    """Warn of lengths and bases that config.json leaves to transformers."""
    renamed = config.text.attribute_map.get("max_position_embeddings")
    if not {"max_position_embeddings", renamed} & config.stated.keys():
        yield f"config.json has no max_position_embeddings: transformers' default is {config.window}"
    written = json.dumps(config.raw, default=str)
    if not any(key in written for key in THETA_KEYS):
        yield f"config.json has no rope_theta: transformers' default is {plain(config.rope.rope_theta)}"


def _of_gguf(plan: Planned, model: GgufModel) -> Iterator[str]:
    if model.rope.is_scaled:
        yield f"the model is already scaled: {plan.method.name} is applied on top of its frequencies"
    yield from _length_warnings(plan, model.rope)
    if model.sliding_window and model.architecture in GGUF_GLOBAL:
        yield "the RoPE of the sliding-window layers does not change"
    elif 0 < model.sliding_window < plan.target:
        yield (
            f"sliding_window {model.sliding_window} does not change: in layers that have it, tokens "
            "farther apart do not attend to each other"
        )
    if plan.change.tables.get(FREQS):
        yield f"forks of llama.cpp that ignore {FREQS} (ik_llama.cpp) silently run this file unscaled"
    yield "transformers drops every RoPE scaling when it loads a GGUF file"
