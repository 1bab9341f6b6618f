"""What a dry run says of a recipe."""

import pytest
from run_recipes import small_recipe

import ropepatch
from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError
from ropepatch.training import adapter
from ropepatch.training.forecast import forecast
from ropepatch.training.recipe_sections import Data, Watch

PLAN = ropepatch.plan("tiny", to=512)


def reading(text):
    return small_recipe(data=Data(sources=(Texts(text=str(text)),), windows=(64,), tokens_per_batch=128))


def test_it_counts_what_is_trained_and_read_and_says_on_what_time_and_memory_rest(tmp_path):
    found = forecast(PLAN, small_recipe(), tmp_path / "out")
    content = found.to_dict()
    assert content["tokens"] == 6 * 128
    assert content["trained_weights"] == 4 * 4 * 4 * (192 + 192) + 9 * 192
    assert content["precision"]["dtype"] == "float32"  # as the recipe states
    assert content["cost"]["trained"] == content["trained_weights"]
    assert 0 < content["disk"]["needed"] < content["disk"]["free"]
    assert not content["obstacles"] + content["warnings"]
    named = {line.split()[0] for line in str(found).splitlines()[1:]}
    assert named == {
        *("steps", "rows", "data", "measured", "trains"),
        *("precision", "memory", "time", "disk", "makes"),
    }
    assert not list(tmp_path.iterdir())


def test_texts_that_are_here_have_sizes_and_one_that_is_not_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("once upon a time " * 100)
    (source,) = forecast(PLAN, reading(tmp_path / "text.txt"), "out").content["sources"]
    assert (source["files"], source["bytes"]) == (1, 1700)
    with pytest.raises(RopepatchError, match=r"gone\.txt"):
        forecast(PLAN, reading(tmp_path / "gone.txt"), "out")
    (source,) = forecast(PLAN, reading("owner/name"), "out").content["sources"]
    assert source["kind"] == "hub"


@pytest.mark.parametrize(("model", "warned"), [("./models/tiny", False), ("meta-llama/Llama-2-7b-hf", True)])
def test_a_recipe_for_another_model_warns(model, warned):
    found = forecast(PLAN, small_recipe(model=model), "out")
    assert [model in warning for warning in found.warnings] == [True] * warned


def test_what_stands_in_its_way_is_told_with_all_the_rest(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(adapter, "import_module", missing)
    found = forecast(PLAN, small_recipe(attention="flash_attention_2"), "out")
    assert [str(error).split()[0] for error in found.obstacles] == ["transformers", "peft"]
    assert found.content["tokens"]


def test_what_is_watched_is_named(tmp_path):
    (tmp_path / "held.txt").write_text("once")
    watched = forecast(PLAN, small_recipe(watch=Watch(text=str(tmp_path / "held.txt"))), "out").content[
        "watched"
    ]
    assert (watched["name"], watched["bytes"]) == (str(tmp_path / "held.txt"), 4)
