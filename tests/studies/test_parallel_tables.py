"""The study of several processes: its table, and what its recipes read."""

import parallel_study
import parallel_tables
import pytest

from ropepatch.training.recipe import Recipe


def row(way, processes, losses):
    return {"way": way, "processes": processes, "step": 1.5, "tokens": 5461, "memory": 1024, "losses": losses}


def test_a_difference_of_losses_is_the_greatest_of_any_step():
    rows = [
        row("one process", 1, [2.0, 1.5]),
        row("ddp", 2, [2.25, 1.5]),
    ]
    _, _, alone, ddp = parallel_tables.ways_table(rows).splitlines()
    assert alone == "| one process | 1 | 1,024 | – |"
    assert ddp == "| ddp | 2 | 1,024 | 2.5e-01 |"


@pytest.mark.parametrize("way", parallel_study.WAYS)
@pytest.mark.parametrize("processes", parallel_study.PROCESSES)
def test_every_way_reads_as_many_rows_a_step(way, processes):
    content = parallel_study.recipe_of(way, processes)
    sharing = content.pop("parallel", {}).get("sequence", processes if way in parallel_study.SPLIT else 1)
    recipe = Recipe.model_validate(content)
    at_once = processes // sharing
    assert recipe.trainer["gradient_accumulation_steps"] * at_once == parallel_study.ROWS
