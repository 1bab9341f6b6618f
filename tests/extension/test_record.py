"""`ropepatch.json` is declared once, refused in one line, and read however old it is."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import RECORDS, SWAPPED

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.extension.record import FILE, VERSION, Record, amend, exists, read, sound_keys, write
from ropepatch.model.checkpoint import Checkpoint

ADAPTATION = RECORDS["trained"]["adaptation"]


@pytest.fixture
def record():
    return Record.of(ropepatch.plan("tiny", to=1024))


def put(folder, content):
    (folder / FILE).write_text(json.dumps(content))
    return folder


# Records of before


def without_new(content):
    """A record as it was before facts had fields of their own."""
    if isinstance(content, dict):
        new = {"version", "switches", "compared", "difference"}
        return {key: without_new(value) for key, value in content.items() if key not in new}
    return [*map(without_new, content)] if isinstance(content, list) else content


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_from_before_is_read_and_nothing_of_it_is_lost(name, tmp_path):
    record = read(put(tmp_path, RECORDS[name]))
    assert without_new(record.to_dict()) == RECORDS[name]
    write(tmp_path, record)
    assert read(tmp_path) == record
    assert json.loads((tmp_path / FILE).read_text())["version"] == VERSION


def test_the_record_of_a_swapped_encoding_from_before_is_read(tmp_path):
    record = Checkpoint(put(tmp_path, SWAPPED)).swapped
    assert without_new(record.to_dict()) == SWAPPED
    assert (record.encoding, record.model_type) == ("t5", "llama")
    with pytest.raises(RopepatchError, match="position encoding is swapped"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("note", "switches"),
    [
        ("multiplies the length again: pass --max-model-len 1024", ["--max-model-len 1024"]),
        ("serves 256 tokens without --max-model-len 1024; half-split layouts only", ["--max-model-len 1024"]),
        ("builds that ignore attention_factor take 1.1386", []),
    ],
)
def test_switches_that_only_a_note_told_are_read_from_it(note, switches, record):
    engines = [{"engine": "vLLM", "reads": "yes", "note": note}]
    old = {key: value for key, value in record.to_dict().items() if key != "version"} | {"engines": engines}
    assert Record.parse(old).engines[0].switches == switches


@pytest.mark.parametrize(
    ("logits", "compared", "difference"),
    [
        ("equal", True, 0.0),
        ("within 3.1e-07", True, 3.1e-07),
        ("within 3.9e-06 of the largest, before folding", True, 3.9e-06),
        ("not compared: quantised weights", False, None),
        ("off by 3", True, None),
    ],
)
def test_a_verdict_that_was_only_a_sentence_is_read_from_it(logits, compared, difference, record):
    old = record.to_dict() | {"verified": {"frequencies": "equal", "logits": logits}}
    verdict = Record.parse(old).verified
    assert (verdict.compared, verdict.difference) == (compared, difference)


# Records of today


@pytest.mark.parametrize("method", ["yarn", "linear", "dynamic"])
def test_what_is_written_comes_back(method, tmp_path):
    record = Record.of(ropepatch.plan("tiny", to=1024, method=method), adaptation=ADAPTATION)
    assert not exists(tmp_path)
    write(tmp_path, record)
    assert exists(tmp_path)
    assert read(tmp_path) == record
    assert read(tmp_path).to_dict() == json.loads((tmp_path / FILE).read_text())


def test_amending_keeps_what_it_does_not_know(record, tmp_path):
    mine = {"mine": {"a": [1, None]}, "adaptation": ADAPTATION | {"loss": "ours"}}
    put(tmp_path, record.to_dict() | mine)
    amended = amend(tmp_path, command="ropepatch extend", engines=[])
    assert amended == read(tmp_path)
    assert json.loads((tmp_path / FILE).read_text()) == record.to_dict() | mine | {
        "command": "ropepatch extend",
        "engines": [],
    }
    assert "command" not in amend(tmp_path, command=None).to_dict()


def test_an_amendment_that_fails_leaves_the_record_as_it_was(record, tmp_path, monkeypatch):
    write(tmp_path, record)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(RopepatchError, match="says nothing usable of target, got 0"):
        amend(tmp_path, target=0)

    def full(path, content):
        path.write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ropepatch.extension.record.write_json", full)
    with pytest.raises(OSError, match="No space"):
        amend(tmp_path, command="ropepatch")
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert (tmp_path / FILE).read_bytes() == before


# Records of strangers

GATE = ADAPTATION["gate"]
DAMAGED = {
    "earlier.target": {"earlier": RECORDS["extended"] | {"target": "32k"}},
    "base.language": {"base": {"language": ["en", 3]}},
    "adaptation.gate.now": {"adaptation": ADAPTATION | {"gate": GATE | {"now": None}}},
    "engines.switches": {
        "engines": [{"engine": "vLLM", "reads": "yes", "note": "", "switches": ["-x; rm -rf ~"]}]
    },
    "inv_freq": {"inv_freq": [True]},
    "config_changes.rope_parameters": {"config_changes": {"rope_parameters": "yarn"}},
    "target": {"target": 10**30},
    "factor": {"factor": 10**400},
    "version": {"version": "1"},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_value_of_the_wrong_kind_is_named_in_one_line(name, record, tmp_path):
    put(tmp_path, record.to_dict() | DAMAGED[name])
    with pytest.raises(RopepatchError, match=re.escape(f"says nothing usable of {name}, got ")) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_a_key_that_is_missing_is_named(record, tmp_path):
    content = record.to_dict()
    del content["target"]
    with pytest.raises(RopepatchError, match="says nothing usable of target, got nothing"):
        read(put(tmp_path, content))


def test_a_record_of_a_later_version_is_refused_with_what_to_do(record, tmp_path):
    with pytest.raises(
        RopepatchError, match="is of version 2, this ropepatch reads up to version 1"
    ) as caught:
        read(put(tmp_path, record.to_dict() | {"version": 2}))
    assert "pip install" in caught.value.hint


@pytest.mark.parametrize("name", ["a=1)\nimport os; os.system('x')", "", "a b", "import", "1a", "*a"])
def test_a_parameter_that_is_no_name_is_refused(name, record):
    with pytest.raises(RopepatchError, match=r"names a parameter .*expected a plain name"):
        record.amended(parameters={name: 1.0})


ODD = st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=3)
ODD = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner)
)


@given(st.dictionaries(st.sampled_from([*Record.model_fields]), ODD))
@settings(max_examples=100, deadline=None)
def test_of_a_damaged_record_the_keys_that_are_sound_are_left(damage):
    content = RECORDS["trained"] | damage
    sound = sound_keys(content)
    assert {key for key in RECORDS["trained"] if key not in damage} <= sound.keys()
    if sound.keys() < content.keys():
        with pytest.raises(RopepatchError):
            Record.parse(content)
