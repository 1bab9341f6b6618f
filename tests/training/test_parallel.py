"""Processes that share a run, really started: each way trains as one process does, also after a death."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import ways
from safetensors.torch import load_file

from ropepatch.errors import RopepatchError
from ropepatch.model.config import load_config
from ropepatch.model.source import TINY
from ropepatch.training.parallel import SPLIT, Sharing, part_of_row
from ropepatch.training.recipe import Recipe

pytest.importorskip("deepspeed")
CONFIG: Any = load_config(json.loads((TINY / "config.json").read_text()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[[str | None, bool], Path]:
    """The checkpoint that a way makes where nothing happens to it."""

    @cache
    def of(way: str | None, lora: bool) -> Path:
        place = tmp_path_factory.mktemp(f"{way}-{lora}")
        done = ways.start(way, place, lora=lora)
        assert done.returncode == 0, done.stderr
        return place / "out"

    return of


def losses(out: Path) -> list[float]:
    """Of every step, and within the old context."""
    rows = json.loads((out / "adaptation" / "history.json").read_text())
    return [row[key] for row in rows for key in ("loss", "short_loss", "target_loss") if key in row]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("way", "lora"),
    [*((way, True) for way in ways.FILES), ("fsdp2", False), ("zero2", False), ("alst", False)],
)
def test_two_processes_have_the_losses_and_the_weights_of_one(trained, way, lora):
    """Of packed documents at skipped positions; what is saved was compared by stock transformers."""
    one, two = trained(None, lora), trained(way, lora)
    assert len(losses(one)) == ways.STEPS + 2 * 3
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    base, before, after = (load_file(at / "model.safetensors") for at in (TINY, one, two))
    for name, weight in before.items():
        moved = (weight - base[name]).abs().max()
        rounding = (
            1e-2 if lora else 1e-3
        )  # AdamW divides small gradients, and what they are rounded by, by their size
        assert (weight - after[name]).abs().max() <= rounding * moved + 1e-7, name
    assert json.loads((two / "ropepatch.json").read_text())["verified"]["logits"]


@pytest.mark.sweep
@pytest.mark.parametrize("way", ways.FILES)
def test_a_death_of_one_or_of_all_ends_the_others_and_the_same_command_ends_as_if_there_had_been_none(
    trained, way, tmp_path
):
    for kill in ("1 step 1", "all checkpoint 2", *(("0 checkpoint 4", "all merge") if way == "ddp" else ())):
        died = ways.start(way, tmp_path, lora=True, kill=kill)  # a start that hangs raises
        assert died.returncode != 0, kill
        assert not (tmp_path / "out").exists(), kill
    done = ways.start(way, tmp_path, lora=True)
    assert done.returncode == 0, done.stderr
    expected = load_file(trained(way, True) / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert losses(tmp_path / "out") == losses(trained(way, True))


def recipe(**changes: Any) -> Recipe:
    """The small recipe, shared by two."""
    return Recipe.model_validate(ways.recipe_of("alst", lora=True) | changes)


def rows(window: int) -> dict[str, Any]:
    return {"sources": [{"generated": "tales"}], "windows": [window], "tokens_per_batch": 2 * window}


ALST = {"engine": "DEEPSPEED", "zero": 3, "sequence": 2, "processes": 2}


@pytest.mark.parametrize(
    ("sharing", "changes", "said"),
    [
        ({"engine": None, "zero": None}, {}, "nothing that splits them runs"),
        ({"zero": 2}, {}, "nothing that splits them runs"),
        ({"processes": 3}, {}, "3 processes are not a multiple"),
        ({"sequence": 4, "processes": 4}, {}, "6 attention heads are not"),
        ({}, {"data": rows(63)}, r"rows of \[63\] tokens are not"),
        ({}, {"attention": "flash_attention_2"}, "flash_attention_2 is not sdpa"),
        ({}, {"distil": {}}, "no teacher to distil from"),
    ],
)
def test_what_processes_cannot_share_is_refused_by_name_before_anything_is_read(
    monkeypatch, sharing, changes, said
):
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    with pytest.raises(RopepatchError, match=said):
        Sharing(**ALST | sharing).check(recipe(**changes), CONFIG, 256)
    Sharing(**ALST).check(recipe(), CONFIG, 256)
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    with pytest.raises(RopepatchError, match="context parallelism"):
        Sharing(processes=2).check(recipe(parallel=None), CONFIG, 256)


def test_what_the_launcher_and_the_recipe_say_is_read_once_and_handed_on(monkeypatch):
    launched = {"WORLD_SIZE": "8", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    for name, value in (launched | {"PARALLELISM_CONFIG_SP_SIZE": "8"}).items():
        monkeypatch.setenv(name, value)
    for name in ("PARALLELISM_CONFIG_DP_SHARD_SIZE", "ACCELERATE_GRADIENT_CLIPPING"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    sharing = Sharing.of(recipe())
    assert sharing == Sharing(processes=8, engine="DEEPSPEED", zero=3, sequence=2)
    assert sharing.rows_at_once == 4
    sharing.announce(recipe())
    assert Sharing.of(recipe(parallel=None)) == sharing  # the file now says the same
    assert Sharing.of(recipe(parallel={"sequence": 4})).rows_at_once == 2


def test_parts_of_a_row_on_end_are_the_row_and_labels_are_those_of_what_follows():
    ids = torch.arange(8)[None]
    batch = {
        "input_ids": ids,
        "labels": ids * 10,
        "position_ids": ids + 5,
        "cu_seq_lens_q": torch.tensor([0, 8]),
    }
    parts = [part_of_row(batch, rank, 2) for rank in (0, 1)]
    whole = {name: torch.cat([part[name] for part in parts], 1) for name in SPLIT}
    assert torch.equal(whole["input_ids"], ids)
    assert torch.equal(whole["position_ids"], ids + 5)
    assert whole["shift_labels"].tolist() == [[10, 20, 30, 40, 50, 60, 70, -100]]
    assert all(torch.equal(part["cu_seq_lens_q"], batch["cu_seq_lens_q"]) for part in parts)
    assert "labels" not in parts[0]
