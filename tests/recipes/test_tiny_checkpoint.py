"""The bundled checkpoint reads and retrieves within 256 tokens and is blind beyond, as its card says."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import ropepatch
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.model.checkpoint import TINY


def test_stock_transformers_loads_it_in_float32(tiny):
    stock = AutoModelForCausalLM.from_pretrained(TINY)
    assert (type(stock), stock.dtype) == (LlamaForCausalLM, torch.float32)
    ids = AutoTokenizer.from_pretrained(TINY)(
        "The river runs.", return_tensors="pt"
    ).input_ids
    assert torch.equal(stock(ids).logits, tiny[0](ids).logits)


@pytest.mark.slow
def test_it_retrieves_at_every_depth_within_its_window(tiny):
    answers = ropepatch.passkey(*tiny, lengths=[160, 256], haystacks=40, seed=2)
    for length in answers.lengths:
        for depths in ((0, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 1)):
            assert answers.found(length, depths=depths).value >= 0.95


@pytest.mark.slow
def test_its_loss_is_near_the_floor_within_its_window_alone(tiny):
    within = held_out_tales(tiny[1], length=256, count=40)
    floor = -torch.stack([tale.log_probs()[1:] for tale in within]).mean().item()
    loss = (
        ropepatch.perplexity(tiny[0], None, [tale.ids for tale in within]).at(256).value
    )
    assert floor < loss <= 1.05 * floor
    tales = held_out_tales(tiny[1], length=1024, count=8)
    seen = [(tale.distance > 0) & (tale.distance <= 256) for tale in tales]
    pairs = zip(tales, seen, strict=True)
    nearby = (
        -torch.stack([tale.prior.masked_fill(near, 0)[512:] for tale, near in pairs])
        .mean()
        .item()
    )
    curve = ropepatch.perplexity(tiny[0], None, [tale.ids for tale in tales])
    assert curve.between(512, 1024).value > 2 * nearby


def test_a_folder_called_tiny_is_reached_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert (
        ropepatch.plan(
            "tiny", to=512
        ).source.config.rope.original_max_position_embeddings
        == 256
    )
    for folder in ("./tiny", Path("tiny")):
        with pytest.raises(RopepatchError, match=r"no config\.json in tiny"):
            ropepatch.plan(folder, to=512)
