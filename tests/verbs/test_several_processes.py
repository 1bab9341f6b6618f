"""`evaluate` and `extend` in two processes: shared work, with the results and files of one process."""

import pytest
import torch
from rank_processes import on_processes

import ropepatch
from ropepatch.evaluation.measuring import Method, Suite
from ropepatch.evaluation.perplexity import LossReader
from ropepatch.evaluation.tasks import PerplexityTask

SUITE = Suite(
    methods=(Method(name="yarn"),), to=(512,), tasks=(PerplexityTask(windows=3),)
)


def call(rank, out):
    """Measure and extend; save the results and the number of sequences that this process evaluated."""
    read, calls = [], {}
    with pytest.MonkeyPatch.context() as patch:
        reads = LossReader.read
        patch.setattr(
            LossReader,
            "read",
            lambda self, batch: read.extend(batch) or reads(self, batch),
        )
        report = out / "measured.html"
        calls["evaluate"] = ropepatch.evaluate(
            "tiny", SUITE, device="cpu", out=out / "measured", report=report
        )
        written = ropepatch.extend("tiny", out / "tiny-512", to=512)
        calls["extension"] = ropepatch.evaluate(written, SUITE, device="cpu")
    rows = {
        name: [(result.label, result.rows) for result in results]
        for name, results in calls.items()
    }
    torch.save((rows, len(read)), out / f"{rank}.pt")


@pytest.mark.slow
def test_two_processes_write_the_same_files_as_one(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    call(0, tmp_path / "one")
    on_processes(2, call, tmp_path / "two")
    (rows, alone), *shared = (
        torch.load(file, weights_only=False)
        for file in (
            tmp_path / "one" / "0.pt",
            *(tmp_path / "two" / f"{rank}.pt" for rank in (0, 1)),
        )
    )
    assert [found for found, _ in shared] == [rows, rows]
    assert [count for _, count in shared] == [alone * 2 // 3, alone // 3] == [8, 4]
    left = [
        sorted(
            file.relative_to(place) for file in place.rglob("*") if file.suffix != ".pt"
        )
        for place in tmp_path.iterdir()
    ]
    assert left[0] == left[1]
