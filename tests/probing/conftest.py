"""Fixtures of the probe tests."""

import pytest
import torch
from checkpoint_folders import write_checkpoint
from transformers import AutoModelForCausalLM

import ropepatch


@pytest.fixture(scope="session")
def extended(tmp_path_factory):
    """An extended checkpoint with its fingerprint."""
    return ropepatch.extend(
        "tiny", tmp_path_factory.mktemp("extended") / "out", to="4x"
    ).folder


@pytest.fixture
def without_queries(tmp_path):
    """A checkpoint that ignores its RoPE."""
    source = write_checkpoint(tmp_path / "without_queries")
    model = AutoModelForCausalLM.from_pretrained(source)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    model.save_pretrained(source)
    return source
