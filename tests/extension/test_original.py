"""`original`: the original context length, if config.json contains another."""

import json

import pytest
import torch
from checkpoint_folders import write_checkpoint
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import ropepatch
from ropepatch import RopepatchError
from ropepatch.extension.patching import plan_of_record
from ropepatch.extension.record import read
from ropepatch.extension.writing import check
from ropepatch.model.checkpoint import Checkpoint

STATED, TRAINED, TARGET = 80, 64, 256
# https://huggingface.co/Qwen/Qwen3-8B, "Processing Long Texts"; its config.json says 40,960
PUBLISHED = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "source"
    return write_checkpoint(folder, max_position_embeddings=STATED)


@pytest.mark.parametrize(
    ("model_type", "stated", "said"), [("qwen3", 40960, True), ("qwen3", 32768, False)]
)
def test_the_plan_suggests_the_known_original_length_unless_it_is_given(
    model_type, stated, said
):
    config = tiny_model(model_type).config
    config.max_position_embeddings = stated
    hinted = [
        line
        for line in ropepatch.plan(config, to="128k").warnings
        if "`original=32k`" in line
    ]
    assert bool(hinted) == said
    assert not any(
        "`original=" in line
        for line in ropepatch.plan(config, to="4x", original="32k").warnings
    )


def test_a_target_within_a_nominal_length_suggests_an_original_length():
    config = tiny_model("qwen2").config
    config.max_position_embeddings = 131_072
    with pytest.raises(RopepatchError) as refused:
        ropepatch.plan(config, to="128k")
    assert "`original`" in refused.value.hint


def test_yarn_for_qwen3_is_written_as_published(tmp_path):
    model = tiny_model("qwen3")
    model.config.max_position_embeddings = 40960
    model.save_pretrained(tmp_path / "source")
    plan = ropepatch.plan(tmp_path / "source", to="4x", original="32k")
    assert plan.target == 131_072
    written = check(plan, tmp_path / "out").write().path
    raw = json.loads((written / "config.json").read_text())
    assert raw["max_position_embeddings"] == 131_072
    theta = raw["rope_parameters"]["rope_theta"]
    assert raw["rope_parameters"].items() >= PUBLISHED.items()
    config = AutoConfig.from_pretrained(tmp_path / "source")
    config.max_position_embeddings, config.rope_parameters = (
        131_072,
        PUBLISHED | {"rope_theta": theta},
    )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    rotary = AutoModelForCausalLM.from_pretrained(written).model.rotary_emb
    assert torch.equal(rotary.inv_freq, inv_freq)
    assert rotary.attention_scaling == attention_factor == pytest.approx(1.138629436)


@pytest.mark.parametrize("method", ["yarn", "self-extend"])
def test_a_patch_and_the_record_of_a_checkpoint_have_the_given_original_length(
    method, source, tmp_path
):
    plan = ropepatch.plan(source, to=TARGET, method=method, original=TRAINED)
    assert not any("original" in line for line in plan.warnings)  # the user said it
    assert f"\noriginal length {TRAINED}; config.json states {STATED}\n" in str(plan)
    model = AutoModelForCausalLM.from_pretrained(source)
    with ropepatch.patch(model, method, to=TARGET, original=TRAINED) as handle:
        patched = handle.plan if method == "yarn" else handle.distances
        if method == "yarn":
            assert patched.to_dict() == plan.to_dict()
        else:
            assert patched == plan.method
    record = read(ropepatch.extend(plan, tmp_path / "out", reading=False).folder)
    assert (record.original, record.original_max_position_embeddings) == (
        TRAINED,
        TRAINED,
    )
    if method == "yarn":
        found = Checkpoint.find(source, original=record.original)
        assert plan_of_record(record, found).to_dict() == plan.to_dict()


def test_measurements_use_the_given_original_length():
    quick = {"to": "2x", "original": "0.5x", "say": lambda line: None}
    scaled = [
        *ropepatch.evaluate("tiny", methods="yarn", lengths="1x", limit=1, **quick)
    ][-1]
    assert (scaled.model["trained"], scaled.target, scaled.scaling["factor"]) == (
        128,
        256,
        2.0,
    )
    assert {row.length for row in scaled.rows if row.at.keys() == {"length"}} == {128}
    chosen = ropepatch.compare(
        "tiny", methods="linear", windows=1, haystacks=0, **quick
    )
    assert {result.model["trained"] for result in chosen.results} == {128}


@pytest.mark.parametrize("original", [0, -1, True, 64.0, "0.001x", "", 512])
def test_an_invalid_original_length_or_one_beyond_the_target_is_rejected(
    original, source
):
    with pytest.raises(RopepatchError):
        ropepatch.plan(source, to=TARGET, original=original)


def test_an_original_length_with_a_plan_or_for_a_scaled_model_is_rejected(
    source, tmp_path
):
    plan = ropepatch.plan(source, to=TARGET, original=TRAINED)
    with pytest.raises(RopepatchError, match=r"a plan already sets .* original"):
        ropepatch.extend(plan, tmp_path / "out", original=TRAINED)
    out = check(plan, tmp_path / "out").write().path
    with pytest.raises(
        RopepatchError,
        match=f"`original` is {TRAINED}, but this model is already scaled",
    ):
        ropepatch.plan(out, to=4 * TARGET, original=TRAINED)
