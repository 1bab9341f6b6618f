"""Multimodal checkpoints: only their language model is extended."""

import copy

import pytest
import torch
from methods import applied
from oldest import needs
from tiny_models import tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForMultimodalLM

import ropepatch
from ropepatch import RopepatchError
from ropepatch.extension.planning import plan_method
from ropepatch.model.checkpoint import InMemory
from ropepatch.model.config import Config
from ropepatch.model.head import evaluating

PATCHES = (1, 4, 4)  # of the image: frames, rows, columns
IMAGE, VIDEO = 100, 101  # of the 128 tokens
OLDER = {
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "rope_theta": 10000.0,
}


@torch.no_grad()
def three_tokens(model):
    """The tokens generated for a prompt with an image, and their logits."""
    draw, merged = torch.Generator().manual_seed(0), 4
    ids = torch.tensor([[5, 6, *[IMAGE] * merged, 7, 8, 9]])
    vision = model.config.vision_config
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    out = model.generate(
        input_ids=ids,
        mm_token_type_ids=(ids == IMAGE).int(),
        image_grid_thw=torch.tensor([PATCHES]),
        pixel_values=torch.randn(merged * 4, values, generator=draw),
        max_new_tokens=3,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize(
    "model_type", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.sweep)]
)
def test_a_patched_model_processes_images_like_its_checkpoint(tmp_path, model_type):
    sizes = {
        "out_hidden_size": 64,
        "depth": 2,
        "num_heads": 4,
        "deepstack_visual_indexes": [0],
    }
    config = tiny_config(
        model_type, image_token_id=IMAGE, video_token_id=VIDEO
    ).to_dict()
    config["vision_config"] |= sizes | {"fullatt_block_indexes": [1]}
    drawn = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(**config))
    drawn.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "preprocessor_config.json").write_text('{"patch_size": 16}')
    # on some processors sums depend on where weights lie in memory: both models are loaded from files
    model = AutoModelForMultimodalLM.from_pretrained(tmp_path / "source").eval()
    before = three_tokens(model)
    out = ropepatch.extend(
        tmp_path / "source", tmp_path / "out", to="4x", reading=False
    )
    assert (out.folder / "preprocessor_config.json").read_text() == '{"patch_size": 16}'
    assert "image rows, columns and frames" in str(out.plan)
    reloaded = three_tokens(AutoModelForMultimodalLM.from_pretrained(out).eval())
    with ropepatch.patch(model, out.plan):
        patched = three_tokens(model)
    assert all(map(torch.equal, patched, reloaded))
    assert not torch.equal(patched[1], before[1])
    assert all(map(torch.equal, three_tokens(model), before))


@pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated")
@pytest.mark.parametrize(("method", "kind"), [("yarn", "yarn"), ("ntk", "default")])
@pytest.mark.parametrize(
    "places", [("text_config",), ("top",), ("top", "text_config")], ids=str
)
def test_only_the_older_keys_of_mrope_change_at_any_level(places, method, kind):
    raw = tiny_config("qwen2_5_vl").to_dict()
    text = raw.pop("text_config") | OLDER
    del text["rope_parameters"]
    top = {key: value for key, value in text.items() if key not in raw}
    if "top" in places:
        raw |= top
    if "text_config" in places:
        raw["text_config"] = text
    made = plan_method(InMemory("it", None, Config(raw)), method, {}, "4x")
    after = applied(made, raw)
    before, now = raw.get("text_config", raw), after.get("text_config", after)
    sections = {"type": kind, "mrope_section": [2, 3, 3]}
    assert now["rope_scaling"].items() >= sections.items()
    changed = {key for key in now if now[key] != before.get(key)}
    assert changed <= made.changes.keys()
    if "text_config" in places:
        assert all(after[key] == raw[key] for key in top.keys() & raw.keys())
    read = AutoConfig.for_model(**copy.deepcopy(after)).get_text_config()
    assert read.max_position_embeddings == 256
    assert read.rope_parameters.items() >= made.rope_parameters.items()
    assert now["rope_theta"] == made.rope_parameters["rope_theta"]


OUTSIDE = {
    "gemma3": {"text_config": None},
    "llava": {"rope_theta": 5e5},
    "qwen3_asr": {"thinker_config": {"text_config": {"rope_theta": 5e5}}},
}


@pytest.mark.parametrize("model_type", OUTSIDE)
def test_a_language_model_outside_its_known_section_is_rejected(model_type):
    needs(model_type)
    with pytest.raises(RopepatchError, match=r"where config\.json has none"):
        _ = Config({"model_type": model_type} | OUTSIDE[model_type]).rope


def test_text_positions_are_reset_after_an_image():
    model = tiny_model("qwen3_vl")
    model.model.rope_deltas = torch.tensor([[-7]])
    with evaluating(model):
        assert model.model.rope_deltas is None
