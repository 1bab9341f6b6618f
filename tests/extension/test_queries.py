"""Query factors: folding into weights, unfolding, saving, and errors."""

import copy
import errno
import json
import math
import os

import numpy as np
import pytest
import torch
from checkpoint_folders import PAIRS, edit_json, largest_file, write_checkpoint
from families import every_family, refusal
from oldest import NOT_YET
from tiny_models import tiny_model
from transformers import AttentionInterface, AutoModelForCausalLM

import ropepatch
from ropepatch import RopepatchError
from ropepatch.extension.queries import QueryLayers, unfolded
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.scaling import make_scaling

IDS = torch.randint(3, 40, (1, 24), generator=torch.Generator().manual_seed(0))
FOLDED = ("llama", "cohere", "ernie4_5", "gemma3", "glm", "granite", "olmo2", "qwen2", "qwen3")  # at least


def factors(layers, heads, pairs, seed=0):
    draw = np.random.default_rng(seed)
    amplitudes = draw.uniform(0.5, 1.5, (layers, heads, pairs))
    return np.stack([amplitudes, draw.uniform(-2, 2, (layers, heads, pairs))], -1)


def custom(pairs, queries, factor=4.0):
    return make_scaling("custom", factor=factor, divisors=(1.0,) * pairs, queries=queries)


def seen_queries(model, **inputs):
    """The queries [B, H, T, D] of each layer, for inputs that no attention layer has changed."""
    calls = {}

    def capture(module, query, key, value, attention_mask=None, **others):
        calls[module] = query.detach()
        batch, heads, tokens, _ = query.shape
        return value.new_zeros(batch, tokens, heads, value.shape[-1]), None

    AttentionInterface.register("capture_queries", capture)
    before = model.config._attn_implementation
    model.set_attn_implementation("capture_queries")
    try:
        with torch.no_grad():
            model(IDS, use_cache=False, **inputs)
    finally:
        model.set_attn_implementation(before)
    return calls


@every_family(*FOLDED)
def test_a_phase_of_theta_i_times_n_moves_a_query_by_n_positions(model_type):
    if model_type in NOT_YET or refusal(model_type):
        return
    model = tiny_model(model_type)
    found = Checkpoint.of(model)
    try:
        found_layers = QueryLayers(model, found)
    except RopepatchError:
        assert model_type not in FOLDED
        return
    layers, heads, pairs = found_layers.shape
    phases = 3 * found.rope.inv_freq().double()
    queries = torch.stack((torch.ones(pairs), phases), -1).expand(layers, heads, pairs, 2).tolist()
    positions = torch.arange(IDS.shape[1])[None]
    now, later = (seen_queries(model, position_ids=positions + n) for n in (0, 3))
    rotating = [
        module for module in found_layers.modules.values() if not torch.equal(now[module], later[module])
    ]
    try:
        patch = ropepatch.patch(model, custom(pairs, queries))
    except RopepatchError:  # a part of a model, not a language model by itself
        assert model_type not in FOLDED
        return
    with patch:
        multiplied = seen_queries(model, position_ids=positions)
    assert rotating
    for module in rotating:
        tolerance = 1e-5 * later[module].abs().max()
        assert (multiplied[module] - later[module]).abs().max() <= tolerance
        assert (multiplied[module] - now[module]).abs().max() > 100 * tolerance


def test_gain_and_phase_multiply_each_pair_as_a_complex_number(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path / "source"))
    queries = factors(2, 2, PAIRS)
    positions = torch.zeros_like(IDS)  # where nothing rotates
    module = model.model.layers[0].self_attn
    before = seen_queries(model, position_ids=positions)[module].double().numpy()
    with ropepatch.patch(model, custom(PAIRS, queries.tolist())):
        after = seen_queries(model, position_ids=positions)[module].double().numpy()
    expected = (before[..., :PAIRS] + 1j * before[..., PAIRS:]) * (
        queries[0, :, None, :, 0] * np.exp(1j * queries[0, :, None, :, 1])
    )
    assert np.abs(after[..., :PAIRS] - expected.real).max() < 1e-4
    assert np.abs(after[..., PAIRS:] - expected.imag).max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checkpoint_in_stock_transformers_equals_the_patched_model(tmp_path, dtype):
    source = write_checkpoint(tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    (source / "model.safetensors").unlink()
    model.save_pretrained(source, max_shard_size="20KB")
    plan = ropepatch.plan(
        source, to="4x", method="custom", divisors=(2.0,) * PAIRS, queries=factors(2, 2, PAIRS).tolist()
    )
    assert "queries=(2 x 2 x 8 x 2 numbers)" in str(plan)
    assert "config.json alone does not contain it" in plan.warnings[-1]
    with torch.no_grad(), ropepatch.patch(model, plan):
        patched = model(IDS).logits
    out = ropepatch.extend(plan, tmp_path / "out", link_weights=True).folder
    stock = AutoModelForCausalLM.from_pretrained(out, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(stock(IDS).logits, patched)
    record = json.loads((out / "ropepatch.json").read_text())
    assert record["verified"]["logits"] == "equal"
    linked = [file.name for file in out.glob("*.safetensors") if file.stat().st_nlink > 1]
    assert 0 < len(linked) < len([*out.glob("*.safetensors")])


def test_removal_restores_the_weights_also_of_copied_cast_and_trained_models(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path / "source"))
    projection = model.model.layers[1].self_attn.q_proj
    weight, before = projection.weight, projection.weight.detach().clone()
    patch = ropepatch.patch(model, custom(PAIRS, factors(2, 2, PAIRS).tolist()))
    assert not torch.equal(projection.weight, before)
    with unfolded(model):
        assert torch.equal(projection.weight, before)
    assert not torch.equal(projection.weight, before)
    twin = copy.deepcopy(model)
    patch.remove()
    assert projection.weight is weight
    assert torch.equal(weight, before)

    half = ropepatch.patch(model, custom(PAIRS, factors(2, 2, PAIRS).tolist()))
    model.bfloat16()
    half.remove()
    assert torch.equal(projection.weight, before.bfloat16())

    gone = ropepatch.patch(model, custom(PAIRS, factors(2, 2, PAIRS).tolist()))
    model.to("meta")
    gone.remove()
    assert projection.weight.is_meta
    assert ropepatch.active(model) is None

    trained = twin.model.layers[1].self_attn.q_proj
    with torch.no_grad():
        trained.weight.mul_(2)
    ropepatch.extension.patching.active(twin).remove()
    assert torch.allclose(trained.weight, 2 * before, atol=1e-5 * before.abs().max())


def test_requires_grad_set_under_the_patch_is_kept(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path / "source"))
    for frozen in (True, False):
        model.requires_grad_(frozen)
        with ropepatch.patch(model, custom(PAIRS, factors(2, 2, PAIRS).tolist())):
            model.requires_grad_(not frozen)
        assert {parameter.requires_grad for parameter in model.parameters()} == {not frozen}


def test_a_full_disk_raises_a_one_line_error_and_leaves_nothing(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    given = {"divisors": (1.0,) * PAIRS, "queries": factors(2, 2, PAIRS).tolist()}
    plan = ropepatch.plan(source, to="4x", method="custom", **given)
    size = (source / "model.safetensors").stat().st_size
    with largest_file(size // 2), pytest.raises(RopepatchError, match=os.strerror(errno.EFBIG)):
        ropepatch.extend(plan, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "queries",
    [
        *(factors(*shape) for shape in ((1, 2, PAIRS), (2, 1, PAIRS), (2, 2, PAIRS - 1))),
        *(-factors(2, 2, PAIRS), factors(2, 2, PAIRS)[..., :1], np.full((2, 2, PAIRS, 2), math.nan)),
        [factors(1, 2, PAIRS)[0], factors(1, 1, PAIRS)[0]],
        [factors(1, 2, PAIRS)[0], factors(1, 2, PAIRS - 1)[0]],
    ],
)
def test_invalid_query_factors_are_rejected_before_weights_are_read(tmp_path, queries):
    source = write_checkpoint(tmp_path / "source")
    given = {"divisors": (1.0,) * PAIRS, "queries": [layer.tolist() for layer in queries]}
    with pytest.raises(RopepatchError, match="queries"):
        ropepatch.plan(source, to="4x", method="custom", **given)


def test_quantised_or_missing_query_weights_are_rejected_and_leave_nothing(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    given = {"divisors": (1.0,) * PAIRS, "queries": factors(2, 2, PAIRS).tolist()}
    edit_json(source / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    plan = ropepatch.plan(source, to="4x", method="custom", **given)
    with pytest.raises(RopepatchError, match="quantised"):
        ropepatch.extend(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(RopepatchError, match="query factors cannot be folded into the weights"):
        ropepatch.plan(tiny_model("phi3"), to="4x", method="custom", **given)


def test_quantised_or_offloaded_weights_are_not_folded_in_memory(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    scaling = custom(PAIRS, factors(2, 2, PAIRS).tolist())
    for change, said in (
        (lambda projection: projection.weight.to(torch.int8), "quantised"),
        (lambda projection: projection.weight.to(torch.float8_e4m3fn), "quantised"),
        (lambda projection: projection.weight.to("meta"), "offloaded"),
    ):
        model = AutoModelForCausalLM.from_pretrained(source)
        first, last = (layer.self_attn.q_proj for layer in model.model.layers)
        last.weight = torch.nn.Parameter(change(last), requires_grad=False)
        before = first.weight, last.weight
        with pytest.raises(RopepatchError, match=f"layers.1.self_attn.q_proj.weight is {said}"):
            ropepatch.patch(model, scaling)
        assert first.weight is before[0]
        assert last.weight is before[1]


def test_a_failed_fold_leaves_the_model_unchanged(tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path / "source"))
    before = [layer.self_attn.q_proj.weight for layer in model.model.layers]
    fold = QueryLayers._folded

    def full(self, attention, factors, weight):
        if weight is before[1]:
            raise MemoryError
        return fold(self, attention, factors, weight)

    monkeypatch.setattr(QueryLayers, "_folded", full)
    with pytest.raises(MemoryError):
        ropepatch.patch(model, custom(PAIRS, factors(2, 2, PAIRS).tolist()))
    now = [layer.self_attn.q_proj.weight for layer in model.model.layers]
    assert all(weight is then for weight, then in zip(now, before, strict=True))
