"""The logits of a last token that attends to tokens far apart, by the llama.cpp of llama-cpp-py-sync.

    python gguf_last_token.py FILE.gguf ASKED.json OUT.npy

ASKED.json has `ids` and `positions`. Every token but the last is its own sequence, at its position; the last
one attends to all of them. Prints the build of llama.cpp. The package needs glibc 2.38.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp_py_sync import __version__
from llama_cpp_py_sync._cffi_bindings import ffi, get_lib


def main(file: str, asked: Path, out: Path) -> None:
    llama: Any = get_lib()
    llama.llama_backend_init()
    given = json.loads(asked.read_text())
    ids, positions = given["ids"], given["positions"]
    model = llama.llama_model_load_from_file(
        file.encode(), llama.llama_model_default_params()
    )
    assert model != ffi.NULL, f"llama.cpp does not load {file}"
    how = llama.llama_context_default_params()
    how.n_ctx, how.n_batch, how.n_ubatch, how.n_seq_max = 512, 128, 128, len(ids)
    how.n_threads = how.n_threads_batch = 1
    how.type_k = how.type_v = how.flash_attn_type = 0
    how.kv_unified = True
    context = llama.llama_init_from_model(model, how)

    def decode(tokens: list[int], places: list[int], sequences: list[int]) -> None:
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, place, sequence) in enumerate(
            zip(tokens, places, sequences, strict=True)
        ):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = (
                token,
                place,
                1,
                1,
            )
            batch.seq_id[i][0] = sequence
        assert llama.llama_decode(context, batch) == 0

    decode(ids[:-1], positions[:-1], list(range(1, len(ids))))
    memory = llama.llama_get_memory(context)
    for sequence in range(1, len(ids)):
        llama.llama_memory_seq_cp(memory, sequence, 0, -1, -1)
    decode(ids[-1:], positions[-1:], [0])
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    logits = np.frombuffer(
        ffi.buffer(llama.llama_get_logits(context), size * 4), dtype=np.float32
    )
    np.save(out, logits)
    print(f"b{__version__.rpartition('.')[2]}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
