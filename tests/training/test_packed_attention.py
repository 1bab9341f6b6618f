import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from caches import into
from loss_models import Largest
from tiny_models import WEIGHT_SCALE, tiny_fields, tiny_model
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ropepatch.attention import plain
from ropepatch.errors import RopepatchError
from ropepatch.training import packed_attention as attention
from ropepatch.training.packed_attention import packed_attention
from ropepatch.training.positions import CREAM, PoSE, RandPos, row_positions

SLIDING = {"sliding_window": 7}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with as many keys as queries": {"num_key_value_heads": 4},
    "qwen2": {},
    "qwen2 with windows": SLIDING | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2},
    "qwen3": {},
    "mistral": SLIDING,
    "gemma3_text": SLIDING,
    "phi3": SLIDING,
    "granite": {},
}
DOCUMENTS = [13, 1, 22]


def build(family: str = "llama", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    kind = CONFIG_MAPPING[family.split()[0]]
    config = kind(**tiny_fields(kind) | FAMILIES.get(family, {}) | changes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(WEIGHT_SCALE if parameter.ndim >= 2 else 1)
    return model


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    """Whoever changes it changes it back."""
    return build()


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding windows by blocks of a few tokens."""
    monkeypatch.setattr(plain, "BLOCK", 5)


def tokens(count: int = 36, rows: int = 1) -> Tensor:
    return torch.randint(3, 120, (rows, count), generator=torch.Generator().manual_seed(1))


def segments(lengths: list[int], positions: Tensor | None = None) -> dict[str, Any]:
    """What a row is passed with, positions included."""
    each = torch.cat([torch.arange(length) for length in lengths])
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "position_ids": (each if positions is None else positions)[None],
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "use_cache": False,
    }


def alone(model: PreTrainedModel, ids: Tensor, lengths: list[int]) -> Tensor:
    """Logits [1, T, V] of each document read by itself."""
    return torch.cat([model(one, use_cache=False).logits for one in ids.split(lengths, 1)], 1)


def gradients(model: PreTrainedModel, logits: Tensor) -> list[Tensor]:
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad((logits * weights).mean(), trained))


def assert_same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * max(1, expected.abs().max().item()))


# What it computes


@pytest.mark.parametrize(
    ("family", "lengths"),
    [
        *((family, [13, 1, 22]) for family in FAMILIES),
        ("llama", [12] * 3),
        ("llama", [36]),
        ("mistral", [36]),
    ],
)
def test_packed_documents_are_read_as_each_document_alone_by_stock_transformers(family, lengths):
    assert_read_as_alone(build(family), lengths)


@pytest.mark.parametrize("lengths", [[13, 1, 22], [36]])
def test_so_they_are_with_sliding_windows_in_several_blocks(lengths, blocks):
    assert_read_as_alone(build("mistral"), lengths)


def assert_read_as_alone(model: PreTrainedModel, lengths: list[int]) -> None:
    ids = tokens()
    expected = alone(model, ids, lengths)
    with packed_attention(model):
        got = model(ids, **segments(lengths)).logits
    assert_same(got, expected)
    for ours, theirs in zip(gradients(model, got), gradients(model, expected), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_without_the_segments_the_documents_would_be_read_otherwise(family):
    model, lengths = build(family), DOCUMENTS
    positions = segments(lengths)["position_ids"][0]
    with packed_attention(model), torch.no_grad():
        apart = model(tokens(), **segments(lengths)).logits
        joined = model(tokens(), **segments([36], positions)).logits
    assert (apart - joined).abs().max() > 0.1


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "phi3", "qwen2 with windows"])
def test_these_families_read_otherwise_with_another_window(family):
    narrow, wide = (alone(build(family, sliding_window=w), tokens(), [36]) for w in (7, 8))
    assert (narrow - wide).abs().max() > 1e-3


def by_hand(model: PreTrainedModel, ids: Tensor, lengths: list[int], positions: Tensor) -> Tensor:
    """Logits under stock eager attention with a causal mask for each segment, drawn token by token."""
    mask = torch.full((1, 1, len(positions), len(positions)), torch.finfo(torch.float32).min)
    start = 0
    for length in lengths:
        for query in range(start, start + length):
            mask[..., query, start : query + 1] = 0
        start += length
    model.set_attn_implementation("eager")
    try:
        return model(ids, position_ids=positions[None], attention_mask=mask, use_cache=False).logits
    finally:
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize(
    ("sampling", "lengths"), [(PoSE(), DOCUMENTS), (RandPos(), [36]), (CREAM(), DOCUMENTS)], ids=repr
)
def test_positions_that_jump_are_read_as_with_a_causal_mask_drawn_by_hand(sampling, lengths):
    model = build("qwen3")
    positions = row_positions(sampling, lengths, 8 * 36, random.Random(3))
    assert positions.diff().ne(1).sum() > len(lengths) - 1
    with packed_attention(model), torch.no_grad():
        got = model(tokens(), **segments(lengths, positions)).logits
    with torch.no_grad():
        assert_same(got, by_hand(model, tokens(), lengths, positions))


def test_stock_sdpa_takes_the_jump_for_the_end_of_a_document(llama):
    positions = torch.cat([torch.arange(20), torch.arange(100, 116)])
    with torch.no_grad():
        stock = llama(tokens(), position_ids=positions[None], use_cache=False).logits
        second = llama(tokens()[:, 20:], use_cache=False).logits
        with packed_attention(llama):
            ours = llama(tokens(), **segments([36], positions)).logits
    assert_same(stock[:, 20:], second)  # transformers#39194; once this fails, the trap is gone
    assert (ours - stock)[:, 20:].abs().max() > 1


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 11, 12, 16, 17, 40])
@pytest.mark.parametrize("block", [1024, 5])
def test_a_sliding_window_is_read_as_with_its_whole_mask(window, block, monkeypatch):
    monkeypatch.setattr(plain, "BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 17, 8, generator=generator) for heads in (4, 2, 2))
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    got = plain.causal(module, query, key, value, window, 0.5)
    last = plain.causal(module, query[:, :, -7:], key, value, window, 0.5)
    torch.testing.assert_close(last, got[:, -7:], rtol=0, atol=1e-6)
    for row in range(2):
        for head in range(4):
            for token in range(17):
                seen = slice(max(0, token - window + 1), token + 1)
                scores = key[row, head // 2, seen] @ query[row, head, token] * 0.5
                torch.testing.assert_close(
                    got[row, token, head], scores.softmax(0) @ value[row, head // 2, seen], rtol=0, atol=1e-5
                )


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_attention_dropout_stays_in_force(family):
    model = build(family, attention_dropout=0.5).train()
    with packed_attention(model), torch.no_grad():
        first, second = (model(tokens(), **segments([12, 24])).logits for _ in range(2))
    assert (first - second).abs().max() > 0.1


# How training calls it


def checkpoint_activations(model: Any) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_activation_checkpointing_changes_no_gradient(family):
    model, lengths = build(family).train(), DOCUMENTS
    expected = gradients(model, alone(model, tokens(), lengths))
    checkpoint_activations(model)
    with packed_attention(model):
        got = gradients(model, model(tokens(), **segments(lengths)).logits)
    for ours, theirs in zip(got, expected, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_checkpointed_backward_pass_outside_of_the_block_fails_instead_of_crossing_segments(family):
    model = build(family).train()
    checkpoint_activations(model)
    with packed_attention(model):
        logits = model(tokens(), **segments([13, 23])).logits
    with pytest.raises(RuntimeError):
        logits.sum().backward()


def test_a_peft_model_is_switched_inside(llama):
    peft = pytest.importorskip("peft")
    ids, lengths = tokens(), DOCUMENTS
    model = build()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    expected = alone(wrapped, ids, lengths)
    assert (expected - alone(llama, ids, lengths)).abs().max() > 1e-3
    checkpoint_activations(model.train())
    with packed_attention(wrapped):
        got = wrapped(ids, **segments(lengths)).logits
        assert_same(got, expected)
        ours = gradients(wrapped, got)
    for one, other in zip(ours, gradients(wrapped, expected), strict=True):
        assert_same(one, other)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("family", "lengths"), [("llama", [4096]), ("mistral", [4096]), ("mistral", [100, 3900, 96])], ids=str
)
def test_no_tensor_grows_with_the_square_of_the_tokens(family, lengths, monkeypatch):
    monkeypatch.setattr(plain, "BLOCK", 64)
    model = build(family, vocab_size=128, num_hidden_layers=1)
    with Largest() as counter, packed_attention(model):
        model(tokens(sum(lengths)), **segments(lengths)).logits.sum().backward()
    assert counter.numel == 4096 * 128  # the logits


# What it refuses


@pytest.fixture
def switched(llama: PreTrainedModel) -> Iterator[PreTrainedModel]:
    with packed_attention(llama), torch.no_grad():
        yield llama


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seq_lens_q": None}, "no cu_seq_lens_q"),
        ({"attention_mask": torch.ones(1, 36, dtype=torch.long)}, "an attention mask"),
        ({"attention_mask": torch.zeros(1, 1, 36, 36)}, "a mask of the model's own"),
        *(
            ({"cu_seq_lens_q": torch.tensor(edges, dtype=torch.int32)}, "segments")
            for edges in ([0, 35], [0, 37], [0, 20, 20, 36], [0, 40, 36], [3, 36], [0], [], [1, 20, 37])
        ),
        ({"input_ids": tokens(rows=2)}, "segments .* for 2 x 36"),
        ({"softcap": torch.ones(1)}, "softcap from LlamaAttention"),
        ({"s_aux": torch.ones(1)}, "s_aux from LlamaAttention"),
        ({"position_bias": torch.ones(1)}, "position_bias from LlamaAttention"),
    ],
)
def test_what_is_no_packed_row_is_refused(switched, changes, message):
    with pytest.raises(RopepatchError, match=f"packed attention got {message}") as error:
        switched(**{"input_ids": tokens()} | segments([36]) | changes)
    assert "outside" in error.value.hint


def test_a_cached_past_is_refused(switched):
    cache = DynamicCache(config=switched.config)
    arguments = segments([36]) | into(cache)
    switched(tokens(), **arguments)
    with pytest.raises(RopepatchError, match="36 queries and 72 keys"):
        switched(tokens(), **arguments)


def stateful() -> PreTrainedModel:
    model = build()
    model._is_stateful = True
    return model


def not_causal() -> PreTrainedModel:
    config = build().config
    config.is_causal = False
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tiny_model("llama4_text"), "layers of the type chunked_attention"),
        (lambda: tiny_model("gemma2"), ""),  # newer releases refuse sdpa, older ones drop the cap of scores
        (stateful, "carries a state"),
        (lambda: build("gemma3_text", use_bidirectional_attention=True), "not causal"),
        (not_causal, "not causal"),
    ],
)
def test_models_that_do_more_than_attend_causally_are_refused_before_a_step(make, reason):
    model = make()
    before = model.config._attn_implementation
    message = f"{model.config.model_type}.*packed rows: .*{reason}"
    with pytest.raises(RopepatchError, match=message), packed_attention(model):
        pytest.fail("entered")
    assert model.config._attn_implementation == before


# Switching


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_leaving_the_block_restores_the_model_exactly_even_by_an_error(before):
    model = build()
    model.set_attn_implementation(before)
    with torch.no_grad():
        expected = model(tokens()).logits
        with pytest.raises(ZeroDivisionError), packed_attention(model):
            _ = 1 / 0
        assert model.config._attn_implementation == before
        assert torch.equal(model(tokens()).logits, expected)


def test_other_models_are_left_alone(llama):
    other = build(seed=1)
    positions = segments([13, 23])["position_ids"]
    with torch.no_grad():
        expected = other(tokens(), position_ids=positions, use_cache=False).logits
        with packed_attention(llama):
            assert torch.equal(other(tokens(), position_ids=positions, use_cache=False).logits, expected)
            with packed_attention(other):
                pass
            assert (llama.config._attn_implementation, other.config._attn_implementation) == (
                attention.NAME,
                "sdpa",
            )


def test_saving_amid_training_writes_no_name_of_ours(tmp_path):
    model = build()
    with packed_attention(model):
        model.save_pretrained(tmp_path)
    assert attention.NAME not in (tmp_path / "config.json").read_text()
