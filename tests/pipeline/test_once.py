"""Each call opens the files and models of a checkpoint once and passes them on."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ropepatch
from ropepatch.evaluation.tasks import PerplexityTask, RetrievalTask
from ropepatch.extension import record
from ropepatch.model import checkpoint
from ropepatch.model.source import TINY

OPENERS = {  # functions in model/checkpoint.py and what they open
    "locate": "found",
    "blueprint": "skeleton",
    "read_rope": "rope",
    "read_json": "config.json",
    "read_headers": "headers",
    "load_tokenizer": "tokenizer",
    "load_model": "model",
}
PLACED = {"config.json", "headers", "tokenizer", "model"}  # their first argument is the folder


@pytest.fixture
def opened(monkeypatch) -> Counter[str]:
    """How often each thing was opened; "written" marks another folder than the source."""
    counts: Counter[str] = Counter()

    def counted(opens: Callable[..., Any], what: str) -> Callable[..., Any]:
        def opening(*arguments: Any, **options: Any) -> Any:
            elsewhere = what in PLACED and TINY not in (Path(arguments[0]), *Path(arguments[0]).parents)
            counts[f"written {what}" if elsewhere else what] += 1
            return opens(*arguments, **options)

        return opening

    for name, what in OPENERS.items():
        monkeypatch.setattr(checkpoint, name, counted(getattr(checkpoint, name), what))
    monkeypatch.setattr(record, "read_json", counted(record.read_json, "record"))
    for kind in (PerplexityTask, RetrievalTask):
        monkeypatch.setattr(kind, "prepare", counted(kind.prepare, kind.__name__))
    return counts


SOURCE = dict.fromkeys(("found", "skeleton", "rope", "config.json"), 1)
READ = SOURCE | {"headers": 1, "model": 1}
TOKENIZED = {"tokenizer": 1}
WRITTEN = {"written config.json": 1, "written headers": 1, "record": 1}
JUDGED = WRITTEN | {"written model": 1}
TASKS = {"PerplexityTask": 1, "RetrievalTask": 1}
QUIET = {"say": lambda line: None, "to": "2x"}
CALLS = {  # each call and what it opens
    "plan": (lambda out: ropepatch.plan("tiny", to="2x"), SOURCE),
    "extend": (lambda out: ropepatch.extend("tiny", out, **QUIET), READ | JUDGED | {"written tokenizer": 1}),
    # A remapping is verified by its written code, and its layers are found in the loaded model.
    "extend by a remapping": (
        lambda out: ropepatch.extend("tiny", out, method="self-extend", **QUIET),
        READ | WRITTEN | {"rope": 2},
    ),
    # The source is loaded for the comparison and for the measurement; the record is opened before and after.
    "extend and measure": (
        lambda out: ropepatch.extend("tiny", out, evaluate="demo", limit=1, reading=False, **QUIET),
        READ | JUDGED | TOKENIZED | TASKS | {"model": 2, "record": 3},
    ),
    # The source is loaded for training and again for merging; the check and the end are recorded.
    "extend by a recipe": (
        lambda out: ropepatch.extend("tiny", out, recipe=two_steps(), say=lambda line: None),
        READ | JUDGED | TOKENIZED | {"written tokenizer": 1, "model": 2, "record": 4},
    ),
    "evaluate four methods": (
        lambda out: [*ropepatch.evaluate("tiny", methods="linear,ntk,yarn,llama3", limit=1, **QUIET)],
        READ | TOKENIZED | {"PerplexityTask": 1},
    ),
    # The first preparation checks whether the needles fit.
    "compare": (
        lambda out: ropepatch.compare("tiny", methods="linear,yarn", windows=1, haystacks=1, **QUIET),
        READ | TOKENIZED | TASKS | {"RetrievalTask": 2},
    ),
}


def two_steps():
    recipe = ropepatch.read_recipe("tiny")
    return recipe.model_copy(update={"trainer": recipe.trainer | {"max_steps": 2}})


@pytest.mark.parametrize("name", CALLS)
def test_each_call_opens_files_and_models_the_expected_number_of_times(name, opened, tmp_path):
    call, expected = CALLS[name]
    call(tmp_path / "out")
    assert opened == expected
