"""A summary quotes what the results say, at the trained context and at the target."""

import json
from dataclasses import replace

import pytest
from made_results import adapted, asking, model_record, reading, scoring

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.summaries import summary

RESULTS = [
    reading("floor", [0.4, 0.39, 0.38]),
    reading("as it is", [0.6, 2.0, 12.0]),
    reading("yarn", [0.65, 0.6, 0.55], method="yarn"),
    adapted(reading("yarn + mine", [0.61, 0.5, 0.45], method="yarn")),
    asking("as it is", [4, 0, 0]),
    adapted(asking("yarn + mine", [4, 4, 3], method="yarn")),
    scoring("as it is", {("long_task", "acc"): 0.1}),
]


def test_results_are_quoted_at_the_trained_context_and_at_the_target_with_their_intervals():
    reading_task, asking_task, scores = (task["results"] for task in summary(RESULTS)["tasks"])
    assert list(reading_task) == ["floor", "as it is", "yarn", "yarn + mine"]
    assert reading_task["yarn + mine"] == {
        "256": {"nats": 0.61, "interval": pytest.approx([0.51, 0.71])},
        "1024": {"nats": 0.45, "interval": pytest.approx([0.35, 0.55])},
    }
    assert reading_task["floor"]["1024"]["nats"] == 0.38
    assert asking_task["as it is"]["256"]["correct"] == 12
    interval = RESULTS[5].tables["by_length"][-1]["interval"]
    assert asking_task["yarn + mine"]["1024"] == {"correct": 9, "n": 12, "interval": interval}
    row = {"task": "long_task", "metric": "acc", "value": 0.1, "stderr": 0.02, "n": 20}
    assert scores == {"as it is": [row]}


def test_the_model_and_what_was_asked_stand_with_the_figures():
    made = summary(RESULTS)
    assert (made["model"], made["trained"], made["target"]) == ("tiny", 256, 1024)
    settings = {"protocol": "one-pass", "bos": "none", "text": "books"}
    settings |= {"digest": "f00d", "pieces": 10, "read": 1024}
    assert made["tasks"][0] == {"task": "perplexity", "results": made["tasks"][0]["results"]} | settings
    assert made["tasks"][1]["trials"] == 4
    assert made["tasks"][2]["limit"] == 20


@pytest.mark.parametrize(
    ("lengths", "quoted"),
    [
        ((128, 512, 1000), ["128", "1000"]),
        ((128, 255), ["255"]),
        ((300, 1024), ["1024"]),
        ((256,), ["256"]),
    ],
)
def test_a_length_that_was_not_measured_gives_way_to_the_next_below_it(lengths, quoted):
    result = replace(reading("yarn", [0.5] * len(lengths), lengths=lengths), target=1024)
    (task,) = summary([result])["tasks"]
    assert list(task["results"]["yarn"]) == quoted


def test_a_summary_is_what_its_file_says():
    made = summary([reading("yarn", [0.6] * 3, width=None), asking("yarn", [4, 4, 4])])
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert made["tasks"][0]["results"]["yarn"]["1024"]["interval"] == [None, None]


@pytest.mark.parametrize(
    "results",
    [
        [],
        [*RESULTS, reading("yarn", [1.0] * 3, model=model_record("other"))],
        [*RESULTS, reading("yarn", [1.0] * 2, lengths=(256, 512))],
    ],
)
def test_a_summary_is_of_one_model_and_one_target(results):
    with pytest.raises(RopepatchError, match="one model and one target"):
        summary(results)
