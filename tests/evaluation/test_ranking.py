"""The ranking of scalings: how often it errs in simulated worlds, and what follows from known results."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy
from made_results import asking, reading

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.ranking import rank
from ropepatch.evaluation.results import BASELINE, FLOOR

LENGTHS = (256, 1024)
NOISE = 0.05  # nats by which a text differs from one scaling to the next


def read(label, nats, inside=0.5, **options):
    """The losses within the trained context and over the target."""
    return reading(label, [inside, nats], lengths=LENGTHS, **options)


def asked(
    label,
    log_prob,
    correct=(4, 4),
    n=4,
    **options,
):
    """The answers to questions that the baseline knows within its context."""
    log_probs = None if log_prob is None else [-0.1, log_prob]
    return asking(label, correct, n=n, log_prob=log_probs, lengths=LENGTHS, **options)


def ranked(*results):
    return rank(results)


# Simulated worlds, fixed seeds


def recommended(seed, scalings, texts, gain=0.0, *, ask):
    """What is recommended in a world where only the first scaling gains, if any does."""
    draw = np.random.default_rng([seed, scalings, texts])
    hard, deep = draw.normal(3, 0.5, texts), draw.normal(-2, 0.5, 10)
    results = []
    for label in (BASELINE, *(f"s{number}" for number in range(scalings))):
        own = hard - gain * (label == "s0")
        results.append(
            read(label, (own + draw.normal(0, NOISE, texts)).tolist(), hard.tolist())
        )
        if ask:
            log_probs = (deep + draw.normal(0, NOISE, 10)).tolist()
            results.append(asked(label, log_probs, (10, 5), n=10, depths=(0.5,)))
    return ranked(*results).recommended


@pytest.mark.parametrize(
    ("scalings", "texts", "ask"),
    [
        (1, 3, False),
        pytest.param(4, 8, True, marks=pytest.mark.sweep),
        pytest.param(13, 8, True, marks=pytest.mark.sweep),
    ],
)
def test_where_none_helps_none_is_recommended_in_95_percent(scalings, texts, ask):
    """In 1,000 worlds of each cell it was one in 1.4 to 3.3 %: the tests have two sides, one recommends."""
    worlds = 200
    taken = sum(
        recommended(seed, scalings, texts, ask=ask) is not None
        for seed in range(worlds)
    )
    assert taken <= 0.05 * worlds


def test_a_gain_of_two_deviations_is_found_in_24():
    gain = 2 * NOISE * math.sqrt(2)  # the noise of a difference
    found = [recommended(seed, 4, 24, gain, ask=False) == "s0" for seed in range(40)]
    assert sum(found) >= 36


# What follows from results that are known; each text, and each haystack, is as hard for all


def test_scalings_are_told_apart_document_by_document():
    """Intervals of the losses are 0.2 nats wide to each side, the scalings differ by 0.05."""
    floor, base = read(FLOOR, 0.1), read(BASELINE, 3.0, width=0.2)
    ranking = ranked(
        base, read("b", 1.05, width=0.2), read("a", 1.0, 0.6, width=0.2), floor
    )
    assert [row.label for row in ranking.rows] == ["a", "b", BASELINE]
    first, second, last = ranking.rows
    assert (first.loss.value, first.loss_gain.value) == pytest.approx((1.0, 2.0))
    assert second.loss_gain.interval() == pytest.approx((1.56, 2.34))
    assert first.short_context_cost.value == pytest.approx(0.1)
    assert [row.better for row in ranking.rows] == [("loss",), ("loss",), ()]
    assert (last.loss_gain.value, last.answers) == (0, {})
    assert (ranking.recommended, ranking.target, ranking.original) == ("a", 1024, 256)


@pytest.mark.parametrize("ask", [False, True])
@pytest.mark.parametrize("texts", [1, 2])
def test_with_fewer_than_three_texts_no_method_helps(texts, ask):
    """They cannot tell a harm to the loss, which a recommendation excludes, whatever the answers say."""
    answers = [asked(BASELINE, -2.0), asked("a", -0.5)] if ask else []
    losses = [
        read(label, [nats] * texts, [0.5] * texts)
        for label, nats in ((BASELINE, 9.0), ("a", 1.0))
    ]
    ranking = ranked(*losses, *answers)
    assert ranking.recommended is None
    assert not any(row.helps for row in ranking.rows)
    assert ranking.warnings[0].startswith(f"documents: {texts};")


@pytest.mark.parametrize(("loss", "recommended"), [(2.0, None), (1.0, "a")])
def test_with_fewer_than_three_prompts_answers_have_no_effect(loss, recommended):
    answers = [
        asked(label, log_prob, (2, 2), 2)
        for label, log_prob in ((BASELINE, -9.0), ("a", -0.1))
    ]
    ranking = ranked(read(BASELINE, 2.0), read("a", loss), *answers)
    assert ranking.recommended == recommended
    assert ranking.not_counted == {"passkey": "too few prompts for an interval: 2"}
    assert ranking.kinds == []
    assert len(ranking.warnings) == 1


def test_answer_log_prob_ranks_where_accuracy_and_loss_are_equal():
    """By 0.2 nats, where haystacks differ by 2."""
    deep, gained = np.array([-1.0, -3.0, -2.0, -4.0]), np.array([0.9, 1.1, 1.05, 0.95])
    labels = {BASELINE: -3.0, "a": 0.0, "b": 0.2}
    readings = [read(label, 2.0) for label in labels]
    answers = [
        asked(label, list(deep + gain * gained), (4, 1))
        for label, gain in labels.items()
    ]
    ranking = ranked(*readings, *answers)
    assert [row.label for row in ranking.rows] == ["b", "a", BASELINE]
    assert len({row.answers["passkey"].found.value for row in ranking.rows}) == 1
    assert ranking.recommended == "b"
    assert ranking.rows[0].gain("passkey").value == pytest.approx(3.2)
    assert [row.better for row in ranking.rows] == [("passkey",), ("passkey",), ()]


@pytest.mark.parametrize(
    ("loss", "log_prob"),
    [(1.0, -3.0), (2.1, -0.5)],
    ids=["worse answers", "worse loss"],
)
def test_a_method_worse_in_one_measure_is_not_recommended(loss, log_prob):
    ranking = ranked(
        read(BASELINE, 2.0),
        read("a", loss),
        asked(BASELINE, -1.0, (4, 2)),
        asked("a", log_prob, (4, 2)),
    )
    assert ranking.recommended is None
    (a,) = [row for row in ranking.rows if row.label == "a"]
    assert {*a.better, *a.worse} == {"loss", "passkey"}


def harmed_beside(others):
    """Method x has a lower loss and less probable answers, each significant alone; the others do nothing."""
    draw = np.random.default_rng(3)
    loss, deep = draw.normal(3, 0.3, 12), draw.normal(-1, 0.3, 10)
    harm = -0.1 + draw.normal(0, 0.095, 10)
    assert (
        0.05 / (2 * (others + 1)) < scipy.stats.ttest_1samp(harm, 0).pvalue < 0.05
        or not others
    )

    def of(label, gain, change):
        read_loss = read(label, list(loss - gain), list(np.full(12, 0.5)))
        return [
            read_loss,
            asked(label, list(deep + change), (10, 5), 10, depths=(0.5,)),
        ]

    results = of(BASELINE, np.zeros(12), np.zeros(10)) + of(
        "x", 0.5 + draw.normal(0, 0.02, 12), harm
    )
    for number in range(others):
        results += of(f"o{number}", draw.normal(0, 0.3, 12), draw.normal(0, 0.3, 10))
    return ranked(*results)


@pytest.mark.parametrize("others", [0, 12])
def test_more_methods_never_hide_a_harm(others):
    ranking = harmed_beside(others)
    (x,) = [row for row in ranking.rows if row.label == "x"]
    assert (x.better, x.worse) == (("loss",), ("passkey",))
    assert ranking.recommended is None


def test_a_loss_breaks_the_tie_of_answers():
    wave = [-1.0, -2.0, -1.0, -2.0]
    ranking = ranked(
        *(
            read(label, nats)
            for label, nats in {BASELINE: 9.0, "a": 1.5, "b": 1.0}.items()
        ),
        asked(BASELINE, -9.0),
        asked("a", wave),
        asked("b", [x - 0.1 for x in wave[::-1]], (4, 3)),
    )
    assert (ranking.recommended, ranking.rows[0].label) == ("b", "b")
    by_loss = [row.answers["passkey"].log_prob.value for row in ranking.rows]
    assert by_loss[0] < by_loss[1]


def test_kinds_with_opposite_rankings_are_judged_separately():
    """By both together nothing would differ."""
    correct = {BASELINE: (15, 15), "a": (27, 25), "b": (25, 27), "mixed": (27, 3)}
    answers = [
        asked(label, None, {"number": (27, number), "fact": (27, fact)}, 30)
        for label, (number, fact) in correct.items()
    ]
    ranking = ranked(*(read(label, 2.0) for label in correct), *answers)
    verdicts = {
        row.label: [ranking.verdict(row, kind) for kind in ("number", "fact")]
        for row in ranking.rows
    }
    assert verdicts == {
        "a": ["better"] * 2,
        "b": ["better"] * 2,
        "mixed": ["better", "worse"],
        BASELINE: ["", ""],
    }
    assert {row.label for row in ranking.rows if row.helps} == {"a", "b"}


def test_only_kinds_count_that_the_baseline_answers():
    """With 4 keys, a quarter is found by guessing: the fact is known, the chain is not, nor does it rank."""
    known = {"fact": (9, 5), "chain": (3, 5)}
    answers = [
        asked(label, log_prob, known, 10, keys=4)
        for label, log_prob in {BASELINE: -1.0, "a": -0.5}.items()
    ]
    losses = [read(BASELINE, 2.0), read("a", 2.0)]
    ranking = ranked(*losses, *answers)
    assert ranking.recommended == "a"
    verdicts = {kind: ranking.verdict(ranking.rows[0], kind) for kind in known}
    assert verdicts == {"fact": "better", "chain": "not counted"}
    chain = "within 256 tokens the unscaled model answers 9 of 30 (95 % interval "
    assert ranking.not_counted["chain"].startswith(chain)
    unknown = [
        asked(label, x, {"chain": (3, 5)}, 10, keys=4)
        for label, x in {BASELINE: -1, "a": -0.5}.items()
    ]
    assert ranked(*losses, *unknown).recommended is None
    by_loss = ranked(read(BASELINE, 2.0), read("a", 1.0), *unknown)
    assert (by_loss.recommended, by_loss.kinds) == ("a", [])


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([read("a", 1.0), read("b", 1.0)], "nothing to rank"),
        ([read(BASELINE, 1.0), read("a", [1.0] * 9)], "not the same in each"),
        (
            [
                replace(r, rows=r.rows[1:])
                for r in (read(BASELINE, 1.0), read("a", 2.0))
            ],
            "no loss at",
        ),
    ],
)
def test_results_that_are_not_comparable_raise(results, message):
    with pytest.raises(RopepatchError, match=message):
        ranked(*results)
