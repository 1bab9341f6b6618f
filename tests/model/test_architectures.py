"""The exceptions by architecture: every row is about models that transformers has."""

from fnmatch import fnmatchcase

import pytest
from oldest import OLDEST
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ropepatch.model import architectures
from ropepatch.model.architectures import Exceptional

ROWS = {name: row for name, row in vars(architectures).items() if isinstance(row, Exceptional)}


@pytest.mark.parametrize("name", ROWS)
def test_every_name_is_one_of_transformers_and_every_row_has_a_reason(name):
    row, known = ROWS[name], CONFIG_MAPPING.keys()
    assert OLDEST or all(any(fnmatchcase(one, pattern) for one in known) for pattern in row.model_types)
    assert row.reason
    assert row.version


def test_a_name_is_matched_whole_and_a_star_stands_for_any_letters():
    row = Exceptional(frozenset({"gemma3*", "phi3"}), "reason", "version")
    assert "gemma3_text" in row
    assert "phi3" in row
    assert "phi3_v" not in row
    assert "t5gemma3" not in row
    assert None not in row
