import json
import math
from dataclasses import asdict, replace

import pytest
from made_results import fine_tuned, reading

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.results import (
    Result,
    Row,
    comparisons,
    read_result,
    results_json,
    row_of,
)

ROW = Row(
    measure="loss",
    at={"length": 256},
    value=0.1 + 0.2,
    low=1e-300,
    high=None,
    n=3,
    clusters=[[0.9, 3]],
)


def make_result(**changes):
    result = Result(
        task="perplexity",
        label="yarn é",
        model={"name": "tiny", "revision": None, "weights": "0f", "trained": 256},
        scaling={
            "method": "yarn",
            "factor": 4.0,
            "parameters": {},
            "attention_factor": 1.0,
        },
        target=1024,
        parameters={"lengths": [256, 1024], "seed": 0},
        rows=[
            ROW,
            Row(measure="acc", at={"task": "t", "version": "1"}, value=None, n=0),
        ],
        env={"torch": "2.13"},
        seconds=1.5,
    )
    return replace(result, **changes)


def write_content(file, **changes):
    """The file of a result with some keys changed; `...` stands for one that is left out."""
    content = json.loads(make_result().to_json()) | changes
    file.write_text(
        json.dumps({key: value for key, value in content.items() if value is not ...})
    )
    return file


# files


def test_lists_of_numbers_stand_on_one_line():
    content = {"a": [1, -2.5e-07], "b": [[3.0, 4]], "c": [], "d": ["[\n1\n]", "[ 1 ]"]}
    text = results_json(content)
    assert json.loads(text) == content
    assert text.startswith(
        '{\n  "a": [1, -2.5e-07],\n  "b": [\n    [3.0, 4]\n  ],\n  "c": [],\n'
    )


@pytest.mark.parametrize("number", [math.nan, -math.inf])
def test_infinities_and_nan_are_never_written(tmp_path, number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        make_result(rows=[replace(ROW, value=number)]).write(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 3}, "schema must be 2, got 3"),
        ({"row": []}, r"unknown result key 'row'.*\nhint: did you mean rows\?"),
        ({"parameters": ...}, "result needs parameters"),
        ({"target": "1024"}, "target must be a valid integer, got"),
        ({"rows": [asdict(ROW), None]}, r"rows\[1\] must be"),
        ({"rows": [{"at": {}}]}, r"rows\[0\]"),
        (
            {"rows": [asdict(ROW) | {"at": {"length": 0.5}}]},
            r"rows\[0\].at.length must be",
        ),
        (
            {"rows": [asdict(ROW) | {"clusters": [[1, 0]]}]},
            r"rows\[0\].clusters\[0\]\[1\] must be greater than 0",
        ),
        ({"model": {"name": "x"}}, "result needs model.trained"),
    ],
)
def test_invalid_keys_of_a_result_are_named(tmp_path, changes, message):
    with pytest.raises(RopepatchError, match=rf"(?s)a\.json: .*{message}"):
        read_result(write_content(tmp_path / "a.json", **changes))


def test_seconds_and_schema_may_be_missing(tmp_path):
    assert (
        read_result(write_content(tmp_path / "a.json", seconds=..., schema=...))
        == make_result()
    )


# rows


def test_a_row_has_its_mean_interval_and_clusters():
    mean = Mean(((6.0, 3), (15.0, 3), (9.0, 3)))
    row = row_of("loss", {"length": 4}, mean)
    assert (row.value, (row.low, row.high), row.n) == (mean.value, mean.interval(), 9)
    assert row.clusters == [(6.0, 3), (15.0, 3), (9.0, 3)]
    assert (row.text, row.interval) == ("3.333", f"{row.low:.3f} to {row.high:.3f}")
    found = row_of("found", {"length": 4}, Mean(((1, 4), (3, 4), (4, 4)), share=True))
    assert (found.mean.share, found.text) == (True, "67%")


# Comparisons


def test_results_are_compared_for_any_spelling_of_the_model():
    first = reading("baseline", [0.6, 2.0, 12.0])
    second = fine_tuned(reading("yarn + mine", [0.61, 0.5, 0.45], method="yarn"))
    other = {
        "model": second.model | {"name": "./tiny"},
        "parameters": second.parameters | {"text": "./books"},
    }
    (group,) = comparisons([first, replace(second, **other)])
    assert (group.model, list(group.results)) == ("tiny", [first.label, second.label])
