"""The fingerprint `reading.json`: what `extend` writes, its text, its limits, and errors of damaged files."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from checkpoint_folders import edit_json
from engines import Engine

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
    draw_ids,
)


@pytest.fixture
def copied(extended, tmp_path):
    return shutil.copytree(extended, tmp_path / "copy")


def test_the_fingerprint_equals_stock_transformers_at_every_position(extended):
    reading = readings.read(extended)
    assert (extended / READING).stat().st_size <= 200_000
    assert reading.weights == Checkpoint(extended).fingerprint
    assert reading.beyond.count(True) == reading.beyond.count(False) == making.SIDE
    assert set(reading.tops) == {RIGHT, UNSCALED, TWICE, FACTORLESS, DOUBLED, MISREAD}
    assert reading.positions[-1] < reading.target == len(reading.ids)
    for name, tops in reading.tops.items():
        computed = Engine(extended, name).log_probs(reading.ids[:-1])
        for row, position in enumerate(reading.positions):
            for token, log_prob in tops[row].items():
                assert log_prob == pytest.approx(
                    computed[position - 1, token].item(), abs=2e-3
                )


def lacks_its_unknown_token(text, **_):
    raise Exception("WordLevel error: Missing [UNK] token")  # as tokenizers does


@pytest.mark.parametrize(
    "tokenizer",
    [None, lambda text, **_: SimpleNamespace(input_ids=[]), lacks_its_unknown_token],
)
def test_without_a_usable_tokenizer_the_text_is_random_tokens(tokenizer):
    ids = draw_ids(tokenizer, 48, 300)
    assert len(ids) == 300
    assert set(ids) == set(range(48))


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


def test_limits_on_time_and_memory_prevent_the_fingerprint(extended, monkeypatch):
    record, checkpoint = records.read(extended), Checkpoint(extended)
    job = making.Job(checkpoint, record, checkpoint.config)
    monkeypatch.setattr(making, "MOST_WORK", {"cpu": 0.9 * job.operations})
    monkeypatch.setattr(making, "HOUR", {"cpu": 120 * job.operations / 7})
    with pytest.raises(RopepatchError, match="takes about 7 min at 1024 tokens"):
        job.check_affordable()
    monkeypatch.setattr(making, "available_bytes", lambda: 1000)
    with pytest.raises(RopepatchError, match="memory is too small"):
        job.check_affordable()


DAMAGE = [
    lambda content: content["tops"].pop(RIGHT),
    lambda content: content["tops"][RIGHT].pop(),
    lambda content: content["tops"][RIGHT][0].clear(),
    lambda content: content["tops"][RIGHT][0].update({"0": 1000}),
    lambda content: content["tops"][RIGHT][0].update({"-1": -1}),
    lambda content: content["positions"].reverse(),
    lambda content: content.update(target=content["target"] + 1),
    lambda content: content["ids"].__setitem__(0, content["vocabulary"]),
    lambda content: content["rounded"].pop(),
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
    plan = ropepatch.plan(copied, to=1280, method="linear")
    out = ropepatch.extend(plan, tmp_path / "again").folder
    reading = readings.read(out)
    assert (reading.window, reading.target) == (1024, 1280)
    assert reading.weights == Checkpoint(out).fingerprint


def test_mistakes_that_linear_scaling_cannot_have_are_left_out(tmp_path):
    plan = ropepatch.plan("tiny", to="4x", method="linear")
    tables = ropes(records.Record.of(plan))
    assert list(tables) == [RIGHT, UNSCALED, TWICE, DOUBLED]
    base = plan.config.rope.inv_freq()
    assert torch.equal(tables[UNSCALED].inv_freq, base)
    assert torch.allclose(tables[TWICE].inv_freq, base / 16)
    assert torch.allclose(tables[DOUBLED].inv_freq, base / 8)
