"""A model spread over several devices computes the same as on one."""

from contextlib import nullcontext

import pytest
import torch
from transformers.utils import generic

import ropepatch
from ropepatch.encodings.loading import load_checkpoint
from ropepatch.model.checkpoint import TINY, Checkpoint
from ropepatch.model.precision import describe_placement

DOCUMENTS = [list(range(5, 300)), list(range(9, 200))]


@pytest.fixture(scope="module")
def spread():
    """The bundled checkpoint, every other layer on disk."""
    places = dict.fromkeys(
        ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu"
    )
    places |= {
        f"model.layers.{number}": ("disk", "cpu")[number % 2] for number in range(4)
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            generic, "_is_mlx_available", False
        )  # accelerate's hooks check it
        yield load_checkpoint(Checkpoint(TINY), None, places)


def test_layers_on_several_devices_give_the_same_results(spread, tiny):
    model, tokenizer = tiny
    assert describe_placement(spread) == "on cpu, disk, float32"
    assert spread.model.layers[0].self_attn.q_proj.weight.is_meta
    for method in (None, "yarn"):
        curves = []
        for one in (model, spread):
            with ropepatch.patch(one, method, to=1024) if method else nullcontext():
                curves.append(ropepatch.perplexity(one, None, DOCUMENTS))
        assert all(map(torch.equal, *(curve.nll for curve in curves)))
    asked = {"lengths": [192, 320], "haystacks": 2}
    found = [ropepatch.passkey(one, tokenizer, **asked) for one in (model, spread)]
    assert found[0] == found[1]


def test_device_auto_applies_to_inference_only(tiny):
    model, _ = ropepatch.load("tiny", device="auto")
    ids = torch.arange(5, 25)[None]
    assert torch.equal(model(ids).logits, tiny[0](ids).logits)
    results = ropepatch.evaluate("tiny", lengths=[64], windows=1, device="auto")
    assert [result.label for result in results][-1] == "baseline"
