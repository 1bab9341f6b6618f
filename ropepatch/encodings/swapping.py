"""Replace the RoPE of a loaded model by another position encoding, reversibly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.attention.interchange import (
    ATTENTION,
    PositionsInAttention,
    refusal,
    rotating_layers,
    uninterchangeable,
)
from ropepatch.attention.modeling_position_remapping import rotate
from ropepatch.encodings import ENCODINGS
from ropepatch.encodings.attention import ENCODING_ATTENTION
from ropepatch.encodings.encoding import (
    AttentionInputs,
    Encoding,
    EncodingModule,
    ModelShape,
)
from ropepatch.encodings.rotary import rotated
from ropepatch.errors import RopepatchError
from ropepatch.files import absent, new_folder
from ropepatch.model.architectures import SCALED_EMBEDDINGS
from ropepatch.model.checkpoint import saving, write_swapped
from ropepatch.model.config import Config, text_config
from ropepatch.model.rotary import (
    Substitution,
    base_model,
    find_substitute,
    own_configs,
)


class SwappedPositions(PositionsInAttention):
    """Replaces the rotary module of a model with a swapped encoding.

    Args:
        stock: The original rotary module; not registered.
        module: The encoding, registered so that it is trained, moved and saved.
        config: The configuration of the language model.
    """

    state = "the position encoding of this model is swapped"
    way_back = "call remove() on its swap first"
    attention = ENCODING_ATTENTION

    def __init__(
        self, stock: nn.Module, module: EncodingModule, config: PreTrainedConfig
    ) -> None:
        super().__init__(stock, config)
        self.encoding = module.encoding
        self.module: nn.Module = module  # PEFT wraps it
        self.hook: RemovableHandle | None = None

    @property
    def absolute(self) -> bool:
        """Whether position vectors are added before the first layer."""
        return self.encoding.family == "absolute"

    def encoded(self, inputs: AttentionInputs) -> AttentionInputs:
        """Encode the inputs of attention in a layer."""
        encoded: AttentionInputs = inputs if self.absolute else self.module(inputs)
        return encoded

    def added(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Add position vectors to the inputs of the first layer: a forward pre-hook."""
        hidden, *others = args
        vectors = self.module(kwargs["position_ids"])
        return (hidden + vectors.to(hidden.dtype), *others), kwargs

    def extra_repr(self) -> str:
        """Return the text that `print(model)` shows."""
        return repr(self.encoding)


class Swap(Substitution[SwappedPositions]):
    """Handle of a model with a swapped encoding, and a context manager that restores the RoPE."""

    @property
    def encoding(self) -> Encoding:
        """The encoding."""
        return self._substitute.encoding

    @property
    def module(self) -> nn.Module:
        """The module of the encoding; its parameters are new and need training."""
        return self._substitute.module

    def save(
        self, out: str | Path, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Path:
        """Write the model with this encoding into a new folder, which `ropepatch.load` loads again.

        Stock transformers would load such weights with RoPE, with meaningless results. So config.json has a
        model type that transformers rejects, and ropepatch.json records the original type and the encoding.

        Args:
            out: The folder to make.
            tokenizer: Saved with the model.

        Raises:
            RopepatchError: If the encoding has been removed, the model contains an unmerged adapter, or the
                folder exists or cannot be written.
        """
        folder, encoding = absent(out), self.encoding
        if not self.in_force:
            raise RopepatchError(
                "this encoding has been taken out of the model", hint="swap it in again"
            )
        weights = [name for name, _ in self.model.named_parameters()]
        if any(".base_layer." in name or ".lora_" in name for name in weights):
            raise RopepatchError(
                "this model holds an adapter that is not merged",
                hint="model.merge_and_unload() first, or save the adapter by PEFT",
            )
        with new_folder(folder) as partial:
            with saving(folder):
                self.model.save_pretrained(partial)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
            write_swapped(partial, encoding.name, encoding.parameters())
        return folder

    def _undo(self) -> None:
        self._substitute.empty_slots()
        if self._substitute.hook is not None:
            self._substitute.hook.remove()


def swap(model: nn.Module, encoding: str | Encoding, **parameters: Any) -> Swap:
    """Replace the position encoding of one loaded model, in memory and reversibly.

    A model that was trained with RoPE has to be trained with the new encoding; before that its loss is about
    that of shuffled text. New parameters are drawn from torch's generator; seed it first. With PEFT, swap
    first, and train them with `modules_to_save=["rotary_emb.module"]`.

    Args:
        model: A LLaMA-like causal language model, possibly inside a PEFT model.
        encoding: A name from `ENCODINGS`, or an encoding made by `make_encoding`.
        **parameters: The parameters of the encoding.

    Raises:
        RopepatchError: If there is no such encoding, or the model is patched, swapped or not LLaMA-like.
    """
    if isinstance(encoding, Encoding):
        encoding = encoding.model_copy(update=parameters)
    else:
        encoding = ENCODINGS.make(encoding, **parameters)
    base = base_model(model)
    with torch.device("cpu"), own_configs(base, *ATTENTION) as configs:
        config = Config.of(base)
        path = config.site.path
        decoder: Any = base.get_submodule(path.rpartition(".")[0])
        attentions = _attentions(base, config)
        if encoding.family == "absolute":
            _check_embeddings(base)
        device = next(attentions[0].parameters()).device
        module = EncodingModule(encoding, ModelShape.of(config)).to(device, base.dtype)
        stock = base.get_submodule(path)
        positions = SwappedPositions(stock, module, text_config(base.config))
        positions.put(base, path, dict.fromkeys(attentions, True), configs)
        if positions.absolute:
            positions.hook = decoder.layers[0].register_forward_pre_hook(
                positions.added, with_kwargs=True
            )
        return Swap(base, path, positions)


def swapped(model: nn.Module) -> Swap | None:
    """Return the swap of a model, also of a copy of a swapped model, or None."""
    base = base_model(model)
    place = find_substitute(base, SwappedPositions)
    return None if place is None else Swap(base, *place)


def _attentions(base: PreTrainedModel, config: Config) -> list[nn.Module]:
    """Return the attention modules of a model; raises an error if an encoding cannot replace their RoPE."""
    if reason := uninterchangeable(base):
        raise refusal(base, reason)
    if config.rotates_partly:
        raise refusal(base, "only a part of each head rotates")
    if config.layer_type is not None:
        raise refusal(base, "its RoPE differs by layer type")
    layers = rotating_layers(base, config.site)
    if not all(layers.values()):
        raise refusal(base, "some layers do not rotate")
    if not all(_rotates_halves(layer, config.head_dim) for layer in layers):
        raise refusal(base, "its rotary pairs are laid out otherwise")
    return list(layers)


def _rotates_halves(attention: nn.Module, head_dim: int) -> bool:
    """Return whether a model rotates the pairs (x_i, x_(i + D/2)), as the encodings here do."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 3, head_dim, generator=draw, dtype=torch.float32)
    angles = torch.randn(1, 3, head_dim // 2, generator=draw, dtype=torch.float32)
    both = torch.cat((angles, angles), -1)
    return torch.equal(rotate(attention, x, both.cos(), both.sin()), rotated(x, angles))


def _check_embeddings(base: PreTrainedModel) -> None:
    """Raise an error for absolute positions in a model that scales its embeddings."""
    config: Any = text_config(base.config)
    multiplied = getattr(config, "embedding_multiplier", None) not in (None, 1)
    scaled = multiplied or hasattr(base.get_input_embeddings(), "embed_scale")
    if scaled or config.model_type in SCALED_EMBEDDINGS:
        raise RopepatchError(
            f"{config.model_type} scales its embeddings: absolute positions would have another weight in it",
            hint="use a relative or rotary encoding, or a model of llama's type",
        )
