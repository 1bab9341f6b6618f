"""The invariants of a patched model (design, section 3), on tiny random LLaMA models."""

import pytest
import torch
from methods import applied
from swaps import logits, lora
from tiny_models import tiny_model

import ropepatch
from ropepatch import RopepatchError
from ropepatch.encodings.swapping import swap
from ropepatch.scaling import Scaling, make_scaling

WINDOW = 64


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 120, (1, 96), generator=torch.Generator().manual_seed(1))


def plan_for(model, method="yarn"):
    return ropepatch.plan(model, to=4 * WINDOW, method=method)


def test_the_handle_of_a_removed_patch_changes_nothing(model):
    frequencies = model.model.rotary_emb.inv_freq.clone()
    old = ropepatch.patch(model, plan_for(model))
    assert "ScaledRope(yarn, 64 -> 256 tokens, factor=4" in str(model)
    model.bfloat16()
    old.remove()
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert ropepatch.active(model) is None
    new = ropepatch.patch(model, plan_for(model, "ntk"))
    old.remove()
    assert ropepatch.active(model).plan == new.plan
    with pytest.raises(RopepatchError, match="removed"):
        _ = old.plan


class Short(Scaling):
    """Has too few frequencies."""

    name = "short"

    def _inv_freq(self, rope):
        return rope.inv_freq()[1:]


def test_a_faulty_custom_scaling_is_named_and_changes_nothing(model):
    with pytest.raises(RopepatchError, match=r"Short\._inv_freq must"):
        ropepatch.patch(model, Short(factor=4))
    assert ropepatch.active(model) is None
    assert model.config.max_position_embeddings == WINDOW


@pytest.mark.parametrize("verb", [ropepatch.active, ropepatch.patch])
@pytest.mark.parametrize("given", ["tiny", None, torch.nn.Linear(2, 2)], ids=str)
def test_what_is_no_loaded_model_is_rejected(verb, given):
    with pytest.raises(RopepatchError, match="holds no transformers model"):
        verb(given)


def test_a_method_takes_no_further_parameters(model):
    with pytest.raises(RopepatchError, match="got also beta"):
        ropepatch.patch(model, make_scaling("linear", factor=2.0), beta=2)


def test_the_plan_of_another_model_is_rejected(model):
    plan = plan_for(model)
    other = tiny_model("llama", max_position_embeddings=128)
    with pytest.raises(RopepatchError, match="the plan is for another model"):
        ropepatch.patch(other, plan)
    assert ropepatch.active(other) is None


@pytest.mark.parametrize("wrap", ["peft", "compile", "decoder"])
def test_a_plan_is_for_the_model_inside_its_wrappers(model, ids, wrap):
    wrapped = {
        "peft": lora,
        "compile": lambda model: torch.compile(model, backend="eager"),
        "decoder": lambda model: model.model,
    }[wrap](model)
    plan = ropepatch.plan(wrapped, to=256)
    for made in (plan, ropepatch.plan(tiny_model("llama"), to=256)):
        with ropepatch.patch(wrapped, made):
            assert ropepatch.active(wrapped).plan == made


def test_unscaled_layers_keep_their_frequencies():
    """In modernbert-decoder the older flat keys also apply to sliding layers."""
    model = tiny_model("modernbert-decoder")
    plan = ropepatch.plan(model, to=256, method="linear")
    changed = type(model.config).from_dict(applied(plan, model.config.to_dict()))
    assert (
        changed.rope_parameters["sliding_attention"]
        == model.config.rope_parameters["sliding_attention"]
    )


CASTS = {
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "there and back": lambda model: model.half().float(),
    "through meta": lambda model: model.to("meta").to_empty(device="cpu"),
    "another vocabulary": lambda model: model.resize_token_embeddings(140),
    "other weights": lambda model: model.init_weights(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_change_of_dtype_device_or_weights_keeps_the_frequencies(family, cast):
    model = tiny_model(family)
    plan = ropepatch.plan(model, to=256)
    ropepatch.patch(model, plan)
    cast(model)
    rope = model.get_submodule(plan.config.site.path)
    table = getattr(rope.table, plan.config.site.attribute("inv_freq"))
    assert table.dtype == torch.float32
    assert torch.equal(table, plan.frequencies().inv_freq)


def test_a_patched_model_compiles_without_a_graph_break(ids):
    model = tiny_model("llama", num_hidden_layers=1)
    ropepatch.patch(model, plan_for(model))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert (logits(compiled, ids) - logits(model, ids)).abs().max() < 1e-4
    assert ropepatch.active(compiled).plan.method.name == "yarn"


def test_a_patched_model_can_be_exported(model, ids):
    ropepatch.patch(model, plan_for(model))
    program = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
    exported = program.module()(ids, use_cache=False).logits
    assert (exported - logits(model, ids)).abs().max() < 1e-4


@pytest.mark.parametrize("more", [{"to": 512}, {"original": 32}])
def test_a_plan_takes_no_further_arguments(model, more):
    with pytest.raises(RopepatchError, match="a plan already sets "):
        ropepatch.patch(model, plan_for(model), **more)


# Several models with one configuration

WAYS = {
    "patch": lambda model: ropepatch.patch(model, "yarn", to=256),
    "map": lambda model: ropepatch.patch(model, "rerope", to=256, window=8),
    "swap": lambda model: swap(model, "alibi"),
}


def configs(model):
    """The configurations of a model's modules."""
    return [module.config for module in model.modules() if hasattr(module, "config")]


def are_the_same(some, others):
    return [id(config) for config in some] == [id(config) for config in others]


@pytest.mark.parametrize(
    ("way", "second"), [("patch", "map"), ("map", "swap"), ("swap", "patch")]
)
def test_models_that_share_a_configuration_change_and_restore_independently(
    model, ids, way, second
):
    """Changes of the configuration by the user meanwhile are kept."""
    other = type(model)(model.config).eval()
    held, content = configs(model), model.config.to_dict()
    before = logits(model, ids), logits(other, ids)
    first = WAYS[way](model)
    assert model.config is not other.config
    assert are_the_same(configs(other), held)
    assert other.config.to_dict() == content
    assert torch.equal(logits(other, ids), before[1])
    alone = logits(model, ids)
    then = WAYS[second](other)
    model.config.use_cache = False
    then.remove()
    assert torch.equal(logits(model, ids), alone)
    first.remove()
    assert are_the_same(configs(model), held)
    assert are_the_same(configs(other), held)
    assert model.config.use_cache is False
    assert torch.equal(logits(model, ids), before[0])
    assert torch.equal(logits(other, ids), before[1])
