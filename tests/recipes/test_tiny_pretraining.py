"""The recipe of the bundled checkpoint, and the rows it is trained on."""

import hashlib
import json
from pathlib import Path

import pretraining
import pytest
import yaml
from pretraining import Rows, make_tokenizer
from pretraining_recipe import Stage, read_recipe
from pretraining_rows import MATERIALS, Stock
from transformers import AutoTokenizer, LlamaForCausalLM

from ropepatch.errors import RopepatchError
from ropepatch.model.source import TINY

SHIPPED = Path(__file__).parents[2] / "recipes" / "tiny" / "pretrain.yaml"
# Of eight rows of 161 tokens.
GOLDEN_ROWS = {
    "strings": "6446358c2961a37f",
    "copies": "80917c4a9c361f4e",
    "passkey": "0a83097660b18c5c",
    "tales": "579bb1a2f13be9ff",
    "recalls": "c1b6b333f6862382",
    "retold": "57631cde0758c668",
    "stories": "4621f5decff4c6c2",
}
TEXT = "Once a small grey cat sat by the road, and nobody saw it. " * 60


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def stock(tokenizer):
    return Stock.of(tokenizer, [TEXT, "And then it rained."])


def content(**changes):
    stage = {
        "name": "one",
        "mixture": {"strings": 0.5, "tales": 0.5},
        "windows": [11, 13],
        "tokens_per_step": 44,
        "steps": 5,
        "learning_rate": 1.0e-3,
    }
    model = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 96,
    }
    stages = [stage | changes.pop("stage", {})]
    model |= changes.pop("model", {})
    return {"seed": 0, "vocab_size": 670, "texts": [], "model": model, "stages": stages} | changes


def written(folder, recipe):
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def test_the_shipped_recipe_is_what_the_bundled_checkpoint_was_made_from(tokenizer):
    recipe = read_recipe(SHIPPED)
    made, bundled = recipe.config().to_dict(), LlamaForCausalLM.config_class.from_pretrained(TINY).to_dict()
    for key in ("hidden_size", "num_hidden_layers", "head_dim", "vocab_size", "max_position_embeddings"):
        assert made[key] == bundled[key]
    assert made["rope_parameters"]["rope_theta"] == bundled["rope_parameters"]["rope_theta"] == 10000
    assert recipe.vocab_size == len(tokenizer)
    assert max(max(stage.windows) for stage in recipe.stages) == bundled["max_position_embeddings"]


@pytest.mark.parametrize(
    ("recipe", "message", "hint"),
    [
        (content(stages=content()["stages"] * 2), "two stages have the same name: one, one", None),
        (content(stage={"name": "a/b"}), "name must be letters, digits, _ and -", None),
        (content(stage={"name": "checkpoint"}), "stages[0]: name must not be checkpoint", None),
        (content(stage={"mixture": {"tale": 1}}), "got 'tale'", "did you mean tales?"),
        (content(stage={"windows": [11, 45]}), "a row of 45 tokens has no room in 44 tokens_per_step", None),
        (content(model={"hidden_sise": 8}), "unknown model key 'hidden_sise'", "did you mean hidden_size?"),
        (content(model={"hidden_size": "big"}), "model: Validation error for", None),
    ],
)
def test_a_wrong_recipe_is_refused_in_one_line(tmp_path, recipe, message, hint):
    file = written(tmp_path, recipe)
    with pytest.raises(RopepatchError) as caught:
        read_recipe(file)
    assert str(caught.value).startswith(f"{file}")
    assert message in str(caught.value)
    assert "\n" not in f"{caught.value}{caught.value.hint}"
    assert hint is None or caught.value.hint.startswith(hint)


def test_each_material_is_what_it_was_when_the_bundled_checkpoint_was_trained(stock):
    """The rows are part of the recipe: a change here makes other weights."""
    rows = {
        name: hashlib.sha256(
            b"".join(part.numpy().tobytes() for seed in range(8) for part in draw(stock, 161, seed))
        ).hexdigest()[:16]
        for name, draw in MATERIALS.items()
    }
    assert rows == GOLDEN_ROWS


def stage(**changes):
    return Stage(**content(stage=changes)["stages"][0])


def test_the_rows_of_a_stage_are_always_the_same(stock):
    """Their number, the windows in turn, the material by its share and the seed of each are all in the hash.

    A seed of its own draws the material: from the row's it would foretell the first draw of the row.
    """
    mixture = {"tales": 1, "strings": 1.0, "copies": 2}
    rows = Rows(stage(mixture=mixture, windows=[11, 13, 44], tokens_per_step=440, steps=7), stock, seed=3)
    steps = [rows[step] for step in range(len(rows))]
    assert [tuple(step["input_ids"].shape) for step in steps] == [(40, 11), (33, 13), (10, 44)] * 2 + [
        (40, 11)
    ]
    hashed = hashlib.sha256(b"".join(step[key].numpy().tobytes() for step in steps for key in sorted(step)))
    assert hashed.hexdigest()[:16] == "97dc374c47d072f5"
    everything = [tuple(row.tolist()) for step in steps for row in step["input_ids"]]
    assert len(set(everything)) > 0.99 * len(everything)


@pytest.mark.slow
def test_the_tokenizer_of_the_shipped_recipe_is_the_bundled_one(shared, tokenizer, monkeypatch):
    monkeypatch.chdir(SHIPPED.parents[2])
    recipe = read_recipe(SHIPPED)
    documents = [*pretraining.stream_texts(shared / "texts" / "tinystories")]
    made = make_tokenizer(recipe, documents).backend_tokenizer
    assert made.to_str() == tokenizer.backend_tokenizer.to_str()


@pytest.mark.parametrize("begun", [{"recipe.json": {"seed": 1}}, {"thesis.txt": ""}])
def test_what_is_not_of_the_same_run_is_not_written_into(begun, tokenizer, stock, tmp_path, monkeypatch):
    monkeypatch.setattr(pretraining, "make_tokenizer", lambda *_: tokenizer)
    monkeypatch.setattr(Stock, "of", lambda *_: stock)
    (tmp_path / "one").mkdir()
    for name, content_of_it in begun.items():
        (tmp_path / "one" / name).write_text(json.dumps(content_of_it))
    with pytest.raises(RopepatchError, match="one is of another recipe"):
        pretraining.pretrain(read_recipe(written(tmp_path, content())), tmp_path)
    assert [file.name for file in (tmp_path / "one").iterdir()] == [*begun]
