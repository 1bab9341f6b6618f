"""Every method on the bundled checkpoint, training-free, at 2, 4 and 8 times its original length.

    python eval/studies/training_free/training_free.py [--only "factor=4,method=yarn"]

The loss on held-out stories by position, next to the floor and to the floor of a perfect model with a
context of 256 tokens; and passkey accuracy by length.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from torch import Tensor

import ropepatch
from ropepatch.data.tiny.tales import Tale, held_out_tales
from ropepatch.evaluation.perplexity import LossCurve

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from study import FLOOR, KEYS, Row, Study, checkpoint

TALES = 32
SHORT_FLOOR = "256-token floor"
# Required parameters; all others have their defaults. Methods with lists of factors are left out, because no
# search was made for this checkpoint.
GIVEN: dict[str, Row] = {"abf": {"rope_theta": 500_000.0}}
METHODS = [
    name
    for name, kind in ropepatch.METHODS.items()
    if name in GIVEN or not kind.required()
]


def cases(given: Namespace) -> Iterator[Row]:
    """Every method and both floors at every factor."""
    for factor in (2, 4, 8):
        for method in (*METHODS, FLOOR, SHORT_FLOOR):
            yield checkpoint("tiny", factor).named | {"method": method}


def measure(case: Row, given: Namespace) -> Row:
    """The nats per token by range of positions, with half the 95 % interval over stories; and passkeys."""
    place, method = checkpoint("tiny", case["factor"]), case["method"]
    model, tokenizer = place.loaded
    ends = [place.trained << step for step in range(case["factor"].bit_length())]
    tales = held_out_tales(tokenizer, length=place.target, count=TALES)

    def losses(curve: LossCurve) -> Row:
        means = {f"{a} to {b}": curve.between(a, b) for a, b in pairwise([0, *ends])}
        return {
            span: [round(loss.value, 4), round(loss.interval()[1] - loss.value, 4)]
            for span, loss in means.items()
        }

    if method in (FLOOR, SHORT_FLOOR):
        window = place.target if method == FLOOR else place.trained
        return {
            "nats": losses(
                LossCurve(tuple(-nearby(tale, window)[1:] for tale in tales))
            )
        }
    options = GIVEN.get(method, {})
    with ropepatch.patch(model, method, to=place.target, **options):
        curve = ropepatch.perplexity(model, None, [tale.ids for tale in tales])
        answers = ropepatch.passkey(
            model, tokenizer, lengths=ends, haystacks=KEYS, seed=0
        )
    found = {end: answers.found(end).clusters for end in ends}
    keys = {
        str(end): [sum(int(one) for one, _ in each), len(each)]
        for end, each in found.items()
    }
    return {"given": options, "nats": losses(curve), "keys": keys}


def nearby(tale: Tale, window: int) -> Tensor:
    """The log-prob [T] of every token for a perfect model with a context of the last `window` tokens."""
    return tale.prior.masked_fill((tale.distance > 0) & (tale.distance <= window), 0.0)


STUDY = Study(name="tiny-training-free", about=__doc__, cases=cases, measure=measure)

if __name__ == "__main__":
    STUDY.main()
