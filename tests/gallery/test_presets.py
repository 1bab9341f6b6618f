"""The geometries of current models: each has a source, and a plan."""

import json
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

import pytest
from oldest import needs

from ropepatch import plan
from ropepatch.extension.planning import Plan
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.rotary import stock_table
from ropepatch.settings import parse_length

FILE = resources.files("ropepatch.gallery") / "presets.json"
PRESETS = {preset["name"]: preset for preset in json.loads(FILE.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Callable[[str], Plan]:
    """The plan of a preset to its target, from nothing but its config.json."""

    @cache
    def of(name: str) -> Plan:
        needs(PRESETS[name]["config"]["model_type"])
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(PRESETS[name]["config"]), encoding="utf-8")
        return plan(folder, to=PRESETS[name]["to"], method="yarn")

    return of


@pytest.mark.parametrize("name", PRESETS)
def test_stock_transformers_reads_the_planned_frequencies(name, planned):
    after: Any = Checkpoint(None, stated_raw=planned(name).apply(PRESETS[name]["config"])).config
    assert after.max_position_embeddings == parse_length(PRESETS[name]["to"])
    table = stock_table(after, planned(name).site, beyond_switch=True)
    assert table.distance(planned(name).frequencies()) == 0
