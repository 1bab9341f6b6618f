"""The checkpoints of a run."""

from ropepatch.training.run_checkpoints import PARTIAL, newest


def test_the_newest_checkpoint_counts_and_what_was_not_finished_goes(tmp_path):
    assert newest(tmp_path) is None
    for name in (
        "checkpoint-9",
        "checkpoint-10",
        "checkpoint-best",
        "trained",
        f"{PARTIAL}/checkpoint-11",
    ):
        (tmp_path / name).mkdir(parents=True)
    assert newest(tmp_path).name == "checkpoint-10"
    assert {path.name for path in tmp_path.iterdir()} == {
        *("checkpoint-9", "checkpoint-10", "checkpoint-best", "trained")
    }
