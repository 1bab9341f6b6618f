"""Every protocol against hand-written windows and against one forward pass per token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_models import VOCABULARY, build, shift_model, tokens
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.evaluation.protocols import Disjoint, OnePass, Sliding, Truncated

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


@torch.no_grad()
def loss(model: PreTrainedModel, context: Tensor, token: int) -> float:
    """-ln p(token | context) from a forward pass of its own."""
    return -model(context[None]).logits[0, -1].log_softmax(-1)[token].item()


# What is scored with what context, one token at a time. Contexts as [begin, end) of the document.


def slow_one_pass(length: int) -> list[tuple[int, int]]:
    return [(0, t) for t in range(1, length)]


def slow_sliding(length: int, window: int, stride: int) -> list[tuple[int, int]]:
    """For each token, try windows from the left until one holds it."""
    contexts = []
    for t in range(1, length):
        begin = 0
        while not begin <= t < begin + window:
            begin += stride
        contexts.append((begin, t))
    return contexts


def slow_disjoint(length: int, window: int) -> list[list[tuple[int, int]]]:
    rows: dict[int, list[tuple[int, int]]] = {}
    for t in range(length):
        begin = t // window * window
        if t > begin:
            rows.setdefault(begin, []).append((begin, t))
    return list(rows.values())


def slow_row(model: PreTrainedModel, ids: Tensor, contexts: list[tuple[int, int]]) -> Tensor:
    return torch.tensor([loss(model, ids[begin:end], int(ids[end])) for begin, end in contexts])


def slow_row_after_bos(model: PreTrainedModel, ids: Tensor, contexts: list[tuple[int, int]]) -> Tensor:
    """The same with the beginning-of-sequence token, at the document's index 0, in front of every context."""
    return torch.tensor(
        [
            loss(model, torch.cat([torch.tensor([BOS]), ids[max(begin, 1) : end]]), int(ids[end]))
            for begin, end in contexts
        ]
    )


def assert_rows(found: tuple[Tensor, ...], wanted: list[Tensor]) -> None:
    assert [len(row) for row in found] == [len(row) for row in wanted]
    torch.testing.assert_close(list(found), wanted, rtol=1e-5, atol=2e-5)


LENGTHS = (23, 9, 2, 16, 17)


def test_one_pass_gives_every_token_all_before_it(llama):
    found = perplexity(llama, None, tokens(*LENGTHS), protocol=OnePass(), chunk=6).nll
    assert_rows(found, [slow_row(llama, ids, slow_one_pass(len(ids))) for ids in tokens(*LENGTHS)])


@pytest.mark.parametrize("tokens_per_batch", [1, 30, 4096])
@pytest.mark.parametrize(("window", "stride"), [(8, 3), (8, 7), (8, 1), (8, 4), (2, 1), (22, 5), (23, 9)])
def test_sliding_gives_every_token_the_first_window_that_holds_it(llama, window, stride, tokens_per_batch):
    curve = perplexity(
        llama,
        None,
        tokens(*LENGTHS),
        protocol=Sliding(window, stride),
        chunk=6,
        tokens_per_batch=tokens_per_batch,
    )
    rows = [slow_row(llama, ids, slow_sliding(len(ids), window, stride)) for ids in tokens(*LENGTHS)]
    assert_rows(curve.nll, rows)
    assert curve.documents == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("window", [2, 9, 17, 23])
def test_truncated_reads_the_beginning_of_the_documents_that_are_long_enough(llama, window):
    curve = perplexity(llama, None, tokens(*LENGTHS), protocol=Truncated(window), chunk=6)
    long_enough = [index for index, length in enumerate(LENGTHS) if length >= window]
    documents = tokens(*LENGTHS)
    assert_rows(curve.nll, [slow_row(llama, documents[i], slow_one_pass(window)) for i in long_enough])
    assert curve.documents == tuple(long_enough)


@pytest.mark.parametrize("window", [2, 5, 8, 23, 40])
def test_disjoint_reads_every_window_on_its_own(llama, window):
    curve = perplexity(llama, None, tokens(*LENGTHS), protocol=Disjoint(window), chunk=6)
    rows = [
        (index, slow_row(llama, ids, contexts))
        for index, ids in enumerate(tokens(*LENGTHS))
        for contexts in slow_disjoint(len(ids), window)
    ]
    assert_rows(curve.nll, [row for _, row in rows])
    assert curve.documents == tuple(index for index, _ in rows)


# A beginning-of-sequence token before every window


def text_of(ids: Tensor) -> str:
    return " ".join(str(int(i)) for i in ids)


@pytest.mark.parametrize(("window", "stride"), [(8, 3), (8, 7), (3, 2), (22, 5)])
def test_sliding_windows_that_begin_with_bos(llama, window, stride):
    documents = [torch.cat([torch.tensor([BOS]), ids]) for ids in tokens(*LENGTHS)]
    found = perplexity(
        llama, WithBos(), tokens(*LENGTHS), protocol=Sliding(window, stride), bos="window", chunk=6
    )
    # Of every window, BOS included, window - 1 tokens are the document's.
    contexts = [slow_sliding(len(ids) - 1, window - 1, stride) for ids in documents]
    rows = [
        slow_row_after_bos(llama, ids, [(1, 1), *((begin + 1, end + 1) for begin, end in row)])
        for ids, row in zip(documents, contexts, strict=True)
    ]
    assert_rows(found.nll, rows)


@pytest.mark.parametrize("window", [2, 5, 8, 30])
def test_disjoint_windows_that_begin_with_bos_score_every_token(llama, window):
    found = perplexity(llama, WithBos(), tokens(*LENGTHS), protocol=Disjoint(window), bos="window", chunk=6)
    rows = [
        torch.tensor(
            [
                loss(llama, torch.cat([torch.tensor([BOS]), piece[:t]]), int(piece[t]))
                for t in range(len(piece))
            ]
        )
        for ids in tokens(*LENGTHS)
        for piece in ids.split(window - 1)
    ]
    assert_rows(found.nll, rows)
    assert sum(map(len, found.nll)) == sum(LENGTHS)


@pytest.mark.parametrize("protocol", [OnePass(), Truncated(10), Sliding(50, 3)], ids=lambda p: p.label)
def test_bos_before_the_only_window_is_bos_before_the_document(llama, protocol):
    texts = [text_of(ids) for ids in tokens(20, 12)]
    by_window, by_document = (
        perplexity(llama, WithBos(), texts, protocol=protocol, bos=bos).nll for bos in ("window", "document")
    )
    assert all(map(torch.equal, by_window, by_document))


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


@pytest.mark.parametrize("documents", [[[]], [[BOS]]])
def test_nothing_but_bos_is_no_document(llama, documents):
    with pytest.raises(RopepatchError, match=r"documents\[0\] must be one row of at least 2 tokens"):
        perplexity(llama, WithBos(), documents, bos="window")


@pytest.mark.parametrize(
    ("tokenizer", "reason"), [(None, "tokenizer is None"), (WithoutBos(), "WithoutBos has none")]
)
def test_bos_of_windows_needs_a_tokenizer_that_has_one(llama, tokenizer, reason):
    with pytest.raises(RopepatchError, match=f"beginning-of-sequence token, but {reason}"):
        perplexity(llama, tokenizer, tokens(9), bos="window")


def test_a_bos_outside_the_vocabulary_is_named(llama):
    class Foreign(WithBos):
        bos_token_id = VOCABULARY

    with pytest.raises(RopepatchError, match=rf"documents\[0\]: token 0 is {VOCABULARY}"):
        perplexity(llama, Foreign(), tokens(9), bos="window")


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


def test_documents_that_are_all_too_short_are_an_error(llama):
    with pytest.raises(
        RopepatchError, match="truncated window=30: none of 2 documents is so long, the longest has 20 tokens"
    ):
        perplexity(llama, None, tokens(20, 12), protocol=Truncated(30))


@pytest.mark.parametrize("settings", [{"protocol": "sliding"}, {"bos": "always"}])
def test_settings_that_do_not_exist_are_named(llama, settings):
    (name, value), *_ = settings.items()
    with pytest.raises(RopepatchError, match=f"{name} must be one of .* got '{value}'"):
        perplexity(llama, None, tokens(9), **settings)
