"""A patch, a remapping and a swap change only one of several models with the same configuration."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from swaps import logits
from tiny_models import tiny_model
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

import ropepatch
from ropepatch import RopepatchError
from ropepatch.attention import remap_positions
from ropepatch.attention.interchange import attending_by
from ropepatch.encodings import swap
from ropepatch.training.packed_attention import packed_attention

IDS = torch.randint(3, 120, (1, 96), generator=torch.Generator().manual_seed(1))
WAYS: dict[str, Any] = {
    "patch": lambda model: ropepatch.patch(model, "yarn", to=256),
    "map": lambda model: remap_positions(model, "rerope", to=256, window=8),
    "swap": lambda model: swap(model, "alibi"),
}


@pytest.fixture
def two() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two models with one configuration."""
    one = tiny_model("llama")
    return one, type(one)(one.config).eval()


def configs(model: nn.Module) -> list[tuple[str, PreTrainedConfig]]:
    """All configurations of a model's modules."""
    return [
        (name, value)
        for name, module in model.named_modules()
        for value in vars(module).values()
        if isinstance(value, PreTrainedConfig)
    ]


def same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(
        a == b and x is y for (a, x), (b, y) in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("way", "second"), [("patch", "map"), ("map", "swap"), ("swap", "patch")])
def test_two_models_with_one_configuration_are_changed_and_restored_in_any_order(two, way, second):
    one, other = two
    held, before = configs(one), [logits(model, IDS) for model in two]
    first, then = WAYS[way](one), WAYS[second](other)
    alone = logits(one, IDS)
    then.remove()
    assert torch.equal(logits(one, IDS), alone)
    first.remove()
    assert same(configs(one), held)
    assert one.config is other.config
    assert all(torch.equal(logits(model, IDS), wanted) for model, wanted in zip(two, before, strict=True))


@pytest.mark.parametrize("way", ["map", "swap"])
def test_an_error_after_the_checks_leaves_the_configuration_unchanged(way, monkeypatch):
    model = tiny_model("llama")
    held, content = configs(model), deepcopy(vars(model.config))

    def refused(*arguments: Any) -> bool:
        raise RopepatchError("no")

    monkeypatch.setattr("ropepatch.attention.probe._rotates", refused)
    with pytest.raises(RopepatchError, match="no"):
        WAYS[way](model)
    assert same(configs(model), held)
    assert vars(model.config) == content


def test_a_patch_within_packed_attention_may_outlast_it():
    model = tiny_model("llama")
    held, attention = configs(model), model.config._attn_implementation
    with packed_attention(model):
        handle = ropepatch.patch(model, "yarn", to=256)
    assert model.config._attn_implementation == attention
    handle.remove()
    assert same(configs(model), held)
    assert model.config._attn_implementation == attention
    handle = ropepatch.patch(model, "yarn", to=256)
    with packed_attention(model):
        handle.remove()
    assert same(configs(model), held)
    assert model.config._attn_implementation == attention


def test_loading_a_remapping_again_does_not_change_another_model(two):
    one, other = two
    expected = logits(other, IDS)
    with remap_positions(one, "rerope", to=256, window=8) as handle:
        through = logits(one, IDS)
    held = configs(one)
    with handle.again():
        assert torch.equal(logits(one, IDS), through)
        assert torch.equal(logits(other, IDS), expected)
    assert same(configs(one), held)


def test_the_attention_implementation_is_restored_after_the_block():
    model = tiny_model("llama")
    attention = model.config._attn_implementation
    with pytest.raises(ZeroDivisionError), attending_by(model, "eager"):
        _ = (model.config._attn_implementation == "eager") / 0
    assert model.config._attn_implementation == attention
