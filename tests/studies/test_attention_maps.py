"""The attention maps of eval/ give the distances of the papers, and else the stock model."""

import math

import attention_maps as maps
import pytest
import torch
from loss_models import Largest
from tiny_models import tiny_model

import ropepatch

pytestmark = pytest.mark.sweep

TOKENS = 48


def some_ids(rows=2, tokens=TOKENS):
    return torch.randint(64, (rows, tokens), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def logits(model, ids, **inputs):
    return model(ids, use_cache=False, **inputs).logits


def apart(one, other):
    return (one - other).abs().max().item()


# Distances


@pytest.mark.parametrize(
    ("name", "settings", "query", "wanted"),
    [
        ("rerope", (1024,), 5000, {0: 1024, 3976: 1024, 3977: 1023, 5000: 0}),
        ("leaky_rerope", (1024, 16), 16384, {0: 1984, 14336: 1088, 15360: 1024, 15361: 1023}),
        ("self_extend", (1024, 8), 16383, {15360: 1023, 15359: 1024, 8000: 1943, 0: 2943}),
    ],
)
def test_distances_are_those_of_the_papers(name, settings, query, wanted):
    keys = torch.tensor([*wanted])
    found = getattr(maps, name)(*settings).distances(torch.tensor([query]), keys)
    assert found[0].tolist() == pytest.approx([*wanted.values()])


def test_a_group_cuts_the_window_down_to_whole_groups():
    # W = 5 and G = 2: the shift is 5 - 2, not 5 - 2.5, and a distance of 5 already counts in groups.
    found = maps.self_extend(5, 2).distances(torch.tensor([9, 10]), torch.arange(10))
    assert found.tolist() == [[7, 7, 6, 6, 5, 4, 3, 2, 1, 0], [8, 8, 7, 7, 6, 6, 4, 3, 2, 1]]


# Against the model as it is


@pytest.mark.parametrize(
    ("name", "settings"), [("identity", ()), ("leaky_rerope", (8, 1.0)), ("self_extend", (8, 1))]
)
def test_a_map_that_changes_no_distance_is_the_stock_model(name, settings):
    model, ids = tiny_model("llama"), some_ids()
    with maps.mapped(model, getattr(maps, name)(*settings), block=20):
        found = logits(model, ids)
    assert apart(found, logits(model, ids)) < 1e-4


def test_a_patched_model_keeps_its_frequencies_and_attention_factor():
    model, ids = tiny_model("llama"), some_ids()
    with ropepatch.patch(model, ropepatch.make_scaling("yarn", factor=4.0)):
        stock = logits(model, ids)
        with maps.mapped(model, maps.identity()):
            found = logits(model, ids)
        rotary = model.model.rotary_emb
        assert rotary.attention_scaling > 1.1
    assert apart(found, stock) < 1e-4
    assert apart(stock, logits(model, ids)) > 0.1


def test_padding_on_either_side_is_not_read():
    model, ids = tiny_model("llama"), some_ids()
    mask = torch.ones_like(ids)
    mask[0, :7], mask[1, -5:] = 0, 0
    seen = mask.bool()
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with maps.mapped(model, maps.identity()):
        found = logits(model, ids, **inputs)
    assert apart(found[seen], logits(model, ids, **inputs)[seen]) < 1e-4


def test_documents_packed_in_a_row_are_read_as_if_alone():
    model, ids = tiny_model("llama"), some_ids(rows=1)
    positions = torch.cat([torch.arange(21), torch.arange(TOKENS - 21)])[None]  # 21: within a group of 4
    with maps.mapped(model, maps.self_extend(8, 4)):
        packed = logits(model, ids, position_ids=positions)[:, 21:]
        alone = logits(model, ids[:, 21:])
    assert apart(packed, alone) < 1e-4


# Against a slow oracle


def effective(name, m, n):
    """With W = 5, and k = G = 3."""
    if m - n < 5:
        return m - n
    far = {"rerope": 5, "leaky_rerope": 5 + (m - n - 5) / 3, "self_extend": m // 3 - n // 3 + 5 - 5 // 3}
    return far[name]


def turned(vector, inv_freq, distance):
    """A vector of complex pairs (i, i + D/2), turned by a distance."""
    half = len(vector) // 2
    pairs = torch.complex(vector[:half], vector[half:])
    return pairs * torch.exp(1j * distance * inv_freq)


@pytest.mark.parametrize("block", [4, 64])
@pytest.mark.parametrize("name", ["rerope", "leaky_rerope", "self_extend"])
def test_scores_are_those_of_pairs_turned_by_the_effective_distance(name, block):
    model = tiny_model("llama")
    rotary, tokens, heads, scaling = model.model.rotary_emb, 17, 4, 0.3
    inv_freq = rotary.inv_freq.double()
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(1, heads, tokens, 16, generator=generator)
    key, value = (torch.randn(1, 2, tokens, 16, generator=generator) for _ in range(2))
    settings = (5,) if name == "rerope" else (5, 3)
    with maps.mapped(model, getattr(maps, name)(*settings), block=block):
        attention = model.model.layers[0].self_attn
        found, _ = maps.attend(attention, query, key, value, None, scaling=scaling)
    for head in range(heads):
        keys, values = key[0, head // 2].double(), value[0, head // 2].double()
        for m in range(tokens):
            near = [
                (
                    turned(query[0, head, m].double(), inv_freq, effective(name, m, n))
                    * turned(keys[n], inv_freq, 0).conj()
                )
                .real.sum()
                .item()
                for n in range(m + 1)
            ]
            most = max(near)
            weights = [math.exp(scaling * (score - most)) for score in near]
            wanted = sum(w * values[n] for n, w in enumerate(weights)) / sum(weights)
            assert apart(found[0, m, head].double(), wanted) < 1e-5


# One model, and what is left behind


def test_two_models_have_maps_of_their_own():
    one, two, ids = tiny_model("llama"), tiny_model("llama", seed=1), some_ids()
    alone = []
    for model, window in ((one, 4), (two, 16)):
        with maps.mapped(model, maps.rerope(window)):
            alone.append(logits(model, ids))
    with maps.mapped(one, maps.rerope(4)), maps.mapped(two, maps.rerope(16)):
        assert torch.equal(logits(one, ids), alone[0])
        assert torch.equal(logits(two, ids), alone[1])


def test_the_model_is_left_as_it_was_even_by_an_exception():
    model, ids = tiny_model("llama"), some_ids()
    rotary, implementation = model.model.rotary_emb, model.config._attn_implementation
    before = logits(model, ids)
    with pytest.raises(KeyboardInterrupt), maps.mapped(model, maps.rerope(8)):
        raise KeyboardInterrupt
    assert model.model.rotary_emb is rotary
    assert model.config._attn_implementation == implementation
    assert not any(hasattr(layer.self_attn, "attention_map") for layer in model.model.layers)
    assert torch.equal(logits(model, ids), before)


def test_a_second_map_and_a_cache_are_refused_and_the_first_stays():
    model, ids = tiny_model("llama"), some_ids()
    with maps.mapped(model, maps.rerope(8)):
        before = logits(model, ids)
        with pytest.raises(ValueError, match="without an attention map"), maps.mapped(model, maps.identity()):
            pass
        assert torch.equal(logits(model, ids), before)
        cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="all tokens at once"):
            model(ids[:, :1], past_key_values=cache)


def test_memory_grows_with_the_length_and_not_with_its_square():
    model, most = tiny_model("llama"), []
    for tokens in (512, 1024):
        with maps.mapped(model, maps.self_extend(16, 4), block=32), Largest() as seen, torch.no_grad():
            model.model(some_ids(rows=1, tokens=tokens), use_cache=False)
        most.append(seen.numel)
    assert most == [4 * 32 * 512, 4 * 32 * 1024]
