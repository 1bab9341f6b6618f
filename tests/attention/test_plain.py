"""Causal attention with and without a window is that of a whole mask."""

import pytest
import torch

from ropepatch.attention import plain


@pytest.mark.parametrize("window", [1, 4, 5, 6, 11, 17, 40])
@pytest.mark.parametrize("block", [1024, 5])
def test_a_sliding_window_is_read_as_with_its_whole_mask(window, block, monkeypatch):
    monkeypatch.setattr(plain, "QUERY_BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 17, 8, generator=generator) for heads in (4, 2, 2)
    )
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    got = plain.causal(module, query, key, value, window, 0.5)
    last = plain.causal(module, query[:, :, -7:], key, value, window, 0.5)
    torch.testing.assert_close(last, got[:, -7:], rtol=0, atol=1e-6)
    apart = torch.arange(17)[:, None] - torch.arange(17)
    scores = query @ key.repeat_interleave(2, 1).mT * 0.5
    seen = scores.masked_fill((apart < 0) | (apart >= window), -torch.inf).softmax(-1)
    expected = seen @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(got, expected.transpose(1, 2), rtol=0, atol=1e-5)
