"""Whether one scaling is seen to find more than another, where the truth is known."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from made_results import asking, result_of

from ropepatch.evaluation.answers import Answers, answers
from ropepatch.evaluation.grid import wilson
from ropepatch.evaluation.retrieval import share_row


def row(found, wanted=1, *, kept=True):
    kept = {"found": list(found), "wanted": wanted} if kept else {}
    return share_row(found, wanted) | kept


def two(more, less, both=4, neither=4, **options):
    """A scaling that answers `more` questions that another does not, and the other way round."""
    mine = [1] * more + [0] * less + [1] * both + [0] * neither
    other = [0] * more + [1] * less + [1] * both + [0] * neither
    return Answers({"k": row(mine, **options)}), Answers({"k": row(other, **options)})


def by_signs(more, less):
    """McNemar's test by its definition: every way in which chance deals the differing questions out."""
    extreme = abs(more - less)
    outcomes = [abs(sum(signs)) >= extreme for signs in product((1, -1), repeat=more + less)]
    return more > less and sum(outcomes) / len(outcomes) <= 0.05


COUNTS = [(0, 0), (4, 0), (5, 0), (6, 0), (7, 1), (8, 1), (9, 2), (10, 2), (9, 3), (0, 6), (6, 6)]


@pytest.mark.parametrize(("more", "less"), COUNTS)
def test_the_verdict_is_that_of_every_way_in_which_chance_could_have_dealt_the_questions(more, less):
    mine, other = two(more, less)
    assert mine.finds_more_than(other) == by_signs(more, less)
    assert (mine.against(other), other.against(mine)) == ((more, less), (less, more))


def test_a_test_without_the_care_for_few_questions_would_be_caught():
    def careless(more, less):  # the approximate test: the square of a normal deviate
        return more > less and (more - less) ** 2 / max(1, more + less) > 1.96**2

    assert [careless(*counts) for counts in COUNTS] != [by_signs(*counts) for counts in COUNTS]


@pytest.mark.parametrize(("more", "seen"), [(5, False), (20, True)])
def test_of_five_questions_nothing_is_seen(more, seen):
    mine, other = two(more, 0, both=0, neither=0)
    assert mine.finds_more_than(other) is seen


def test_what_is_equal_is_seldom_told_apart_and_what_differs_much_often_is():
    draw = torch.Generator().manual_seed(0)

    def seen(mine, other):
        answered = [(torch.rand(400, 20, generator=draw) < share).int().tolist() for share in (mine, other)]
        verdicts = [
            Answers({"k": row(a)}).finds_more_than(Answers({"k": row(b)}))
            for a, b in zip(*answered, strict=True)
        ]
        return sum(verdicts) / len(verdicts)

    assert seen(0.5, 0.5) <= 0.025
    assert seen(0.95, 0.4) >= 0.75


def test_parts_of_answers_count_as_parts_of_questions():
    mine, other = (Answers({"k": row(found, 3)}) for found in ([3, 2, 1, 0], [0, 0, 2, 0]))
    assert mine.against(other) == pytest.approx((5 / 3, 1 / 3))
    halves = Answers({"k": row([1] * 11, 2)}), Answers({"k": row([0] * 11, 2)})
    assert not halves[0].finds_more_than(halves[1])  # five questions and a half


def test_where_the_answers_were_not_kept_as_many_differ_as_can():
    mine, other = two(8, 2, both=8, neither=2, kept=False)
    assert mine.against(other) == pytest.approx((10, 4))
    assert other.against(mine) == pytest.approx((4, 10))
    assert Answers({"k": row([1] * 20, kept=False)}).finds_more_than(Answers({"k": row([1] * 8 + [0] * 12)}))


def test_every_kind_weighs_the_same_in_the_share_and_every_question_in_the_verdict():
    mine = Answers({"a": row([1] * 4), "b": row([1, 0])})
    assert (mine.share, mine.n) == (0.75, 6)
    assert mine.interval == wilson(4.5, 6)
    assert mine.against(Answers({"a": row([0] * 4), "b": row([0, 1])})) == (5, 1)


# Which kinds count


def retrieval(label, shares, parameters=None):
    """What is found of each kind at 256 tokens, where the model was trained, and at 1024, of 20 questions."""
    rows = [
        {"kind": kind, "length": length} | row([1] * round(20 * share) + [0] * (20 - round(20 * share)))
        for kind, pair in shares.items()
        for length, share in zip((256, 1024), pair, strict=True)
    ]
    return result_of("retrieval", label, {"by_kind": rows, "by_length": []}, parameters or {})


KNOWN = {"niah_multikey": (0.9, 0.1), "vt": (0.5, 0.2)}  # chance is 0.25 and 0.33: vt is not told from it
EASY = {"niah_multivalue": (0.7, 0.5)}  # chance is 0.5


def counting(*results):
    """The kinds of what is ranked, which are the same for all that was asked, and whether they rank."""
    found, ranks = answers(results, base="base", labels=["base", "a"])
    return sorted({kind for of in found.values() for kind in of.kinds}), ranks


def test_only_kinds_count_that_the_model_as_it_is_answers_and_does_not_guess():
    results = [retrieval(label, KNOWN | EASY) for label in ("base", "a", "another")]
    assert counting(*results) == (["niah_multikey"], True)
    keys = [asking(label, [4, 0, 0]) for label in ("base", "a")]
    assert counting(*results, *keys) == (["niah_multikey", "passkey"], True)


def test_where_no_kind_counts_all_are_shown_and_none_ranks():
    results = [retrieval(label, {"vt": (0.4, 0.2)} | EASY) for label in ("base", "a")]
    assert counting(*results) == (["niah_multivalue", "vt"], False)


@pytest.mark.parametrize(
    "results",
    [
        [retrieval("base", KNOWN)],
        [retrieval("a", KNOWN)],
        [retrieval("base", KNOWN), retrieval("a", KNOWN, {"seed": 1})],
        [retrieval("base", KNOWN), replace(retrieval("a", KNOWN), target=2048)],
        [retrieval("base", KNOWN), retrieval("a", {"vt": (1.0, 1.0)})],
        [],
    ],
    ids=["not the others", "not the model", "other prompts", "not at the target", "other kinds", "nothing"],
)
def test_what_not_all_were_asked_does_not_count(results):
    assert counting(*results)[1] is False


def test_passkeys_among_others_count_if_the_model_does_not_guess_them():
    def found(correct, distractors):
        return [asking(label, [correct, 0, 0], distractors=distractors) for label in ("base", "a")]

    assert counting(*found(2, 0))[1]  # 6 of 12
    assert not counting(*found(3, 1))[1]  # 9 of 12 of two keys each, interval from 0.47
    assert counting(*found(4, 1))[1]


def test_a_kind_of_another_version_is_left_alone():
    results = [retrieval(label, KNOWN | {"kind of 2030": (1.0, 1.0)}) for label in ("base", "a")]
    assert counting(*results)[0] == ["niah_multikey"]


def test_nothing_is_lost_by_the_names_of_labels():
    found, _ = answers([retrieval("base", KNOWN)], base="base", labels=["base", "a"])
    assert found.keys() == {"base"}
    assert math.isclose(found["base"].share, 0.15)
