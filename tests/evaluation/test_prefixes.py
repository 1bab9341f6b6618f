import functools
import logging
from itertools import product
from typing import Any

import pytest
import torch
from passkey_cases import TOKENIZERS, Known, Remembering, copied, within
from tiny_models import tiny_model
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicLayer

import ropepatch
from ropepatch.data.prompts import PasskeyTemplate, needle_prompt, passkey_prompt
from ropepatch.evaluation.passkey import draw_needles, passkey
from ropepatch.evaluation.prefixes import read_in_batches
from ropepatch.settings import seed_of

DEPTHS = (0.0, 0.3, 0.6, 0.8, 1.0)


def rows_of(tokenizer: PreTrainedTokenizerFast, length: int) -> list[list[int]]:
    """The prompts that `passkey` makes of six trials, one by one."""
    words = PasskeyTemplate()
    seeds = (
        (depth, seed_of("passkey", 0, length, depth, trial)) for depth, trial in product(DEPTHS, range(6))
    )
    return [
        needle_prompt(
            tokenizer, length=length, needles=draw_needles(words, depth, 0, seed), template=words
        ).ids.tolist()
        for depth, seed in seeds
    ]


# Every prompt is read whole, from the cache or at once


@pytest.mark.parametrize("tokens_per_batch", [1, 500, 2048, 10**6])
@pytest.mark.parametrize("length", [80, 113, 400])
def test_every_prompt_is_read_and_its_beginning_is_its_own(tokenizer, length, tokens_per_batch):
    model = Remembering(copied)
    grid = passkey(
        model, tokenizer, lengths=[length], depths=DEPTHS, trials=6, tokens_per_batch=tokens_per_batch
    )
    expected = rows_of(tokenizer, length)
    trunk = expected[-1]  # read for its verdict, into the cache, and again from there
    assert sorted(model.seen) == sorted([*expected, trunk, trunk])
    assert any(past for _, _, past in model.read)
    assert grid == passkey(Known(copied), tokenizer, lengths=[length], depths=DEPTHS, trials=6)


@pytest.mark.parametrize("window", [75, 90, 250])
def test_verdicts_from_the_cache_are_counted_in_their_own_cells(tokenizer, window):
    def says(ids: list[int]) -> list[int]:
        return within(window)(ids) if ids[-1] % 3 else copied(ids)

    ask = functools.partial(passkey, tokenizer=tokenizer, lengths=(90, 300), depths=DEPTHS, trials=7)
    shared, whole = ask(Remembering(says)), ask(Known(says))
    assert shared == whole
    assert len({cell.correct for cell in whole.cells.values()}) > 1


def test_a_prompt_like_the_trunk_to_the_end_is_read_for_its_whole_answer(tokenizer):
    model = Remembering(copied)
    words = PasskeyTemplate(keys=(1, 12))
    grid = passkey(model, tokenizer, lengths=[120], trials=20, template=words, tokens_per_batch=1)
    assert {cell.correct for cell in grid.cells.values()} == {20}
    assert len({*map(tuple, model.seen)}) < 60


def test_a_prompt_is_read_from_where_its_batch_leaves_the_trunk_and_no_earlier(tokenizer):
    model = Remembering(copied)
    passkey(model, tokenizer, lengths=[300], depths=DEPTHS, trials=6, tokens_per_batch=1)
    *rows, trunk = rows_of(tokenizer, 300)

    def alike(row: list[int]) -> int:
        return min(next(at for at, (a, b) in enumerate(zip(row, trunk, strict=True)) if a != b), 300 - 7)

    expected = sorted((alike(row) for row in rows), reverse=True)
    from_cache = [past for _, _, past in model.read[3:] if past]
    assert from_cache == expected[: len(from_cache)]
    assert len(from_cache) == sum(at * 2 * (300 + 6) >= 300**2 for at in expected)
    assert model.read[:3] == [(1, 300, 0), (1, 300, 0), (1, 300 - from_cache[-1], from_cache[-1])]


def test_the_cache_has_room_for_no_more_tokens_than_are_read_at_once(tokenizer, monkeypatch):
    made = []
    allocate = Tensor.new_empty
    monkeypatch.setattr(
        Tensor, "new_empty", lambda self, *shape: made.append(shape) or allocate(self, *shape)
    )
    model = Remembering(copied)
    passkey(model, tokenizer, lengths=[200], depths=DEPTHS, trials=6, tokens_per_batch=900)
    assert made == [(4, 2, 200, 3), (4, 2, 200, 2)]
    assert max(rows for rows, _, _ in model.read) == 4


@pytest.mark.parametrize(
    ("options", "calls"),
    [({"depths": [0.0, 1.0], "trials": 2}, 1), ({"depths": DEPTHS, "trials": 6, "share_prefixes": False}, 5)],
    ids=["few, where sharing would cost more", "asked for"],
)
def test_prompts_are_read_at_once(tokenizer, options, calls):
    model = Remembering(copied)
    passkey(model, tokenizer, lengths=[300], **options)
    assert [past for _, _, past in model.read] == [0] * calls


# Logits are those of reading at once


def logits_of(model: nn.Module, ids: Tensor, *, share: bool, rows: int = 8) -> dict[int, Tensor]:
    with torch.inference_mode():
        return {
            row: logits
            for batch, found in read_in_batches(model, ids, 6, rows=rows, share=share)
            for row, logits in zip(batch, found, strict=True)
        }


def greatest_difference(model: nn.Module, ids: Tensor, **options: Any) -> float:
    """Of the logits from the cache to those of one plain call per prompt, relative to the greatest."""
    found = logits_of(model, ids, share=True, **options)
    assert sorted(found) == list(range(len(ids)))
    with torch.inference_mode():
        expected = torch.stack([model(row[None], use_cache=False).logits[0, -7:-1] for row in ids])
    given = torch.stack([found[row] for row in range(len(ids))])
    return float((given - expected).abs().max() / expected.abs().max())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Ours; transformers has its own."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("ropepatch")]


def prompts(tokenizer: PreTrainedTokenizerFast, length: int) -> Tensor:
    asked = product(DEPTHS, ("04711", "31415", "27182", "16180"))
    return torch.stack(
        [passkey_prompt(tokenizer, length=length, depth=depth, key=key).ids for depth, key in asked]
    )


def small_llama(rope: dict[str, Any]) -> LlamaForCausalLM:
    """A random model that was trained, as it were, on 128 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
        max_position_embeddings=128,
        initializer_range=0.25,
        rope_parameters={"rope_theta": 1e4} | rope,
    )
    return LlamaForCausalLM(config).eval()


PLAIN = {"rope_type": "default"}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + step for step in range(8)],
}


@pytest.fixture
def cached(monkeypatch) -> list[int]:
    """The tokens that come from a cache, in each call that takes one."""
    taken: list[int] = []
    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)
    def watch(self: Any, *args: Any, past_key_values: Any = None, **options: Any) -> Any:
        if past_key_values is not None:
            taken.append(past_key_values.get_seq_length())
        return forward(self, *args, past_key_values=past_key_values, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", watch)
    return taken


@pytest.mark.parametrize("rope", [PLAIN, DYNAMIC, LONGROPE], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("length", [100, 140, 300])
def test_logits_with_stock_ropes_are_those_of_reading_at_once(tokenizer, rope, length, cached, caplog):
    model = small_llama(rope)
    assert greatest_difference(model, prompts(tokenizer, length)) < 1e-4
    assert sum(map(bool, cached)) >= 3
    assert not warnings_of(caplog)


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=lambda rope: rope["rope_type"])
def test_a_trunk_cut_before_it_is_read_would_be_wrong_with_ropes_that_depend_on_the_length(tokenizer, rope):
    model, row = small_llama(rope), prompts(tokenizer, 300)[-1:]
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(row[:, :100], past_key_values=cache, use_cache=True)
        found = model(row[:, 100:], past_key_values=cache, use_cache=True).logits[:, -7:-1]
        expected = model(row, use_cache=False).logits[:, -7:-1]
    assert (found - expected).abs().max() > 0.1 * expected.abs().max()


@pytest.mark.parametrize("method", ["yarn", "dynamic", "dynamic-yarn"])
def test_logits_of_a_patched_model_are_those_of_reading_at_once(tiny, method, caplog):
    model, tokenizer = tiny
    with ropepatch.patch(model, ropepatch.plan("tiny", to=1024, method=method)):
        assert greatest_difference(model, prompts(tokenizer, 400)) < 1e-4
    assert not caplog.records


# Models with which nothing is shared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_reads_a_cache_otherwise_reads_everything_at_once_and_says_so(tokenizer, dtype, caplog):
    """With a cache, every token stands one position too late."""

    def shift(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        cache = options.get("past_key_values")
        if cache is not None and (past := cache.get_seq_length()):
            options["position_ids"] = torch.arange(past + 1, past + 1 + options["input_ids"].shape[1])[None]

    model = small_llama(PLAIN).to(dtype)
    model.register_forward_pre_hook(shift, with_kwargs=True)
    ids = prompts(tokenizer, 200)
    with caplog.at_level(logging.WARNING):
        found = logits_of(model, ids, share=True)
    expected = logits_of(model, ids, share=False)
    assert found.keys() == expected.keys()
    scale = max(float(logits.abs().max()) for logits in expected.values())
    assert all((found[row] - expected[row]).abs().max() < 0.02 * scale for row in found)
    assert [record.getMessage() for record in caplog.records] == [
        "LlamaForCausalLM: a prompt of 200 tokens has other logits with a key-value cache than without; "
        "all prompts of this length are read in full"
    ]


@pytest.mark.parametrize(
    ("dtype", "by", "refused"),
    [
        (torch.float32, 2e-4, False),
        (torch.float32, 5e-3, True),
        (torch.bfloat16, 0.015, False),
        (torch.bfloat16, 0.08, True),
    ],
)
def test_logits_may_differ_by_the_rounding_of_their_dtype_and_no_more(tokenizer, dtype, by, refused, caplog):
    """With a cache, the logits are greater by a share of them."""

    def scale(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        if options.get("past_key_values") is not None:
            output.logits = output.logits * (1 + by)

    model = small_llama(PLAIN).to(dtype)
    model.register_forward_hook(scale, with_kwargs=True)
    logits_of(model, prompts(tokenizer, 120), share=True)
    assert len(caplog.records) == refused


@pytest.mark.parametrize("family", ["gemma2", "llama4_text", "mamba", "qwen3_next"])
def test_models_whose_layers_do_not_keep_all_tokens_are_given_no_cache(family):
    model, given = tiny_model(family), []
    model.register_forward_pre_hook(lambda _, __, options: given.append(options), with_kwargs=True)
    tokenizer = TOKENIZERS["whole_words"]()
    template = PasskeyTemplate(digits=1)
    passkey(model, tokenizer, lengths=[76], depths=DEPTHS, trials=4, template=template)
    assert given
    assert not any("past_key_values" in options for options in given)
    assert all(options["input_ids"].shape == (1, 1) for options in given if options["use_cache"])


class WithoutPast(Remembering):
    """Takes no cache."""

    def forward(self, input_ids, use_cache=None, logits_to_keep=0):
        assert not use_cache
        return super().forward(input_ids, logits_to_keep=logits_to_keep)


def subclassed(cache: DynamicCache) -> object:
    other = type("HybridCache", (DynamicCache,), {})()
    other.layers = cache.layers
    return other


def with_quantized_layer(cache: DynamicCache) -> object:
    cache.layers.append(type("QuantizedLayer", (DynamicLayer,), {})())
    return cache


CACHES = {
    "tuples": lambda cache: ((cache.layers[0].keys, cache.layers[0].values),),
    "subclass": subclassed,
    "without layers": lambda cache: DynamicCache(),
    "quantized": with_quantized_layer,
}


@pytest.mark.parametrize("kind", ["none", *CACHES])
def test_models_with_another_cache_or_none_read_everything_at_once(tokenizer, kind, caplog, monkeypatch):
    model = WithoutPast(copied) if kind == "none" else Remembering(copied)
    if kind != "none":
        cache = CACHES[kind](model.own_cache())
        monkeypatch.setattr(model, "own_cache", lambda: cache)
    assert passkey(model, tokenizer, lengths=[200], depths=DEPTHS, trials=6).at(200).correct == 30
    assert not any(past for _, _, past in model.read)
    assert len(model.seen) == 30
    assert not caplog.records
