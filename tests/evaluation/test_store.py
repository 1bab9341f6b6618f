"""A measurement that is killed goes on where it was."""

import hashlib
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from loss_models import LENGTHS, PROTOCOLS, build, decoder_passes, tokens
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.evaluation.store import LossStore, claim_folder, remove_folders


class Killed(BaseException):
    pass


def passes(model: PreTrainedModel, **options: object) -> tuple[list[torch.Tensor], int]:
    """The losses and how many forward passes of the decoder they took."""
    with decoder_passes(model) as shapes:
        return list(perplexity(model, None, tokens(*LENGTHS), **options).nll), len(shapes)


def killed_after(batches: int):
    told: list[int] = []

    def progress(done: int, total: int | None) -> None:
        told.append(done)
        if len(told) == batches:
            raise Killed

    return progress


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: p.label)
@pytest.mark.parametrize("batches", [1, 2, 3])
def test_killed_and_started_again_the_losses_are_the_same_and_nothing_is_read_twice(
    llama, tmp_path, protocol, batches
):
    options, folder = {"protocol": protocol, "tokens_per_batch": 70}, tmp_path / "made" / "here"
    uninterrupted, whole = passes(llama, **options)
    with pytest.raises(Killed):
        perplexity(llama, None, tokens(*LENGTHS), keep=folder, progress=killed_after(batches), **options)
    resumed, rest = passes(llama, keep=folder, **options)
    assert rest == whole - batches
    assert all(map(torch.equal, resumed, uninterrupted))
    told: list[tuple[int, int | None]] = []
    again, none = passes(llama, keep=folder, progress=lambda *done: told.append(done), **options)
    assert none == 0
    assert told[-1][0] == told[-1][1]  # what is found counts
    assert all(map(torch.equal, again, uninterrupted))


def test_found_losses_do_not_hold_those_of_their_batch(tmp_path):
    kept = LossStore(tmp_path)
    kept.write("batch", [torch.ones(3), torch.zeros(5)])
    found = kept.find("batch", [3, 5])
    assert [row.tolist() for row in found] == [[1.0] * 3, [0.0] * 5]
    assert [row.untyped_storage().nbytes() for row in found] == [12, 20]
    assert kept.find("other", [3, 5]) is None


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def shortened(file: Path) -> None:
    nll = load_file(file)["nll"][:-1].clone()
    save_file({"nll": nll}, file, metadata={"sha256": hashlib.sha256(nll.numpy().tobytes()).hexdigest()})


def unsigned(file: Path) -> None:
    save_file(load_file(file), file)


def renamed(file: Path) -> None:
    save_file({"losses": load_file(file)["nll"]}, file)


@pytest.mark.parametrize("damage", [cut, flipped, shortened, unsigned, renamed])
def test_a_damaged_file_is_measured_again_with_a_warning(llama, tmp_path, damage, caplog):
    wanted, _ = passes(llama, keep=tmp_path)
    file = sorted(tmp_path.iterdir())[0]
    whole = file.read_bytes()
    damage(file)
    found, read = passes(llama, keep=tmp_path)
    assert read == 1
    assert all(map(torch.equal, found, wanted))
    assert file.read_bytes() == whole
    (message,) = [m for name, _, m in caplog.record_tuples if name == LossStore.__module__]
    assert str(file) in message
    assert "measuring again" in message


def test_losses_that_are_no_numbers_are_not_kept(tmp_path):
    model = build()
    model.lm_head.register_forward_hook(lambda _, __, logits: logits * float("nan"))
    with pytest.raises(RopepatchError, match="expected a number"):
        perplexity(model, None, tokens(9), keep=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_an_error(llama, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RopepatchError, match=r"cannot keep losses in .*file"):
        perplexity(llama, None, tokens(9), keep=tmp_path / "file")


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_nothing(llama, tmp_path, monkeypatch):
    def full(*arguments: object, **options: object) -> None:
        Path(arguments[1]).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ropepatch.evaluation.store.save_file", full)
    with pytest.raises(RopepatchError, match="No space left on device"):
        perplexity(llama, None, tokens(9), keep=tmp_path)
    assert not list(tmp_path.iterdir())


DIGEST = "0123456789abcdef"


def claimed(job: Path, digest: str = DIGEST) -> Path:
    """A folder that is claimed and given back."""
    with ExitStack() as held:
        return claim_folder(job, digest, held)


def test_a_folder_is_of_one_at_a_time_and_claimed_again_when_it_is_free(tmp_path):
    job = tmp_path / ".job [1]"
    with ExitStack() as held:
        first = claim_folder(job, DIGEST, held)
        with ExitStack() as later:
            second = claim_folder(job, DIGEST, later)
            assert claimed(job, DIGEST[::-1]) not in (first, second)
            remove_folders(job)
            assert sorted(tmp_path.iterdir()) == sorted([first, second])
        assert claimed(job) == second != first
        remove_folders(job)
        assert list(tmp_path.iterdir()) == [first]
    assert claimed(job) == first
    remove_folders(job)
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_killed_process_is_free(tmp_path):
    """It dies with the lock in its hands."""
    killed = f"""
import contextlib, os, pathlib
from ropepatch.evaluation.store import claim_folder
claim_folder(pathlib.Path({str(tmp_path / ".job")!r}), {DIGEST!r}, contextlib.ExitStack())
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", killed], env=os.environ, check=False)
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    assert claimed(tmp_path / ".job") == left


def test_the_folders_of_a_job_whose_name_goes_on_are_not_removed(tmp_path):
    other = claimed(tmp_path / ".yarn-factor=8.5")
    claimed(tmp_path / ".yarn-factor=8")
    remove_folders(tmp_path / ".yarn-factor=8")
    assert list(tmp_path.iterdir()) == [other]


def test_a_folder_that_is_removed_before_it_is_locked_is_not_missed(tmp_path, monkeypatch):
    """Another process ends between the making of a folder and its lock."""
    job, acquire, removed = tmp_path / ".job", FileLock.acquire, []

    def late(lock: FileLock, **options: object) -> object:
        if not removed:
            removed.append(Path(lock.lock_file).parent)
            removed[0].rmdir()
        return acquire(lock, **options)

    monkeypatch.setattr(FileLock, "acquire", late)
    with ExitStack() as held:
        folder = claim_folder(job, DIGEST, held)
        remove_folders(job)
        assert len(removed) == 1
        assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_cannot_be_claimed_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(RopepatchError, match=r"cannot keep losses in .*absent"):
        claimed(tmp_path / "absent" / ".job")

    def unsupported(lock: FileLock, **options: object) -> None:
        raise NotImplementedError("no locks here")

    monkeypatch.setattr(FileLock, "acquire", unsupported)
    with pytest.raises(RopepatchError, match="no locks here"):
        claimed(tmp_path / ".job")
