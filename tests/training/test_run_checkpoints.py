"""The checkpoints of a run."""

import json

import pytest

from ropepatch.training.run_checkpoints import SEAL, newest_sound, seal


@pytest.fixture
def run(tmp_path):
    """Checkpoints of steps 2, 9 and 10, sealed."""
    for step in (2, 9, 10):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "part").mkdir(parents=True)
        (folder / "weights.bin").write_bytes(bytes(range(step)))
        (folder / "part" / "state.json").write_text(json.dumps({"step": step}))
        seal(folder)
    return tmp_path


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "weights.bin").write_bytes(bytes(9)),
        lambda folder: (folder / "weights.bin").unlink(),
        lambda folder: (folder / "part" / "state.json").write_text("{}"),
        lambda folder: (folder / "more.bin").write_bytes(b""),
        lambda folder: (folder / SEAL).write_text("{"),
        lambda folder: (folder / SEAL).unlink(),
    ],
    ids=["other bytes", "a file gone", "a file in a folder", "a file more", "seal cut", "no seal"],
)
def test_a_damaged_one_is_skipped_with_a_warning_for_the_one_before(run, harm, caplog):
    harm(run / "checkpoint-10")
    assert newest_sound(run).name == "checkpoint-9"
    assert not (run / "checkpoint-10").exists()
    assert "checkpoint-10 is damaged, resuming from the one before" in caplog.text


def test_without_a_sound_one_there_is_none(run):
    for step in (2, 9, 10):
        (run / f"checkpoint-{step}" / SEAL).unlink()
    assert newest_sound(run) is None


def test_other_folders_are_left_alone(run):
    (run / "checkpoint-best").mkdir()
    (run / "trained").mkdir()
    newest_sound(run)
    assert (run / "checkpoint-best").is_dir()
    assert (run / "trained").is_dir()
