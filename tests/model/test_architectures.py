"""The tables of exceptions by architecture, compared with transformers' model types."""

from oldest import OLDEST
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ropepatch.model import architectures


def test_every_named_model_type_is_one_of_transformers():
    tables = [
        table
        for name, table in vars(architectures).items()
        if isinstance(table, frozenset) and not name.startswith("GGUF")
    ]
    assert len(tables) >= 9
    assert OLDEST or frozenset().union(*tables) <= {*CONFIG_MAPPING}
