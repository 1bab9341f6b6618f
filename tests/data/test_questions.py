"""Training sequences with a question about a needle far before it."""

import random
import re

import pytest
import torch

from ropepatch.data import haystack
from ropepatch.data.haystack import KINDS
from ropepatch.data.questions import ANSWERS, ROUND, TAUGHT, Questions


@pytest.fixture(scope="module")
def rows(tiny):
    texts = [f"The cat {word} the mat. " * 80 for word in ("ate", "saw", "drew")]
    return lambda kinds, numbers, seed=0: [
        Questions(tiny[1], texts, kinds, seed).row(number, 512) for number in numbers
    ]


@pytest.mark.parametrize("kind", ["passkey", "number", "sentence"])
def test_the_marked_answer_stands_earlier_in_its_sequence(kind, rows, tiny):
    for row in rows([kind], range(8)):
        assert (len(row.ids), len(row.answers)) == (512, 512)
        answer = "".join(tiny[1].decode(row.ids[row.answers > 0]).split())
        first = int(row.answers.nonzero()[0])
        before = tiny[1].decode(row.ids[:first])
        assert re.fullmatch(r"\d{4}|\d{6}", answer)
        assert answer in before.replace(" ", "")
        places = row.answers.nonzero().flatten()
        assert torch.equal(places, first + torch.arange(len(places)))
        assert row.answers.mean() == pytest.approx(ANSWERS)


def test_training_questions_cover_all_depths_alternate_kinds_and_never_repeat(
    rows, tiny
):
    def depth(row):
        ids = row.ids, row.ids[row.answers > 0]
        text, answer = (tiny[1].decode(one).replace(" ", "") for one in ids)
        return text.index(answer) / len(text)

    passkeys = rows(["passkey"], range(2 * ROUND))
    several = rows(["number"], range(ROUND))
    for part in (passkeys[:ROUND], passkeys[ROUND:], several):
        counts = torch.histc(torch.tensor([depth(row) for row in part]), 4, 0, 1)
        assert counts.min() >= ROUND / 8
    assert len({tuple(row.ids.tolist()) for row in passkeys}) == 2 * ROUND
    mixed = rows(["passkey", "sentence"], range(2))
    has_key = ["pass key is" in tiny[1].decode(row.ids) for row in mixed]
    assert has_key == [True, False]
    (other,) = rows(["passkey"], [0], seed=1)
    assert not torch.equal(other.ids, passkeys[0].ids)


def texts_of(kind):
    """The texts of all items without their numbers, and the lengths of these."""
    items = kind.draw(random.Random(0), kind.most)
    texts = {
        text for item in items for text in (*item.needles, item.question, item.stem)
    }
    return {re.sub(r"\d", "", text) for text in texts}, {
        len(item.answer) for item in items
    }


@pytest.mark.parametrize("name", TAUGHT)
def test_training_shares_no_template_name_or_number_with_eval(name):
    taught, digits = texts_of(TAUGHT[name])
    asked, asked_digits = texts_of(KINDS[name])
    assert not taught & asked
    assert not digits & asked_digits
    words = {word for thing in TAUGHT["number"].things for word in thing.split()[1:]}
    assert not words & {word for thing in haystack.THINGS for word in thing.split()}
