"""What a model can be examined with."""

import pytest
import torch

from ropepatch.evaluation import exam
from ropepatch.evaluation.exam import answerable


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(exam, "MOST", 8)


def test_answerable_kinds_are_answered_within_the_original_length(
    tiny,
):
    model, tokenizer = tiny
    assert answerable(model, tokenizer, 256, seed=0) == ["passkey"]
    weights = {
        name: torch.randn_like(weight) for name, weight in model.state_dict().items()
    }
    stranger = type(model)(model.config).eval()
    stranger.load_state_dict(weights)
    assert answerable(stranger, tokenizer, 256, seed=0) == []
