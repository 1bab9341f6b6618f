"""Read a checkpoint with an attention map as whoever downloads it does: by transformers, without ropepatch.

A script that `map_code` starts; it is never imported.
"""

from __future__ import annotations

import sys
from typing import Any


def main(folder: str, asked: str, answer: str) -> None:
    """Write the logits [1, T, V] of the tokens that were asked for, and the frequencies.

    Args:
        folder: The checkpoint.
        asked: Holds `ids` and `positions`, [1, T].
        answer: The file to write.
    """
    sys.modules["ropepatch"] = None  # type: ignore[assignment]  # an import of it fails now

    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    model: Any = load(
        folder, trust_remote_code=True, local_files_only=True, use_safetensors=True, dtype="float32"
    )
    told = load_file(asked)
    # The mask is explicit because jumps in the positions would be taken for packed documents.
    mask = torch.ones_like(told["ids"])
    with torch.inference_mode():
        out = model.eval()(told["ids"], position_ids=told["positions"], attention_mask=mask, use_cache=False)
    tables = {name.rpartition(".")[2]: table for name, table in model.named_buffers() if "inv_freq" in name}
    save_file({"logits": out.logits.float().contiguous()} | {k: v.clone() for k, v in tables.items()}, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
