"""Measurements of one model by several threads: each has its own numbers, and the model stays as it was."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

import ropepatch
from ropepatch import RopepatchError
from ropepatch.model.head import cache_keyword, evaluating, reading_on, shadowed

LENGTH = 48


@pytest.fixture
def model():
    return tiny_model("llama")


def loss(model, ids):
    return ropepatch.perplexity(model, None, [ids], length=LENGTH).at(LENGTH).mean


def test_threads_that_measure_one_model_get_what_one_after_the_other_gets(model):
    threads = 8
    texts = torch.randint(0, 64, (threads, LENGTH), generator=torch.Generator().manual_seed(0))
    model.train()
    with torch.no_grad():
        before = model(texts).logits
    expected = [loss(model, ids) for ids in texts]
    start = Barrier(threads)

    def measured(ids):
        start.wait()
        return [loss(model, ids) for _ in range(5)]

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(measured, texts)) == [[value] * 5 for value in expected]
    assert all(module.training and "forward" not in vars(module) for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(texts).logits, before)


def test_a_thread_that_runs_the_model_meanwhile_gets_the_models_own_answers():
    layer, x = torch.nn.Linear(3, 3), torch.ones(3)
    usual = layer(x)
    with shadowed(layer, lambda x: -x), ThreadPoolExecutor(1) as pool:
        assert torch.equal(layer(x), -x)
        assert torch.equal(pool.submit(layer, x).result(), usual)
    assert torch.equal(layer(x), usual)


def test_a_second_thread_waits_until_the_first_has_let_go():
    layer, entered, order = torch.nn.Linear(3, 3).train(), Event(), []

    def second():
        entered.set()
        with evaluating(layer):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with evaluating(layer):
            waiting = pool.submit(second)
            entered.wait()
            order.append("first")
            assert not waiting.done()
        waiting.result()
    assert order == ["first", "second"]
    assert layer.training


@pytest.mark.parametrize("wrapped", [False, True], ids=["as it is", "within a LoRA"])
def test_the_cache_is_taken_and_given_under_one_name(wrapped):
    stock, model = tiny_model("llama").eval(), tiny_model("llama").eval()
    if wrapped:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    keyword = cache_keyword(model)
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        read = reading_on(model)
        pieces = torch.cat([read(piece).logits for piece in ids.split([5, 1, 2], dim=1)], 1)
        assert torch.allclose(pieces, stock(ids, use_cache=False).logits, atol=1e-5)
        first = model(input_ids=ids[:, :5], use_cache=True)
        then = model(input_ids=ids[:, 5:], use_cache=True, **{keyword: first[keyword]})
        assert first[keyword].get_seq_length() == 8
        assert torch.allclose(then.logits, stock(ids, use_cache=False).logits[:, 5:], atol=1e-5)


def test_a_model_that_takes_no_cache_has_no_name_for_it():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert cache_keyword(model) is None
    with pytest.raises(RopepatchError, match="Sequential takes no key-value cache"):
        reading_on(model)


@pytest.mark.parametrize("length", [LENGTH, 100])
@torch.no_grad()
def test_a_dynamic_rope_is_measured_as_if_it_had_read_nothing_before(length):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = LlamaConfig(**{**tiny_model("llama").config.to_dict(), "rope_parameters": rope})
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 64, (1, 200), generator=torch.Generator().manual_seed(0))
    expected = model(ids[:, :length], use_cache=False).logits
    model(ids, use_cache=False)
    with evaluating(model):
        assert torch.equal(model(ids[:, :length], use_cache=False).logits, expected)
