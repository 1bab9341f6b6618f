"""Which layers use a model's RoPE, determined by running one of each kind on the meta device."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ropepatch.model.config import GLOBAL_LAYERS, text_config
from ropepatch.model.rotary import RotarySite

LOCAL_LAYERS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
TABLES = "position_embeddings"  # transformers' argument with the outputs of a rotary module


class LocalRope(NamedTuple):
    """The local layers (sliding or chunked attention) that use the one RoPE of the model.

    Args:
        layers: Their number.
        of: The number of all layers.
        window: The sliding window or chunk, in tokens.
        shared: Whether global-attention layers rotate, too.
    """

    layers: int
    of: int
    window: int
    shared: bool


def local_rope(skeleton: PreTrainedModel, site: RotarySite) -> LocalRope | None:
    """Find out whether local layers use the RoPE that would be scaled.

    Args:
        skeleton: The model on the meta device; its weights no longer require gradients.
        site: Its rotary module.

    Returns:
        None if they do not, or have another RoPE, or there is no global attention.
    """
    config: Any = text_config(skeleton.config)
    kinds = getattr(config, "layer_types", None) or []
    local = next((kind for kind in LOCAL_LAYERS if kind in kinds), None)
    if site.layer_type is not None or local is None or GLOBAL_LAYERS not in kinds:
        return None
    rotating = _rotating(skeleton.requires_grad_(False), skeleton.get_submodule(site.path), config)
    if local not in rotating:
        return None
    window = getattr(config, LOCAL_LAYERS[local])
    return LocalRope(kinds.count(local), len(kinds), window, GLOBAL_LAYERS in rotating)


@torch.inference_mode(False)
@torch.enable_grad()
def _rotating(skeleton: PreTrainedModel, rotary: nn.Module, config: Any) -> set[str]:
    """Return the types of the layers whose output depends on the rotary module."""
    x = torch.zeros(1, 2, config.hidden_size, dtype=skeleton.dtype)
    # dynamic scalings compare position values, which meta tensors do not have
    tables = copy.deepcopy(rotary).to_empty(device="cpu")(x, torch.zeros(1, 2, dtype=torch.long))
    x = x.to("meta")
    given_tables = tables if isinstance(tables, tuple) else (tables,)
    traced = [table.detach().to("meta").requires_grad_() for table in given_tables]
    given = {"hidden_states": x, TABLES: tuple(traced) if isinstance(tables, tuple) else traced[0]}
    rotating: set[str] = set()
    for kind, layer in _attention(skeleton, config.layer_types):
        names = _arguments(type(layer).forward)
        if kind not in rotating:
            out = layer(**dict.fromkeys(names) | {name: given[name] for name in given if name in names})
            rotating |= {kind} if (out[0] if isinstance(out, tuple) else out).requires_grad else set()
    return rotating


def _attention(skeleton: nn.Module, kinds: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield one attention module for each layer type and setting, with the layer type."""
    seen = set()
    for module in skeleton.modules():
        index = getattr(module, "layer_idx", None)
        if index is None or TABLES not in _arguments(type(module).forward):
            continue
        if any(TABLES in _arguments(type(part).forward) for part in module.modules() if part is not module):
            continue  # a decoder layer that contains the attention module
        plain = (item for item in vars(module).items() if isinstance(item[1], int | float | str | None))
        setting = kinds[index], type(module), *(item for item in plain if item[0] != "layer_idx")
        if setting not in seen:
            seen.add(setting)
            yield kinds[index], module


@functools.cache
def _arguments(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the required arguments of a module, and TABLES if it accepts it."""
    parameters = inspect.signature(forward).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return (*needed[1:], *(TABLES for p in parameters if p.name == TABLES and p.name not in needed))
