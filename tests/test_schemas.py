"""The JSON Schemas by which editors complete recipes and suites; ROPEPATCH_UPDATE=1 writes them anew."""

import json
from pathlib import Path

import pytest
from pretraining_recipe import Recipe as PretrainingRecipe
from readme import updating

from ropepatch.cli import catalogue
from ropepatch.evaluation.suites import Suite
from ropepatch.files import json_text
from ropepatch.training.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
SCHEMAS = {
    "eval/suites/suite.schema.json": Suite,
    "recipes/recipe.schema.json": Recipe,
    "recipes/tiny/pretraining.schema.json": PretrainingRecipe,
}


@pytest.mark.parametrize("file", SCHEMAS)
def test_a_schema_is_that_of_its_model(file):
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | SCHEMAS[file].model_json_schema()
    text = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
    if updating():
        (ROOT / file).write_text(text, encoding="utf-8")
    assert (ROOT / file).read_text(encoding="utf-8") == text


@pytest.mark.parametrize("file", SCHEMAS)
def test_every_yaml_file_beside_a_schema_names_it_first(file):
    schema = ROOT / file
    for path in schema.parent.glob("*.yaml"):
        line = path.read_text(encoding="utf-8").splitlines()[0]
        assert line == f"# yaml-language-server: $schema={schema.name}"


def described(schema: dict):
    """Keys and their descriptions; without constants, which say which of several mappings it is."""
    for name, part in {"": schema, **schema.get("$defs", {})}.items():
        for key, value in part.get("properties", {}).items():
            if "const" not in value and name not in ("NamedMethod", "TrainerArguments"):
                yield f"{name}.{key}", value.get("description")


@pytest.mark.parametrize("file", SCHEMAS)
def test_every_key_has_a_description(file):
    texts = dict(described(SCHEMAS[file].model_json_schema()))
    assert len(texts) > 10
    assert all(texts.values()), texts


def test_what_commands_list_without_torch_is_what_the_registries_hold():
    text = json_text(catalogue.compiled()) + "\n"
    if updating():
        catalogue.FILE.write_text(text, encoding="utf-8")
    assert catalogue.FILE.read_text(encoding="utf-8") == text
