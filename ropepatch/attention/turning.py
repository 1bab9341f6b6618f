"""Queries and keys turned as a model turns its own, or faster where its layout of pairs is the common one."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn


def turned(module: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys [B, H, T, D], turned by the model's own function in its own layout of pairs."""
    width = cos.shape[-1]
    out, _ = _own(module)(x[..., :width], x[:, :0, :, :width], cos, sin)
    return out if width == x.shape[-1] else torch.cat((out, x[..., width:]), -1)


def quickly_turned(module: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `turned`, but for the last bits, in half the time."""
    width, half = cos.shape[-1], cos.shape[-1] // 2
    if width != x.shape[-1] or not _in_halves(_own(module), width):
        return turned(module, x, cos, sin)
    out, sin = x * cos[:, None], sin[:, None]
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def _own(module: nn.Module) -> Any:
    return sys.modules[type(module).__module__].apply_rotary_pos_emb


@lru_cache
def _in_halves(apply: Any, width: int) -> bool:
    """Whether a function turns each number of the first half with the one as far into the second."""
    x = torch.arange(1.0, width + 1, device="cpu")
    cos, sin = 3 * x, 5 * x + 1  # whole numbers: no rounding
    first, second = x.chunk(2)
    out, _ = apply(x[None, None, None], x[None, None, None][:, :0], cos[None, None], sin[None, None])
    return torch.equal(out[0, 0, 0], x * cos + torch.cat((-second, first)) * sin)
