"""A summary quotes what the results say, at the trained context and at the target."""

import json
from dataclasses import replace

import pytest
from made_results import asking, fine_tuned, model_record, reading, scoring

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import comparisons, summary

RESULTS = [
    reading("floor", [0.4, 0.39, 0.38]),
    reading("baseline", [0.6, 2.0, 12.0]),
    fine_tuned(reading("yarn + mine", [0.61, 0.5, 0.45], method="yarn")),
    asking("baseline", [4, 0, 0]),
    fine_tuned(asking("yarn + mine", [4, 4, 3], method="yarn")),
    scoring("baseline", {("long_task", "acc"): 0.1}),
]


def test_results_are_quoted_with_what_was_asked_at_the_trained_context_and_at_the_target():
    made = summary(RESULTS)
    assert (made["model"], made["trained"], made["target"]) == ("tiny", 256, 1024)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    read, asked, scores = (task["results"] for task in made["tasks"])
    assert list(read) == ["baseline", "yarn + mine", "floor"]
    assert read["yarn + mine"] == [
        RESULTS[2].row("loss", length=length).tidy() for length in (256, 1024)
    ]
    assert [(row["measure"], row["length"]) for row in asked["yarn + mine"]] == [
        (measure, length) for measure in ("found", "log_prob") for length in (256, 1024)
    ]
    assert scores == {"baseline": [RESULTS[5].rows[0].tidy()]}
    assert (
        made["tasks"][0].items()
        >= {"stride": None, "text": "books", "digest": "f00d"}.items()
    )
    assert (made["tasks"][1]["haystacks"], made["tasks"][2]["limit"]) == (4, 20)


def test_results_with_the_same_settings_are_compared_for_any_spelling_of_model_and_text():
    first, second = RESULTS[1:3]
    other = {
        "model": second.model | {"name": "./tiny"},
        "parameters": second.parameters | {"text": "./books"},
    }
    (group,) = comparisons([first, replace(second, **other)])
    assert (group.model, list(group.results)) == ("tiny", [first.label, second.label])
    assert (
        len(summary([RESULTS[1], replace(RESULTS[3], model=other["model"])])["tasks"])
        == 2
    )


@pytest.mark.parametrize(
    ("lengths", "quoted"),
    [((128, 512, 1000), [128, 1000]), ((128, 255), [255]), ((300, 1024), [1024])],
)
def test_a_missing_length_is_replaced_by_the_next_below(lengths, quoted):
    result = replace(
        reading("yarn", [0.5] * len(lengths), lengths=lengths), target=1024
    )
    (task,) = summary([result])["tasks"]
    assert [row["length"] for row in task["results"]["yarn"]] == quoted


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
