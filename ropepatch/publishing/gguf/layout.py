"""A checkpoint's tensors under llama.cpp's names and in its layout; only those that its LLaMA graph runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropepatch.errors import RopepatchError
from ropepatch.extension.writing import check_weights
from ropepatch.model.architectures import IN_LLAMA_CPP
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import blueprint, load_config, load_text_config
from ropepatch.model.survey import Survey, survey_checkpoint
from ropepatch.model.weights import TensorEntry
from ropepatch.scaling.rope import divisors

DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # numpy has no bfloat16: its bits
ROPE_FREQS = "rope_freqs.weight"
UNQUANTISED = "export the checkpoint before it was quantised; llama.cpp quantises a GGUF itself"


@dataclass(frozen=True)
class GgufTensor:
    """One tensor under llama.cpp's name.

    Args:
        name: The name in the GGUF file.
        shape: Rows first.
        dtype: F32, F16 or BF16.
        read: Returns the values in llama.cpp's layout; of BF16 the bits.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        """The size in the GGUF file."""
        return np.dtype(DTYPES[self.dtype]).itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """What a GGUF file says of a model, but for its tokenizer.

    Args:
        survey: The checkpoint's configuration and rope.
        tensors: In the order in which they are written; first `ROPE_FREQS`, theta_i / theta'_i for every
            rotary pair in float32, unless the rope is plain.
    """

    survey: Survey
    tensors: tuple[GgufTensor, ...]

    @property
    def is_scaled(self) -> bool:
        """Whether the rope is not plain."""
        return self.survey.rope.carried is not None


def interleaved(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Query or key rows [heads * head_dim, ...] from halves, pair i in rows i and i + head_dim / 2, to pairs.

    llama.cpp's LLaMA rotates rows 2i and 2i + 1 of a head together.
    """
    pairs = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def fits_gguf(checkpoint: Checkpoint) -> bool:
    """Whether llama.cpp's LLaMA can hold a checkpoint, by its config.json."""
    try:
        check_architecture(checkpoint)
    except RopepatchError:
        return False
    return True


def read_layout(checkpoint: Checkpoint) -> Layout:
    """What of a checkpoint goes where in a GGUF file; no tensor is read.

    Raises:
        RopepatchError: If llama.cpp's LLaMA cannot hold it, or its weights are unsound.
    """
    from gguf import MODEL_ARCH, get_tensor_name_map

    survey = check_architecture(checkpoint)
    config = survey.config
    model = blueprint(load_config(survey.raw))
    weights = checkpoint.weights
    check_weights(weights, model)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors = []
    if survey.rope.carried is not None:
        frequencies = divisors(survey.rope.unscaled(), survey.rope.inv_freq()).float().numpy()
        tensors.append(GgufTensor(ROPE_FREQS, frequencies.shape, "F32", lambda: frequencies))
    for name in model.state_dict():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise _other(f"it has a tensor {name}")
        entry = weights.tensors.get(name)
        if entry is None:
            if config.tie_word_embeddings and name in (model._tied_weights_keys or ()):
                continue  # one that is stored is loaded, by transformers 5 too
            raise RopepatchError(
                f"the weights have no {name}",
                hint="load them with transformers and save_pretrained them again",
            )
        if entry.dtype not in DTYPES:
            raise RopepatchError(
                f"{name} is stored as {entry.dtype}, expected one of {', '.join(DTYPES)}", hint=UNQUANTISED
            )
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        read = partial(_values, entry, heads.get(gguf_name.split(".")[-2]))
        # llama.cpp adds and multiplies vectors in float32 only.
        dtype = "F32" if len(entry.shape) == 1 else entry.dtype
        tensors.append(GgufTensor(gguf_name, entry.shape, dtype, read))
    return Layout(survey, tuple(tensors))


def _values(entry: TensorEntry, heads: int | None) -> NDArray[Any]:
    """The values of a tensor, vectors in float32, queries and keys with rotary pairs together."""
    stored: NDArray[Any] = np.memmap(
        entry.file, dtype=DTYPES[entry.dtype], mode="r", offset=entry.offset, shape=entry.shape
    )
    if stored.ndim == 1:
        bits = entry.dtype == "BF16"
        stored = (stored.astype(np.uint32) << 16).view(np.float32) if bits else stored.astype(np.float32)
    return interleaved(stored, heads) if heads else stored


def check_architecture(checkpoint: Checkpoint) -> Survey:
    """The survey of a checkpoint that llama.cpp's LLaMA can hold, by its config.json.

    Raises:
        RopepatchError: If it cannot.
    """
    raw = checkpoint.raw
    config: Any = load_text_config(raw)
    if raw.get("quantization_config"):
        raise RopepatchError("the weights are quantised", hint=UNQUANTISED)
    if config.model_type not in IN_LLAMA_CPP:
        types = ", ".join(sorted(IN_LLAMA_CPP.model_types))
        raise _other(f"model_type {config.model_type} is none of {types}")
    if config.hidden_act not in ("silu", "swish"):
        raise _other(f"hidden_act is {config.hidden_act}, not silu")
    if getattr(config, "sliding_window", None):
        raise _other("it has sliding-window attention")
    parameters = config.rope_parameters or {}
    kind = parameters.get("rope_type", "default")
    lists = parameters.get("short_factor"), parameters.get("long_factor")
    if kind == "dynamic" or (kind == "longrope" and lists[0] != lists[1]):
        raise RopepatchError(
            f"this rope ({kind}) follows the sequence length, and a GGUF file holds one table of frequencies",
            hint="extend the base checkpoint with a static method, yarn say, and export that",
        )
    survey = survey_checkpoint(checkpoint)
    if survey.rope.rotary_dim != survey.head_dim:
        raise _other(f"it rotates {survey.rope.rotary_dim} of {survey.head_dim} dimensions")
    return survey


def _other(reason: str) -> RopepatchError:
    return RopepatchError(
        f"llama.cpp's LLaMA cannot hold this model: {reason}",
        hint="llama.cpp's own convert_hf_to_gguf.py converts other architectures",
    )
