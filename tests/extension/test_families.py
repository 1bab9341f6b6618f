"""The contract that every supported architecture keeps, on a tiny random model; the README's list of them."""

import json

import pytest
import torch
import transformers
from caches import CACHE, into
from families import FAMILIES, plan_family, refusal
from huggingface_hub.errors import StrictDataclassFieldValidationError
from oldest import BROKEN, NOT_YET
from readme import block, updating, write_block
from tiny_models import NOT_BUILT, ROTARY_TYPES, tiny_config, tiny_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import ropepatch
from ropepatch import RopepatchError
from ropepatch.scaling.rope import Frequencies

IDS = torch.randint(3, 120, (1, 40), generator=torch.Generator().manual_seed(0))
UNTRIED = "not tried: no small random model of it can be built without more packages or another model"


def supported(group: str) -> str | None:
    """The first supported architecture that runs a body; None where all are refused, loaded models too."""
    for model_type in FAMILIES[group]:
        if model_type in NOT_YET:
            continue
        if refusal(model_type) is None:
            return model_type
        with pytest.raises(RopepatchError, match="is not supported"):
            plan_family(tiny_model(model_type), "ntk")
    return None


def test_what_the_oldest_transformers_is_said_not_to_build_it_does_not():
    for model_type in BROKEN:
        with pytest.raises((AttributeError, StrictDataclassFieldValidationError)):
            tiny_model(model_type)


@torch.no_grad()
def logits(model, **inputs):
    return model(IDS, **inputs).logits


@pytest.mark.parametrize("group", FAMILIES)
def test_patched_is_reloaded_off_is_never_on_cached_is_full(group, tmp_path):
    """By a method that is saved as longrope."""
    if (model_type := supported(group)) is None:
        return
    model = tiny_model(model_type)
    before = logits(model)
    with ropepatch.patch(model, plan_family(model, "ntk-mixed")):
        patched = logits(model)
        cached = decode(model)
        model.save_pretrained(tmp_path)
    assert torch.equal(patched, logits(type(model).from_pretrained(tmp_path)))
    assert (patched - before).abs().max() > 1e-3 * before.std()
    assert torch.equal(logits(model), before)
    assert (cached - patched).abs().max() < 1e-4 * max(1.0, patched.abs().max().item())


@pytest.mark.parametrize("group", FAMILIES)
def test_a_checkpoint_extends_into_one_that_stock_transformers_computes_alike(group, tmp_path):
    """By a method with a rope type of its own."""
    if (model_type := supported(group)) is None:
        return
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path / "source")
    if (
        model.config.model_type != model_type
    ):  # the language model of a composite, under the composite's config
        tiny_config(model_type).save_pretrained(tmp_path / "source")
    window = model.config.get_text_config().max_position_embeddings
    plan = ropepatch.plan(tmp_path / "source", to=4 * window, method="yarn")
    out = ropepatch.extend(plan, tmp_path / "extended").folder
    verdict = json.loads((out / "ropepatch.json").read_text())["verified"]
    assert verdict == {"frequencies": "equal", "logits": "equal", "compared": True, "difference": 0.0}


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", ROTARY_TYPES)
def test_the_rope_of_every_architecture_is_where_the_plan_says_and_becomes_what_it_says(model_type):
    """Without any weights: the rotary module of stock transformers, on its own, has the tables to the bit."""
    config = tiny_config(model_type)
    if refusal(model_type):
        with pytest.raises(RopepatchError):
            plan_family(config, "yarn")
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    plan = plan_family(config, "yarn")
    module = model.get_submodule(plan.site.path)
    assert type(module) is plan.site.rotary_class
    after = CONFIG_MAPPING[config.model_type].from_dict(plan.apply(config.to_dict()))
    now = Frequencies(plan.rope.inv_freq(), plan.rope.carried_attention_factor)
    for whole, table in ((config, now), (after, plan.frequencies())):
        stock = plan.site.rotary_class(whole.get_text_config())
        assert torch.equal(getattr(stock, plan.site.attribute("inv_freq")), table.inv_freq)
        assert getattr(stock, plan.site.attribute("attention_scaling")) == table.attention_factor
    assert after.get_text_config().max_position_embeddings == plan.target


@torch.no_grad()
def decode(model):
    """Logits of the whole sequence, the last eight tokens one by one from the cache."""
    cache, steps, begin = None, [], 0
    for piece in IDS.split([32, *[1] * 8], dim=1):
        positions = torch.arange(begin, begin + piece.shape[1])[None]
        out = model(piece, position_ids=positions, **into(cache))
        cache, begin = out[CACHE], begin + piece.shape[1]
        steps.append(out.logits)
    return torch.cat(steps, 1)


@pytest.mark.sweep
@pytest.mark.skipif(
    not transformers.__version__.startswith("5.23"), reason="the README lists the types of transformers 5.23"
)
def test_the_readme_lists_exactly_the_supported_and_the_refused_types():
    reasons = {model_type: refusal(model_type) for model_type in ROTARY_TYPES} | dict.fromkeys(
        NOT_BUILT, UNTRIED
    )
    supported = [model_type for model_type in sorted(reasons) if not reasons[model_type]]
    refused = [f"| `{name}` | {cell(reasons[name])} |" for name in sorted(reasons) if reasons[name]]
    names = ", ".join(f"`{name}`" for name in supported)
    table = "\n".join(
        [f"{len(supported)} model types: {names}.", "", "| refused | reason |", "|---|---|", *refused]
    )
    if updating():
        write_block("families", table)
    assert block("families") == table


def cell(reason: str) -> str:
    return reason.split(" is not supported: ")[-1].replace("|", "\\|")
