"""The contract that every supported architecture keeps, on a tiny random model; the README's list of them."""

import functools
import json

import pytest
import torch
import transformers
from readme import block, updating, write_block
from tiny_models import NOT_BUILT, ROTARY_TYPES, tiny_config, tiny_model

import ropepatch
from ropepatch import RopepatchError

IDS = torch.randint(3, 120, (1, 40), generator=torch.Generator().manual_seed(0))
# One method with a rope type of its own, one that is saved as longrope.
METHODS = ("yarn", "ntk-mixed")
UNTRIED = "not tried: no small random model of it can be built without more packages or another model"


@functools.cache
def refusal(model_type: str) -> str | None:
    """Why a type is refused, None where it is supported."""
    try:
        plan(tiny_model(model_type), "ntk")
    except RopepatchError as error:
        return str(error)
    return None


def plan(model, method):
    window = getattr(model.config.get_text_config(), "max_position_embeddings", 64)
    scaled = method == "yarn" and plan(model, "ntk").rope.is_scaled
    return ropepatch.plan(model, to=4 * window, method=method, **({"ramp": "rotations"} if scaled else {}))


@torch.no_grad()
def logits(model, **inputs):
    return model(IDS, **inputs).logits


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model_type", ROTARY_TYPES)
def test_patched_is_reloaded_off_is_never_on_cached_is_full(model_type, method, tmp_path):
    model = tiny_model(model_type)
    if reason := refusal(model_type):
        with pytest.raises(RopepatchError) as caught:
            plan(model, method)
        assert reason.split()[0] in str(caught.value)
        return
    before = logits(model)
    with ropepatch.patch(model, plan(model, method)):
        patched = logits(model)
        cached = decode(model)
        model.save_pretrained(tmp_path)
    assert torch.equal(patched, logits(type(model).from_pretrained(tmp_path)))
    assert (patched - before).abs().max() > 1e-3 * before.std()
    assert torch.equal(logits(model), before)
    assert (cached - patched).abs().max() < 1e-4 * max(1.0, patched.abs().max().item())


@pytest.mark.parametrize("model_type", ROTARY_TYPES)
def test_a_checkpoint_extends_into_one_that_stock_transformers_computes_alike(model_type, tmp_path):
    if refusal(model_type):
        with pytest.raises(RopepatchError):
            ropepatch.plan(tiny_config(model_type), to=256)
        return
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path / "source")
    if (
        model.config.model_type != model_type
    ):  # the language model of a composite, under the composite's config
        tiny_config(model_type).save_pretrained(tmp_path / "source")
    window = model.config.get_text_config().max_position_embeddings
    plan = ropepatch.plan(tmp_path / "source", to=4 * window, method="linear")
    out = ropepatch.extend(plan, tmp_path / "extended")
    verdict = json.loads((out / "ropepatch.json").read_text())["verified"]
    assert verdict == {"frequencies": "equal", "logits": "equal"}


@torch.no_grad()
def decode(model):
    """Logits of the whole sequence, the last eight tokens one by one from the cache."""
    cache, steps, begin = None, [], 0
    for piece in IDS.split([32, *[1] * 8], dim=1):
        positions = torch.arange(begin, begin + piece.shape[1])[None]
        out = model(piece, position_ids=positions, past_key_values=cache, use_cache=True)
        cache, begin = out.past_key_values, begin + piece.shape[1]
        steps.append(out.logits)
    return torch.cat(steps, 1)


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
