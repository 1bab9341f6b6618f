"""Self-generated text: sampling, caching, and resuming after an interruption."""

import itertools

import pytest
import torch
from loss_models import shift_model
from run_recipes import small_recipe, yarn

from ropepatch.errors import RopepatchError
from ropepatch.model.checkpoint import TINY, Checkpoint
from ropepatch.training import self_written as module
from ropepatch.training.recipe import Distil, Generated
from ropepatch.training.run import Run
from ropepatch.training.self_written import generated, self_written
from ropepatch.training.supply import read_supply


class Marks:
    """A tokenizer with special tokens only."""

    def __init__(self, bos, eos=None):
        self.bos_token_id, self.eos_token_id = bos, eos


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def test_token_frequencies_match_the_models_probabilities_at_the_temperature():
    model = shift_model(3, 0.7)
    documents = generated(model, Marks(None), 64, draws(), 256)
    steps = torch.cat([document.diff() % 20 for document in documents])
    expected = torch.full((20,), 0.3 / 19)
    expected[3] = 0.7
    expected = expected ** (1 / 0.8)
    found = torch.bincount(steps, minlength=20) / len(steps)
    torch.testing.assert_close(found, expected / expected.sum(), rtol=0.02, atol=0.005)


@pytest.mark.parametrize(
    ("bos", "eos", "first"), [(1, 5, {1}), (None, 5, {5}), (None, None, set(range(20)))]
)
def test_documents_begin_with_a_first_token_and_have_one_length(bos, eos, first):
    documents = generated(shift_model(1, 0.5), Marks(bos, eos), 64, draws(), 256)
    assert {int(document[0]) for document in documents} == first
    assert {len(document) for document in documents} == {64}
    assert 5 in torch.cat([document[1:] for document in documents])


def write_tiny(folder, tokenizer, tokens, **changes):
    settings = {"length": 8, "tokens": tokens, "seed": 0} | changes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROPEPATCH_CACHE", str(folder))
        return self_written(Checkpoint(TINY), tokenizer, **settings)


def files_in(folder):
    """The files and when each was written."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {(file, file.stat().st_mtime_ns) for file in files}


def killed_after(shards):
    """The generation of some shards, which is interrupted in the next one."""
    stock, numbers = module.generated, itertools.count()

    def write(*told):
        if next(numbers) == shards:
            raise KeyboardInterrupt
        return stock(*told)

    return write


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(module, "SHARD", 64)


def test_generation_resumes_after_the_last_whole_shard(
    tmp_path, small_parts, tiny, monkeypatch
):
    one, two, (_, tokenizer) = tmp_path / "one", tmp_path / "two", tiny
    many, few = write_tiny(one, tokenizer, 400), write_tiny(two, tokenizer, 100)
    assert 100 <= len(few) < 200
    assert len(many) >= 400
    assert torch.equal(many.ids(0, len(few)), few.ids(0, len(few)))
    whole = files_in(two)
    with monkeypatch.context() as patch:
        patch.setattr(module, "generated", killed_after(2))
        with pytest.raises(KeyboardInterrupt):
            write_tiny(two, tokenizer, 400)
    assert whole < files_in(two)
    whole = files_in(two)
    assert write_tiny(two, tokenizer, 400).digest == many.digest
    assert whole < files_in(two)
    assert write_tiny(one, tokenizer, 400, seed=1).digest != many.digest
    monkeypatch.setattr(module, "generated", killed_after(0))
    assert write_tiny(one, tokenizer, 400).digest == many.digest
    assert write_tiny(one, tokenizer, 100).digest == few.digest


def test_non_finite_logits_raise_a_one_line_error():
    model = shift_model(1, 0.5)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(
        RopepatchError,
        match="generates no text: its logits are no numbers after 1 tokens",
    ):
        generated(model, Marks(1), 64, draws(), 2)


def test_a_training_reads_self_generated_text_three_times(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD", 1024)
    monkeypatch.setenv("ROPEPATCH_CACHE", str(tmp_path / "cache"))
    data = small_recipe().data.model_copy(
        update={"sources": (Generated(generated="self"),)}
    )
    recipe = small_recipe(data=data, distil=Distil())
    supply = read_supply(Run(yarn(), recipe, tmp_path / "out"))
    held_out = sum(map(len, supply.pieces))
    assert supply.notes == [
        f"self-generated text: 12 documents, {supply.tokens // 3 + held_out} tokens"
    ]
