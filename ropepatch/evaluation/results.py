"""What stands beside every figure: where it was measured, and with what."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import transformers

import ropepatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def environment(model: PreTrainedModel) -> dict[str, str]:
    """Versions, device and dtype."""
    on_gpu = model.device.type == "cuda"
    return {
        "ropepatch": ropepatch.__version__,
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if on_gpu else str(model.device),
        "dtype": str(model.dtype),
    }


def finite(value: float) -> float | None:
    """The value, or None if it is infinite, which JSON cannot say."""
    return value if math.isfinite(value) else None
