"""Training sequences with a question about a needle far before it."""

import re

import pytest
import torch

from ropepatch.data.haystack import KINDS
from ropepatch.data.questions import ANSWERS, ROUND, Questions


@pytest.fixture(scope="module")
def rows(tiny):
    texts = [f"The cat {word} the mat. " * 80 for word in ("ate", "saw", "drew")]
    return lambda kinds, numbers, seed=0: [
        Questions(tiny[1], texts, kinds, seed).row(number, 512) for number in numbers
    ]


@pytest.mark.parametrize("kind", ["passkey", "number", "sentence"])
def test_the_marked_answer_of_a_training_sequence_appears_earlier_in_it(
    kind, rows, tiny
):
    for row in rows([kind], range(8)):
        assert (len(row.ids), len(row.answers)) == (512, 512)
        answer = "".join(tiny[1].decode(row.ids[row.answers > 0]).split())
        first = int(row.answers.nonzero()[0])
        before = tiny[1].decode(row.ids[:first])
        assert re.fullmatch(r"\d{5}", answer)
        assert answer in before.replace(" ", "")
        places = row.answers.nonzero().flatten()
        assert torch.equal(places, first + torch.arange(len(places)))
        assert row.answers.mean() == pytest.approx(ANSWERS)


def test_training_questions_cover_all_depths_alternate_kinds_and_never_repeat(
    rows, tiny
):
    def depth(row):
        text = tiny[1].decode(row.ids)
        answer = tiny[1].decode(row.ids[row.answers > 0])
        return text.replace(" ", "").index(answer.replace(" ", "")) / len(
            text.replace(" ", "")
        )

    passkeys = rows(["passkey"], range(2 * ROUND))
    for part in (passkeys[:ROUND], passkeys[ROUND:]):
        counts = torch.histc(torch.tensor([depth(row) for row in part]), 4, 0, 1)
        assert counts.min() >= ROUND / 8
    assert len({tuple(row.ids.tolist()) for row in passkeys}) == 2 * ROUND
    mixed, others = (
        rows(["passkey", "sentence"], range(4)),
        rows(["passkey"], range(2), seed=1),
    )
    assert [
        KINDS["sentence"].title != "" and "pass key is" in tiny[1].decode(row.ids)
        for row in mixed
    ] == [
        True,
        False,
        True,
        False,
    ]
    assert not torch.equal(others[0].ids, passkeys[0].ids)
