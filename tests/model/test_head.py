"""A model's decoder, head and KV cache, and the warnings of transformers."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model

from ropepatch import RopepatchError
from ropepatch.model.config import stock_code
from ropepatch.model.head import cache_keyword, evaluating, incremental_forward

LENGTH = 48


@pytest.fixture
def heard():
    """The messages that a handler of transformers' logger receives."""
    messages = []
    handler = logging.StreamHandler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_warnings_of_transformers_are_hidden_in_this_thread_only(heard):
    """Two threads enter the block one after the other, and leave it in the same order."""
    logger = logging.getLogger("transformers.models")
    level = logging.getLogger("transformers").level
    first, second = stock_code("a"), stock_code("b")
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(first.__enter__).result()
        other.submit(second.__enter__).result()
        logger.warning("of a third thread")
        for pool in (one, other):
            pool.submit(logger.warning, "within").result()
            pool.submit(logger.error, "error").result()
        one.submit(first.__exit__, None, None, None).result()
        other.submit(second.__exit__, None, None, None).result()
        one.submit(logger.warning, "afterwards").result()
    assert heard == ["of a third thread", "error", "error", "afterwards"]
    assert logging.getLogger("transformers").level == level


def test_too_little_memory_is_no_mistake_in_config_json():
    with pytest.raises(RuntimeError, match="Cannot allocate"), stock_code("load it"):
        raise RuntimeError(
            "unable to mmap 269060552 bytes from file: Cannot allocate memory (12)"
        )


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "LoRA"])
def test_the_kv_cache_has_one_name_in_input_and_output(wrapped):
    stock, model = tiny_model("llama").eval(), tiny_model("llama").eval()
    if wrapped:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    keyword = cache_keyword(model)
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        run = incremental_forward(model)
        outputs = [run(piece) for piece in ids.split([5, 1, 2], dim=1)]
        pieces = torch.cat([output.logits for output in outputs], 1)
        assert torch.allclose(pieces, stock(ids, use_cache=False).logits, atol=1e-5)
        assert outputs[-1][keyword].get_seq_length() == 8


def test_a_model_without_a_kv_cache_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert cache_keyword(model) is None
    with pytest.raises(RopepatchError, match="Sequential takes no key-value cache"):
        incremental_forward(model)


@pytest.mark.parametrize("length", [LENGTH, 100])
@torch.no_grad()
def test_evaluation_resets_dynamic_rope_of_an_earlier_longer_text(length):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = tiny_model("llama", rope_parameters=rope)
    ids = torch.randint(0, 64, (1, 200), generator=torch.Generator().manual_seed(0))
    expected = model(ids[:, :length], use_cache=False).logits
    model(ids, use_cache=False)
    with evaluating(model):
        assert torch.equal(model(ids[:, :length], use_cache=False).logits, expected)
