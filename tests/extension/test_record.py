"""`ropepatch.json`: validation with one-line errors, and lossless reading and writing."""

import json

import pytest
from checkpoint_folders import RECORDS, SWAPPED

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.extension.record import (
    Record,
    ShortContextCheck,
    amend,
    context_before,
    read,
    write,
)
from ropepatch.model.checkpoint import RECORD, Checkpoint

TRAINING = RECORDS["trained"]["training"]
VLLM = {"engine": "vLLM", "reads": "yes", "how": None, "note": ""}


@pytest.fixture
def record():
    return Record.of(ropepatch.plan("tiny", to=1024))


def put(folder, content):
    (folder / RECORD).write_text(json.dumps(content))
    return folder


def test_the_short_context_check_judges_the_interval():
    alone = ShortContextCheck.of(2.0, 2.1, 0.06)
    assert alone.increase == pytest.approx(0.05)
    assert (alone.passed, alone.limited(0.04).passed) == (True, False)
    unsure = ShortContextCheck.of(2.0, 2.1, 0.02, (0.01, 0.09))
    assert (unsure.passed, unsure.limited(0.005).passed) == (True, False)
    assert unsure.limited(0.03).passed


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_read_and_written_without_loss(name, tmp_path):
    record = read(put(tmp_path, RECORDS[name]))
    assert record.to_dict() == RECORDS[name]
    write(tmp_path, record)
    assert read(tmp_path) == record


def test_the_record_of_a_swapped_encoding_is_another(tmp_path):
    record = Checkpoint(put(tmp_path, SWAPPED)).swapped
    assert (record.encoding, record.model_type) == ("t5", "llama")
    with pytest.raises(RopepatchError, match="swapped position encoding"):
        read(tmp_path)


def test_amending_keeps_unknown_keys(record, tmp_path):
    mine = {"mine": {"a": [1, None]}, "training": TRAINING | {"loss": "ours"}}
    put(tmp_path, record.to_dict() | mine)
    amended = amend(tmp_path, command="ropepatch extend", engines=[])
    assert amended == read(tmp_path)
    changed = {"command": "ropepatch extend", "engines": []}
    assert amended.to_dict() == record.to_dict() | mine | changed
    assert "command" not in amend(tmp_path, command=None).to_dict()


@pytest.mark.parametrize("path", ["/home/zorro/llama", "https://zorro:key@host/llama"])
def test_no_path_of_this_machine_is_written(path, record, tmp_path):
    sources = ({"text": path},)
    trained = TRAINING | {"recipe": {"data": {"sources": sources}}}
    earlier = record.model_copy(update={"model": path})
    given = {"command": f"ropepatch extend {path} --to 1k", "training": trained}
    made = Record.of(ropepatch.plan("tiny", to=1024), earlier=earlier, **given)
    for one in (made, record.amended(model=path, **given)):
        write(tmp_path, one)
        assert "zorro" not in (tmp_path / RECORD).read_text()


def test_a_training_ends_the_untrained_extensions(record, tmp_path):
    base = record.amended(original_max_position_embeddings=64)
    trained = record.amended(training=TRAINING, earlier=base)
    write(tmp_path, record.amended(weights="w", earlier=trained))
    assert context_before(tmp_path, "w") == 256


def test_a_failed_amendment_leaves_the_record_unchanged(record, tmp_path):
    write(tmp_path, record)
    with pytest.raises(RopepatchError, match="target must be greater than 0"):
        amend(tmp_path, target=0)
    assert read(tmp_path) == record


# Records from other people


@pytest.mark.parametrize(
    "damage",
    [
        {"earlier": RECORDS["extended"] | {"target": "32k"}},
        {"base": {"language": ["en", 3]}},
        {"training": TRAINING | {"short_context": {"now": None}}},
        {"engines": [VLLM | {"switches": ["-x; rm -rf ~"]}]},
        {"inv_freq": [True]},
        {"config_changes": {"rope_parameters": "yarn"}},
        *({"target": 10**30}, {"factor": 10**400}, {"version": "1"}, {"version": 2}),
    ],
    ids=str,
)
def test_a_wrong_type_or_a_later_version_is_rejected(damage, record, tmp_path):
    with pytest.raises(RopepatchError) as caught:
        read(put(tmp_path, record.to_dict() | damage))
    assert caught.value.hint


def test_the_error_of_a_missing_key_names_it(record, tmp_path):
    content = {key: value for key, value in record.to_dict().items() if key != "target"}
    with pytest.raises(RopepatchError, match="record needs target"):
        read(put(tmp_path, content))


@pytest.mark.parametrize(
    "name", ["a=1)\nimport os; os.system('x')", "", "a b", "import", "1a", "*a"]
)
def test_a_parameter_that_is_not_an_identifier_is_rejected(name, record):
    with pytest.raises(
        RopepatchError, match=r"has a parameter .*expected a plain name"
    ):
        record.amended(parameters={name: 1.0})
