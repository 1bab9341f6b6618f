"""The attention factor in the query weights: the same logits, with 1 for the factor."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_folders import PAIRS, VOCABULARY, contents, edit_json, write_checkpoint
from methods import example
from oldest import needs
from run_recipes import record_of
from safetensors.torch import load_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

import ropepatch
from ropepatch import RopepatchError
from ropepatch.files import read_json
from ropepatch.publishing import folding
from ropepatch.publishing.folding import fold_attention

TARGET = 256


def extended(source, out, method="yarn", **parameters):
    given = example(method, PAIRS).parameters() | parameters
    plan = ropepatch.plan(source, to=TARGET, method=method, **given)
    return ropepatch.extend(plan, out, reading=False).folder


@pytest.fixture(scope="module")
def yarn(shards, tmp_path_factory):
    return extended(shards, tmp_path_factory.mktemp("yarn") / "yarn")


@pytest.fixture(scope="module")
def folded(yarn):
    return fold_attention(yarn, yarn.parent / "folded")


def weights(folder):
    return {
        name: t
        for file in folder.glob("*.safetensors")
        for name, t in load_file(file).items()
    }


@torch.inference_mode()
def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(
        3, VOCABULARY, (2, TARGET), generator=torch.Generator().manual_seed(1)
    )
    return model(ids, use_cache=False).logits


def largest_difference(one, other):
    """Relative to the largest logit, both in stock transformers."""
    expected = logits(one)
    return ((logits(other) - expected).abs().max() / expected.abs().max()).item()


def random_model(model_type):
    """With biases and norms that are not what they are at the start."""
    model = tiny_model(model_type)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def extension_of(model, place):
    model.save_pretrained(place / "source")
    return extended(place / "source", place / "made")


def test_the_factor_becomes_1_in_every_key(folded):
    config = read_json(folded / "config.json")
    for parameters in (config["rope_parameters"], config["rope_scaling"]):
        factors = (
            parameters.get(key, 1.0)
            for key in ("attention_factor", "short_mscale", "long_mscale")
        )
        assert set(factors) == {1.0}
        # Engines that derive a factor take it from the ratio of these two.
        assert (
            parameters["original_max_position_embeddings"]
            == config["max_position_embeddings"]
            == TARGET
        )


def test_only_queries_grow_by_the_square_of_the_factor(yarn, folded):
    a = record_of(yarn)["attention_factor"]
    before, after = weights(yarn), weights(folded)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        expected = tensor * a**2 if "q_proj" in name else tensor
        assert torch.allclose(after[name], expected, rtol=1e-6, atol=0)
        assert torch.equal(after[name], tensor) == ("q_proj" not in name)
    assert sum("q_proj" in name for name in before) == 2
    files = sorted(file.name for file in yarn.glob("*safetensors*"))
    assert len(files) > 2
    assert sorted(file.name for file in folded.glob("*safetensors*")) == files


@pytest.mark.parametrize("method", ["longrope", "linear"])
def test_every_method_with_a_factor_can_be_folded(shards, tmp_path, method):
    made = extended(shards, tmp_path / "made", method)
    if method == "linear":
        assert "attention factor 1" in refused(made, tmp_path)
    else:
        out = fold_attention(made, tmp_path / "folded")
        assert largest_difference(made, out) < 1e-5


@pytest.mark.parametrize(
    ("model_type", "folded_into"),
    [
        ("qwen2", "q_proj.bias"),
        ("qwen3", "q_norm.weight"),  # times w
        ("gemma3_text", "q_norm.weight"),  # times 1 + w, and of the global layers alone
        ("olmo2", "q_norm.weight"),  # over all heads at once
        ("mixtral", "q_proj.weight"),
    ],
)
def test_other_families_fold_where_their_queries_get_their_size(
    tmp_path, model_type, folded_into
):
    needs(model_type)
    model = random_model(model_type)
    made = extension_of(model, tmp_path)
    out = fold_attention(made, tmp_path / "out")
    before, after = weights(made), weights(out)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(name.endswith(folded_into) for name in changed)
    if model_type == "gemma3_text":
        kinds = enumerate(model.config.layer_types)
        scaled = {layer for layer, kind in kinds if kind == "full_attention"}
        assert {int(name.split(".")[2]) for name in changed} == scaled
        assert len(scaled) < model.config.num_hidden_layers
    assert largest_difference(made, out) < 1e-5


def test_weights_stored_more_coarsely_than_they_are_loaded_lose_nothing(tmp_path):
    made = ropepatch.extend(
        ropepatch.plan("tiny", to=1024), tmp_path / "made", reading=False
    ).folder
    assert {tensor.dtype for tensor in weights(made).values()} == {torch.bfloat16}
    assert read_json(made / "config.json")["dtype"] == "float32"
    out = fold_attention(made, tmp_path / "out")
    queries = [tensor for name, tensor in weights(out).items() if "q_proj" in name]
    assert {tensor.dtype for tensor in queries} == {torch.float32}
    assert float(record_of(out)["verified"]["logits"].split()[1]) < 1e-5


def test_the_record_stays_that_of_the_extension(yarn, folded):
    before, after = record_of(yarn), record_of(folded)
    assert after["folded_attention_factor"] == before["attention_factor"] > 1
    assert after["attention_factor"] == 1
    for key in ("method", "target", "original_max_position_embeddings", "model"):
        assert after[key] == before[key]
    assert after["config_changes"]["rope_parameters"]["rope_type"] == "longrope"
    assert after["verified"]["frequencies"] == "equal"


def test_the_record_drops_what_no_longer_holds(yarn, tmp_path):
    """The results are those of other weights."""
    measured = Path(shutil.copytree(yarn, tmp_path / "measured"))
    evaluation = {"model": "x", "trained": 64, "target": 256, "tasks": []}
    edit_json(measured / "ropepatch.json", evaluation=evaluation, command="x")
    kept = record_of(fold_attention(measured, tmp_path / "out"))
    assert not {"evaluation", "command"} & kept.keys()
    (measured / "ropepatch.json").unlink()  # as one that ropepatch did not make
    out = fold_attention(measured, tmp_path / "again")
    assert largest_difference(measured, out) < 1e-5
    assert record_of(out)["folded_attention_factor"] > 1


def refused(source, tmp_path):
    before = contents(source)
    with pytest.raises(RopepatchError) as error:
        fold_attention(source, tmp_path / "out")
    assert contents(source) == before
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.partial"))
    assert error.value.hint
    return str(error.value)


def test_a_factor_of_1_and_quantised_weights_are_refused(shards, yarn, tmp_path):
    assert "attention factor 1" in refused(shards, tmp_path)
    source = Path(shutil.copytree(yarn, tmp_path / "source"))
    edit_json(
        source / "config.json", quantization_config={"quant_method": "gptq", "bits": 4}
    )
    assert "quantised" in refused(source, tmp_path)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("phi3", "no weights of its queries alone"),
        ("gpt_neox", "only part of each head"),
    ],
)
def test_queries_without_weights_of_their_own_are_refused(tmp_path, model_type, reason):
    made = extension_of(tiny_model(model_type), tmp_path)
    assert reason in refused(made, tmp_path)


@pytest.mark.parametrize("power", [0.5, 0.0])
def test_a_wrong_power_of_the_factor_would_be_refused(
    yarn, tmp_path, monkeypatch, power
):
    scaled = folding._scaled
    monkeypatch.setattr(
        folding, "_scaled", lambda scale, *rest: scaled(scale**power, *rest)
    )
    assert "times as large" in refused(yarn, tmp_path)


def test_a_factor_that_config_json_keeps_would_be_refused(yarn, tmp_path, monkeypatch):
    def keep(source, out, plan, change):
        shutil.copy(yarn / "config.json", out)

    monkeypatch.setattr(folding, "write_configuration", keep)
    monkeypatch.setattr(folding, "check_frequencies", lambda *_: None)
    assert "changes the logits" in refused(yarn, tmp_path)


def test_rounding_of_a_bfloat16_model_is_no_fault(tmp_path):
    source = write_checkpoint(tmp_path / "source", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    for layer in model.model.layers:
        # Sharp attention: a little of the queries is much of the logits
        layer.self_attn.q_proj.weight.data *= 16
    model.save_pretrained(source)
    made = extended(source, tmp_path / "made")
    out = fold_attention(made, tmp_path / "out")
    assert {tensor.dtype for tensor in weights(out).values()} == {torch.bfloat16}
    assert largest_difference(made, out) > 0.05
    assert record_of(out)["verified"]["difference"] > 0.01


def test_a_norm_of_the_other_kind_would_be_refused(tmp_path, monkeypatch):
    made = extension_of(random_model("qwen3"), tmp_path)
    monkeypatch.setattr(folding, "_offset", lambda norm: 1.0)
    assert "changes the logits" in refused(made, tmp_path)


def test_the_export_command_prints_the_factor_and_logits(yarn, tmp_path, run_here):
    done = run_here("export", yarn, "--fold-attention", cwd=tmp_path)
    assert done.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["yarn-folded"]
    assert "attention factor 1.1386 -> 1" in done.stdout
    assert "logits within" in done.stdout
    as_json = run_here(
        "export", yarn, "--fold-attention", "--out", tmp_path / "again", "--json"
    )
    assert json.loads(as_json.stdout) == record_of(tmp_path / "again")
