"""Which models an encoding fits: what it must know of them, and whether their attention is LLaMA's."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropepatch.attention.interchange import SLOT, attending_here, uninterchangeable
from ropepatch.encodings.attention import NAME
from ropepatch.encodings.encoding import AttentionInputs
from ropepatch.encodings.rotary import rotated as rotated_by
from ropepatch.errors import RopepatchError
from ropepatch.model.architectures import SCALED_EMBEDDINGS
from ropepatch.model.config import text_config
from ropepatch.model.survey import Survey


def attentions_of(base: PreTrainedModel) -> list[Any]:
    """The attention modules, in the order of the layers."""
    layers = [module for module in base.modules() if hasattr(module, "layer_idx")]
    return [module for module in layers if getattr(module, "q_proj", None) is not None]


def check_model(base: PreTrainedModel, survey: Survey, attentions: list[Any]) -> None:
    """Refuse a model whose attention an encoding cannot take over.

    Raises:
        RopepatchError: With the reason.
    """
    if reason := uninterchangeable(base) or _unlike_llama(base, survey, attentions):
        raise RopepatchError(
            f"the encoding of {survey.config.model_type} cannot be swapped: {reason}",
            hint="use a LLaMA-like model: llama, mistral, qwen2, qwen3",
        )


def _unlike_llama(base: PreTrainedModel, survey: Survey, attentions: list[Any]) -> str | None:
    """Why an encoding cannot stand in for the rope of a model, or None."""
    if survey.rotates_partly:
        return "only a part of each head rotates"
    if not attentions:
        return "it has no attention with a q_proj"
    projection = attentions[0].q_proj
    if not hasattr(base.get_submodule(survey.site.path.rpartition(".")[0]), "layers"):
        return "its layers do not stand beside its rotary module"
    if base.config._attn_implementation.startswith("ropepatch_"):
        return "it is within packed attention"
    if projection.weight.is_meta and hasattr(projection, "_hf_hook"):
        return "its weights are offloaded"
    if survey.site.layer_type is not None:
        return "its rope differs by layer type"
    if not _turns_halves(attentions[0], survey):
        return "its rotary pairs are laid out otherwise"
    with attending_here(base, NAME):
        if not all(_turns_last(attention, survey, base.dtype) for attention in attentions):
            return "some layers do not rotate, or normalise after it"
    return None


def check_embeddings(base: PreTrainedModel) -> None:
    """Refuse a model that scales its embeddings before its first layer, where absolute positions are added.

    Raises:
        RopepatchError: With its model type.
    """
    config: Any = text_config(base.config)
    multiplied = getattr(config, "embedding_multiplier", None) not in (None, 1)
    scaled = multiplied or hasattr(base.get_input_embeddings(), "embed_scale")
    if scaled or config.model_type in SCALED_EMBEDDINGS:
        raise RopepatchError(
            f"{config.model_type} scales its embeddings: absolute positions would have another weight in it",
            hint="use a relative or rotary encoding, or a model of llama's type",
        )


def _turns_halves(attention: nn.Module, survey: Survey) -> bool:
    """Whether the model turns the pairs (x_i, x_(i + D/2)), as the encodings here do."""
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        return False
    x, angles = _draw(survey.head_dim, survey)
    try:
        rotated, _ = apply(x, x, *_tables(angles))
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False
    return torch.equal(rotated, rotated_by(x, angles))


@torch.no_grad()
def _turns_last(attention: Any, survey: Survey, dtype: torch.dtype) -> bool:
    """Whether rotation is the last that happens to queries and keys, read off three like tokens."""
    device = attention.q_proj.weight.device
    tokens, angles = _draw(survey.config.hidden_size, survey)
    tokens = tokens[0, :, :1].expand(1, 3, -1)
    angles[:, 0] = 0.0
    rotated: list[Tensor] = []

    def encoded(inputs: AttentionInputs) -> AttentionInputs:
        rotated.extend((inputs.query, inputs.key))
        return inputs

    modes = [(part, part.training) for part in attention.modules()]
    attention.__dict__[SLOT] = SimpleNamespace(encoded=encoded, wants_weights=False)
    try:
        attention.eval()(
            hidden_states=tokens.to(device, dtype),
            position_embeddings=[table.to(device, dtype) for table in _tables(angles)],
            attention_mask=None,
        )
    except (TypeError, KeyError):
        return False
    finally:
        del attention.__dict__[SLOT]
        for part, mode in modes:
            part.training = mode
    return len(rotated) > 0 and all(
        x.is_meta
        or torch.allclose(rotated_by(x[:, :, :1].expand_as(x), angles.to(x.device)), x, rtol=1e-2, atol=1e-2)
        for x in rotated
    )


def _draw(width: int, survey: Survey) -> tuple[Tensor, Tensor]:
    """Random vectors [1, 1, 3, width] and angles [1, 3, D/2]."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 3, width, generator=draw, dtype=torch.float32)
    return x, torch.randn(1, 3, survey.head_dim // 2, generator=draw, dtype=torch.float32)


def _tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as a rotary module returns them, [1, 3, D]."""
    both = torch.cat((angles, angles), -1)
    return both.cos(), both.sin()
