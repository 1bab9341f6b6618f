"""What is read with what context, against one forward pass per token; and what is read together."""

import random
from itertools import starmap

import pytest
import torch
from loss_models import LENGTHS as OF_DOCUMENTS
from loss_models import (
    PROTOCOLS,
    VOCABULARY,
    build,
    decoder_passes,
    expected,
    protocol_name,
    tokens,
)
from tiny_models import tiny_model

from ropepatch.errors import RopepatchError
from ropepatch.evaluation import perplexity as module
from ropepatch.evaluation.perplexity import Window, key_of_batch, perplexity

BOS = 1
NEARLY = (
    60,
    58,
    60,
    60,
    33,
    33,
    60,
    7,
    7,
    60,
)  # some of them so alike that they are read together


def sliding(window, stride):
    return {"window": window, "stride": stride}


class WithBos:
    """As much of a tokenizer as token ids need: words are numbers."""

    bos_token_id: int | None = BOS
    eos_token_id = None

    def __call__(self, texts, **options):
        assert options["add_special_tokens"] is False
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


def test_every_sliding_window_begins_with_bos_if_needed():
    ids = torch.arange(10, 22)
    found = module.windows(0, ids, 6, 3, first=BOS)
    assert [window.ids.tolist() for window in found] == [
        [10, 11, 12, 13, 14, 15],
        [BOS, 14, 15, 16, 17, 18],
        [BOS, 17, 18, 19, 20, 21],
    ]
    assert [window.first for window in found] == [1, 3, 3]


def test_sliding_windows_of_gemma_begin_with_bos_by_default():
    model = tiny_model("gemma2")
    ids = torch.randint(3, 50, (40,))
    first = model.config.bos_token_id
    assert first is not None
    by_default, given = (
        perplexity(model, None, [ids], **sliding(16, 8), first=one).nll[0]
        for one in (None, first)
    )
    plain = perplexity(model, None, [ids], **sliding(16, 8), bos=False).nll[0]
    assert torch.equal(by_default, given)
    assert not torch.equal(by_default, plain)


# What is scored with what context


@torch.no_grad()
def slow_losses(model, ids, window=10**9, stride=1):
    """The losses -ln p(token | context) of a document, each from a forward pass of its own."""
    losses = []
    for t in range(1, len(ids)):
        begin = 0
        while (
            not begin <= t < begin + window
        ):  # windows from the left until one holds it
            begin += stride
        losses.append(
            -model(ids[None, begin:t]).logits[0, -1].log_softmax(-1)[ids[t]].item()
        )
    return torch.tensor(losses)


LENGTHS = (23, 9, 2, 16, 17, 16)
SLIDING = ((8, 3), (8, 7), (2, 1), (50, 3))


@pytest.mark.parametrize("tokens_per_batch", [1, 30])
@pytest.mark.parametrize(
    "protocol", [{}, *starmap(sliding, SLIDING)], ids=protocol_name
)
def test_every_token_gets_the_context_that_its_protocol_says(
    llama, protocol, tokens_per_batch, monkeypatch
):
    monkeypatch.setattr(module, "CHUNK", 6)
    options = protocol | {"tokens_per_batch": tokens_per_batch}
    curve = perplexity(llama, None, tokens(*LENGTHS), **options)
    expected = [slow_losses(llama, ids, **protocol) for ids in tokens(*LENGTHS)]
    torch.testing.assert_close(list(curve.nll), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("protocol", [{}, sliding(6, 2)], ids=protocol_name)
def test_bos_is_before_texts_alone_if_wanted(llama, protocol):
    (ids,) = tokens(12)
    words = " ".join(map(str, ids.tolist()))
    with_bos = torch.cat([torch.tensor([BOS]), ids])
    bare, begun = perplexity(llama, None, [ids, with_bos], **protocol).nll
    for bos, wanted in ((True, begun), (False, bare)):
        text, taken = perplexity(
            llama, WithBos(), [words, ids], bos=bos, **protocol
        ).nll
        assert torch.equal(text, wanted)
        assert torch.equal(taken, bare)
        (cut,) = perplexity(
            llama, WithBos(), [words], bos=bos, length=5, **protocol
        ).nll
        assert len(cut) == 4  # with bos, of five tokens it is one


# Memory and batches


def shapes_read(model, documents, **options):
    """(rows, length) of every forward pass of the decoder."""
    with decoder_passes(model) as shapes:
        perplexity(model, None, documents, **options)
    return shapes


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=protocol_name)
def test_the_order_of_documents_read_together_changes_nothing(llama, protocol):
    documents = tokens(*NEARLY)
    nll = perplexity(llama, None, documents, tokens_per_batch=200, **protocol).nll
    for seed in range(3):
        order = random.Random(seed).sample(range(len(NEARLY)), len(NEARLY))
        shuffled = perplexity(
            llama, None, [documents[i] for i in order], tokens_per_batch=200, **protocol
        )
        assert all(map(torch.equal, shuffled.nll, [nll[i] for i in order]))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0] * 4,
            "long_factor": [9.0] * 4,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_length_dependent_rope_has_no_memory_between_documents(rope):
    parameters = rope | {"rope_theta": 100.0, "original_max_position_embeddings": 31}
    model = build(max_position_embeddings=31, rope_parameters=parameters)
    documents = tokens(31, 32, 30, 32, 40)
    assert shapes_read(model, documents) == [(1, 30), (1, 31), (2, 32), (1, 40)]
    curve = perplexity(model, None, documents)
    for ids, nll in zip(documents, curve.nll, strict=True):
        perplexity(
            model, None, tokens(8)
        )  # makes `dynamic` forget the longer document before
        torch.testing.assert_close(nll, expected(model, ids), rtol=1e-5, atol=2e-5)


def test_the_key_of_a_batch_names_its_scored_tokens():
    ids, other = torch.arange(1, 7), torch.tensor([1, 2, 3, 4, 5, 7])
    same = [
        Window(0, 0, ids, 1),
        Window(7, 0, ids, 1),
        Window(0, 9, ids, 1),
    ]  # wherever it is read
    others = [Window(0, 0, other, 1), Window(0, 0, ids[:5], 1), Window(0, 0, ids, 2)]
    assert len({key_of_batch([window]) for window in same + others}) == 4


# Settings


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([], {}, "no documents"),
        (
            [[1, 2], [1, 2], [3]],
            {},
            r"documents\[2\] must have at least 2 tokens, got 1",
        ),
        (
            [[1, 2], [1, 2, VOCABULARY]],
            {},
            rf"documents\[1\]: token 2 is {VOCABULARY}, expected 0 to 47",
        ),
        (
            tokens(9),
            {"window": 8, "stride": 1.5},
            "`stride` must be a whole number, got 1.5",
        ),
        (
            tokens(9),
            {"window": 8},
            "need a length and a stride, got window=8, stride=None",
        ),
        *(
            (tokens(9), sliding(8, stride), f"from 1 to 7 .* got {stride}")
            for stride in (0, 8)
        ),
    ],
)
def test_invalid_documents_and_settings_raise_before_the_first_forward_pass(
    llama, documents, options, message
):
    def unread(done, total):
        raise AssertionError

    with pytest.raises(RopepatchError, match=message) as refused:
        perplexity(
            llama,
            documents=documents,
            progress=unread,
            **{"tokenizer": WithBos()} | options,
        )
    assert "\n" not in str(refused.value).partition("\nhint")[0]


# Resuming


class Killed(BaseException):
    pass


def passes(model, **options):
    """The losses and how many forward passes of the decoder they took."""
    with decoder_passes(model) as shapes:
        return list(perplexity(model, None, tokens(*OF_DOCUMENTS), **options).nll), len(
            shapes
        )


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=protocol_name)
def test_a_killed_measurement_resumes_with_the_same_losses(llama, tmp_path, protocol):
    batches = 3
    options, folder = protocol | {"tokens_per_batch": 70}, tmp_path / "made" / "here"
    uninterrupted, whole = passes(llama, **options)
    left = iter(range(batches - 1, -1, -1))

    def killed(done, total):
        if next(left) == 0:
            raise Killed

    with pytest.raises(Killed):
        perplexity(
            llama, None, tokens(*OF_DOCUMENTS), keep=folder, progress=killed, **options
        )
    resumed, rest = passes(llama, keep=folder, **options)
    assert rest == whole - batches
    assert all(map(torch.equal, resumed, uninterrupted))
    told = []
    again, none = passes(
        llama, keep=folder, progress=lambda *done: told.append(done), **options
    )
    assert none == 0
    assert told[-1][0] == told[-1][1]  # what is found counts
    assert all(map(torch.equal, again, uninterrupted))
