"""A checkpoint as one file for llama.cpp: GGUF of the LLaMA architecture, whatever its rope.

llama.cpp's LLaMA graph divides every frequency by `rope_freqs.weight` and multiplies cos and sin by
`rope.scaling.attn_factor`. So any static rope needs no rope type of its own, whose rules its converter and
its runtime apply in part only.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ropepatch.errors import RopepatchError
from ropepatch.extension import record as records
from ropepatch.extension.writing import check_weights
from ropepatch.files import absent, check_space, whole_file
from ropepatch.model.architectures import IN_LLAMA_CPP
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import blueprint, load_config, load_text_config
from ropepatch.model.source import find_source
from ropepatch.model.survey import Survey, survey_checkpoint
from ropepatch.model.weights import Progress, TensorEntry
from ropepatch.publishing.gguf_tokenizer import Vocabulary, read_vocabulary
from ropepatch.scaling.rope import divisors

if TYPE_CHECKING:
    from gguf import GGUFWriter

DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # numpy has no bfloat16: its bits
ROPE_FREQS = "rope_freqs.weight"
UNQUANTISED = "export the checkpoint before it was quantised; llama.cpp quantises a GGUF itself"


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that was written and read back.

    Args:
        file: The file.
        num_bytes: Its size.
        num_tensors: How many tensors it holds, the frequencies among them.
        context_length: The tokens the model reads.
        scaled: Whether it holds frequencies of its own.
        attention_factor: The factor of cos and sin.
        tokenizer: `llama` (SentencePiece), `gpt2` (byte-level BPE) or `no_vocab`.
        notes: Remarks for the user.
    """

    file: Path
    num_bytes: int
    num_tensors: int
    context_length: int
    scaled: bool
    attention_factor: float
    tokenizer: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class GgufTensor:
    """One tensor under llama.cpp's name: its shape, rows first, F32, F16 or BF16, and how it is read.

    `read` returns the values in llama.cpp's layout; of BF16 the bits.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        """The size in the GGUF file."""
        return np.dtype(DTYPES[self.dtype]).itemsize * math.prod(self.shape)


def export_gguf(
    model: str | Path, out: str | Path, *, revision: str | None = None, progress: Progress | None = None
) -> GgufFile:
    """Write a checkpoint as GGUF: its weights in their dtype, vectors in float32.

    Args:
        model: A checkpoint folder, a Hub id, or `tiny`.
        out: The file to make; it must not exist.
        revision: The branch, tag or commit of a Hub id.
        progress: Called with the bytes written so far and in all.

    Raises:
        RopepatchError: If llama.cpp's LLaMA cannot hold the model, its rope follows the sequence length, its
            weights are unsound, or the file exists or cannot be written; nothing is left behind then.
    """
    try:
        import gguf
    except ImportError as error:
        raise RopepatchError(f"GGUF needs {error.name}", hint='pip install "ropepatch[gguf]"') from error
    file = absent(out)
    source = find_source(model, revision, weights=True)
    survey = check_architecture(source)
    tensors = read_tensors(source, survey)
    vocabulary = read_vocabulary(source.folder, survey.config.vocab_size)
    try:
        size = sum(tensor.num_bytes for tensor in tensors)
        check_space("the file", file.parent, size, hint="free some space, or choose another `out`")
        with whole_file(file) as partial_file:
            writer = gguf.GGUFWriter(partial_file, "llama")
            try:
                _add_metadata(writer, source, survey)
                vocabulary.write(writer)
                _write_tensors(gguf, writer, tensors, progress)
            finally:
                writer.close()
            _verify(gguf, partial_file, survey, tensors, vocabulary)
    except OSError as error:
        # numpy does not pass on why a write fell short.
        reason = os.strerror(error.errno) if error.errno else f"not all of it fits ({error})"
        hints = {
            errno.ENOENT: "make the folder first, or choose another `out`",
            errno.EACCES: "choose a folder you may write to",
        }
        hint = hints.get(error.errno or 0, "make room, or choose another `out`")
        raise RopepatchError(f"cannot write {file}: {reason}", hint=hint) from error
    return GgufFile(
        file=file,
        num_bytes=file.stat().st_size,
        num_tensors=len(tensors),
        context_length=survey.rope.original_max_position_embeddings,
        scaled=survey.rope.carried is not None,
        attention_factor=survey.rope.carried_attention_factor,
        tokenizer=vocabulary.model,
        notes=vocabulary.notes,
    )


# What llama.cpp's LLaMA can hold


def fits_gguf(checkpoint: Checkpoint) -> bool:
    """Whether llama.cpp's LLaMA can hold a checkpoint, by its config.json."""
    try:
        check_architecture(checkpoint)
    except RopepatchError:
        return False
    return True


def check_architecture(checkpoint: Checkpoint) -> Survey:
    """The survey of a checkpoint that llama.cpp's LLaMA can hold, by its config.json; others are refused."""
    raw = checkpoint.raw
    if checkpoint.kind == "mapped":
        raise RopepatchError(
            f"a GGUF file cannot hold an attention map, and {checkpoint.name} has one",
            hint="transformers alone runs it; extend the checkpoint it was made from by a scaling",
        )
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
    switches = kind == "longrope" and parameters.get("short_factor") != parameters.get("long_factor")
    if kind == "dynamic" or switches:
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


# Tensors


def read_tensors(checkpoint: Checkpoint, survey: Survey) -> list[GgufTensor]:
    """The tensors of a GGUF file in their order, of which none is read yet.

    First `ROPE_FREQS`, theta_i / theta'_i for every rotary pair in float32, unless the rope is plain.
    """
    rope = survey.rope
    tensors = [*_weights(checkpoint, survey)]
    if rope.carried is not None:
        frequencies = divisors(rope.unscaled(), rope.inv_freq()).float().numpy()
        tensors.insert(0, GgufTensor(ROPE_FREQS, frequencies.shape, "F32", lambda: frequencies))
    return tensors


def _weights(checkpoint: Checkpoint, survey: Survey) -> Iterator[GgufTensor]:
    from gguf import MODEL_ARCH, get_tensor_name_map

    config, weights = survey.config, checkpoint.weights
    model = blueprint(load_config(survey.raw))
    check_weights(weights, model)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
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
        # llama.cpp adds and multiplies vectors in float32 only.
        dtype = "F32" if len(entry.shape) == 1 else entry.dtype
        read = partial(_values, entry, heads.get(gguf_name.split(".")[-2]))
        yield GgufTensor(gguf_name, entry.shape, dtype, read)


def _values(entry: TensorEntry, heads: int | None) -> NDArray[Any]:
    """The values of a tensor, vectors in float32, queries and keys with rotary pairs together.

    They are read, not mapped: a file that another program shortens ends in an error, not in a signal.
    """
    count = math.prod(entry.shape)
    stored = np.fromfile(entry.file, DTYPES[entry.dtype], count, offset=entry.offset)
    if stored.size < count:
        raise RopepatchError(
            f"{entry.file} was shortened while it was read", hint="export it again when nothing writes it"
        )
    if len(entry.shape) == 1:
        bits = entry.dtype == "BF16"
        stored = (stored.astype(np.uint32) << 16).view(np.float32) if bits else stored.astype(np.float32)
    stored = stored.reshape(entry.shape)
    return interleaved(stored, heads) if heads else stored


def interleaved(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Query or key rows [heads * head_dim, ...] from halves, pair i in rows i and i + head_dim / 2, to pairs.

    llama.cpp's LLaMA rotates rows 2i and 2i + 1 of a head together.
    """
    pairs = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


# The file


def _add_metadata(writer: GGUFWriter, source: Checkpoint, survey: Survey) -> None:
    """The name, of the base's card what the record carries over, and the sizes of the model."""
    writer.add_type("model")
    writer.add_name(Path(source.name).resolve().name)
    base = records.read(source.folder).base if records.exists(source.folder) else None
    for key in ("license", "license_name", "license_link"):
        if isinstance(value := getattr(base, key, None), str):
            getattr(writer, f"add_{key}")(value)
    config, rope = survey.config, survey.rope
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(rope.original_max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(survey.head_dim)
    writer.add_value_length(survey.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(survey.head_dim)
    writer.add_rope_freq_base(rope.rope_theta)
    if rope.carried is not None:
        writer.add_string("llama.rope.scaling.type", "none")  # else llama.cpp assumes linear
        writer.add_float32("llama.rope.scaling.attn_factor", rope.carried_attention_factor)


def _write_tensors(
    gguf: ModuleType, writer: GGUFWriter, tensors: Sequence[GgufTensor], progress: Progress | None
) -> None:
    for tensor in tensors:
        dtype, kind = np.dtype(DTYPES[tensor.dtype]), gguf.GGMLQuantizationType[tensor.dtype]
        writer.add_tensor_info(tensor.name, tensor.shape, dtype, tensor.num_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done, total = 0, sum(tensor.num_bytes for tensor in tensors)
    for tensor in tensors:
        writer.write_tensor_data(tensor.read())
        done += tensor.num_bytes
        if progress:
            progress(done, total)


def _verify(
    gguf: ModuleType, written: Path, survey: Survey, tensors: Sequence[GgufTensor], vocabulary: Vocabulary
) -> None:
    """Read the file back: every tensor's name, shape and dtype, and what carries the rope."""
    reader, rope = gguf.GGUFReader(written), survey.rope
    shapes = {
        tensor.name: (tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name)
        for tensor in reader.tensors
    }
    values = {
        "llama.context_length": rope.original_max_position_embeddings,
        "llama.rope.freq_base": np.float32(rope.rope_theta),
        "tokenizer.ggml.model": vocabulary.model,
    }
    if rope.carried is not None:
        values["llama.rope.scaling.attn_factor"] = np.float32(rope.carried_attention_factor)
    read = {name: field.contents() if (field := reader.get_field(name)) else None for name in values}
    tables = [tensor.data for tensor in reader.tensors if tensor.name == ROPE_FREQS]
    expected = [tensor.read() for tensor in tensors if tensor.name == ROPE_FREQS]
    if (
        shapes != {tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors}
        or read != values
        or not all(map(np.array_equal, tables, expected))
    ):
        raise RopepatchError(
            "the file, read back, is not what was written",
            hint="nothing was kept; check the disk, and report the version of gguf",
        )
