"""`probe` on a model in memory, and the callback that stops a Trainer whose model computes another RoPE."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
)

import ropepatch
from ropepatch import RopepatchError
from ropepatch.extension import record as records
from ropepatch.probing import reading as readings
from ropepatch.probing.judging import OTHER_MODEL
from ropepatch.probing.making import ropes
from ropepatch.probing.reading import RIGHT, UNSCALED


def loaded(folder, rope=RIGHT, dtype=None):
    """The model as a trainer loads it, in train mode, with the RoPE of a hypothesis."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    table, rotary = ropes(records.read(folder))[rope], model.model.rotary_emb
    rotary.inv_freq, rotary.attention_scaling = (
        table.inv_freq.clone(),
        table.attention_factor,
    )
    return model.train()


def fine_tuned(model):
    return get_peft_model(
        model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def checkpointing(model):
    newer = getattr(
        model, "activation_checkpointing_enable", None
    )  # since transformers 5.19
    (newer or model.gradient_checkpointing_enable)()
    return model


WAYS = {
    "fine-tuned": fine_tuned,
    "gradient checkpointing": checkpointing,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "bfloat16": lambda model: model,
}


def test_probe_identifies_every_mistake_of_a_model_in_memory(extended):
    for name in readings.read(extended).tops:
        found = ropepatch.probe(loaded(extended, name), extended)
        assert found.judgement.verdict == name, str(found)
        assert found.to_dict()["engine"] == "LlamaForCausalLM in memory"


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.sweep] * (way == "compiled"))
        for way in WAYS
    ],
)
def test_probe_recognises_a_correct_wrapped_model_and_leaves_it_unchanged(
    extended, way
):
    dtype = torch.bfloat16 if way == "bfloat16" else None
    model = WAYS[way](loaded(extended, dtype=dtype))
    next(model.modules()).training = False  # unlike the others
    modes = [module.training for module in model.modules()]
    assert any(modes)
    # compared with the checkpoint that its config names
    assert ropepatch.probe(model).is_right
    assert [module.training for module in model.modules()] == modes
    assert all(weight.grad is None for weight in model.parameters())
    ids = torch.ones(1, 8, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()


def test_probe_identifies_other_weights_and_raises_an_error_for_nan(extended):
    model = loaded(extended)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)
    assert ropepatch.probe(model, extended).judgement.verdict == OTHER_MODEL
    model.model.rotary_emb.inv_freq.fill_(torch.nan)
    with pytest.raises(RopepatchError, match="NaN") as caught:
        ropepatch.probe(model, extended)
    assert "ropepatch doctor" in caught.value.hint


def trained(model, folder, place, steps=4, resume=None, **options):
    arguments = TrainingArguments(
        str(place), max_steps=steps, save_steps=2, use_cpu=True, report_to=[]
    )
    rows = [{"input_ids": [3, 4, 5, 6], "labels": [3, 4, 5, 6]}] * 8
    probe = ropepatch.ProbeCallback(folder, **options)
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[probe])
    trainer.train(resume_from_checkpoint=resume)


def said(caplog):
    ours = [one for one in caplog.records if one.name == "ropepatch"]
    return [one.getMessage().partition(", ")[2] for one in ours]


def test_the_callback_probes_first_and_checks_rope_tables_later(
    extended, tmp_path, caplog
):
    caplog.set_level(logging.INFO, "ropepatch")
    trained(fine_tuned(loaded(extended)), extended, tmp_path, every=3)
    begin, later = said(caplog)
    assert begin.startswith("step 0: OK: the model applies the RoPE scaling")
    assert later == "step 3: OK: the RoPE tables match the checkpoint"
    caplog.clear()  # a resumed training is not probed: its weights have changed
    again = fine_tuned(loaded(extended))
    resume = str(tmp_path / "checkpoint-2")
    trained(again, extended, tmp_path, every=9, resume=resume)
    assert said(caplog) == ["step 2: OK: the RoPE tables match the checkpoint"]


def test_an_unscaled_model_is_not_trained_unless_raises_is_false(
    extended, tmp_path, caplog
):
    model = loaded(extended, UNSCALED)
    before = model.lm_head.weight.clone()
    with pytest.raises(
        RopepatchError, match=r"step 0: WRONG: the model ignores the RoPE scaling"
    ):
        trained(model, extended, tmp_path)
    assert torch.equal(model.lm_head.weight, before)
    trained(model, extended, tmp_path, steps=1, every=1, raises=False)
    ours = [one.levelname for one in caplog.records if one.name == "ropepatch"]
    assert ours == ["WARNING"] * 2
    assert "the RoPE in memory is not the config's" in said(caplog)[1]


def test_the_callback_rejects_a_checkpoint_without_fingerprint(template):
    with pytest.raises(RopepatchError, match=r"no reading\.json") as caught:
        ropepatch.ProbeCallback(template)
    assert "save_reading=True" in caught.value.hint
