"""The recipe of the bundled checkpoint, and the rows it is trained on."""

import hashlib
from pathlib import Path

import pretraining
import pytest
from pretraining import Rows, make_tokenizer
from pretraining_recipe import Stage, read_recipe
from pretraining_rows import MATERIALS, Stock
from transformers import AutoTokenizer, LlamaForCausalLM

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


def test_the_shipped_recipe_is_what_the_bundled_checkpoint_was_made_from(tokenizer):
    recipe = read_recipe(SHIPPED)
    made, bundled = recipe.config().to_dict(), LlamaForCausalLM.config_class.from_pretrained(TINY).to_dict()
    for key in ("hidden_size", "num_hidden_layers", "head_dim", "vocab_size", "max_position_embeddings"):
        assert made[key] == bundled[key]
    assert made["rope_parameters"]["rope_theta"] == bundled["rope_parameters"]["rope_theta"] == 10000
    assert recipe.vocab_size == len(tokenizer)
    assert max(max(stage.windows) for stage in recipe.stages) == bundled["max_position_embeddings"]


def test_each_material_is_what_it_was_when_the_bundled_checkpoint_was_trained(stock):
    """The rows are part of the recipe: a change here makes other weights."""
    rows = {
        name: hashlib.sha256(
            b"".join(part.numpy().tobytes() for seed in range(8) for part in draw(stock, 161, seed))
        ).hexdigest()[:16]
        for name, draw in MATERIALS.items()
    }
    assert rows == GOLDEN_ROWS


def test_the_rows_of_a_stage_are_always_the_same(stock):
    """Their number, the windows in turn, the material by its share and the seed of each are all in the hash.

    A seed of its own draws the material: from the row's it would foretell the first draw of the row.
    """
    mixture = {"tales": 1, "strings": 1.0, "copies": 2}
    stage = Stage(
        name="one", mixture=mixture, windows=[11, 13, 44], tokens_per_step=440, steps=7, learning_rate=1e-3
    )
    rows = Rows(stage, stock, seed=3)
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
