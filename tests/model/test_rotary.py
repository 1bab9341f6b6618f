"""Replacements of a rotary module: found by class, moved with the model, removable."""

import pytest
import torch

from ropepatch.errors import RopepatchError
from ropepatch.model.config import find_rotary
from ropepatch.model.rotary import RotarySubstitute, find_substitute, rotating_by


class Replacement(RotarySubstitute):
    state, way_back = "a replacement is active", "remove the replacement"

    def forward(self, x, position_ids):
        return self.stock(x, position_ids)


@pytest.fixture
def model(tiny):
    return tiny[0]


def test_a_substitute_is_found_and_removed_after_an_error(model):
    path = find_rotary(model).path
    stock = model.get_submodule(path)
    refused = pytest.raises(RopepatchError, match="a replacement is active")
    with refused as caught, rotating_by(model, path, Replacement(stock)):
        assert find_substitute(model, Replacement)[0] == path
        find_rotary(model)
    assert caught.value.hint == "remove the replacement"
    assert model.get_submodule(path) is stock
    assert find_substitute(model, Replacement) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_move_with_the_model_and_are_never_rounded(model, dtype):
    path = find_rotary(model).path
    stock = model.get_submodule(path)
    exact = stock.inv_freq.clone()
    before = model.dtype
    with rotating_by(model, path, Replacement(stock)):
        holder = model.get_submodule(path.rpartition(".")[0])
        replacement = holder.rotary_emb.to(dtype).to("meta")
        assert stock.inv_freq.is_meta
        replacement.to_empty(device="cpu")
        assert torch.equal(stock.inv_freq, exact)
        assert not replacement.state_dict()
    assert model.dtype == before
