"""Fixtures that several files need."""

import os
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import ropepatch


@pytest.fixture(scope="session")
def tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The bundled checkpoint, which can read; whoever changes the model changes it back."""
    return ropepatch.load("tiny")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real checkpoints and texts; without it the test is skipped, visibly, or fails in CI."""
    default = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("ROPEPATCH_SHARED", default))
    if not folder.is_dir():
        missing = f"no real checkpoints and texts at {folder} (set ROPEPATCH_SHARED)"
        if os.environ.get("ROPEPATCH_REQUIRE_SHARED"):
            pytest.fail(missing)
        pytest.skip(missing)
    return folder
