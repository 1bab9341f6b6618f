"""Invariants of tiny random models with a position remapping or a swapped encoding."""

import pytest
import torch
from families import every_family
from swaps import ONE, TRAINED, apart, every_change, logits, lora, put
from tiny_models import tiny_model

import ropepatch
from ropepatch import RopepatchError
from ropepatch.attention.remapped import mapped
from ropepatch.encodings import make_encoding
from ropepatch.encodings.swapping import swap, swapped


def traces(model):
    """All parts of a model that a change may touch."""
    return {
        "modules": [id(module) for module in model.modules()],
        "attention": [
            one.config._attn_implementation
            for one in model.modules()
            if hasattr(one, "config")
        ],
        "config": model.config.to_dict(),
        "slots": [set(vars(module)) for module in model.modules()],
        "hooks": [
            list(value)
            for one in model.modules()
            for kind, value in vars(one).items()
            if "hooks" in kind
        ],
        "state": list(model.state_dict()),
        "training": [module.training for module in model.modules()],
    }


@every_change
def test_removing_an_encoding_or_remapping_restores_the_model(model, name):
    model.set_attn_implementation("eager")
    model.train().model.layers[1].eval()
    before, expected = traces(model), logits(model)
    handle = put(model, name)
    changed, added = logits(model), model.state_dict().keys() - before["state"]
    assert (apart(changed, expected) > 1e-2) == (name != "rope")
    assert bool(added) == (name in TRAINED)
    assert all(key.startswith("model.rotary_emb.module.") for key in added)
    for _ in range(2):
        handle.remove()
        assert traces(model) == before
    assert torch.equal(logits(model), expected)
    with put(model, name):
        assert torch.equal(logits(model), changed)
    assert traces(model) == before
    assert swapped(model) is mapped(model) is None


@pytest.mark.parametrize("name", ["t5", "rerope", "yarn"])
def test_modules_to_save_cannot_contain_a_replaced_rotary_module(model, name):
    if name == "yarn":
        ropepatch.patch(model, name, to="2x")
    else:
        put(model, name)
    with pytest.raises(RopepatchError, match="not copied alone") as error:
        lora(model, modules_to_save=["rotary_emb"])
    assert "rotary_emb.module" in error.value.hint


@pytest.mark.parametrize("name", TRAINED)
def test_lora_trains_encoding_parameters_listed_in_modules_to_save(model, name):
    """They are in `model.rotary_emb.module`; PEFT matches the end of a name in modules_to_save."""
    put(model, name)
    plain = logits(model)
    wrapped = lora(model, modules_to_save=["rotary_emb.module"])
    trained = {k: p for k, p in wrapped.named_parameters() if p.requires_grad}
    of_encoding = [key for key in trained if "module.modules_to_save" in key]
    assert len(of_encoding) == len([*swapped(model).module.parameters()]) // 2
    wrapped(ONE, labels=ONE, use_cache=False).loss.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in trained.values())
    torch.optim.SGD(trained.values(), lr=0.1).step()
    with wrapped.disable_adapter():
        assert torch.equal(logits(wrapped), plain)
    expected = logits(wrapped)
    merged = wrapped.merge_and_unload()
    assert apart(logits(merged), expected) < 1e-4
    assert apart(expected, plain) > 1e-3
    swapped(merged).remove()
    logits(merged)


def test_swap_accepts_an_adapter_with_dropout_in_training_mode(model):
    put(lora(model, lora_dropout=0.5).train(), "alibi")
    assert swapped(model).module.training


def test_resizing_embeddings_and_init_weights_keep_the_encoding(model):
    put(model, "shaw")
    expected = logits(model)
    model.init_weights()
    model.resize_token_embeddings(
        140
    )  # last, because transformers 5.4 would initialise a resized head again
    assert torch.equal(logits(model)[..., :128], expected)


# Errors


CHANGES = {
    "remapped": lambda model: put(model, "rerope"),
    "swapped": lambda model: put(model, "alibi"),
    "patched": lambda model: ropepatch.patch(model, "linear", to=128),
}


@pytest.mark.parametrize("first", CHANGES)
def test_a_changed_model_rejects_a_second_change(model, first):
    """Two changes at once could not be removed in any order."""
    before = traces(model)
    with CHANGES[first](model):
        within, expected = traces(model), logits(model)
        for second, change in CHANGES.items():
            with pytest.raises(RopepatchError):
                change(model)
            assert traces(model) == within, second
        assert torch.equal(logits(model), expected)
    assert traces(model) == before


@pytest.mark.parametrize("name", ["rerope", "rope", "learned"])
def test_another_attention_raises_an_error_in_the_forward_pass(model, name):
    stock = logits(model)
    handle = put(model, name)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="'eager' would ignore this model's"):
        logits(model)
    handle.remove()
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model), stock)


def test_nan_weights_are_named_and_leave_the_model_unchanged(model):
    before = traces(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] = float("nan")
    for change in ("rerope", "alibi"):
        with pytest.raises(
            RopepatchError, match=r"contain NaN or infinity: .*\.0\.self_attn\.k_proj"
        ):
            put(model, change)
        assert traces(model) == before


@pytest.mark.parametrize(
    ("encoding", "parameters"),
    [
        ("alibbi", {}),
        ("axial", {"grid": (3, 3)}),
        (make_encoding("alibi"), {"clip": 2}),
        (7, {}),
    ],
    ids=str,
)
def test_a_rejected_encoding_leaves_the_model_unchanged(model, encoding, parameters):
    before = traces(model)
    with pytest.raises(RopepatchError):
        swap(model, encoding, **parameters)
    assert traces(model) == before


# Other architectures


def with_unequal_channels(model):
    """Make norm weights and biases differ between channels, so that their order matters."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.rand(parameter.shape, generator=draw))
    return model


ACCEPTED = [
    "llama",
    "mistral",
    "mixtral",
    "ministral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "granite",
    "olmo2",
    "phi3",
]


@every_family(*ACCEPTED)
def test_swapping_rope_into_any_architecture_keeps_logits_or_raises(model_type):
    model = with_unequal_channels(tiny_model(model_type))
    before, stock = traces(model), None
    try:
        with swap(model, "rope"):
            stock = logits(model)
    except RopepatchError:
        assert model_type not in ACCEPTED
    else:
        expected = logits(model)
        assert apart(stock, expected) < 1e-5
    assert traces(model) == before


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("phi", "only a part of each head rotates"),
        ("cohere", "its rotary pairs are laid out otherwise"),
        ("falcon", "its attention is no interchangeable function"),
        ("cohere2", "some layers do not rotate"),
        ("gpt2", "it has no rotary module"),
    ],
)
def test_swap_rejects_unsupported_architectures_with_the_reason(family, reason):
    model = tiny_model(family)
    with pytest.raises(RopepatchError, match=reason):
        swap(model, "alibi")
    assert swapped(model) is None
