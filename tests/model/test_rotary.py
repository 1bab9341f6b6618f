"""What stands in the place of a rotary module: told by its kind, moved with the model, taken out again."""

import pytest
import torch
from torch import nn

from ropepatch.errors import RopepatchError
from ropepatch.model.rotary import RotarySubstitute, find_rotary, find_substitute, rotating_by


class Guest(RotarySubstitute):
    state, way_back = "a guest is here", "show it out"

    def forward(self, x, position_ids):
        return self.stock(x, position_ids)


@pytest.fixture
def model(tiny):
    return tiny[0]


def test_a_substitute_is_told_by_its_kind_whatever_its_name(model):
    path = find_rotary(model).path
    stock = model.get_submodule(path)
    with rotating_by(model, path, Guest(stock)):
        found = find_substitute(model, Guest)
        assert found is not None
        assert found[0] == path
        with pytest.raises(RopepatchError, match="a guest is here") as caught:
            find_rotary(model)
        assert caught.value.hint == "show it out"
    assert model.get_submodule(path) is stock
    assert find_substitute(model, Guest) is None


def test_the_stock_module_is_back_after_an_error(model):
    path = find_rotary(model).path
    stock = model.get_submodule(path)
    with pytest.raises(ZeroDivisionError), rotating_by(model, path, nn.Identity()):
        raise ZeroDivisionError
    assert model.get_submodule(path) is stock


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_tables_move_with_the_model_and_are_never_rounded(model, dtype):
    path = find_rotary(model).path
    stock = model.get_submodule(path)
    exact = stock.inv_freq.clone()
    before = model.dtype
    with rotating_by(model, path, Guest(stock)):
        holder = model.get_submodule(path.rpartition(".")[0])
        guest = holder.rotary_emb.to(dtype).to("meta")
        assert stock.inv_freq.is_meta
        guest.to_empty(device="cpu")
        assert torch.equal(stock.inv_freq, exact)
        assert not guest.state_dict()
    assert model.dtype == before
