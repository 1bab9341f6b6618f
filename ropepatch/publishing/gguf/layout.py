"""A checkpoint's tensors under llama.cpp's names and in its layout; only those that its LLaMA graph runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ropepatch.errors import RopepatchError
from ropepatch.extension.writing import check_weights
from ropepatch.files import read_json
from ropepatch.model.architectures import IN_LLAMA_CPP
from ropepatch.model.config import blueprint, load_config, load_text_config
from ropepatch.model.survey import Survey, survey_folder
from ropepatch.model.weights import TensorEntry, read_headers
from ropepatch.scaling.rope import divisors

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # numpy has no bfloat16: its bits


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file, for llama.cpp.

    Args:
        name: llama.cpp's.
        entry: Where its bytes are, and what they are: F32, F16 or BF16.
        heads: Of the queries or keys, whose rows are ordered anew; 0 for every other tensor.
    """

    name: str
    entry: TensorEntry
    heads: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first."""
        return self.entry.shape

    @property
    def written_dtype(self) -> str:
        """llama.cpp adds and multiplies vectors in float32 only."""
        return "F32" if len(self.shape) == 1 else self.entry.dtype

    @property
    def num_bytes(self) -> int:
        """In the GGUF file."""
        size: int = np.dtype(DTYPES[self.written_dtype]).itemsize
        return size * int(np.prod(self.shape))

    def read(self) -> NDArray[Any]:
        """Its values as llama.cpp wants them; of BF16 the bits."""
        entry, dtype = self.entry, DTYPES[self.entry.dtype]
        stored: NDArray[Any] = np.memmap(
            entry.file, dtype=dtype, mode="r", offset=entry.offset, shape=self.shape
        )
        if entry.dtype == "BF16" and self.written_dtype == "F32":
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        elif self.written_dtype == "F32":
            stored = stored.astype(np.float32)
        return interleaved(stored, self.heads) if self.heads else stored


@dataclass(frozen=True)
class Layout:
    """What a GGUF file says of a model, but for its tokenizer.

    Args:
        survey: The checkpoint's configuration and rope.
        tensors: In the order in which they are written.
        divisors: theta_i / theta'_i for every rotary pair, float32; None for a plain rope.
    """

    survey: Survey
    tensors: tuple[StoredTensor, ...]
    divisors: NDArray[np.float32] | None

    @property
    def attention_factor(self) -> float:
        """What multiplies cos and sin."""
        return self.survey.rope.carried_attention_factor


def interleaved(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Query or key rows [heads * head_dim, ...] from halves, pair i in rows i and i + head_dim / 2, to pairs.

    llama.cpp's LLaMA rotates rows 2i and 2i + 1 of a head together.
    """
    pairs = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def fits_gguf(folder: Path) -> bool:
    """Whether llama.cpp's LLaMA can hold a checkpoint, by its config.json."""
    try:
        check_architecture(folder)
    except RopepatchError:
        return False
    return True


def read_layout(folder: Path) -> Layout:
    """What of a checkpoint goes where in a GGUF file; no tensor is read.

    Raises:
        RopepatchError: If llama.cpp's LLaMA cannot hold it, or its weights are unsound.
    """
    found = check_architecture(folder)
    config = found.config
    model = blueprint(load_config(found.raw))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    weights = read_headers(folder)
    check_weights(weights, model)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = []
    for name in expected:
        ours = _gguf_name(name)
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
                f"{name} is stored as {entry.dtype}, expected one of {', '.join(DTYPES)}",
                hint="export the checkpoint before it was quantised; llama.cpp quantises a GGUF itself",
            )
        permuted = heads.get(ours.split(".")[-2], 0)
        tensors.append(StoredTensor(ours, entry, permuted))
    return Layout(found, tuple(tensors), _divisors(found))


def check_architecture(folder: Path) -> Survey:
    """The survey of a checkpoint that llama.cpp's LLaMA can hold, by its config.json.

    Raises:
        RopepatchError: If it cannot.
    """
    raw = read_json(folder / "config.json")
    config: Any = load_text_config(raw)
    if raw.get("quantization_config"):
        raise RopepatchError(
            "the weights are quantised",
            hint="export the checkpoint before it was quantised; llama.cpp quantises a GGUF itself",
        )
    if config.model_type not in IN_LLAMA_CPP:
        known = ", ".join(sorted(IN_LLAMA_CPP.model_types))
        raise _other(f"model_type {config.model_type} is none of {known}")
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
    found = survey_folder(folder)
    if found.rope.rotary_dim != found.head_dim:
        raise _other(f"it rotates {found.rope.rotary_dim} of {found.head_dim} dimensions")
    return found


def _other(reason: str) -> RopepatchError:
    return RopepatchError(
        f"llama.cpp's LLaMA cannot hold this model: {reason}",
        hint="llama.cpp's own convert_hf_to_gguf.py converts other architectures",
    )


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    layer = LAYER.fullmatch(module)
    ours = f"blk.{layer[1]}.{IN_LAYER[layer[2]]}" if layer and layer[2] in IN_LAYER else WHOLE.get(module)
    if ours is None or kind not in ("weight", "bias"):
        raise _other(f"it has a tensor {name}")
    return f"{ours}.{kind}"


def _divisors(found: Survey) -> NDArray[np.float32] | None:
    if found.rope.carried is None:
        return None
    return divisors(found.rope.unscaled(), found.rope.inv_freq()).float().numpy()
