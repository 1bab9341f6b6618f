"""Models without a language model head or without RoPE, draft models, and remote code."""

import json
import warnings

import pytest
import torch
import transformers
from oldest import needs
from tiny_models import tiny_config, tiny_model
from transformers import CONFIG_MAPPING

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.files import read_json, write_json
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.publishing.card.writing import card_text, read_folder

LENGTH = "max_position_embeddings"


def written(folder, method, to="4x"):
    """An extended copy of a checkpoint, and its record."""
    out = folder.parent / f"{folder.name}-out"
    ropepatch.extend(folder, out, to=to, method=method, reading=False)
    return out, read_json(out / "ropepatch.json")


@torch.inference_mode()
def hidden_states(model):
    torch.manual_seed(0)
    ids, positions = torch.randint(40, (1, 9)), torch.arange(9)[None] * 20
    return model.base_model(
        ids, position_ids=positions, attention_mask=torch.ones_like(ids)
    ).last_hidden_state


@pytest.mark.parametrize(
    "name",
    ["Qwen3ForSequenceClassification", "LlamaModel", "ModernBertForMaskedLM"],
)
def test_a_model_with_another_head_has_its_planned_hidden_states(name, tmp_path):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(tiny_config(kind.config_class.model_type)).eval()
    model.save_pretrained(tmp_path / "model")
    out, record = written(tmp_path / "model", "yarn")
    assert record["verified"]["logits"] == "equal, as hidden states"
    reloaded = kind.from_pretrained(out).eval()
    before = hidden_states(model)
    with ropepatch.patch(model, "yarn", to="4x"):
        assert torch.equal(hidden_states(model), hidden_states(reloaded))
    assert not torch.allclose(before, hidden_states(reloaded), atol=1e-4)


def test_the_modules_of_an_embedding_model_are_kept(tmp_path):
    tiny_model("llama").model.save_pretrained(tmp_path / "model")
    (tmp_path / "model/1_Pooling").mkdir()
    files = "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"
    for name in files:
        write_json(tmp_path / "model" / name, {"max_seq_length": 64})
    out, _ = written(tmp_path / "model", "yarn")
    lengths = [read_json(out / name)["max_seq_length"] for name in files]
    assert lengths == [64, 64, 256]


REFUSED = [
    {"model_type": "t5", "is_encoder_decoder": True},
    {"model_type": "medusa", "architectures": ["MedusaModel"]},
]


@pytest.mark.parametrize("config", REFUSED)
def test_a_model_without_rope_is_refused_but_not_accused(config, tmp_path):
    write_json(tmp_path / "config.json", config)
    with pytest.raises(RopepatchError, match=r"'medusa'|an encoder-decoder"):
        ropepatch.plan(tmp_path, to="2x")
    assert not ropepatch.diagnose(tmp_path).has_errors


VERBS = [
    lambda model: ropepatch.evaluate(model, text="stories.txt"),
    lambda model: ropepatch.compare(model, to="2x", text="stories.txt"),
    lambda model: ropepatch.train(model, recipe="tiny", to="2x"),
]


def test_what_generates_no_text_is_not_measured_or_trained(tmp_path):
    kind = transformers.Qwen3ForSequenceClassification
    kind(tiny_config("qwen3")).save_pretrained(tmp_path)
    for verb in VERBS:
        with pytest.raises(RopepatchError, match="has no language model head"):
            verb(tmp_path)
    with pytest.raises(RopepatchError, match="may not be causal"):
        ropepatch.plan(tmp_path, to="2x", method="rerope")


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("nemotron_h", {}),
        ("granitemoehybrid", {"position_embedding_type": "nope"}),
        ("kimi_linear", {"model_max_length": 64}),
    ],
)
def test_a_hybrid_without_rope_gets_only_the_longer_length(
    model_type, options, tmp_path
):
    needs(model_type)
    model = tmp_path / "model"
    tiny_model(model_type, **options).save_pretrained(model)
    with pytest.raises(RopepatchError, match="has no RoPE") as caught:
        ropepatch.plan(model, to="4x")
    assert "`method=none`" in str(caught.value.hint)
    with pytest.raises(RopepatchError, match="its attention has no RoPE"):
        ropepatch.extend(model, tmp_path / "x", to="4x", method="none", reading=True)
    out, record = written(model, "none")
    assert record["verified"]["difference"] == 0
    before, after = (read_json(place / "config.json") for place in (model, out))
    length = CONFIG_MAPPING[model_type].attribute_map.get(LENGTH, LENGTH)
    assert after == before | {length: 4 * before[length]}
    assert not record["warnings"]


def test_a_model_of_only_sliding_layers_is_named_as_that():
    config = tiny_config("gemma3_text", layer_types=["sliding_attention"] * 2)
    with pytest.raises(RopepatchError, match="all 2 layers"):
        ropepatch.plan(config, to="4x")


def renamed(folder, **keys):
    """A checkpoint with other keys in config.json, and code."""
    config = read_json(folder / "config.json") | keys
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    write_json(folder / "config.json", config)
    (folder / "modeling.py").write_text("raise SystemExit\n")
    return folder


def test_remote_code_that_equals_a_stock_class_is_compared(tmp_path):
    tiny_model("deepseek_v3").save_pretrained(tmp_path / "model")
    folder = renamed(tmp_path / "model", model_type="kimi_k2")
    out, record = written(folder, "yarn")
    assert record["verified"]["difference"] == 0
    config = read_json(out / "config.json")
    assert config["model_type"] == "kimi_k2"
    assert config["auto_map"] == {"AutoModelForCausalLM": "modeling.Model"}
    assert (out / "modeling.py").read_text() == "raise SystemExit\n"
    card = card_text(read_folder(out, "me/name"))
    assert (
        'AutoModelForCausalLM.from_pretrained("me/name", trust_remote_code=True)'
        in card
    )
    loaded = Checkpoint(folder).load()
    assert type(loaded) is transformers.DeepseekV3ForCausalLM


@pytest.mark.parametrize(
    ("name", "known_as"),
    [
        ("LlamaForCausalLMEagle3", "LlamaForCausalLMEagle3"),
        ("DFlashDraftModel", "DFlashDraftModel"),
        ("LlamaForCausalLM", "this"),
    ],
)
def test_a_draft_is_never_taken_for_the_model_it_borrows(name, known_as, tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    folder = renamed(tmp_path / "model", architectures=[name], draft_vocab_size=20)
    out, record = written(folder, "yarn")
    assert record["verified"]["logits"] == f"not compared: {known_as} is a draft model"
    assert "original length with `original`" in record["warnings"][1]
    config = read_json(out / "config.json")
    assert (config["architectures"], config["draft_vocab_size"]) == ([name], 20)
    target = ropepatch.plan(model, to="4x").change.keys
    assert config["rope_parameters"] == target["rope_parameters"]
    assert "auto_map" in config
    assert (out / "modeling.py").exists()
    assert "from_pretrained" not in card_text(read_folder(out, "me/name"))
    with pytest.raises(RopepatchError, match="is a draft model"):
        Checkpoint(folder).load()


WRAPPERS = [
    ("InternVLChatModel", "llm_config"),
    ("Eagle3Speculator", "transformer_layer_config"),
]


@pytest.mark.parametrize(("name", "section"), WRAPPERS)
def test_a_wrapper_of_a_stock_language_model_changes_its_part(name, section, tmp_path):
    part = json.loads(tiny_config("qwen2").to_json_string(use_diff=False))
    config = {
        "model_type": "internvl_chat",
        "architectures": [name],
        "auto_map": {"AutoModel": "modeling.Model"},
        section: part,
        "vision_config": {"hidden_size": 8},
    }
    write_json(tmp_path / "config.json", config)
    plan = ropepatch.plan(tmp_path, to="4x")
    stock = ropepatch.plan(tiny_config("qwen2"), to="4x")
    longer = {section: part | stock.change.keys}
    assert plan.config.changed(plan.change.keys).raw == config | longer
    part["rope_parameters"]["rope_type"] = "su"
    write_json(tmp_path / "config.json", config)
    with pytest.raises(RopepatchError, match="no rope_type 'su'"):
        ropepatch.plan(tmp_path, to="4x")


def test_a_plan_shows_no_warnings_of_transformers():
    needs("laguna")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ropepatch.plan(tiny_config("laguna"), to="4x")
    assert not caught
