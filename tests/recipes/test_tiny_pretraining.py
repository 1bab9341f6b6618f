"""The recipe of the bundled checkpoint, and the rows it is trained on."""

import hashlib
from pathlib import Path

import pretraining
import pytest
from pretraining import make_tokenizer
from pretraining_recipe import read_recipe
from pretraining_rows import MATERIALS, Stock
from transformers import LlamaForCausalLM

from ropepatch.model.checkpoint import TINY

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
def stock(tokenizer):
    return Stock.of(tokenizer, [TEXT, "And then it rained."])


def test_the_shipped_recipe_made_the_bundled_checkpoint(tokenizer):
    recipe = read_recipe(SHIPPED)
    made, bundled = (
        recipe.config().to_dict(),
        LlamaForCausalLM.config_class.from_pretrained(TINY).to_dict(),
    )
    for key in (
        "hidden_size",
        "num_hidden_layers",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
    ):
        assert made[key] == bundled[key]
    assert (
        made["rope_parameters"]["rope_theta"]
        == bundled["rope_parameters"]["rope_theta"]
        == 10000
    )
    assert recipe.vocab_size == len(tokenizer)
    assert (
        max(max(stage.windows) for stage in recipe.stages)
        == bundled["max_position_embeddings"]
    )


@pytest.mark.slow
def test_each_material_is_what_tiny_was_trained_on(stock):
    """The rows are part of the recipe: a change here makes other weights."""
    rows = {
        name: hashlib.sha256(
            b"".join(
                part.numpy().tobytes()
                for seed in range(8)
                for part in draw(stock, 161, seed)
            )
        ).hexdigest()[:16]
        for name, draw in MATERIALS.items()
    }
    assert rows == GOLDEN_ROWS


@pytest.mark.slow
def test_the_tokenizer_of_the_shipped_recipe_is_the_bundled_one(
    shared, tokenizer, monkeypatch
):
    monkeypatch.chdir(SHIPPED.parents[2])
    recipe = read_recipe(SHIPPED)
    documents = [*pretraining.stream_texts(shared / "texts" / "tinystories")]
    made = make_tokenizer(recipe, documents).backend_tokenizer
    assert made.to_str() == tokenizer.backend_tokenizer.to_str()
