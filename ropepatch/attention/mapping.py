"""Put an attention map into one model in memory, and take it out again."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ropepatch.attention.attention_map import AttentionMap
from ropepatch.attention.interchange import (
    ATTENTION,
    OTHER_SCORES,
    OWN_MASK,
    SLOT,
    attending_here,
    set_attention,
    uninterchangeable,
)
from ropepatch.attention.mapped_attention import NAME, MappedRope
from ropepatch.attention.maps import make_map
from ropepatch.attention.turning import turned
from ropepatch.errors import RopepatchError
from ropepatch.model.config import text_config
from ropepatch.model.head import evaluating, held, shadowed
from ropepatch.model.rotary import (
    OwnConfigs,
    Substitution,
    base_model,
    find_substitute,
    float32_on_cpu,
    own_configs,
    rotating_by,
)
from ropepatch.model.survey import Survey, survey
from ropepatch.settings import Length, relative_length

PROBE = "ropepatch_probe"
TOKENS = 4  # that a model reads to show how its attention turns

logger = logging.getLogger("ropepatch")


class Mapped(Substitution[MappedRope]):
    """The handle of a model with an attention map, and a context manager that takes the map out.

    Args:
        model: The model.
        path: Where its rotary module was.
        substitute: What stands there now.
    """

    _slots: Mapping[nn.Module, Any] = {}  # of attention modules; known once it is taken out

    @property
    def distances(self) -> AttentionMap:
        """The map in force, with all its parameters.

        Raises:
            RopepatchError: If it has been taken out.
        """
        if not self.in_force:
            raise RopepatchError("this map has been taken out", hint="call map_attention again")
        return self._substitute.distances

    def _undo(self) -> None:
        self._slots = {
            part: part.__dict__.pop(SLOT) for part in self.model.modules() if SLOT in part.__dict__
        }
        self.model.__dict__.pop("save_pretrained", None)
        logger.info("%s: map %s -> none", type(self.model).__name__, self._substitute.distances.name)

    @contextmanager
    def again(self) -> Iterator[None]:
        """A map that was taken out, in force within the block for forward passes without gradients.

        Afterwards what stood in the rotary module's place and the attention that was set are back. The
        configuration says nothing of it.
        """
        rope = self._substitute
        with held(self.model):
            configs = OwnConfigs(self.model, ATTENTION)
            for part, slot in self._slots.items():
                part.__dict__[SLOT] = slot
            try:
                set_attention(self.model, NAME)
                rope.config = text_config(self.model.config)
                with rotating_by(self.model, self.path, rope):
                    yield
            finally:
                for part in self._slots:
                    part.__dict__.pop(SLOT, None)
                configs.put_back(self.model)
                rope.memo.clear()


@float32_on_cpu()
def map_attention(
    model: nn.Module, distances: str | AttentionMap, *, to: Length, **parameters: Any
) -> Mapped:
    """Keep every distance of one loaded model within those it was trained on, in memory and reversibly.

    Layers that do not turn, and those that slide within the model's window, stay as they are. While it is in
    force the configuration says so (`attention_map`), and `save_pretrained` refuses: transformers would read
    what it writes without the map.

    Args:
        model: A causal language model, possibly inside a PEFT model.
        distances: One of `MAPS`, or what `make_map` returned.
        to: N, the tokens it is to read, `32k`, or `4x` for four times L. Parameters that are left
            out follow from it.
        parameters: The parameters of a map that is given by its name.

    Raises:
        RopepatchError: If there is no such map, its distances would leave the window before N, or the model
            is patched, swapped, or does more than turn queries and keys and attend causally.
    """
    if isinstance(distances, str):
        distances = make_map(distances, **parameters)
    elif not isinstance(distances, AttentionMap) or parameters:
        raise RopepatchError(
            f"map_attention takes a name with its parameters, or a map, got {distances!r}",
            hint="map_attention(model, 'self-extend', to=8192)",
        )
    base = base_model(model)
    with held(base), own_configs(base, *ATTENTION, "max_position_embeddings", "attention_map") as configs:
        return _mapped(base, distances, to, configs)


def _mapped(base: PreTrainedModel, distances: AttentionMap, to: Length, configs: OwnConfigs) -> Mapped:
    """The model, whose configurations are its own, with a map."""
    surveyed = survey(base.config.to_dict(), base)
    config: Any = text_config(base.config)
    window = surveyed.rope.original_max_position_embeddings
    check_mappable(base, window)
    try:
        target = relative_length(to, window) if isinstance(to, str) else operator.index(to)
    except TypeError:
        raise RopepatchError(f"to must be a whole number of tokens, got {to!r}", hint="to=32_768") from None
    if target <= window:
        raise RopepatchError(
            f"{surveyed.config.model_type} already covers {window} tokens; nothing to extend to {target}",
            hint=f"to is the target context, e.g. to={4 * window}",
        )
    fitted = distances.fitted(window, target)
    turning = _turning(base, surveyed)
    if not any(turns and _sees_far(module, config, window) for module, turns in turning.items()):
        raise _refusal(config.model_type, _narrow(config.sliding_window, window))
    path = surveyed.site.path
    stock = base.get_submodule(path)
    rope = MappedRope(stock, config, fitted, window, surveyed.site.layer_type).train(stock.training)
    rope.configs = configs
    base.set_submodule(path, rope)
    for module, turns in turning.items():
        module.__dict__[SLOT] = rope if turns else None
    config.max_position_embeddings = target
    config.attention_map = {"name": fitted.name, "target": target} | fitted.parameters()
    base.__dict__["save_pretrained"] = partial(_refuse_saving, fitted.name)
    set_attention(base, NAME)
    logger.info("%s: map none -> %s", type(base).__name__, rope.extra_repr())
    return Mapped(base, path, rope)


def check_mappable(model: PreTrainedModel, window: int) -> None:
    """Refuse what classes and configuration of a model tell, whose weights may be on the meta device.

    Raises:
        RopepatchError: With the reason why it cannot have a map.
    """
    config: Any = text_config(model.config)
    reason = uninterchangeable(model)
    sees, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not reason and sees and sees <= window and not set(kinds or ()) - {"sliding_attention"}:
        reason = _narrow(sees, window)
    if reason:
        raise _refusal(config.model_type, reason)


def _narrow(sees: int, window: int) -> str:
    return f"its layers that turn see no farther than {sees} of its {window} tokens"


def mapped(model: nn.Module) -> Mapped | None:
    """The map of a model (also of a copy of a mapped model), or None."""
    base = base_model(model)
    place = find_substitute(base, MappedRope)
    return None if place is None else Mapped(base, *place)


def _refuse_saving(name: str, *given: Any, **options: Any) -> NoReturn:
    """In the place of a model's `save_pretrained`."""
    raise RopepatchError(
        f"a model with an attention map ({name}) cannot be saved: transformers would read it without the map",
        hint="take the map out first; an adapter can be saved by itself",
    )


def _refusal(model_type: str, reason: str) -> RopepatchError:
    return RopepatchError(
        f"{model_type} cannot have an attention map: {reason}",
        hint="extend it by a method of frequencies: `ropepatch methods` lists them",
    )


def _sees_far(module: Any, config: Any, window: int) -> bool:
    """Whether an attention sees farther than the model's window, or slides within it."""
    sees = getattr(config, "sliding_window", None)
    if sees is None or sees > window:
        return True
    kinds = getattr(config, "layer_types", None)
    return kinds is not None and kinds[module.layer_idx] != "sliding_attention"


@dataclass(frozen=True, eq=False)
class _Heard:
    """What an attention function was given."""

    module: nn.Module
    query: Tensor
    key: Tensor
    mask: Tensor | None
    others: dict[str, Any]


_HEARD: ContextVar[list[_Heard]] = ContextVar("heard")


def _listen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Attention that reads nothing: what later layers are given does not depend on how this one turns."""
    _HEARD.get().append(_Heard(module, query, key, attention_mask, others))
    sequences, heads, queries, _ = query.shape
    return value.new_zeros(sequences, queries, heads, value.shape[-1]), None


AttentionInterface.register(PROBE, _listen)
AttentionMaskInterface.register(PROBE, lambda **_: None)


def _turning(base: PreTrainedModel, surveyed: Survey) -> dict[nn.Module, bool]:
    """Every attention of a model, and whether it turns its queries and keys.

    Told from a few tokens that the model reads with and without its rotation; other threads see neither.

    Raises:
        RopepatchError: Where one does more, with the reason.
    """
    if any(parameter.is_meta for parameter in base.parameters()):
        raise _refusal(surveyed.config.model_type, "its weights are on the meta device")
    stock, mapped_layers = base.get_submodule(surveyed.site.path), surveyed.site.layer_type
    rotate = stock.forward
    tables: list[Tensor] = []

    def stand(x: Tensor, position_ids: Tensor, *layer_type: str) -> Any:
        cos, sin = rotate(x, position_ids, *layer_type)
        if layer_type != (() if mapped_layers is None else (mapped_layers,)):
            return cos, sin
        tables[:] = cos, sin
        return torch.ones_like(cos), torch.zeros_like(sin)

    try:
        with evaluating(base), attending_here(base, PROBE):
            moved = _hear(base)
            with shadowed(stock, stand):
                stood = _hear(base)
    except RopepatchError:
        raise
    except Exception as error:
        kind = type(error).__name__
        raise _refusal(
            surveyed.config.model_type, f"it does not run with attention of another kind ({kind})"
        ) from error
    kinds = {}
    for one, other in zip(moved, stood, strict=True):
        if reason := _more_than_attention(other):
            raise _refusal(surveyed.config.model_type, reason)
        kinds[one.module] = _turns(one, other, tables, surveyed)
    if not any(kinds.values()):
        raise _refusal(
            surveyed.config.model_type, "its attention is no interchangeable function, or turns nothing"
        )
    return kinds


@torch.no_grad()
def _hear(base: PreTrainedModel) -> list[_Heard]:
    token = _HEARD.set([])
    try:
        base.base_model(input_ids=torch.arange(TOKENS, device=base.device)[None], use_cache=False)
        return _HEARD.get()
    finally:
        _HEARD.reset(token)


def _more_than_attention(heard: _Heard) -> str | None:
    for argument in OTHER_SCORES:
        if heard.others.get(argument) is not None:
            return f"it changes its scores itself ({argument})"
    if heard.mask is not None:  # nobody gave it one
        return OWN_MASK
    if heard.others.get("position_ids") is None:
        return f"its {type(heard.module).__name__} is not told where its queries stand (position_ids)"
    return None


def _turns(moved: _Heard, stood: _Heard, tables: list[Tensor], surveyed: Survey) -> bool:
    """Whether an attention turns its queries and keys last, and by the function beside it.

    Args:
        moved: What it was given when the model rotated.
        stood: What it was given when it did not.
        tables: cos and sin of the rotation; none where the rotary module was not called.
        surveyed: Of the model.

    Raises:
        RopepatchError: If it turns them in another way.
    """
    pairs = [(moved.query, stood.query), (moved.key, stood.key)]
    if tables:
        cos, sin = tables
        try:
            own = [turned(moved.module, still, cos, sin) for _, still in pairs]
        except (AttributeError, TypeError, ValueError, RuntimeError):
            own = []
        if own and all(_alike(x, y) for x, (y, _) in zip(own, pairs, strict=True)):
            return True
    if all(_alike(x, y) for x, y in pairs):
        return False
    name = type(moved.module).__name__
    raise _refusal(
        surveyed.config.model_type, f"its {name} does not turn queries and keys last, by apply_rotary_pos_emb"
    )


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    tolerance = 1e-4 if one.dtype in (torch.float32, torch.float64) else 2e-2
    scale = float(other.abs().max())
    return bool((one.float() - other.float()).abs().max() <= tolerance * max(scale, 1e-6))
