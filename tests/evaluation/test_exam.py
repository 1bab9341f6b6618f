"""What a model can be examined with."""

import pytest
import torch

from ropepatch.evaluation import exam
from ropepatch.evaluation.exam import answerable
from ropepatch.evaluation.intervals import Mean


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(exam, "MOST", 8)


def test_answerable_kinds_are_those_answered_within_the_original_length_and_none_for_a_guessing_model(
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


def test_kinds_with_several_keys_are_preferred_to_the_passkey(tiny, monkeypatch):
    asked = []

    class Answers:
        def found(self, length, kind):
            asked.append((length, kind))
            return Mean(
                ((1.0 if kind == "number" else 4.0, 8.0),) * 8, share=True
            )  # one of 8 is a guess

    monkeypatch.setattr(exam, "ask", lambda *told, **options: Answers())
    found = answerable(None, tiny[1], 2048, seed=0)
    assert found == ["sentence"]
    assert (2048, "number") in asked
