"""A measurement that is killed goes on where it was."""

import shutil

import pytest
import torch
from loss_models import LENGTHS, PROTOCOLS, build, decoder_passes, protocol_name, tokens
from transformers import PreTrainedModel

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.progress import Kept


class Killed(BaseException):
    pass


def passes(model: PreTrainedModel, **options: object) -> tuple[list[torch.Tensor], int]:
    """The losses and how many forward passes of the decoder they took."""
    with decoder_passes(model) as shapes:
        return list(perplexity(model, None, tokens(*LENGTHS), **options).nll), len(
            shapes
        )


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=protocol_name)
def test_killed_and_started_again_the_losses_are_the_same_and_nothing_is_read_twice(
    llama, tmp_path, protocol
):
    batches = 3
    options, folder = protocol | {"tokens_per_batch": 70}, tmp_path / "made" / "here"
    uninterrupted, whole = passes(llama, **options)
    left = iter(range(batches - 1, -1, -1))

    def killed(done: int, total: int | None) -> None:
        if next(left) == 0:
            raise Killed

    with pytest.raises(Killed):
        perplexity(
            llama, None, tokens(*LENGTHS), keep=folder, progress=killed, **options
        )
    resumed, rest = passes(llama, keep=folder, **options)
    assert rest == whole - batches
    assert all(map(torch.equal, resumed, uninterrupted))
    told: list[tuple[int, int | None]] = []
    again, none = passes(
        llama, keep=folder, progress=lambda *done: told.append(done), **options
    )
    assert none == 0
    assert told[-1][0] == told[-1][1]  # what is found counts
    assert all(map(torch.equal, again, uninterrupted))


@pytest.mark.parametrize("cut", [1, 60])
def test_a_line_that_was_not_written_to_its_end_is_measured_again(llama, tmp_path, cut):
    wanted, whole = passes(llama, keep=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-cut])
    for read in (1, 0):
        found, taken = passes(llama, keep=tmp_path)
        assert taken == read < whole
        assert all(map(torch.equal, found, wanted))


def test_processes_share_a_folder_and_lose_no_line_where_one_was_cut_short_or_the_folder_removed(
    tmp_path,
):
    folder = tmp_path / "shared"
    first, second = Kept(folder), Kept(folder)
    first.write("a", 1)
    (file,) = folder.iterdir()
    second.write("b", 2)
    assert Kept(folder).found == {"a": 1, "b": 2}
    file.write_bytes(file.read_bytes()[:-3])
    first.write("c", 3)
    assert Kept(folder).found == {"b": 2, "c": 3}
    shutil.rmtree(folder)
    second.write("d", 4)
    assert Kept(folder).found == {"d": 4}


def test_losses_that_are_no_numbers_are_not_kept(tmp_path):
    model = build()
    model.lm_head.register_forward_hook(lambda _, __, logits: logits * float("nan"))
    with pytest.raises(RopepatchError, match="expected a number"):
        perplexity(model, None, tokens(9), keep=tmp_path)
    assert not list(tmp_path.iterdir())
