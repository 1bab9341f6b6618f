"""The page says of the distilled SmolLM2 what its results hold; the study reads no long row to train."""

import json
from pathlib import Path

import pytest
import smollm2_distil
import smollm2_distil_tables as tables
from readme import check_block

ROOT = Path(__file__).resolve().parents[2]
ROWS = json.loads((ROOT / "eval" / "results" / "smollm2-distil.json").read_text())["rows"]
PAGE = ROOT / "eval" / "studies" / "distil" / "distil.md"


@pytest.mark.parametrize(
    ("block", "made"),
    [
        ("training", tables.training_line),
        ("smollm2", tables.smollm2_table),
        ("answers", tables.answer_lines),
    ],
)
def test_the_page_has_what_was_measured(block, made):
    check_block(block, made(ROWS), PAGE)


def test_a_count_is_summed_over_depths_and_a_loss_is_weighed_by_tokens():
    row = {"cells": [[0.1, 1, 2], [0.9, 2, 2]]}
    assert tables.keys(row).startswith("3/4 (30% to 95%)")
    assert tables.mean([[1.0, 1], [2.0, 3]]) == 0.75
    assert tables.chat({"nats": [[3.0, 4], [1.0, 4]], "same": 6}) == "0.500, 75%"


def test_nothing_longer_than_a_row_is_read_to_train():
    recipe = smollm2_distil.recipe("model")
    windows, _ = recipe.data.lengths(smollm2_distil.TRAINED)
    assert windows == [smollm2_distil.ROW]
    assert recipe.positions.name == "pose"
    assert not recipe.watch.target
