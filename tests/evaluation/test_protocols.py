"""Every protocol against hand-written windows and against one forward pass per token."""

import math
from itertools import starmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_models import VOCABULARY, build, shift_model, tokens
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.evaluation.protocols import Disjoint, OnePass, Protocol, Sliding, Truncated

BOS = 1


class WithBos:
    """As much of a tokenizer as token ids need: words are numbers."""

    bos_token_id: int | None = BOS
    eos_token_id = None

    def __call__(self, texts: list[str], **options: object) -> dict[str, list[list[int]]]:
        assert options["add_special_tokens"] is False
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


class WithoutBos(WithBos):
    bos_token_id = None


class WithForeignBos(WithBos):
    bos_token_id = VOCABULARY


@torch.no_grad()
def loss(model: PreTrainedModel, context: Tensor, token: int) -> float:
    """-ln p(token | context) from a forward pass of its own."""
    return -model(context[None]).logits[0, -1].log_softmax(-1)[token].item()


# What is scored with what context


def slow_rows(model: PreTrainedModel, ids: Tensor, protocol: Protocol, before: int) -> list[Tensor]:
    """The losses of a document, token by token; where ``before`` is 1, its first token begins each window."""
    if isinstance(protocol, Truncated):
        ids = ids[: protocol.window] if len(ids) >= protocol.window else ids[:0]
    size = len(ids) if isinstance(protocol, OnePass) else protocol.window - before
    rows: dict[int, list[float]] = {}
    for t in range(1, len(ids)):
        begin = before
        if isinstance(protocol, Sliding):  # try windows from the left until one holds it
            while not begin <= t < begin + size:
                begin += protocol.stride
        elif isinstance(protocol, Disjoint):
            begin += (t - before) // size * size
        context = torch.cat([ids[:before], ids[begin:t]])
        if len(context):
            row = rows.setdefault(begin if isinstance(protocol, Disjoint) else 0, [])
            row.append(loss(model, context, int(ids[t])))
    return list(map(torch.tensor, rows.values()))


LENGTHS = (23, 9, 2, 16, 17)


@pytest.mark.parametrize(("bos", "tokens_per_batch"), [("document", 1), ("document", 4096), ("window", 30)])
@pytest.mark.parametrize(
    "protocol",
    [
        OnePass(),
        *map(Truncated, (2, 9, 17, 23)),
        *starmap(Sliding, ((8, 3), (8, 7), (8, 1), (8, 4), (3, 2), (2, 1), (22, 5), (23, 9), (50, 3))),
        *map(Disjoint, (2, 5, 8, 23, 40)),
    ],
    ids=lambda p: p.label,
)
def test_every_token_gets_the_context_that_its_protocol_says(llama, protocol, bos, tokens_per_batch):
    before = int(bos == "window")
    options = {"protocol": protocol, "bos": bos, "tokens_per_batch": tokens_per_batch, "chunk": 6}
    curve = perplexity(llama, WithBos(), tokens(*LENGTHS), **options)
    expected = [
        (index, row)
        for index, ids in enumerate(tokens(*LENGTHS))
        for row in slow_rows(llama, torch.tensor([BOS] * before + ids.tolist()), protocol, before)
    ]
    assert curve.documents == tuple(index for index, _ in expected)
    assert [len(row) for row in curve.nll] == [len(row) for _, row in expected]
    torch.testing.assert_close(list(curve.nll), [row for _, row in expected], rtol=1e-5, atol=2e-5)


# A beginning-of-sequence token before every window


def text_of(ids: Tensor) -> str:
    return " ".join(str(int(i)) for i in ids)


def test_bos_of_a_document_is_before_texts_alone_and_none_is_nowhere(llama):
    (ids,) = tokens(12)
    with_bos = torch.cat([torch.tensor([BOS]), ids])
    bare, begun = perplexity(llama, None, [ids, with_bos]).nll
    for bos, expected in (("document", begun), ("none", bare)):
        text, taken = perplexity(llama, WithBos(), [text_of(ids), ids], bos=bos).nll
        assert torch.equal(text, expected)
        assert torch.equal(taken, bare)


@pytest.mark.parametrize("protocol", [OnePass(), Disjoint(5), Sliding(6, 2)], ids=lambda p: p.label)
def test_ids_that_begin_with_bos_are_given_no_second(llama, protocol):
    (ids,) = tokens(12)
    with_bos = torch.cat([torch.tensor([BOS]), ids])
    bare, begun = (
        perplexity(llama, WithBos(), [document], protocol=protocol, bos="window").nll
        for document in (ids, with_bos)
    )
    assert all(map(torch.equal, bare, begun))


def test_a_length_counts_bos(llama):
    (ids,) = tokens(12)
    for bos in ("window", "document"):
        (nll,) = perplexity(llama, WithBos(), [text_of(ids)], bos=bos, length=5).nll
        assert len(nll) == 4
    assert len(perplexity(llama, WithBos(), [text_of(ids)], bos="none", length=5).nll[0]) == 4


def test_a_single_token_after_bos_is_scored(llama):
    (nll,) = perplexity(llama, WithBos(), [[7]], bos="window").nll
    assert nll.item() == pytest.approx(loss(llama, torch.tensor([BOS]), 7), abs=1e-5)


# Windows


@settings(deadline=None)
@given(st.data())
def test_sliding_scores_every_token_once_with_as_much_context_as_it_says(data):
    window = data.draw(st.integers(2, 40))
    stride = data.draw(st.integers(1, window - 1))
    length = data.draw(st.integers(2, 120))
    before = data.draw(st.sampled_from([0, 1]))
    ((first, *later),) = Sliding(window, stride).rows(length, before)
    scored = [t for begin, end, at in (first, *later) for t in range(at, end)]
    assert scored == list(range(1, length))
    assert all(window - stride <= at - begin + before < window for begin, _, at in later)
    assert all(end - begin + before == window for begin, end, _ in (first, *later)[:-1])
    assert all((begin - before) % stride == 0 for begin, _, _ in later)
    assert (first, *later)[-1].end == length


def lm_eval_rolling(ids: list[int], max_length: int) -> list[tuple[int, int]]:
    """Its windows with context_len 1, as pairs of the input's first token and a target."""
    utils = pytest.importorskip("lm_eval.utils")
    pairs = []
    for window in utils.get_rolling_token_windows(ids[1:], ids[0], max_length, 1):
        inputs, targets = utils.make_disjoint_window(window)
        pairs += [(inputs[0], target) for target in targets]
    return pairs


@pytest.mark.parametrize("length", [6, 7, 12, 13, 14, 30])
def test_the_rolling_likelihood_of_lm_eval_slides_by_its_inputs_but_for_a_last_full_window(length):
    ids = list(range(length))  # every token is its own index
    ((*windows,),) = Sliding(7, stride=6).rows(length, 0)
    begin, _, last = windows[-1]
    ours = [(begin, t) for begin, end, scored in windows for t in range(scored, end)]
    begin = max(0, min(begin, length - 7))
    assert lm_eval_rolling(ids, 6) == [pair if pair[1] < last else (begin, pair[1]) for pair in ours]


# Protocols beside each other


PROTOCOLS = (OnePass(), Truncated(16), Sliding(8, 3), Disjoint(8))


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: p.label)
@pytest.mark.parametrize("bos", ["document", "window", "none"])
def test_a_uniform_model_has_its_vocabulary_for_a_perplexity_by_every_protocol(protocol, bos):
    model = build()
    nn.init.zeros_(model.lm_head.weight)
    curve = perplexity(model, WithBos(), tokens(33, 20), protocol=protocol, bos=bos, chunk=5)
    assert curve.between(0, 40).value == pytest.approx(VOCABULARY)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: p.label)
@pytest.mark.parametrize("step", [-1, 0, 1, 2])
@pytest.mark.parametrize(("probability", "chunk"), [(0.9, 5), (0.25, 1)])
def test_only_the_model_of_the_next_token_scores_well_by_every_protocol(protocol, step, probability, chunk):
    counting = [torch.arange(30) % 20, torch.arange(3, 20)]
    curve = perplexity(shift_model(step, probability), None, counting, protocol=protocol, chunk=chunk)
    score = 1 / probability if step == 1 else 19 / (1 - probability)
    assert curve.between(0, 40).value == pytest.approx(score, rel=1e-4)
    assert torch.cat(curve.nll).sub(math.log(score)).abs().max() < 1e-4


# Memory and batches


def test_of_overlapping_windows_only_scored_positions_pass_the_head():
    model = build(vocab_size=2000)
    passed = []
    model.lm_head.register_forward_hook(lambda _, args, __: passed.append(args[0].shape[:2].numel()))
    perplexity(model, None, tokens(160, vocabulary=2000), protocol=Sliding(64, 16), chunk=1024)
    # One window of 64, scored from token 1 on, and six of which 16 tokens count; two more of each to check.
    assert sum(passed) == (63 + 2) + 6 * (16 + 2)


# Settings


@pytest.mark.parametrize("window", [1, 0, -3])
@pytest.mark.parametrize("protocol", [Truncated, Disjoint, lambda window: Sliding(window, 1)])
def test_a_window_without_a_scored_token_is_an_error(protocol, window):
    with pytest.raises(RopepatchError, match=f"window must be at least 2 tokens, got {window}"):
        protocol(window)


@pytest.mark.parametrize("stride", [0, -1, 8, 9])
def test_a_stride_that_leaves_tokens_out_is_an_error(stride):
    with pytest.raises(RopepatchError, match=f"from 1 to 7 for windows of 8 tokens, got {stride}") as error:
        Sliding(8, stride)
    assert "Disjoint(8)" in str(error.value.hint)


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([], {}, "no documents"),
        (["text"], {"tokenizer": None}, "tokenizer is None"),
        ([[1, 2], [1, 2], [3]], {}, r"documents\[2\] must be one row of at least 2 tokens, got shape \[1\]"),
        ([1, 2, 3], {}, r"documents\[0\] must be one row of at least 2 tokens, got shape \[\]"),
        ([[]], {"bos": "window"}, r"documents\[0\] must be one row of at least 2 tokens"),
        ([[BOS]], {"bos": "window"}, r"documents\[0\] must be one row of at least 2 tokens"),
        ([[1, 2], [1, 2, VOCABULARY]], {}, rf"documents\[1\]: token 2 is {VOCABULARY}, expected 0 to 47"),
        ([[1, -1, 5]], {}, r"documents\[0\]: token 1 is -1, expected"),
        ([[1.0, 2.5]], {}, r"documents\[0\] must hold whole token ids, got torch.float32"),
        (tokens(20, 12), {"protocol": Truncated(30)}, "none of 2 documents is so long, the longest has 20"),
        (tokens(9), {"tokenizer": WithForeignBos(), "bos": "window"}, f"token 0 is {VOCABULARY}"),
        (tokens(9), {"tokenizer": WithoutBos(), "bos": "window"}, "token, but WithoutBos has none"),
        (tokens(9), {"tokenizer": None, "bos": "window"}, "token, but tokenizer is None"),
        (tokens(9), {"bos": "always"}, "bos must be one of .* got 'always'"),
        (tokens(9), {"protocol": "sliding"}, "protocol must be one of .* got 'sliding'"),
        (tokens(9), {"length": 1}, "length must be at least 2"),
        (tokens(9), {"chunk": 0}, "chunk and tokens_per_batch must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_is(llama, documents, options, message):
    def unread(done: int, total: int | None) -> None:
        raise AssertionError

    with pytest.raises(RopepatchError, match=message):
        perplexity(llama, documents=documents, progress=unread, **{"tokenizer": WithBos()} | options)
