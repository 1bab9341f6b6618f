"""Checkpoints with a swapped encoding: saving, loading, evaluation."""

import shutil

import pytest
import torch
from checkpoint_folders import edit_json
from peft import LoraConfig, get_peft_model
from run_recipes import record_of
from swaps import OFTEN, PARAMETERS, cast, logits
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

import ropepatch
from ropepatch import ENCODINGS, RopepatchError
from ropepatch.encodings.loading import load_checkpoint
from ropepatch.encodings.swapping import swapped
from ropepatch.evaluation.measuring import Machine, Subject
from ropepatch.model.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    """The folder of a saved model with T5's bias."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("saved") / "t5"
    with ropepatch.swap(tiny_model("llama"), "t5", max_distance=40) as swap:
        with torch.no_grad():
            swap.module.table.normal_()
        swap.save(folder, tokenizer)
    return folder


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ENCODINGS),
        *((name, torch.bfloat16) for name in OFTEN),
        *(
            pytest.param(name, torch.bfloat16, marks=pytest.mark.sweep)
            for name in ENCODINGS
            if name not in OFTEN
        ),
    ],
)
def test_a_saved_encoding_is_loaded_with_the_same_logits(model, name, dtype, tmp_path):
    torch.manual_seed(2)
    with ropepatch.swap(cast(model, dtype), name, **PARAMETERS.get(name, {})) as swap:
        before = logits(model)
        dtypes = {k: v.dtype for k, v in swap.module.state_dict().items()}
        swap.save(tmp_path / "saved")
        encoding = swap.encoding
    loaded = load_checkpoint(Checkpoint(tmp_path / "saved"))
    assert torch.equal(logits(loaded), before)
    assert swapped(loaded).encoding == encoding
    state = swapped(loaded).module.state_dict()
    assert {k: v.dtype for k, v in state.items()} == dtypes
    assert not loaded.training
    assert loaded.config.model_type == "llama"


def test_load_returns_the_tokenizer_and_leaves_the_random_state_unchanged(
    saved, tokenizer
):
    state = torch.get_rng_state()
    _, loaded = ropepatch.load(saved, device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert loaded("Once upon").input_ids == tokenizer("Once upon").input_ids


def test_a_sharded_checkpoint_is_loaded_with_the_same_logits(model, tmp_path):
    torch.manual_seed(2)
    with ropepatch.swap(model, "shaw") as swap:
        before, folder = logits(model), swap.save(tmp_path / "parts")
        config = (folder / "config.json").read_bytes()
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="10KB")
        (folder / "config.json").write_bytes(config)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert torch.equal(logits(load_checkpoint(Checkpoint(folder))), before)


def test_stock_transformers_rejects_a_swapped_checkpoint_with_needs_ropepatch(saved):
    for load in (AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match="needs_ropepatch"):
            load(saved)
    assert "ropepatch.load" in record_of(saved)["needs_ropepatch"]


@pytest.mark.parametrize(
    "change",
    [
        {"encoding": "t6"},
        {"encoding": "shaw", "parameters": {}},
        {"model_type": "lama"},
        {"parameters": {"buckets": 10**11, "max_distance": 10**12}},
        None,
    ],
    ids=str,
)
def test_loading_rejects_a_missing_or_inconsistent_ropepatch_json(
    saved, tmp_path, change
):
    copied = shutil.copytree(saved, tmp_path / "copied")
    file = copied / "ropepatch.json"
    if change is None:
        file.unlink()
    else:
        edit_json(file, **change)
    with pytest.raises(RopepatchError):
        load_checkpoint(Checkpoint(copied))


def test_a_plan_rejects_a_swapped_checkpoint(saved):
    with pytest.raises(
        RopepatchError, match="the position encoding of this checkpoint is swapped"
    ):
        ropepatch.plan(saved, to=512)


def test_results_of_a_swapped_checkpoint_record_its_encoding(saved):
    subject = Subject(str(saved), Checkpoint(saved), Machine())
    assert swapped(subject.model).encoding.name == "t5"
    assert subject.record["encoding"]["encoding"] == "t5"


def test_saving_rejects_unmerged_adapters_and_removed_swaps(model, tmp_path):
    swap = ropepatch.swap(model, "alibi")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(RopepatchError, match="not merged"):
        swap.save(tmp_path / "out")
    swap.remove()
    with pytest.raises(RopepatchError, match="has been taken out"):
        swap.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
