"""`ropepatch extend --distil`: a model distilled from itself, on a text or on what it writes."""

import json
import shutil

import pytest
from run_recipes import history_of, record_of

import ropepatch
from ropepatch.extension import record as records
from ropepatch.model.source import TINY
from ropepatch.pipeline import request
from ropepatch.publishing.card.parts import teaching
from ropepatch.publishing.card.writing import write_card
from ropepatch.training.recipe import read_recipe

TWO_STEPS = {"max_steps": 2, "bf16": False}


@pytest.fixture
def short(monkeypatch):
    """The recipe, with two steps, which mend little of what YaRN loses."""
    recipe = read_recipe("distil")
    watch = recipe.watch.model_copy(update={"max_short_loss_increase": 0.99})
    two = recipe.model_copy(update={"trainer": recipe.trainer | TWO_STEPS, "watch": watch})
    monkeypatch.setattr(request, "read_recipe", lambda name: two)


@pytest.mark.slow
def test_in_one_line_and_without_a_text_a_stock_checkpoint_comes_out(short, tmp_path, run_here, monkeypatch):
    monkeypatch.setenv("ROPEPATCH_CACHE", str(tmp_path / "cache"))
    done = run_here("extend", "tiny", "--to", "512", "--distil", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "self-generated text: 0 of 5,120 tokens" in done.stderr
    assert "step 2/2, measured: short-context loss" in done.stderr
    assert "warning" not in done.stderr
    folder = tmp_path / "tiny-yarn-512-distil"
    record = record_of(folder)
    assert record["verified"]["logits"] == "equal"
    assert record["adaptation"]["recipe"]["distil"]["map"] == "rerope"
    assert record["adaptation"]["recipe"]["data"]["sources"] == [{"generated": "self", "weight": 1.0}]
    assert [row["step"] for row in history_of(folder)] == [0, 2]
    assert not any("target_loss" in row for row in history_of(folder))
    again = run_here("extend", "tiny", "--to", "512", "--distil", cwd=tmp_path)
    assert f"{folder} is finished" in again.stderr
    card = teaching(records.read(folder).adaptation)
    assert card == (
        "It was distilled from the base model: trained on what that expects "
        "at temperature 2, in place of the tokens of a text; "
        "texts longer than its context the base read under `rerope`."
    )
    assert card in write_card(folder)[0].read_text()


@pytest.mark.parametrize(("trained", "window"), [(256, 256), (8192, 2048)])
def test_it_reads_rows_of_the_old_context_or_of_what_has_room_in_a_batch(tmp_path, trained, window):
    source = shutil.copytree(TINY, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"max_position_embeddings": trained}))
    (tmp_path / "tales.txt").write_text("Once upon a time there was a fox.")
    for text, name in ((None, "self"), (str(tmp_path / "tales.txt"), str(tmp_path / "tales.txt"))):
        ahead = ropepatch.extend(source, to="4x", distil=True, text=text, dry_run=True).forecast
        assert ahead.content["windows"] == [window]
        assert ahead.content["sources"][0]["name"] == name
        assert not ahead.warnings
        assert not ahead.obstacles


def test_a_fit_reads_the_text_that_is_trained_on_less_what_is_held_out(tmp_path):
    options = {
        "to": "4x",
        "parameters": {},
        "revision": None,
        "suite": None,
        "distil": True,
        "original": None,
        "allow_code": False,
        "max_short_loss_increase": None,
        "link_weights": False,
        "limit": None,
        "reading": None,
        "include": (),
        "record": None,
    }
    text = {"text": "tales.txt", "field": "body", "split": "train"}
    for method, read in (("fit", None), ("auto", "tales.txt")):
        asked = request.read_request("tiny", None, None, method=method, text=text, **options)
        assert asked.text["text"] == read
        assert asked.recipe.data.sources[0].field == "body"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--recipe tiny", "--distil beside --recipe"),
        ("--text tales.txt --eval demo", "--text is what --distil trains on, and --eval would measure on it"),
        ("--link-weights", "--link-weights beside --distil, which makes new weights"),
        ("--split train", "--split of --text, which is missing"),
        ("--method rerope", "nothing is trained under an attention map"),
    ],
)
def test_what_does_not_go_with_it_is_said(words, said, tmp_path, run_here):
    done = run_here("extend", "tiny", "--to", "512", "--distil", *words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert not list(tmp_path.iterdir())
