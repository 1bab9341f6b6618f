"""A plan as text."""

import json
import shutil

import pytest
from transformers import Gemma3TextConfig, LlamaConfig

import ropepatch
from ropepatch import RopepatchError
from ropepatch.model.checkpoint import TINY

LAYERED = Gemma3TextConfig(max_position_embeddings=512, head_dim=16)
SCALED = LlamaConfig(
    max_position_embeddings=1024,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.13,
    },
)


def test_a_plan_names_the_earlier_scaling_and_the_scaled_layers():
    scaled, layered = (
        str(ropepatch.plan(one, to=4096, method="linear")) for one in (SCALED, LAYERED)
    )
    assert "attention factor 1.1300 -> 1.1300" in scaled
    assert "scales RoPE in the full_attention layers only" in layered
    remapped = str(ropepatch.plan("tiny", to=1024, method="rerope"))
    assert "within the original context of 256 tokens, at any length" in remapped


def test_a_plan_shows_the_same_text_in_a_notebook(monkeypatch):
    plan = ropepatch.plan("tiny", to=1024)
    text = str(plan)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(plan) == text != ""
    assert repr(plan) == text


def test_untrusted_names_and_values_are_escaped_and_shortened(tmp_path):
    folder = tmp_path / "evil\x1b[2J\nfolder\u202e"
    shutil.copytree(TINY, folder)
    plan = ropepatch.plan(folder, to=1024)
    for text in (str(plan), str(ropepatch.diagnose(folder, measure=False))):
        assert all(line.isprintable() for line in text.splitlines())
        assert r"evil\x1b[2J\nfolder\u202e" in text
    (folder / "config.json").write_text(json.dumps({"model_type": "\x1b" * 500_000}))
    with pytest.raises(RopepatchError, match="unknown model_type") as error:
        ropepatch.plan(folder, to=1024)
    assert len(str(error.value)) < 5000
    assert str(error.value).isprintable()
