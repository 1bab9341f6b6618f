"""The tables of exceptions by architecture, compared with transformers' model types."""

from fnmatch import fnmatchcase

from oldest import OLDEST
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ropepatch.model import architectures
from ropepatch.model.architectures import LOCAL_BASE, ModelTypes


def test_every_pattern_matches_a_complete_model_type_of_transformers():
    named = [one for one in vars(architectures).values() if isinstance(one, ModelTypes)]
    assert len(named) >= 9
    named.remove(architectures.DRAFTS)  # of classes
    patterns = {pattern for model_types in named for pattern in model_types}
    assert OLDEST or all(
        any(fnmatchcase(one, pattern) for one in CONFIG_MAPPING) for pattern in patterns
    )
    assert [one in LOCAL_BASE for one in ("gemma3_text", "t5gemma3", None)] == [
        True,
        False,
        False,
    ]
