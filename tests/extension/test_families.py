"""The contract of every supported architecture, on tiny random models, and the README's list."""

import pytest
import torch
import transformers
from families import plan_family, refusal
from huggingface_hub.errors import StrictDataclassFieldValidationError
from methods import applied
from oldest import BROKEN
from readme import block, updating, write_block
from tiny_models import NOT_BUILT, ROTARY_TYPES, tiny_config, tiny_model
from transformers import CONFIG_MAPPING

from ropepatch import RopepatchError
from ropepatch.model.config import loader_of
from ropepatch.scaling.rope import Frequencies

UNTRIED = "not tried: no small random model of it is built here"


def test_the_oldest_transformers_fails_on_the_listed_types():
    for model_type in BROKEN:
        with pytest.raises((AttributeError, StrictDataclassFieldValidationError)):
            tiny_model(model_type)


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", ROTARY_TYPES)
def test_every_architecture_has_the_planned_rotary_module_and_frequencies(model_type):
    """The rotary module of stock transformers, built without weights, has bit-identical tables."""
    config = tiny_config(model_type)
    if refusal(model_type):
        with pytest.raises(RopepatchError):
            plan_family(config, "yarn")
        return
    with torch.device("meta"):
        model = loader_of(config).from_config(config)
    plan = plan_family(config, "yarn")
    module = model.get_submodule(plan.config.site.path)
    assert type(module) is plan.config.site.rotary_class
    after = CONFIG_MAPPING[config.model_type].from_dict(applied(plan, config.to_dict()))
    now = Frequencies(
        plan.config.rope.inv_freq(), plan.config.rope.carried_attention_factor
    )
    for whole, table in ((config, now), (after, plan.frequencies())):
        stock = plan.config.site.rotary_class(whole.get_text_config())
        assert torch.equal(
            getattr(stock, plan.config.site.attribute("inv_freq")), table.inv_freq
        )
        assert (
            getattr(stock, plan.config.site.attribute("attention_scaling"))
            == table.attention_factor
        )
    assert after.get_text_config().max_position_embeddings == plan.target


@pytest.mark.sweep
@pytest.mark.skipif(
    not transformers.__version__.startswith("5.24"),
    reason="the README lists the types of transformers 5.24",
)
def test_the_readme_lists_exactly_the_supported_and_unsupported_types():
    reasons = {
        model_type: refusal(model_type) for model_type in ROTARY_TYPES
    } | dict.fromkeys(NOT_BUILT.split(), UNTRIED)
    supported = [
        model_type for model_type in sorted(reasons) if not reasons[model_type]
    ]
    refused = [
        f"| `{name}` | {cell(reasons[name])} |"
        for name in sorted(reasons)
        if reasons[name]
    ]
    names = ", ".join(f"`{name}`" for name in supported)
    table = "\n".join(
        [
            f"{len(supported)} model types: {names}.",
            "",
            "| refused | reason |",
            "|---|---|",
            *refused,
        ]
    )
    if updating():
        write_block("families", table)
    assert block("families") == table


def cell(reason):
    return reason.split(" is not supported: ")[-1].replace("|", "\\|")
