"""The tables of the study of several processes say what its result file holds."""

import json
from pathlib import Path

import parallel_study
import parallel_tables
import pytest
from readme import check_block

from ropepatch.training.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "results" / "parallel.json"
KILLED = ROOT / "eval" / "results" / "killed_together.json"
PAGE = ROOT / "eval" / "studies" / "parallel" / "parallel.md"


def row(way, processes, losses):
    return {"way": way, "processes": processes, "step": 1.5, "tokens": 5461, "memory": 1024, "losses": losses}


def test_the_page_has_the_tables_of_the_results():
    rows = json.loads(RESULTS.read_text())["rows"]
    check_block("parallel", parallel_tables.ways_table(rows), PAGE)
    check_block("longest", parallel_tables.longest_table(rows), PAGE)
    check_block("killed", parallel_tables.killed_table(json.loads(KILLED.read_text())), PAGE)


def test_the_losses_of_every_way_that_ran_are_those_of_one_process():
    rows = [row for row in json.loads(RESULTS.read_text())["rows"] if "losses" in row]
    (alone,) = (row for row in rows if row["way"] == "one process")
    for one in rows:
        assert one["losses"] == pytest.approx(alone["losses"], abs=2e-3), one["way"]


def test_a_difference_of_losses_is_the_greatest_of_any_step():
    rows = [
        row("one process", 1, [2.0, 1.5]),
        row("ddp", 2, [2.25, 1.5]),
        {"way": "sp", "processes": 2, "failed": "x"},
    ]
    _, _, alone, ddp, failed = parallel_tables.ways_table(rows).splitlines()
    assert alone == "| one process | 1 | 1.50 | 5,461 | 1,024 | – |"
    assert ddp == "| ddp | 2 | 1.50 | 5,461 | 1,024 | 2.5e-01 |"
    assert failed.startswith("| sp | 2 | failed |")


def test_a_run_that_was_killed_five_times_ended_equal():
    result = json.loads(KILLED.read_text())
    assert (len(result["kills"]), result["steps"]) == (5, 60)
    assert result["equal to the bit"]
    assert all(kill["exit code"] for kill in result["kills"])


@pytest.mark.parametrize("way", parallel_study.WAYS)
@pytest.mark.parametrize("processes", parallel_study.PROCESSES)
def test_every_way_reads_as_many_rows_a_step(way, processes):
    content = parallel_study.recipe_of(way, processes)
    sharing = content.pop("parallel", {}).get("sequence", processes if way in parallel_study.SPLIT else 1)
    recipe = Recipe.model_validate(content)
    at_once = processes // sharing
    assert recipe.trainer["gradient_accumulation_steps"] * at_once == parallel_study.ROWS
