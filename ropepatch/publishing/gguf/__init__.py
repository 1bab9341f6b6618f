"""A checkpoint as one file for llama.cpp: GGUF of the LLaMA architecture, whatever its rope.

llama.cpp's LLaMA graph divides every frequency by `rope_freqs.weight` and multiplies cos and sin by
`rope.scaling.attn_factor`. So any static rope needs no rope type of its own, whose rules its converter and
its runtime apply in part only.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ropepatch.errors import RopepatchError
from ropepatch.extension import record as records
from ropepatch.files import absent, check_space, whole_file
from ropepatch.model.source import find_source
from ropepatch.model.weights import Progress
from ropepatch.publishing.gguf.layout import DTYPES, ROPE_FREQS, GgufTensor, Layout, read_layout
from ropepatch.publishing.gguf.tokenizer import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from gguf import GGUFWriter


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that was written and read back.

    Args:
        file: Where it is.
        num_bytes: Its size.
        num_tensors: How many tensors it holds, the frequencies among them.
        context_length: The tokens the model reads.
        scaled: Whether it holds frequencies of its own.
        attention_factor: What multiplies cos and sin.
        tokenizer: `llama` (SentencePiece), `gpt2` (byte-level BPE) or `no_vocab`.
        notes: What the user should know.
    """

    file: Path
    num_bytes: int
    num_tensors: int
    context_length: int
    scaled: bool
    attention_factor: float
    tokenizer: str
    notes: tuple[str, ...]


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
    gguf = _gguf()
    file = absent(out)
    source = find_source(model, revision, weights=True)
    layout = read_layout(source)
    vocabulary = read_vocabulary(source.folder, layout.survey.config.vocab_size)
    try:
        size = sum(tensor.num_bytes for tensor in layout.tensors)
        check_space("the file", file.parent, size, hint="free some space, or choose another --out")
        with whole_file(file) as partial:
            writer = gguf.GGUFWriter(partial, "llama")
            try:
                _add_metadata(writer, Path(source.name).resolve().name, source.folder)
                _add_model(writer, layout)
                vocabulary.write(writer)
                _write_tensors(gguf, writer, layout.tensors, progress)
            finally:
                writer.close()
            _verify(gguf, partial, layout, vocabulary)
    except OSError as error:
        raise _disk_error(error, file) from error
    rope = layout.survey.rope
    return GgufFile(
        file=file,
        num_bytes=file.stat().st_size,
        num_tensors=len(layout.tensors),
        context_length=rope.original_max_position_embeddings,
        scaled=layout.is_scaled,
        attention_factor=rope.carried_attention_factor,
        tokenizer=vocabulary.model,
        notes=vocabulary.notes,
    )


def _gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise RopepatchError(f"GGUF needs {error.name}", hint='pip install "ropepatch[gguf]"') from error
    return gguf


def _add_metadata(writer: GGUFWriter, name: str, folder: Path) -> None:
    """The name, and of the base's card what the record carries over."""
    writer.add_type("model")
    writer.add_name(name)
    base = records.read(folder).base if records.exists(folder) else None
    for key in ("license", "license_name", "license_link"):
        if isinstance(value := getattr(base, key, None), str):
            getattr(writer, f"add_{key}")(value)


def _add_model(writer: GGUFWriter, layout: Layout) -> None:
    config: Any = layout.survey.config
    rope, head_dim = layout.survey.rope, layout.survey.head_dim
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(rope.original_max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.rope_theta)
    if layout.is_scaled:
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


def _verify(gguf: ModuleType, written: Path, layout: Layout, vocabulary: Vocabulary) -> None:
    """Read the file back: every tensor's name, shape and dtype, and what carries the rope.

    Raises:
        RopepatchError: If anything differs.
    """
    reader = gguf.GGUFReader(written)
    shapes = {
        tensor.name: (tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name)
        for tensor in reader.tensors
    }
    rope = layout.survey.rope
    values = {
        "llama.context_length": rope.original_max_position_embeddings,
        "llama.rope.freq_base": np.float32(rope.rope_theta),
        "tokenizer.ggml.model": vocabulary.model,
    }
    if layout.is_scaled:
        values["llama.rope.scaling.attn_factor"] = np.float32(rope.carried_attention_factor)
    read = {name: field.contents() if (field := reader.get_field(name)) else None for name in values}
    tables = [tensor.data for tensor in reader.tensors if tensor.name == ROPE_FREQS]
    expected = [tensor.read() for tensor in layout.tensors if tensor.name == ROPE_FREQS]
    if (
        shapes != {tensor.name: (tensor.shape, tensor.dtype) for tensor in layout.tensors}
        or read != values
        or not all(map(np.array_equal, tables, expected))
    ):
        raise RopepatchError(
            "the file, read back, is not what was written",
            hint="nothing was kept; check the disk, and report the version of gguf",
        )


def _disk_error(error: OSError, file: Path) -> RopepatchError:
    # numpy does not pass on why a write fell short.
    reason = os.strerror(error.errno) if error.errno else f"not all of it fits ({error})"
    hints = {
        errno.ENOENT: "make the folder first, or choose another --out",
        errno.EACCES: "choose a folder you may write to",
    }
    return RopepatchError(
        f"cannot write {file}: {reason}",
        hint=hints.get(error.errno or 0, "make room, or choose another --out"),
    )
