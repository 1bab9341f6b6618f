"""`original`: the original context length, if config.json contains another."""

import pytest
import torch
from checkpoint_folders import write_checkpoint
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM
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


@pytest.mark.parametrize(("stated", "said"), [(40960, True), (32768, False)])
def test_the_plan_suggests_a_known_original_length(stated, said):
    config = tiny_config("qwen3", max_position_embeddings=stated)
    assert ("`original=32k`" in str(ropepatch.plan(config, to="128k"))) == said
    given = ropepatch.plan(config, to="4x", original="32k")
    assert "`original=" not in str(given)


def test_a_target_within_a_nominal_length_suggests_an_original_length():
    config = tiny_config("qwen2", max_position_embeddings=131_072)
    with pytest.raises(RopepatchError) as refused:
        ropepatch.plan(config, to="128k")
    assert "`original`" in refused.value.hint


def test_yarn_for_qwen3_is_written_as_published():
    config = tiny_config("qwen3", max_position_embeddings=40960)
    plan = ropepatch.plan(config, to="4x", original="32k")
    assert plan.target == plan.changes["max_position_embeddings"] == 131_072
    saved = plan.changes["rope_parameters"]
    assert saved.items() >= PUBLISHED.items()
    config.max_position_embeddings = 131_072
    config.rope_parameters = PUBLISHED | {"rope_theta": saved["rope_theta"]}
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    assert torch.equal(plan.frequencies().inv_freq, inv_freq)
    assert plan.frequencies().attention_factor == attention_factor
    assert attention_factor == pytest.approx(1.138629436)


@pytest.mark.parametrize("method", ["yarn", "self-extend"])
def test_a_patch_and_a_record_have_the_given_original_length(method, source, tmp_path):
    plan = ropepatch.plan(source, to=TARGET, method=method, original=TRAINED)
    assert f"\noriginal length {TRAINED}; config.json states {STATED}\n" in str(plan)
    model = AutoModelForCausalLM.from_pretrained(source)
    with ropepatch.patch(model, method, to=TARGET, original=TRAINED) as handle:
        if method == "yarn":
            assert handle.plan.to_dict() == plan.to_dict()
        else:
            assert handle.distances == plan.method
    record = read(ropepatch.extend(plan, tmp_path / "out", reading=False).folder)
    assert record.original == record.original_max_position_embeddings == TRAINED
    found = Checkpoint.find(source, original=record.original)
    assert plan_of_record(record, found).to_dict() == plan.to_dict()


def test_measurements_use_the_given_original_length():
    quick = {"to": "2x", "original": "0.5x", "say": lambda line: None}
    *_, scaled = ropepatch.evaluate(
        "tiny", methods="yarn", lengths="1x", limit=1, **quick
    )
    assert (scaled.model["trained"], scaled.target) == (128, 256)
    assert scaled.scaling["factor"] == 2.0
    assert {row.length for row in scaled.rows if row.at.keys() == {"length"}} == {128}
    chosen = ropepatch.compare(
        "tiny", methods="linear", windows=1, haystacks=0, **quick
    )
    assert {result.model["trained"] for result in chosen.results} == {128}


@pytest.mark.parametrize("original", [0, -1, True, 64.0, "0.001x", "", 512])
def test_an_invalid_original_length_is_rejected(original, source):
    with pytest.raises(RopepatchError):
        ropepatch.plan(source, to=TARGET, original=original)


def test_a_scaled_model_takes_no_original_length(source, tmp_path):
    plan = ropepatch.plan(source, to=TARGET, original=TRAINED)
    with pytest.raises(RopepatchError, match=r"a plan already sets .* original"):
        ropepatch.extend(plan, tmp_path / "out", original=TRAINED)
    out = check(plan, tmp_path / "out").write().path
    with pytest.raises(RopepatchError, match="this model is already scaled"):
        ropepatch.plan(out, to=4 * TARGET, original=TRAINED)
