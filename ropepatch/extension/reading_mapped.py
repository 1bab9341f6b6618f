"""Read a checkpoint with an attention map as whoever downloads it does: by transformers, without ropepatch.

A script that `map_code` starts; it is never imported.
"""

from __future__ import annotations

import sys
from typing import Any


def main(folder: str, inputs_file: str, outputs_file: str) -> None:
    """Write the logits [1, T, V] of the given tokens, and the frequencies.

    Args:
        folder: The checkpoint.
        inputs_file: Holds `ids` and `positions`, [1, T].
        outputs_file: The file to write.
    """
    sys.modules["ropepatch"] = None  # type: ignore[assignment]  # an import of it fails now

    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    model: Any = load(
        folder, trust_remote_code=True, local_files_only=True, use_safetensors=True, dtype="float32"
    )
    inputs = load_file(inputs_file)
    # The mask is explicit because jumps in the positions would be taken for packed documents.
    mask = torch.ones_like(inputs["ids"])
    with torch.inference_mode():
        out = model.eval()(
            inputs["ids"], position_ids=inputs["positions"], attention_mask=mask, use_cache=False
        )
    tables = {name.rpartition(".")[2]: table for name, table in model.named_buffers() if "inv_freq" in name}
    save_file(
        {"logits": out.logits.float().contiguous()} | {k: v.clone() for k, v in tables.items()}, outputs_file
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
