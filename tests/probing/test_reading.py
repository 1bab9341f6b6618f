"""The fingerprint `reading.json`: what `extend` writes, its text, its limits, and errors of damaged files."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from checkpoint_folders import edit_json, write_checkpoint
from engines import Engine
from transformers import AutoModelForCausalLM

import ropepatch
from ropepatch import RopepatchError
from ropepatch.extension import record as records
from ropepatch.model.checkpoint import READING, Checkpoint
from ropepatch.probing import making
from ropepatch.probing import reading as readings
from ropepatch.probing.making import ropes
from ropepatch.probing.reading import (
    DOUBLED,
    FACTORLESS,
    MISREAD,
    RIGHT,
    TWICE,
    UNSCALED,
    draw_source,
    source_ids,
)


@pytest.fixture
def copied(extended, tmp_path):
    return shutil.copytree(extended, tmp_path / "copy")


def test_the_fingerprint_equals_stock_transformers_within_and_beyond_the_original_context(
    extended,
):
    reading = readings.read(extended)
    assert (extended / READING).stat().st_size <= 200_000
    assert reading.weights == Checkpoint(extended).fingerprint
    assert reading.dtype == "float32"
    assert reading.beyond.count(True) == reading.beyond.count(False) == making.SIDE
    assert set(reading.tops) == {RIGHT, UNSCALED, TWICE, FACTORLESS, DOUBLED, MISREAD}
    assert reading.positions[-1] < reading.target == len(reading.source.ids)
    for name, tops in reading.tops.items():
        computed = Engine(extended, name).log_probs(reading.source.ids[:-1])
        for row, position in enumerate(reading.positions):
            for token, log_prob in tops.rows()[row].items():
                assert log_prob == pytest.approx(
                    computed[position - 1, token].item(), abs=2e-3
                )


def test_a_long_text_is_stored_without_token_ids_and_regenerated(extended, monkeypatch):
    reading = readings.read(extended)
    whole, vocabulary = reading.source, reading.vocabulary
    monkeypatch.setattr("ropepatch.probing.reading.SHORT", 100)
    tokenizer = Checkpoint(extended).tokenizer
    source, _ = draw_source(tokenizer, vocabulary, whole.length, 0)
    assert source.ids is None
    assert source_ids(source, tokenizer, vocabulary, "x") == whole.ids
    for other, reason in (
        (None, "needs the tokenizer"),
        (Checkpoint(extended).tokenizer, "does not fit"),
    ):
        if other is not None:
            source = source.model_copy(update={"seed": 1})
        with pytest.raises(RopepatchError, match=reason):
            source_ids(source, other, vocabulary, "x")


def lacks_its_unknown_token(text, **_):
    raise Exception("WordLevel error: Missing [UNK] token")  # as tokenizers does


@pytest.mark.parametrize(
    "tokenizer",
    [None, lambda text, **_: SimpleNamespace(input_ids=[]), lacks_its_unknown_token],
)
def test_without_a_usable_tokenizer_the_text_is_random_tokens(tokenizer):
    source, _ = draw_source(tokenizer, 48, 300, 0)
    assert source.kind == "tokens"
    assert source_ids(source, None, 48, "x") == source.ids
    assert len(source.ids) == 300
    assert set(source.ids) <= set(range(48))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "self-extend"}, "ropepatch's own code"),
        ({"method": "dynamic"}, "changes with the prompt length"),
        ({"to": 260}, "less than 24 tokens beyond"),
    ],
)
def test_extend_prints_why_there_is_no_fingerprint(tmp_path, options, reason):
    said = []
    out = ropepatch.extend(
        "tiny", tmp_path / "out", **{"to": "2x"} | options, say=said.append
    ).folder
    assert not readings.exists(out)
    assert [
        line for line in said if line.startswith("no reading.json: ") and reason in line
    ]


def test_limits_on_time_and_memory_reduce_or_prevent_the_fingerprint(
    extended, monkeypatch
):
    record, checkpoint = records.read(extended), Checkpoint(extended)
    job = making.Job(checkpoint, record, checkpoint.config)
    assert job.affordable() == job.ropes
    monkeypatch.setattr(making, "MOST_WORK", {"cpu": 3.5 * job.operations})
    assert list(job.affordable()) == [RIGHT, UNSCALED]
    monkeypatch.setattr(making, "MOST_WORK", {"cpu": 1.0})
    monkeypatch.setattr(making, "HOUR", {"cpu": 120 * job.operations})
    minutes = rf"takes about {len(job.ropes) + 1} min at {record.target} tokens"
    with pytest.raises(RopepatchError, match=minutes):
        job.affordable()
    monkeypatch.setattr(making, "available_bytes", lambda: 1000)
    with pytest.raises(RopepatchError, match="memory is too small"):
        job.affordable()


def test_extend_warns_where_no_rope_error_changes_the_predictions(tmp_path):
    source = write_checkpoint(tmp_path / "without_queries")
    model = AutoModelForCausalLM.from_pretrained(source)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    model.save_pretrained(source)
    said = []
    for number, model in enumerate((source, "tiny")):
        ropepatch.extend(
            model, tmp_path / f"out {number}", to="4x", reading=True, say=said.append
        )
    (warning,) = [line for line in said if "cannot show a RoPE error" in line]
    assert warning.startswith("warning: reading.json ")


DAMAGE = [
    lambda content: content.pop("tops"),
    lambda content: content["tops"].pop(RIGHT),
    lambda content: content["positions"].reverse(),
    lambda content: content["tops"][RIGHT]["ids"][0].pop(),
    lambda content: content["tops"][RIGHT]["log_probs"].pop(),
    lambda content: content.update(version=9),
    lambda content: content.update(positions=[]),
    lambda content: content.update(target=content["target"] + 1),
    lambda content: content["source"].update(length=2**25),
    lambda content: content["source"]["ids"].append(content["vocabulary"]),
    lambda content: content["tops"][RIGHT]["log_probs"][0].__setitem__(0, 1000),
    lambda content: content["rounded"].pop(),
    lambda content: content["rounded"].__setitem__(0, -1),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_fingerprint_is_rejected(damage, copied):
    content = json.loads((copied / READING).read_text())
    damage(content)
    (copied / READING).write_text(json.dumps(content))
    with pytest.raises(RopepatchError):
        readings.read(copied)


def test_a_checkpoint_extended_again_gets_its_own_fingerprint(copied, tmp_path):
    edit_json(copied / READING, weights="others")
    plan = ropepatch.plan(copied, to=2048, method="linear")
    out = ropepatch.extend(plan, tmp_path / "again").folder
    reading = readings.read(out)
    assert (reading.window, reading.target) == (1024, 2048)
    assert reading.weights == Checkpoint(out).fingerprint


def test_mistakes_that_do_not_apply_to_linear_scaling_are_left_out(tmp_path):
    plan = ropepatch.plan("tiny", to="4x", method="linear")
    tables = ropes(records.Record.of(plan))
    assert list(tables) == [RIGHT, UNSCALED, TWICE, DOUBLED]
    base = plan.config.rope.inv_freq()
    assert torch.equal(tables[UNSCALED].inv_freq, base)
    assert torch.allclose(tables[TWICE].inv_freq, base / 16)
    assert torch.allclose(tables[DOUBLED].inv_freq, base / 8)
