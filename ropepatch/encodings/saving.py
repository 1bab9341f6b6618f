"""Checkpoints whose position encoding is swapped: only ropepatch loads them, and they say so.

Stock transformers would load such weights with the rope in place and answer nonsense. So config.json names a
model type that it refuses, and ropepatch.json says which one it was and which encoding the weights go with.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from ropepatch.encodings.models import shape_of
from ropepatch.encodings.registry import ENCODINGS, make_encoding
from ropepatch.encodings.swapping import swap_encoding
from ropepatch.errors import RopepatchError
from ropepatch.files import absent, new_folder
from ropepatch.model.record_file import read_swapped, write_swapped
from ropepatch.model.stock import no_progress_bars
from ropepatch.model.survey import survey
from ropepatch.model.weights import read_headers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ropepatch.encodings.encoding import Encoding


def save_swapped(
    model: PreTrainedModel,
    encoding: Encoding,
    out: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    """Write a model with the encoding it has; `ropepatch.load` loads it again.

    Args:
        model: The model.
        encoding: The one it has.
        out: The folder to make.
        tokenizer: Saved beside it.

    Raises:
        RopepatchError: If the folder exists or cannot be written, the model holds an adapter that is not
            merged, or the encoding is none that could be loaded again.
    """
    folder = absent(out)
    if ENCODINGS.get(encoding.name) is not type(encoding):
        raise RopepatchError(
            f"{encoding.name} is not registered: nothing could load it again",
            hint=f"ropepatch.ENCODINGS[{encoding.name!r}] = {type(encoding).__name__}",
        )
    if any(".base_layer." in name or ".lora_" in name for name, _ in model.named_parameters()):
        raise RopepatchError(
            "this model holds an adapter that is not merged",
            hint="model.merge_and_unload() first, or save the adapter by PEFT",
        )
    with new_folder(folder) as partial:
        with no_progress_bars():
            model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        write_swapped(partial, encoding.name, encoding.parameters())
    return folder


def swap_again(model: Any, folder: Path) -> None:
    """Give a model that was loaded from such a folder its encoding, with the folder's parameters.

    Raises:
        RopepatchError: If the record or the weights are not whole.
    """
    record = read_swapped(folder)
    encoding = make_encoding(record.encoding, **record.parameters)
    surveyed = survey(model.config.to_dict(), model)
    prefix, weights = f"{surveyed.site.path}.module.", read_headers(folder)
    with torch.device("meta"):
        wanted = encoding.build(shape_of(model, surveyed)).state_dict()
    expected = {f"{prefix}{name}": tuple(value.shape) for name, value in wanted.items()}
    found = {name: shape for name, shape in weights.shapes.items() if name.startswith(prefix)}
    if found != expected:
        raise RopepatchError(
            f"the weights in {folder} are not those of {encoding.name}: expected "
            f"{sorted(wanted) or 'no parameters'} at {prefix}*, got {_names(found, prefix)}",
            hint="put ropepatch.json and the weights of the same checkpoint together",
        )
    with torch.random.fork_rng(devices=[]):  # what is drawn here is replaced
        swapped = swap_encoding(model, encoding)
    tensors: dict[str, torch.Tensor] = {}
    for file in weights.files:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as held:
                names = [name for name in held.keys() if name in expected]  # noqa: SIM118
                tensors |= {name.removeprefix(prefix): held.get_tensor(name) for name in names}
    swapped.module.load_state_dict(tensors)


def _names(found: dict[str, tuple[int, ...]], prefix: str) -> str:
    return str(sorted(name.removeprefix(prefix) for name in found)) if found else "none"
