"""The invariants of a patched model (design, section 3), on tiny random LLaMA models."""

import pytest
import torch
from methods import applied, example
from swaps import logits, lora
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import ropepatch
from ropepatch import RopepatchError
from ropepatch.scaling import Scaling, make_scaling

WINDOW, FACTOR = 64, 4


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 120, (1, 96), generator=torch.Generator().manual_seed(1))


def plan_for(model, method="yarn", **parameters):
    if not parameters:
        pairs = model.config.head_dim // 2
        parameters = example(method, pairs, FACTOR).parameters()
    return ropepatch.plan(model, to=FACTOR * WINDOW, method=method, **parameters)


def test_the_handle_of_a_removed_patch_changes_nothing(model):
    frequencies = model.model.rotary_emb.inv_freq.clone()
    old = ropepatch.patch(model, plan_for(model))
    model.bfloat16()
    old.remove()
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    new = ropepatch.patch(model, plan_for(model, "ntk"))
    old.remove()
    assert ropepatch.active(model).plan == new.plan
    with pytest.raises(RopepatchError, match="removed"):
        _ = old.plan


def test_models_that_cannot_be_patched_are_rejected(model):
    for given in (
        (torch.nn.Linear(2, 2), make_scaling("linear", factor=2.0)),
        (model, "yarn"),
    ):
        with pytest.raises(RopepatchError):
            ropepatch.patch(*given)
    linear = make_scaling("linear", factor=2.0)
    for scaling, more in ((4, {}), (linear, {"beta": 2})):
        with pytest.raises(
            RopepatchError,
            match=r"unknown method|already has all its parameters, got also beta",
        ):
            ropepatch.patch(model, scaling, **more)


class Short(Scaling):
    """Has too few frequencies."""

    name = "short"

    def _inv_freq(self, rope):
        return rope.inv_freq()[1:]


class Undefined(Scaling):
    """Has frequencies that are not numbers."""

    name = "undefined"

    def _inv_freq(self, rope):
        return rope.inv_freq() * torch.nan


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Short, "Short._inv_freq must"), (Undefined, "Undefined._inv_freq")],
)
def test_the_error_of_a_faulty_custom_scaling_names_it_and_the_model_is_unchanged(
    model, kind, said
):
    with pytest.raises(RopepatchError, match=said):
        ropepatch.patch(model, kind(factor=4))
    assert ropepatch.active(model) is None
    assert model.config.max_position_embeddings == WINDOW


@pytest.mark.parametrize("verb", [ropepatch.active, ropepatch.patch])
@pytest.mark.parametrize("given", ["tiny", None])
def test_a_name_instead_of_a_loaded_model_is_rejected(verb, given):
    with pytest.raises(RopepatchError, match="holds no transformers model"):
        verb(given)


def test_the_factor_of_a_method_gives_its_target(model):
    assert ropepatch.plan(model, method="linear", factor=2.5).target == 160
    assert ropepatch.plan(model, "2x").target == 128


def test_a_patch_shows_in_print_and_in_active(model):
    handle = ropepatch.patch(model, plan_for(model))
    assert "ScaledRope(yarn, 64 -> 256 tokens, factor=4" in str(model)
    assert ropepatch.active(model).plan == handle.plan
    handle.remove()
    assert ropepatch.active(model) is None


def test_a_removed_patch_keeps_what_the_user_configured_meanwhile(model):
    with ropepatch.patch(model, plan_for(model)):
        model.config.use_cache = False
    assert not model.config.use_cache
    assert model.config.max_position_embeddings == WINDOW


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
    with ropepatch.patch(wrapped, plan):
        assert ropepatch.active(wrapped).plan == plan
    with ropepatch.patch(wrapped, ropepatch.plan(tiny_model("llama"), to=256)):
        assert ropepatch.active(wrapped) is not None


def test_unscaled_layers_keep_their_frequencies(tmp_path):
    """In modernbert-decoder the older flat keys also apply to sliding layers."""
    model = tiny_model("modernbert-decoder")
    plan = ropepatch.plan(model, to=256, method="linear")
    changed = type(model.config).from_dict(applied(plan, model.config.to_dict()))
    assert (
        changed.rope_parameters["sliding_attention"]
        == model.config.rope_parameters["sliding_attention"]
    )


@pytest.mark.parametrize(
    "cast",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.half(),
        lambda model: model.bfloat16().float(),
        lambda model: model.to("meta").to_empty(device="cpu"),
    ],
    ids=["bfloat16", "half", "there and back", "through meta"],
)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_casting_the_model_does_not_change_the_frequencies(family, cast):
    model = tiny_model(family)
    plan = ropepatch.plan(model, to=256)
    ropepatch.patch(model, plan)
    cast(model)
    rope = model.get_submodule(plan.config.site.path)
    table = getattr(rope.table, plan.config.site.attribute("inv_freq"))
    assert table.dtype == torch.float32
    assert torch.equal(table, plan.frequencies().inv_freq)


def test_a_bfloat16_model_computes_angles_in_float32(model):
    ropepatch.patch(model, plan_for(model))
    x = torch.zeros(1, 1, 64)
    far = torch.tensor([[131_071]])
    exact, _ = model.model.rotary_emb(x, far)
    rounded, _ = model.bfloat16().model.rotary_emb(x.bfloat16(), far)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, exact.bfloat16())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_equals_that_of_stock_transformers(model, cache, tmp_path):
    ropepatch.patch(model, plan_for(model))
    model.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(3, 120, (2, 48), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(48) >= torch.tensor([[11], [0]])).long()  # left padding
    arguments = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False, "eos_token_id": None,
                 "cache_implementation": cache, "disable_compile": True, "pad_token_id": 0}  # fmt: skip
    assert torch.equal(
        model.generate(ids, **arguments), stock.generate(ids, **arguments)
    )


def test_resizing_the_vocabulary_or_reinitialising_keeps_the_patch(model):
    ropepatch.patch(model, plan_for(model))
    table = model.model.rotary_emb.table.inv_freq.clone()
    model.resize_token_embeddings(140)
    model.init_weights()
    assert torch.equal(model.model.rotary_emb.table.inv_freq, table)


def test_a_patched_model_compiles_without_a_graph_break(model, ids):
    ropepatch.patch(model, plan_for(model))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert (logits(compiled, ids) - logits(model, ids)).abs().max() < 1e-4
    assert ropepatch.active(compiled).plan.method.name == "yarn"


def test_a_patched_model_can_be_exported(model, ids):
    ropepatch.patch(model, plan_for(model))
    program = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
    exported = program.module()(ids, use_cache=False).logits
    assert (exported - logits(model, ids)).abs().max() < 1e-4


@pytest.mark.parametrize(
    "more",
    [{"to": 512}, {"original": 32}],
)
def test_a_plan_takes_no_further_arguments(model, more):
    with pytest.raises(RopepatchError, match="a plan already sets "):
        ropepatch.patch(model, plan_for(model), **more)
