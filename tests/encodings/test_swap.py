"""The invariants of a model whose position encoding is swapped, on tiny random models."""

import gc
import weakref
from typing import Any

import pytest
import torch
from families import every_family
from oldest import OLDEST
from swaps import ONE, TRAINED, apart, cast, every_encoding, logits, lora, put
from tiny_models import tiny_config, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import ropepatch
from ropepatch import RopepatchError
from ropepatch.attention import modeling_attention_map as modeling
from ropepatch.encodings import make_encoding, swap, swapped
from ropepatch.scaling import make_scaling
from ropepatch.training.packed_attention import packed_attention

DOUBLED = make_scaling("linear", factor=2.0)
PACKED = torch.cat([torch.arange(17), torch.arange(23)])[None]  # the positions of two texts in one row


# Off equals never on


def traces(model: PreTrainedModel) -> dict[str, Any]:
    """All that a swap changes in a model."""
    return {
        "modules": [id(module) for module in model.modules()],
        "attention": [one.config._attn_implementation for one in model.modules() if hasattr(one, "config")],
        "config": model.config.to_dict(),
        "slots": [set(vars(module)) for module in model.modules()],
        "hooks": [
            list(value) for one in model.modules() for kind, value in vars(one).items() if "hooks" in kind
        ],
        "state": list(model.state_dict()),
        "training": [module.training for module in model.modules()],
    }


@every_encoding
def test_taking_an_encoding_out_leaves_nothing_behind(model, name):
    before, expected = traces(model), logits(model)
    handle = put(model, name)
    once, added = logits(model), model.state_dict().keys() - before["state"]
    assert (apart(once, expected) > 1e-2) == (name != "rope")
    assert bool(added) == (name in TRAINED)
    assert all(key.startswith("model.rotary_emb.module.") for key in added)
    handle.remove()
    assert traces(model) == before
    assert torch.equal(logits(model), expected)
    handle.remove()
    assert traces(model) == before
    with put(model, name):
        assert torch.equal(logits(model), once)
    assert traces(model) == before


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_and_the_mode_of_a_model_are_put_back_also_after_an_exception(model, attention):
    model.set_attn_implementation(attention)
    model.train()
    model.model.layers[1].eval()
    before = traces(model)
    with pytest.raises(ZeroDivisionError), put(model, "learned") as handle:
        _ = int(handle.module.training) / 0
    assert traces(model) == before
    assert swapped(model) is None


def test_a_taken_out_encoding_keeps_no_module_alive(model):
    gc.freeze()  # then only what is made from here on is looked through
    with put(model, "learned") as handle:
        logits(model)
        gone = weakref.ref(handle.module)
    del handle
    gc.collect()
    gc.unfreeze()
    assert gone() is None


def test_hooks_of_the_user_stay(model):
    calls: list[nn.Module] = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda module, _: calls.append(module))
    with put(model, "sinusoidal"):
        calls.clear()  # the probe of the swap runs the model
        logits(model)
    logits(model)
    assert len(calls) == 2
    hook.remove()


@pytest.mark.parametrize("name", ["alibi", "shaw", "transformer-xl", "sinusoidal"])
def test_documents_of_a_packed_row_are_read_as_if_alone(model, name):
    put(model, name)
    ids = ONE[:, : PACKED.shape[1]]
    alone = torch.cat([logits(model, ids[:, :17]), logits(model, ids[:, 17:])], 1)
    assert apart(logits(model, ids, position_ids=PACKED, use_cache=False), alone) < 1e-5
    assert apart(logits(model, ids, use_cache=False), alone) > 1e-3


# Encodings that are one and the same


IN_ROWS = {"position_ids": PACKED, "use_cache": False}


@pytest.mark.parametrize(
    ("family", "dtype", "attention", "inputs"),
    [
        ("llama", torch.float32, "sdpa", {}),
        ("llama", torch.float32, "eager", IN_ROWS),
        ("llama", torch.bfloat16, "sdpa", IN_ROWS),
        ("llama", torch.bfloat16, "eager", {}),
        ("mistral", torch.float32, "sdpa", IN_ROWS),
        ("qwen2", torch.bfloat16, "sdpa", {}),
        ("qwen3", torch.float32, "eager", {}),
    ],
)
def test_the_rope_swapped_in_equals_the_stock_model_to_the_bit(family, dtype, attention, inputs):
    """With eager attention in bfloat16 because 1/sqrt(D) is a power of two; stock rounds once more."""
    model = cast(tiny_model(family), dtype)
    model.set_attn_implementation(attention)
    expected = logits(model, **inputs)
    put(model, "rope")
    assert torch.equal(logits(model, **inputs), expected)


# Nothing global, visible


# Training and wrappers


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(ONE, labels=ONE, use_cache=False).loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


@pytest.mark.parametrize("name", ["learned", "alibi", "t5", "shaw", "transformer-xl", "rope"])
def test_gradient_checkpointing_gives_the_same_gradients(model, name, monkeypatch):
    """With blocks that are computed again themselves."""
    monkeypatch.setitem(modeling.SCORES, "cpu", 4 * 40 * 16)
    put(model, name)
    plain = gradients(model)
    model.train()
    # The name until transformers 5.18, deprecated since.
    old = getattr(model, "gradient_checkpointing_enable", None)
    getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
    again = gradients(model)
    assert again.keys() == plain.keys()
    for key, gradient in plain.items():
        assert torch.allclose(again[key], gradient, rtol=1e-4, atol=1e-5), key


@pytest.mark.parametrize("name", ["learned", "shaw", "rope"])
def test_an_adapter_before_and_after_the_swap_are_the_same_model(name):
    one, other = tiny_model("llama"), tiny_model("llama")
    wrapped = lora(one)
    put(wrapped, name)
    put(other, name)
    assert torch.equal(logits(wrapped), logits(lora(other)))
    assert swapped(wrapped).encoding.name == name


@pytest.mark.parametrize("name", TRAINED)
def test_lora_trains_the_parameters_of_an_encoding_by_the_name_of_its_module(model, name):
    """They are at `model.rotary_emb.module`; of those that PEFT saves whole, a name is matched at its end."""
    put(model, name)
    plain = logits(model)
    wrapped = lora(model, modules_to_save=["rotary_emb.module"])
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.1)
    before = {key: p.detach().clone() for key, p in wrapped.named_parameters()}
    slopes = gradients(wrapped)
    assert all(gradient.abs().max() > 0 for gradient in slopes.values())
    assert sum(".rotary_emb.module.modules_to_save.default." in key for key in slopes) == len(
        [key for key in before if ".rotary_emb.module.original_module." in key]
    )
    optimizer.step()
    changed = {key for key, p in wrapped.named_parameters() if not torch.equal(p, before[key])}
    assert changed == slopes.keys()
    with wrapped.disable_adapter():
        assert torch.equal(logits(wrapped), plain)
    trained = logits(wrapped)
    merged = wrapped.merge_and_unload()
    assert apart(logits(merged), trained) < 1e-4
    swapped(merged).remove()
    logits(merged)


def test_dropout_of_an_adapter_in_training_is_no_reason_to_refuse_a_model(model):
    put(lora(model, lora_dropout=0.5).train(), "alibi")
    assert swapped(model).module.training


def test_growing_the_vocabulary_or_initialising_again_keeps_the_encoding(model):
    put(model, "shaw")
    expected = logits(model)
    model.init_weights()
    model.resize_token_embeddings(140)  # last: transformers 5.4 would draw a head that has grown anew
    assert torch.equal(logits(model)[..., :128], expected)


# What is refused


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda model: swap(model, "rope"), "already swapped"),
        (lambda model: ropepatch.patch(model, DOUBLED), "encoding of this model is swapped"),
        (lambda model: ropepatch.plan(model, to=256), "encoding of this model is swapped"),
        (
            lambda model: packed_attention(model).__enter__(),
            "cannot be trained on packed rows: its position encoding is swapped",
        ),
    ],
)
def test_what_needs_the_rope_refuses_a_swapped_model_and_leaves_it_alone(model, attempt, message):
    put(model, "alibi")
    expected = logits(model)
    with pytest.raises(RopepatchError, match=message):
        attempt(model)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda model: ropepatch.patch(model, DOUBLED), "already patched"), (packed_attention, "packed")],
)
def test_a_patched_model_and_one_within_packed_attention_are_not_swapped(model, change, message):
    """The end of either would put the stock back, and the swap's end the other."""
    before = traces(model)
    with change(model):
        within = traces(model)
        with pytest.raises(RopepatchError, match=message):
            swap(model, "alibi")
        assert traces(model) == within
    assert traces(model) == before


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["rope", "alibi", "learned"])
def test_another_attention_set_on_a_swapped_model_is_refused_when_it_would_run(model, name, attention):
    handle = put(model, name)
    model.set_attn_implementation(attention)
    with pytest.raises(RopepatchError, match=f"was set to '{attention}', which ignores its encoding"):
        logits(model)
    handle.remove()
    assert apart(logits(model), logits(tiny_model("llama"))) == 0


@pytest.mark.parametrize(
    ("encoding", "parameters", "message"),
    [
        ("alibbi", {}, "unknown encoding 'alibbi'"),
        ("axial", {"grid": (3, 3)}, "3 axes need a head_dim that 6 divides, got 16"),
        (make_encoding("alibi"), {"clip": 2}, "swap takes a name with its parameters, or an encoding"),
        (7, {}, "swap takes a name with its parameters, or an encoding, got 7"),
    ],
)
def test_an_encoding_that_is_none_or_does_not_fit_leaves_the_model_alone(
    model, encoding, parameters, message
):
    before = traces(model)
    with pytest.raises(RopepatchError) as caught:
        swap(model, encoding, **parameters)
    assert message in str(caught.value)
    assert traces(model) == before


# Other families


def uneven(model: PreTrainedModel) -> PreTrainedModel:
    """With gains and biases that differ from channel to channel, so that their place matters."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.rand(parameter.shape, generator=draw))
    return model


ACCEPTED = {
    *("llama", "mistral", "mixtral", "ministral", "qwen2", "qwen3", "qwen3_moe", "gemma", "granite", "olmo2"),
    "phi3",
}


def refusal_or_right(model: PreTrainedModel) -> RopepatchError | None:
    """Why a model is refused, or nothing, and then its rope gives the logits of the stock model."""
    before = traces(model)
    try:
        handle = swap(model, "rope")
    except RopepatchError as refused:
        refusal = refused
    else:
        refusal, rotated = None, logits(model)
        handle.remove()
        expected = logits(model)
        assert apart(rotated, expected) < 1e-5
        if "gemma" not in model.config.model_type:  # which scales its embeddings
            with swap(model, "sinusoidal"):
                assert apart(logits(model), expected) > 1e-3
    assert traces(model) == before
    assert "\n" not in str(refusal)
    return refusal


@every_family(*ACCEPTED)
def test_a_family_is_refused_or_its_rope_is_swapped_in_exactly(model_type):
    refusal = refusal_or_right(uneven(tiny_model(model_type)))
    assert refusal is None or model_type not in ACCEPTED


def test_a_model_some_of_whose_layers_do_not_rotate_is_refused_or_right():
    """SmolLM3's fourth layer."""
    config = tiny_config("smollm3")
    config.num_hidden_layers, config.no_rope_layers = 4, [1, 1, 1, 0]
    config.layer_types = ["full_attention"] * 4
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.ndim > 1 else 1.0)
    refusal_or_right(model)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma2", "it caps its attention scores" if OLDEST else "it does not support sdpa"),
        ("phi", "only a part of each head rotates"),
        ("deepseek_v3", "only a part of each head rotates"),
        ("cohere", "its rotary pairs are laid out otherwise"),
        ("falcon", "its attention is no interchangeable function"),
        ("cohere2", "some layers do not rotate"),
        ("bamba", "carries a state" if OLDEST else "it has layers of the type linear_attention"),
        ("gpt2", "it has no rotary module"),
    ],
)
def test_a_family_that_is_not_like_llama_is_refused_with_its_reason(family, reason):
    model = tiny_model(family)
    with pytest.raises(RopepatchError, match=reason) as caught:
        swap(model, "alibi")
    assert "\n" not in str(caught.value)
    assert swapped(model) is None
