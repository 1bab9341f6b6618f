"""Estimated memory is that of torch's allocations and transformers' caches."""

from itertools import accumulate

import pytest
import torch
from tiny_models import LLAMA_SIZES
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
)

import ropepatch
from ropepatch.model.cost import cache_bytes, forward_bytes, step_bytes
from ropepatch.training.adapter import recompute_activations, trainable
from ropepatch.training.recipe import Lora


def peak_of_allocations(step):
    """Peak of the bytes allocated on the CPU during a step."""
    step()  # the first allocates more
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step()
    events = watched.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]"
    )
    return max(accumulate(change for _, change in changes))


@pytest.mark.parametrize(
    ("lora", "mixed"),
    [
        (None, False),
        (Lora(r=4), True),
        (Lora(r=4, train_embeddings=True), False),
    ],
)
def test_the_activations_are_what_torch_allocates(lora, mixed):
    # As many key as query heads: on the CPU, older torch takes others through [T, T] scores.
    config, tokens = (
        LlamaConfig(**LLAMA_SIZES | {"vocab_size": 32}, use_cache=False),
        512,
    )
    model = LlamaForCausalLM(config)
    model = trainable(model.bfloat16() if mixed else model, lora).train()
    base = model.get_base_model() if lora else model
    recompute_activations(base)
    for weights in model.parameters():
        if weights.requires_grad:
            weights.grad = torch.zeros_like(weights)
    ids = torch.randint(32, (1, tokens))

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            states = base.model(input_ids=ids).last_hidden_state
        states.sum().backward()

    size = 2 if mixed else 4
    stream = 4 if lora is None or lora.train_embeddings else size
    expected = (
        step_bytes(config, tokens, size, stream=stream, recomputed=True)
        - 12 * tokens * 32
    )
    assert expected == pytest.approx(peak_of_allocations(step), rel=0.15)


def test_an_evaluation_takes_what_torch_allocates(tiny):
    config = LlamaConfig(
        **LLAMA_SIZES | {"num_key_value_heads": 2, "num_hidden_layers": 12}
    )
    model = LlamaForCausalLM(config).eval()
    read = [torch.arange(2048) % 1024]
    peak = peak_of_allocations(lambda: ropepatch.perplexity(model, None, read))
    assert forward_bytes(config, 2048, 4) == pytest.approx(peak, rel=0.15)
    asked = {"lengths": [1024], "haystacks": 1}
    peak = peak_of_allocations(lambda: ropepatch.passkey(model, tiny[1], **asked))
    assert forward_bytes(config, 1024, 4, cached=True) == pytest.approx(peak, rel=0.15)


TINY = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**TINY, num_hidden_layers=3),
        MistralConfig(**TINY, num_hidden_layers=2, sliding_window=24),
        Gemma3TextConfig(**TINY, num_hidden_layers=7, head_dim=16, sliding_window=8),
    ],
    ids=lambda config: config.model_type,
)
def test_the_kv_cache_size_equals_that_of_transformers(config):
    model, tokens = AutoModelForCausalLM.from_config(config).eval(), 40
    with torch.no_grad():
        cache = model(
            torch.zeros(1, tokens, dtype=torch.long), use_cache=True
        ).past_key_values
    held = 0
    for layer in cache.layers:
        # Transformers holds one token less
        window = layer.sliding_window if layer.is_sliding else tokens
        held += 2 * layer.keys[..., :1, :].numel() * min(tokens, window)
        assert layer.keys.shape[-2] in (tokens, window - 1)
    assert cache_bytes(config, tokens) == 2 * held


def test_latent_attention_caches_only_its_latents():
    config = DeepseekV3Config(
        kv_lora_rank=512, qk_rope_head_dim=64, num_hidden_layers=61
    )
    assert cache_bytes(config, 1000) == 2 * 61 * 1000 * (512 + 64)
