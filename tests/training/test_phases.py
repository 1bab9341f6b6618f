"""Every long phase of a training has a bar, and runs in the precision that is fastest on the device."""

from contextlib import contextmanager

import pytest
import torch
from run_recipes import fine_tune, small_recipe
from transformers.models.llama.modeling_llama import LlamaModel

import ropepatch
from ropepatch.model import precision
from ropepatch.model.checkpoint import TINY, Checkpoint
from ropepatch.training.recipe import Data, Distil, Generated, Watch


class Bars:
    """The stages that were shown, with the last progress of each."""

    def __init__(self):
        self.last = {}

    @contextmanager
    def __call__(self, name):
        self.last[name] = None
        yield lambda done, total: self.last.update({name: (done, total)})


def taught(**changes):
    sources = (Generated(generated="self"), Generated(generated="questions"))
    return small_recipe(
        data=Data(
            sources=sources, windows=(256,), tokens_per_batch=256, boundaries=False
        ),
        distil=Distil(),
        watch=Watch(every=2, windows=1, passkey_trials=1),
        trainer={"max_steps": 3},
        **changes,
    )


@pytest.fixture
def bfloat16(tmp_path, monkeypatch):
    """The bundled checkpoint in bfloat16, on a CPU without units for it, and the dtypes of its passes."""
    monkeypatch.setenv("ROPEPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ropepatch.training.self_written.SHARD", 2048)
    monkeypatch.setattr(precision, "UNITS", {})
    model, tokenizer = ropepatch.load(TINY, device="cpu", dtype="bfloat16")
    model.save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    run, dtypes = LlamaModel.forward, []

    def recorded(self, *args, **kwargs):
        dtypes.append(self.embed_tokens.weight.dtype)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", recorded)
    return tmp_path / "source", dtypes


@pytest.mark.slow
def test_every_phase_of_a_training_has_a_bar_that_ends(bfloat16, tmp_path):
    source, dtypes = bfloat16
    bars = Bars()
    plan = ropepatch.plan(source, to=512, method="yarn")
    folder = fine_tune(plan, taught(), tmp_path / "out", progress=bars).path
    assert list(bars.last) == [
        "self-generated text",
        "questions within the original length",
        "base model, short context",
        "training",
        "trained model, short context",
    ]
    assert all(done == total for done, total in bars.last.values())
    assert (
        dtypes[-2:] == [torch.bfloat16] * 2
    )  # the verification, before and after reloading
    assert set(dtypes[:-2]) == {torch.float32}
    assert Checkpoint(folder).load().dtype == torch.bfloat16
