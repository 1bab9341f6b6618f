"""Load any checkpoint, with its position encoding or position remapping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.attention import make_remapping
from ropepatch.attention.remapped import remap_positions
from ropepatch.encodings import ENCODINGS
from ropepatch.encodings.encoding import ModelShape
from ropepatch.encodings.swapping import swap
from ropepatch.errors import RopepatchError
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import SEQUENCE, saved_remapping
from ropepatch.model.loading import AUTO
from ropepatch.model.precision import best_device, check_device, known_dtype


def load(
    model: str | Path,
    revision: str | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a checkpoint with its tokenizer, in eval mode.

    Args:
        model: A checkpoint folder, a Hub id, or `tiny`, the bundled checkpoint.
        revision: The branch, tag or commit of a Hub id.
        device: Where to put the model, such as `cuda`. Default: a GPU if there is one. `auto` lets accelerate
            spread it over all GPUs and, if they are too small, the machine's memory.
        dtype: The precision of the weights, such as `torch.bfloat16` or `bfloat16`. Default: that of the
            checkpoint. The RoPE frequencies stay in float32.

    Returns:
        The model and its tokenizer.

    Raises:
        RopepatchError: If there is no such checkpoint, device or dtype, or transformers cannot load it.
    """
    kind, device = known_dtype(dtype), device or best_device()
    if device != AUTO:
        check_device(device)
    checkpoint = Checkpoint.find(model, revision, weights=True)
    loaded: Any = load_checkpoint(checkpoint, kind, AUTO if device == AUTO else None)
    return loaded if device == AUTO else loaded.to(device), checkpoint.tokenizer


def load_checkpoint(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None = None,
    device_map: str | dict[str, str] | None = None,
) -> PreTrainedModel:
    """Load the model of a checkpoint, with its position encoding or position remapping.

    A remapping is loaded from config.json; code in the checkpoint never runs. For device maps see
    `transformers`.
    """
    if checkpoint.kind == "stock":
        return checkpoint.load(dtype, device_map)
    if checkpoint.kind == "swapped":
        model = checkpoint.load(dtype, device_map, config=checkpoint.stock)
        _swap_again(model, checkpoint)
        return model
    described = saved_remapping(checkpoint.raw)
    distances = make_remapping(described["name"], **described["parameters"])
    # The remapping needs the model at its original context length.
    stock = checkpoint.stock
    stated = {"max_position_embeddings", SEQUENCE} & stock.stated.keys()
    original = stock.changed(dict.fromkeys(stated, described["window"]))
    model = checkpoint.load(dtype, device_map, config=original)
    remap_positions(model, distances, to=described["target"])
    return model


def _swap_again(model: Any, checkpoint: Checkpoint) -> None:
    """Swap in the encoding of a checkpoint, with its trained parameters."""
    record, weights = checkpoint.swapped, checkpoint.weights
    encoding = ENCODINGS.make(record.encoding, **record.parameters)
    prefix = f"{checkpoint.stock.site.path}.module."
    parameters = encoding.sizes(ModelShape.of(checkpoint.stock))
    expected = {f"{prefix}{name}": size for name, size in parameters.items()}
    stored = {
        name: shape for name, shape in weights.shapes.items() if name.startswith(prefix)
    }
    if stored != expected:
        raise RopepatchError(
            f"the weights in {checkpoint.folder} are not those of {encoding.name}: "
            f"expected {expected}, got {stored}",
            hint="put ropepatch.json and the weights of the same checkpoint together",
        )
    with torch.random.fork_rng(devices=[]):  # the drawn parameters are replaced below
        handle = swap(model, encoding)
    tensors: dict[str, torch.Tensor] = {}
    for name in parameters:
        with safe_open(weights.tensors[f"{prefix}{name}"].file, "pt") as file:
            tensors[name] = file.get_tensor(f"{prefix}{name}")
    handle.module.load_state_dict(tensors)
