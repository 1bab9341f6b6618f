"""A gain and a phase per query head and rotary dimension pair, folded into the query weights.

A query q at m and a key k at n score the sum over pairs of Re(q_i k_i* exp(i theta_i (m - n))), q_i and k_i
complex. Multiplying q_i by a exp(i phi) only changes the rows of the query projection, so every engine
supports the checkpoint.

Shapes: H query heads of D dimensions, P rotary dimension pairs; W columns of cos and sin, one pair each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropepatch.attention.modeling_position_remapping import precise, rotate
from ropepatch.errors import RopepatchError
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.rotary import float32_on_cpu, scaled_twin
from ropepatch.scaling.rope import Frequencies
from ropepatch.settings import Queries

# The attribute of a projection with its original weights and the functions that fold and unfold
SLOT = "ropepatch_query_weights"
HINT = "use `ropepatch fit --no-queries`, which learns only frequencies"

Change = Callable[[Tensor], Tensor]


def query_layers(model: PreTrainedModel, source: Checkpoint) -> Iterator[tuple[str, Any]]:
    """Yield the decoder's attention modules whose RoPE is scaled and that have a query projection."""
    kinds = dict(enumerate(getattr(source.config, "layer_types", None) or ()))
    language_model = source.site.path.rpartition(".")[0]  # some audio encoders number their layers as well
    for path, module in model.named_modules():
        index = getattr(module, "layer_idx", None) if path.startswith(language_model) else None
        scaled = index is not None and source.site.layer_type in (None, kinds.get(index))
        if scaled and hasattr(module, "q_proj") and hasattr(module, "k_proj"):
            yield path, module


def folds_attention(source: Checkpoint) -> bool:
    """Return whether `export --fold-attention` can fold an attention factor into the query weights."""
    if source.is_quantised or source.rotates_partly:
        return False
    layers = [
        getattr(module, "q_norm", None) or module.q_proj
        for _, module in query_layers(source.skeleton, source)
    ]
    return bool(layers) and all(getattr(layer, "weight", None) is not None for layer in layers)


class QueryLayers:
    """The layers of a model into whose query weights factors can be folded.

    Args:
        model: A model with its stock RoPE; it may be on the meta device.
        source: The model's checkpoint.

    Attributes:
        modules: The attention modules by name.
        shape: The number of modules, H and P.

    Raises:
        RopepatchError: If there is no query projection whose output is rotated directly.
    """

    def __init__(self, model: PreTrainedModel, source: Checkpoint) -> None:
        self.modules = dict(query_layers(model, source))
        heads, pairs = source.config.num_attention_heads, source.rope.num_pairs
        self.shape = len(self.modules), heads, pairs
        rows = heads * source.head_dim
        try:
            if not self.modules:
                raise ValueError
            self._columns = _columns(model, source)
            for module in self.modules.values():
                if any(weight.shape[0] != rows for weight in _weights(module).values()):
                    raise ValueError
                self.multiplied(module, torch.zeros(1, rows), torch.zeros(2, heads, pairs))
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = f"query factors cannot be folded into the weights of {source.config.model_type}"
            raise RopepatchError(reason, hint=HINT) from error

    def multiplied(self, attention: nn.Module, queries: Tensor, factors: Tensor) -> Tensor:
        """Multiply unrotated queries [..., H D] by exp(factors[0] + i factors[1]), factors [2, H, P]."""
        amplitude, phase = factors[..., self._columns].to(queries.device)[:, :, None]  # [H, 1, W] each
        exact = queries.to(torch.promote_types(queries.dtype, torch.float32))
        heads = exact.reshape(-1, self.shape[1], queries.shape[-1] // self.shape[1]).transpose(0, 1)
        cos, sin = amplitude.exp() * phase.cos(), amplitude.exp() * phase.sin()
        out = rotate(attention, heads[:, None], cos.to(exact), sin.to(exact))
        return out[:, 0].transpose(0, 1).reshape(queries.shape).to(queries.dtype)

    def check_held(self, checkpoint: Checkpoint) -> None:
        """Raise if the weight files of a checkpoint have other names for the weights."""
        names = {f"{path}.{name}" for path, module in self.modules.items() for name in _weights(module)}
        if missing := names - checkpoint.weights.shapes.keys():
            raise RopepatchError(f"the weights of {checkpoint.name} contain no {min(missing)}", hint=HINT)

    def changes(self, queries: Queries) -> dict[str, tuple[Change, Change]]:
        """Return the functions that fold factors into and out of each weight [H D, ...], by its name."""
        factors = torch.tensor(queries, dtype=torch.float64)  # [layers, H, P, 2]
        if factors.shape[:-1] != self.shape:
            count = "{} layers of {} query heads with {} rotary pairs".format
            raise RopepatchError(
                f"queries are for {count(*factors.shape)}, this model has {count(*self.shape)}",
                hint="run `ropepatch fit` on this model",
            )
        logs = torch.stack((factors[..., 0].log(), factors[..., 1]), 1)  # [layers, 2, H, P]
        return {
            f"{path}.{name}": (partial(self._folded, module, own), partial(self._folded, module, -own))
            for (path, module), own in zip(self.modules.items(), logs, strict=True)
            for name in _weights(module)
        }

    def _folded(self, attention: nn.Module, factors: Tensor, weight: Tensor) -> Tensor:
        rows = precise(weight.detach())
        columns = rows[:, None] if rows.dim() == 1 else rows
        multiplied = self.multiplied(attention, columns.T, factors).T.reshape(weight.shape)
        return multiplied.to(weight.dtype).contiguous()


def _weights(attention: Any) -> dict[str, Tensor]:
    """Return the weights of a query projection by name in its attention module, also inside an adapter."""
    inside = ".base_layer" if hasattr(attention.q_proj, "base_layer") else ""
    projection = attention.q_proj.get_submodule(inside[1:])
    return {f"q_proj{inside}.{name}": weight for name, weight in projection.named_parameters(recurse=False)}


@float32_on_cpu()
def _columns(model: PreTrainedModel, source: Checkpoint) -> Tensor:
    """Return the rotary dimension pair of each column of cos and sin, [W]."""
    angles = torch.linspace(0.1, 3.0, source.rope.num_pairs)  # all different, within the range of acos
    site, stock = source.site, model.get_submodule(source.site.path)
    layer = () if site.layer_type is None else (site.layer_type,)
    table = scaled_twin(stock, site, Frequencies(angles, 1.0))
    x, one = torch.zeros(1, 1, 1, dtype=torch.float32), torch.ones(1, 1, dtype=torch.long)
    cos, _ = site.rotary_class.forward(table, x, one, *layer)
    angle: Tensor = cos[0, 0, :, None].acos()
    return (angle - angles).abs().argmin(-1)


def fold_queries(model: PreTrainedModel, source: Checkpoint, queries: Queries) -> None:
    """Fold factors into the query weights of a model with its stock RoPE."""
    changes = QueryLayers(model, source).changes(queries)
    for name in changes:
        weight = model.get_parameter(name)
        if not weight.is_floating_point() or weight.itemsize == 1:
            raise RopepatchError(
                f"{name} is quantised ({weight.dtype}): query factors cannot be folded into it", hint=HINT
            )
        if weight.is_meta:
            raise RopepatchError(
                f"{name} is offloaded: query factors cannot be folded into it",
                hint="write a checkpoint with `ropepatch extend`, and offload that",
            )
    try:
        for name, functions in changes.items():
            place, _, leaf = name.rpartition(".")
            holder: Any = model.get_submodule(place)
            weight = getattr(holder, leaf)
            folded = nn.Parameter(functions[0](weight), weight.requires_grad)
            holder.__dict__.setdefault(SLOT, {})[leaf] = (weight, *functions)
            setattr(holder, leaf, folded)
    except BaseException:
        unfold_queries(model)
        raise


def unfold_queries(model: nn.Module) -> None:
    """Restore the query weights from before `fold_queries`, or unfold them if they were trained since.

    `requires_grad` is kept.
    """
    for holder, kept in _folded_into(model):
        for leaf, (before, fold, unfold) in kept.items():
            now = getattr(holder, leaf)
            if now.is_meta:  # no data to unfold
                before = nn.Parameter(before.to(now), now.requires_grad)
            else:
                before.data = before.to(now) if torch.equal(now, fold(before).to(now)) else unfold(now)
                before.requires_grad_(now.requires_grad)
            setattr(holder, leaf, before)
        del holder.__dict__[SLOT]


@contextmanager
def unfolded(model: nn.Module) -> Iterator[None]:
    """Use the query weights from before `fold_queries` within the block, for passes without gradients."""
    now = [(holder, leaf, getattr(holder, leaf)) for holder, kept in _folded_into(model) for leaf in kept]
    try:
        for holder, leaf, weight in now:
            before = vars(holder)[SLOT][leaf][0]
            setattr(holder, leaf, nn.Parameter(before.to(weight), requires_grad=False))
        yield
    finally:
        for holder, leaf, weight in now:
            setattr(holder, leaf, weight)


def _folded_into(model: nn.Module) -> list[tuple[Any, dict[str, Any]]]:
    return [(part, vars(part)[SLOT]) for part in model.modules() if SLOT in vars(part)]
