"""The JSON Schemas that editors use for recipes and suites; docs/tables.py writes them."""

from pathlib import Path

import pytest

from ropepatch.files import read_json

ROOT = Path(__file__).resolve().parents[1]
SCHEMAS = (
    "eval/suites/suite.schema.json",
    "recipes/recipe.schema.json",
    "recipes/tiny/pretraining.schema.json",
)


@pytest.mark.parametrize("file", SCHEMAS)
def test_every_yaml_file_names_its_schema_in_the_first_line(file):
    schema = ROOT / file
    files = [*schema.parent.glob("*.yaml")]
    assert files
    for path in files:
        line = path.read_text(encoding="utf-8").splitlines()[0]
        assert line == f"# yaml-language-server: $schema={schema.name}"


def described(schema):
    """Keys and their descriptions, without the constants that distinguish kinds of mappings."""
    for name, part in {"": schema, **schema.get("$defs", {})}.items():
        for key, value in part.get("properties", {}).items():
            if "const" not in value and name not in ("NamedMethod", "TrainerArguments"):
                yield f"{name}.{key}", value.get("description")


@pytest.mark.parametrize("file", SCHEMAS)
def test_every_key_has_a_description(file):
    texts = dict(described(read_json(ROOT / file)))
    assert len(texts) > 10
    assert all(texts.values()), texts


def test_the_recipe_schema_rejects_unknown_trainer_arguments():
    part = read_json(ROOT / "recipes/recipe.schema.json")["$defs"]["TrainerArguments"]
    assert (part["additionalProperties"], "max_steps" in part["properties"]) == (
        False,
        True,
    )
