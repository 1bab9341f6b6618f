"""A patch, a remapping and a swap change only one of several models with the same configuration."""

from typing import Any

import pytest
import torch
from swaps import logits
from tiny_models import tiny_model
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

import ropepatch
from ropepatch.encodings.swapping import swap

IDS = torch.randint(3, 120, (1, 96), generator=torch.Generator().manual_seed(1))
WAYS: dict[str, Any] = {
    "patch": lambda model: ropepatch.patch(model, "yarn", to=256),
    "map": lambda model: ropepatch.patch(model, "rerope", to=256, window=8),
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


@pytest.mark.parametrize(
    ("way", "second"), [("patch", "map"), ("map", "swap"), ("swap", "patch")]
)
def test_two_models_with_one_configuration_are_changed_and_restored_in_any_order(
    two, way, second
):
    """Changes of the configuration by the user meanwhile are kept."""
    one, other = two
    held, before = configs(one), [logits(model, IDS) for model in two]
    content = other.config.to_dict()
    first = WAYS[way](one)
    assert one.config is not other.config
    assert same(configs(other), held)
    assert other.config.to_dict() == content
    assert torch.equal(logits(other, IDS), before[1])
    alone = logits(one, IDS)
    then = WAYS[second](other)
    one.config.use_cache = False
    then.remove()
    assert torch.equal(logits(one, IDS), alone)
    first.remove()
    assert same(configs(one), held)
    assert one.config is other.config
    assert one.config.use_cache is False
    assert all(
        torch.equal(logits(model, IDS), wanted)
        for model, wanted in zip(two, before, strict=True)
    )
