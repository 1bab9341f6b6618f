"""LongCE against float64 NumPy: the losses of short windows one by one, the weights, and their gradients."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from long_context_oracle import CE_SABOTAGE, long_cross_entropy
from loss_models import build

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.training.forecast import forecast
from ropepatch.training.fused_loss import TeacherOutput, linear_distillation
from ropepatch.training.long_ce import LongCE
from ropepatch.training.loss import causal_lm_loss, linear_head
from ropepatch.training.packed_attention import packed_attention
from ropepatch.training.recipe import LongTokens, read_recipe

WINDOW, STRIDE = 12, 3
SEGMENTS = (40, 9, 12, 27)


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def batch():
    ids = torch.randint(1, 48, (1, sum(SEGMENTS)), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    ends = torch.tensor([0, *SEGMENTS]).cumsum(0, dtype=torch.int32)
    labels[0, ends[:-1].long()] = -100
    labels[0, 25:28] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.cat([torch.arange(length) for length in SEGMENTS])[None],
        **{f"cu_seq_lens_{side}": ends for side in "qk"},
        **{f"max_length_{side}": max(SEGMENTS) for side in "qk"},
    }


@pytest.fixture(scope="module")
def losses(model, batch):
    """By hand, of each labelled token: -ln p with all its segment before it, and in its short window."""

    def loss(ids):
        with torch.no_grad():
            logits = model(ids[None, :-1]).logits[0, -1].double()
        return (logits.logsumexp(0) - logits[ids[-1]]).item()

    full, short = [], []
    begin = 0
    for length in SEGMENTS:
        ids = batch["input_ids"][0, begin : begin + length]
        for at in range(1, length):
            if batch["labels"][0, begin + at] == -100:
                continue
            full.append(loss(ids[: at + 1]))
            first = (
                0 if at < WINDOW else -(-(at + 1 - WINDOW) // STRIDE) * STRIDE
            )  # holds it, moved in strides
            short.append(loss(ids[first : at + 1]) if first else np.nan)
        begin += length
    return np.array(full), np.array(short)


@pytest.fixture(scope="module", params=["chunks", "all logits"])
def found(request, model, batch):
    """The loss and the gradients of a step."""
    head = linear_head(model) if request.param == "chunks" else None
    with packed_attention(model):
        weigh = LongCE(WINDOW, STRIDE, 5.0).weigh(model, batch, head)
        loss = causal_lm_loss(model, batch, head=head, weigh=weigh)
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


def test_the_loss_is_that_of_the_paper(found, losses):
    full, short = losses
    weights = np.exp(short - full)
    assert (np.nanmax(weights) > 5, np.nanmin(weights) < 1, np.isnan(short).any()) == (True, True, True)
    assert found[0] == pytest.approx(long_cross_entropy(full, short), rel=1e-5)


@pytest.mark.parametrize("mistake", CE_SABOTAGE.values(), ids=CE_SABOTAGE)
def test_a_mistaken_loss_is_another(found, losses, mistake):
    assert found[0] != pytest.approx(mistake(*losses), rel=1e-3)


def test_windows_that_do_not_overlap_give_another_loss(model, batch, losses):
    with packed_attention(model):
        apart = LongCE(WINDOW, WINDOW - 1, 5.0).weigh(model, batch, None)
        loss = causal_lm_loss(model, batch, head=None, weigh=apart)
    assert loss.item() != pytest.approx(long_cross_entropy(*losses), rel=1e-3)


def test_no_gradient_goes_through_the_weights(found, model, batch, losses):
    full, short = losses
    weights = np.where(np.isnan(short), 1, np.minimum(np.exp(short - full), 5))
    with packed_attention(model):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits[0, :-1]
    labels = batch["labels"][0, 1:]
    kept = labels != -100
    each = F.cross_entropy(logits[kept], labels[kept], reduction="none")
    expected = (each * torch.tensor(weights, dtype=each.dtype)).mean()
    pairs = zip(found[1], torch.autograd.grad(expected, list(model.parameters())), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_distillation_is_weighed_token_by_token_by_the_losses_of_the_student(share):
    torch.manual_seed(0)
    hidden, weight, teacher = (torch.randn(size, dtype=torch.float64) for size in ((9, 4), (7, 4), (9, 7)))
    labels = torch.tensor([1, 2, -100, 0, 3, 6, 5, 4, 1])
    short = torch.tensor([9, np.nan, 3, 0.5, 2, 1, 8, 0, 4], dtype=torch.float64)
    hidden.requires_grad_()

    def weigh(losses, rows):
        return torch.where(short[rows].isnan(), 1, (short[rows] - losses).exp().clamp(max=5))

    found = linear_distillation(
        hidden,
        weight,
        labels,
        teacher=TeacherOutput(teacher),
        temperature=2.0,
        cross_entropy=share,
        weigh=weigh,
        chunk=4,
    )
    logits, expected = hidden @ weight.T, 0.0
    for n, label in enumerate(labels.tolist()):
        if label == -100:
            continue
        own = -logits[n].log_softmax(0)[label]
        factor = 1.0 if short[n].isnan() else min(np.exp(short[n].item() - own.item()), 5)
        p, q = (teacher[n] / 2).log_softmax(0), (logits[n] / 2).log_softmax(0)
        expected = expected + factor * (share * own + (1 - share) * 4 * (p.exp() * (p - q)).sum())
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(value, hidden)[0] for value in (found, expected)))


def test_segments_within_the_window_weigh_one(model, batch):
    with packed_attention(model):
        weigh = LongCE(40, 10, 5.0).weigh(model, batch, None)
    assert weigh(torch.rand(88) * 9, slice(0, 88)).eq(1).all()


# The recipe


def test_windows_are_the_old_context_by_a_quarter_if_nothing_is_said():
    assert LongTokens().windows(256) == (256, 64)
    assert LongTokens(window="0.5x", stride=100).windows(256) == (128, 100)
    with pytest.raises(RopepatchError, match="stride must be from 1 to 127 for windows of 128, got 128"):
        LongTokens(window=128, stride=128).windows(256)


def test_a_dry_run_says_what_is_read_besides_and_that_no_row_is_longer(tmp_path):
    recipe, plan = read_recipe("tiny"), ropepatch.plan("tiny", to="2k")
    weighed = recipe.model_copy(update={"long_ce": LongTokens(window=1024, stride=512)})
    said = forecast(plan, weighed, tmp_path / "out")
    # Of each of 300 rows of 2048 tokens two windows beside the first; those of 256 are within it.
    assert said.content["weighing_tokens"] == 300 * 2 * 1024
    assert "(LongCE), for which at most" in str(said)
    plain = forecast(plan, recipe, tmp_path / "out")
    assert (plain.content["weighing_tokens"], "LongCE" in str(plain)) == (0, False)
    beyond = weighed.model_copy(update={"long_ce": LongTokens(window=2048)})
    (obstacle,) = forecast(plan, beyond, tmp_path / "out").obstacles
    assert str(obstacle) == "no row is longer than the 2048 tokens of long_ce.window"
