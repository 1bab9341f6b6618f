"""A patch, a map and a swap touch one model: none with the same configuration."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from methods import example
from swaps import logits
from tiny_models import tiny_config, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import ropepatch
from ropepatch import METHODS, RopepatchError
from ropepatch.attention import MAPS, map_attention, mapped
from ropepatch.attention.interchange import attending_by
from ropepatch.encodings import swap, swapped
from ropepatch.training.packed_attention import packed_attention

IDS = torch.randint(3, 120, (1, 96), generator=torch.Generator().manual_seed(1))
WAYS: dict[str, Any] = {
    "patch": lambda model: ropepatch.patch(model, "yarn", to=256),
    "map": lambda model: map_attention(model, "rerope", to=256, window=8),
    "swap": lambda model: swap(model, "alibi"),
}
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def two() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two models of one configuration."""
    one = tiny_model("llama")
    return one, type(one)(one.config).eval()


def configs(model: nn.Module) -> list[tuple[str, PreTrainedConfig]]:
    """Every configuration that a module of a model holds."""
    return [
        (name, value)
        for name, module in model.named_modules()
        for value in vars(module).values()
        if isinstance(value, PreTrainedConfig)
    ]


def same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(
        a == b and x is y for (a, x), (b, y) in zip(one, other, strict=True)
    )


def handle_of(model: nn.Module, way: str) -> Any:
    find = {"patch": ropepatch.active, "map": mapped, "swap": swapped}
    return find[way](model)


# Another model with the same configuration


@every_way
def test_a_model_with_the_same_configuration_is_as_before_and_saves_as_before(two, way, tmp_path):
    one, other = two
    held, content, expected = configs(other), other.config.to_dict(), logits(other, IDS)
    attention = other.config._attn_implementation
    changed = logits(one, IDS)
    with WAYS[way](one):
        assert one.config is one.model.config is not other.config
        assert not torch.equal(logits(one, IDS), changed)
        assert same(configs(other), held)
        assert other.config.to_dict() == content
        assert other.config._attn_implementation == attention
        assert torch.equal(logits(other, IDS), expected)
        other.save_pretrained(tmp_path / "other")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "other").eval()
        assert torch.equal(logits(again, IDS), expected)
    assert torch.equal(logits(one, IDS), changed)


@pytest.mark.parametrize(("way", "second"), [("patch", "map"), ("map", "swap"), ("swap", "patch")])
def test_both_models_are_changed_and_put_back_in_any_order(two, way, second):
    one, other = two
    held, before = configs(one), [logits(model, IDS) for model in two]
    first, then = WAYS[way](one), WAYS[second](other)
    alone = logits(one, IDS)
    then.remove()
    assert torch.equal(logits(one, IDS), alone)
    first.remove()
    assert same(configs(one), held)
    assert one.config is other.config
    assert all(torch.equal(logits(model, IDS), wanted) for model, wanted in zip(two, before, strict=True))


@every_way
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
def test_taken_out_every_module_holds_the_same_configuration_object_again(family, way):
    if (family, way) == ("gemma3_text", "swap"):
        pytest.skip("its rope differs by layer type")
    model = tiny_model(family)
    if family == "mistral":
        model.config.sliding_window = None
    held, content = configs(model), [deepcopy(vars(config)) for _, config in configs(model)]
    try:
        handle = WAYS[way](model)
    except RopepatchError:
        assert way != "patch"
        handle = None
    if handle is not None:
        assert not same(configs(model), held)
        twin = deepcopy(model)
        handle.remove()
        handle_of(twin, way).remove()
        assert twin.config.to_dict() == model.config.to_dict()
        assert len({id(config) for _, config in configs(twin)}) == len({id(config) for _, config in held})
    assert same(configs(model), held)
    assert [vars(config) for _, config in configs(model)] == content


@pytest.mark.parametrize("way", ["map", "swap"])
def test_a_refusal_after_the_model_was_looked_at_leaves_its_configuration_alone(way, monkeypatch):
    model = tiny_model("llama")
    held, content = configs(model), deepcopy(vars(model.config))

    def refused(*arguments: Any) -> bool:
        raise RopepatchError("no")

    monkeypatch.setattr("ropepatch.attention.probe._rotates", refused)
    with pytest.raises(RopepatchError, match="no"):
        WAYS[way](model)
    assert same(configs(model), held)
    assert vars(model.config) == content


@every_way
def test_what_a_user_changes_meanwhile_stays(way):
    model = tiny_model("llama")
    with WAYS[way](model):
        model.config.use_cache = False
        model.resize_token_embeddings(140)
    assert model.config.use_cache is False
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == 140


def test_a_patch_within_packed_attention_may_outlast_it():
    model = tiny_model("llama")
    held, attention = configs(model), model.config._attn_implementation
    with packed_attention(model):
        handle = ropepatch.patch(model, "yarn", to=256)
    assert model.config._attn_implementation == attention
    handle.remove()
    assert same(configs(model), held)
    assert model.config._attn_implementation == attention
    handle = ropepatch.patch(model, "yarn", to=256)
    with packed_attention(model):
        handle.remove()
    assert same(configs(model), held)
    assert model.config._attn_implementation == attention


def test_a_map_that_is_read_again_leaves_another_model_alone(two):
    one, other = two
    expected = logits(other, IDS)
    with map_attention(one, "rerope", to=256, window=8) as handle:
        through = logits(one, IDS)
    held = configs(one)
    with handle.again():
        assert torch.equal(logits(one, IDS), through)
        assert torch.equal(logits(other, IDS), expected)
    assert same(configs(one), held)


def test_attention_within_a_block_is_put_back_where_it_was_set():
    model = tiny_model("llama")
    attention = model.config._attn_implementation
    with pytest.raises(ZeroDivisionError), attending_by(model, "eager"):
        _ = (model.config._attn_implementation == "eager") / 0
    assert model.config._attn_implementation == attention


# Nothing of the process


@pytest.fixture
def default(monkeypatch):
    """A default dtype that nobody may set."""
    torch.set_default_dtype(torch.bfloat16)
    set_it = torch.set_default_dtype

    def refused(dtype: torch.dtype) -> None:
        raise AssertionError(f"the default dtype of the process was set to {dtype}")

    monkeypatch.setattr(torch, "set_default_dtype", refused)
    yield torch.bfloat16
    set_it(torch.float32)


@pytest.fixture(scope="module")
def plans() -> dict[str, Any]:
    """The plan of every method."""
    config = tiny_config("llama")
    parameters = {method: example(method, config.head_dim // 2, 4).parameters() for method in METHODS}
    made = {}
    for method, more in parameters.items():
        plan = ropepatch.plan(config, to=256, method=method, **more)
        made[method] = config, more, plan, plan.scaling.frequencies(plan.rope, 256), plan.frequencies()
    return made


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.mark.parametrize("method", METHODS)
def test_a_plan_neither_sets_nor_follows_the_default_dtype(plans, method, default):
    config, parameters, expected, *wanted = plans[method]
    plan = ropepatch.plan(config, to=256, method=method, **parameters)
    got = plan.scaling.frequencies(plan.rope, 256), plan.frequencies()
    for one, other in zip(got, wanted, strict=True):
        assert one.inv_freq.dtype == torch.float32
        assert torch.equal(one.inv_freq, other.inv_freq)
    assert plan.changes == expected.changes
    assert str(plan) == str(expected)


@every_way
def test_what_is_put_into_a_model_neither_sets_nor_follows_the_default_dtype(model, way, default):
    rope = model.model.rotary_emb
    inv_freq = rope.inv_freq.clone()
    with WAYS[way](model):
        tables = [
            *model.parameters(),
            *model.buffers(),
            *vars(model.model.rotary_emb).get("tables", {}).values(),
        ]
        assert {table.dtype for table in tables} == {torch.float32}
    assert model.model.rotary_emb is rope
    assert torch.equal(rope.inv_freq, inv_freq)
    assert torch.get_default_dtype() == default


@pytest.mark.parametrize("name", MAPS)
def test_a_planned_map_neither_sets_nor_follows_the_default_dtype(name, default):
    plan = ropepatch.plan("tiny", to=480, method=name)
    assert plan.distances.name == name
    assert plan.frequencies().inv_freq.dtype == torch.float32
    assert torch.get_default_dtype() == default
