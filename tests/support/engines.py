"""An engine that runs a checkpoint in some precision, correctly or with one of the known mistakes."""

from __future__ import annotations

from functools import cached_property

import torch

from ropepatch.extension import record as records
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import find_rotary, scaled_twin
from ropepatch.model.rotary import rotating_by
from ropepatch.probing import reading as readings
from ropepatch.probing.making import ropes
from ropepatch.probing.reading import RIGHT

PRECISIONS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Engine:
    """Next-token log-probabilities of a checkpoint, with a RoPE of its own choice.

    Args:
        folder: The checkpoint.
        mistake: A name of `ropepatch.probing.reading`; `right` for none.
        precision: float32, bfloat16, float16, or q8 for weights of 8 bits in blocks of 16.
        noise: The standard deviation of noise added to each weight tensor, relative to that of the tensor.
    """

    def __init__(
        self,
        folder,
        mistake=RIGHT,
        precision="float32",
        noise=0.0,
    ):
        dtype = PRECISIONS.get(precision, torch.float32)
        self.model = Checkpoint(folder).load(dtype)
        self.text = readings.read(folder).ids if readings.exists(folder) else []
        self.site = find_rotary(self.model)
        table = None if mistake == RIGHT else ropes(records.read(folder))[mistake]
        stock = self.model.get_submodule(self.site.path)
        self.rotary = stock if table is None else scaled_twin(stock, self.site, table)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in self.model.parameters():
                if precision == "q8" and weight.numel() % 16 == 0:
                    weight.copy_(in_8_bits(weight))
                if noise:
                    weight += (
                        noise
                        * weight.std()
                        * torch.randn(weight.shape, generator=generator)
                    )

    @torch.inference_mode()
    def log_probs(self, ids):
        """Return the log-probabilities after every token: [T, V]."""
        with rotating_by(self.model, self.site.path, self.rotary):
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return logits.float().log_softmax(-1)

    def tops(self, ids, positions, count=20):
        """Return the most probable next tokens after the first `positions` tokens."""
        is_prefix = ids == self.text[: len(ids)]
        log_probs = self.whole if is_prefix else self.log_probs(ids)
        values, top = log_probs[torch.tensor(positions) - 1].topk(count)
        pairs = zip(top.tolist(), values.tolist(), strict=True)
        return [dict(zip(*pair, strict=True)) for pair in pairs]

    @cached_property
    def whole(self):
        """The log-probabilities after every token of the fingerprint's text."""
        return self.log_probs(self.text)


def in_8_bits(weight):
    """Round weights as in Q8_0, in blocks of 16."""
    blocks = weight.reshape(-1, 16)
    step = (blocks.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    return ((blocks / step).round() * step).reshape(weight.shape)
