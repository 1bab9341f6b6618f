"""What a machine may lack that some tests need."""

import os

import pytest


def lacking(message):
    """Skip the test, or fail in CI."""
    if os.environ.get("ROPEPATCH_REQUIRE_SHARED"):
        pytest.fail(message)
    pytest.skip(message)
