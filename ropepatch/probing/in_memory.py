"""Next-token probabilities of a loaded model at the positions of `reading.json`."""

from __future__ import annotations

import torch
from torch import nn

from ropepatch.errors import RopepatchError
from ropepatch.model.config import stock_code
from ropepatch.model.head import gives_positions, in_eval_mode, input_device
from ropepatch.model.rotary import base_model
from ropepatch.probing.judging import Top
from ropepatch.probing.making import TOP


def next_tokens(model: nn.Module, ids: list[int], positions: list[int]) -> list[Top]:
    """Compute the most probable next tokens at each position, in one pass.

    The whole model runs, with its wrappers, without gradients, and temporarily in eval mode.
    """
    base = base_model(model)
    name, rows = type(base).__name__, torch.tensor(positions) - 1
    if max(ids) >= base.get_input_embeddings().num_embeddings:  # type: ignore[operator]
        raise RopepatchError(
            f"{name} has a smaller vocabulary than the checkpoint: it is another model"
        )
    keeps = any(map(gives_positions, model.modules()))
    tokens = torch.tensor([ids[: positions[-1]]], device=input_device(base))
    # no_grad: a module may cache what it computes here, and inference tensors cannot be used in training
    hint = f"check that it runs at {positions[-1]} tokens"
    with in_eval_mode(model), torch.no_grad(), stock_code(f"run {name}", hint):
        options = {"logits_to_keep": rows} if keeps else {}
        logits = model(input_ids=tokens, use_cache=False, **options).logits[0]
        log_probs = (logits if keeps else logits[rows]).float().log_softmax(-1).cpu()
    if not log_probs.isfinite().any(-1).all():
        hint = "run `ropepatch.diagnose(model)` to check its RoPE"
        raise RopepatchError(
            f"{name} computes logits that are NaN or infinite", hint=hint
        )
    values, tops = log_probs.topk(min(TOP, log_probs.shape[-1]))
    return [
        dict(zip(*row, strict=True))
        for row in zip(tops.tolist(), values.tolist(), strict=True)
    ]
