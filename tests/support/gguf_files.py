"""Small GGUF files of random weights, written by the package `gguf`."""

import gguf
import numpy as np

DIM, BASE, WINDOW, TARGET = 16, 10_000.0, 128, 512


def write_gguf(path, architecture="llama", parts=1, scalar=None, tables=None, **keys):
    """A file of random weights, some in 8 bits, with a vocabulary and a template.

    Args:
        path: The file.
        architecture: The architecture, as llama.cpp names it.
        parts: The number of files.
        scalar: A further tensor without dimensions.
        tables: Divisors of the frequencies, by the name of their tensor without `.weight`.
        keys: Further metadata, and None for what is left out.
    """
    writer = gguf.GGUFWriter(
        path, architecture, split_max_tensors=2 if parts > 1 else 0
    )
    writer.data_alignment = keys.get("general.alignment", writer.data_alignment)
    stated = {
        "context_length": WINDOW,
        "rope.dimension_count": DIM,
        "rope.freq_base": BASE,
    } | keys
    for key, value in stated.items():
        whole = key.startswith(("general.", "tokenizer."))
        name = key if whole else f"{architecture}.{key}"
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        if value is not None:
            add.get(type(value), writer.add_array)(name, value)
    writer.add_token_list(["<s>", "\u0120a", "b" * 70])
    writer.add_token_scores([0.0, -1.5, -2.0])
    writer.add_chat_template("{% for message in messages %}{{ message }}{% endfor %}")
    weights = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    writer.add_tensor("token_embd.weight", weights.astype(np.float16))
    for name in ("blk.0.attn_q.weight", "output.weight"):
        quantised = gguf.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", weights[0])
    if scalar is not None:
        writer.add_tensor("scalar", np.array(scalar, np.float32))
    for name, table in (tables or {}).items():
        writer.add_tensor(f"{name}.weight", table.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (
        path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf")
    )
