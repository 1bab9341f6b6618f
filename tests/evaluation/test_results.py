import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_results import fine_tuned, reading

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import comparisons
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.perplexity import LossCurve
from ropepatch.evaluation.results import (
    SCHEMA,
    Result,
    Row,
    measure_of,
    read_result,
    results_json,
    row_of,
)
from ropepatch.evaluation.tasks import by_position

ROW = Row(
    measure="loss",
    at={"length": 256},
    value=0.1 + 0.2,
    low=1e-300,
    high=None,
    n=3,
    clusters=[[0.9, 3]],
)


def make_result(**changes: object) -> Result:
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


def write_content(file: Path, **changes: object) -> Path:
    """The file of a result with some keys changed; `...` stands for one that is left out."""
    content = json.loads(make_result().to_json()) | changes
    file.write_text(
        json.dumps({key: value for key, value in content.items() if value is not ...})
    )
    return file


# files


NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers()
JSON = st.recursive(
    NUMBERS
    | st.none()
    | st.booleans()
    | st.text(max_size=3)
    | st.sampled_from(["[\n1\n]", "[ 1 ]"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(JSON)
def test_lists_of_numbers_stand_on_one_line_and_nothing_else_changes(content):
    text = results_json(content)
    assert json.loads(text) == content
    assert results_json({"a": [1, -2.5e-07], "b": [[3.0, 4]], "c": []}) == (
        '{\n  "a": [1, -2.5e-07],\n  "b": [\n    [3.0, 4]\n  ],\n  "c": []\n}'
    )


@pytest.mark.parametrize("number", [math.nan, -math.inf])
def test_infinities_and_nan_are_never_written(tmp_path, number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        make_result(rows=[replace(ROW, value=number)]).write(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": SCHEMA + 1, "something": "new"}, "format"),
        ({"schema": None}, "format"),
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


CURVE = LossCurve(
    tuple(
        torch.tensor(nll)
        for nll in ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [0.5], [3.0, 3.0, 3.0, 3.0])
    )
)


def test_a_row_is_its_mean_with_its_interval_and_its_clusters():
    mean = CURVE.at(4)
    row = row_of("loss", {"length": 4}, mean)
    assert (row.value, (row.low, row.high), row.n) == (mean.value, mean.interval(), 9)
    assert row.clusters == [(6.0, 3), (15.0, 3), (9.0, 3)]
    assert row.mean == mean
    assert (row.text, row.interval) == ("3.333", f"{row.low:.3f} to {row.high:.3f}")
    found = row_of("found", {"length": 4}, Mean(((1, 4), (3, 4), (4, 4)), share=True))
    assert found.mean.share
    assert found.text == "67%"


@pytest.mark.parametrize("mean", [Mean(((1.0, 2.0),)), Mean(())])
def test_an_unknown_value_is_null_and_a_dash(mean):
    row = row_of("loss", {}, mean)
    assert (row.low, row.high, row.interval) == (None, None, "")
    assert row.text == ("0.500" if mean.weight == 2 else "–")


def test_rows_by_position_are_those_of_the_curve():
    read = by_position("gain", CURVE, [0, 2, 4, 5])
    assert [row.at for row in read] == [
        {"begin": b, "end": e} for b, e in ((0, 2), (2, 4), (4, 5))
    ]
    assert [row.value for row in read] == [8.5 / 4, 22 / 6, 5.0]
    assert {row.measure for row in read} == {"gain"}


def test_a_metric_of_lm_eval_is_a_measure_of_its_own_name():
    acc, other = measure_of("acc"), measure_of("word_perplexity")
    assert (acc.title, acc.hub, acc.text(0.25), other.hub) == (
        "acc",
        "accuracy",
        "0.25",
        "word_perplexity",
    )


# Comparisons


def test_results_with_the_same_settings_are_compared_for_any_spelling_of_model_and_text():
    first = reading("baseline", [0.6, 2.0, 12.0])
    second = fine_tuned(reading("yarn + mine", [0.61, 0.5, 0.45], method="yarn"))
    other = {
        "model": second.model | {"name": "./tiny"},
        "parameters": second.parameters | {"text": "./books"},
    }
    (group,) = comparisons([first, replace(second, **other)])
    assert (group.model, list(group.results)) == ("tiny", [first.label, second.label])
