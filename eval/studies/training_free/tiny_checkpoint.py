"""The loss and passkey accuracy of the bundled checkpoint within its original length, and beyond it.

    python eval/studies/training_free/tiny_checkpoint.py

Measured on held-out stories and passkeys. The floor is the least possible loss. The excess over it is paired
by story, with its standard error.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import ropepatch
from ropepatch.data.tiny.tales import held_out_tales

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from study import Row, Study, checkpoint
from training_free import nearby

SEED = 1  # of the prompts
FIFTHS = ("earliest", "early", "middle", "late", "latest")  # of the passkeys, by depth
INSIDE, BEYOND = (96, 128, 192, 256), (512, 1024, 2048)


def tales(model: Any, tokenizer: Any, *, length: int, count: int) -> dict[str, Any]:
    """The nats per token of the model, of the floor, and of a perfect model without context."""
    documents = held_out_tales(tokenizer, length=length, count=count)
    losses = ropepatch.perplexity(model, None, [tale.ids for tale in documents]).nll
    floors = [-tale.log_probs()[1:].mean().item() for tale in documents]
    excess = [
        loss.mean().item() - floor for loss, floor in zip(losses, floors, strict=True)
    ]
    floor = statistics.fmean(floors)
    return {
        "tales": count,
        "tokens": length,
        "floor": floor,
        "loss": floor + statistics.fmean(excess),
        "excess": statistics.fmean(excess),
        "excess_standard_error": statistics.stdev(excess) / count**0.5,
        "over_floor": statistics.fmean(excess) / floor,
        "forgetful": statistics.fmean(
            -tale.prior[1:].mean().item() for tale in documents
        ),
    }


def worth(tokenizer: Any, *, length: int, count: int) -> dict[str, float]:
    """The nats per token of a perfect model in the second half of the stories, by context length."""
    documents = held_out_tales(tokenizer, length=length, count=count)
    windows = (64, 256, 512, 1024, length)
    return {
        str(window): statistics.fmean(
            -nearby(tale, window)[length // 2 :].mean().item() for tale in documents
        )
        for window in windows
    }


def retrieval(
    model: Any, tokenizer: Any, lengths: tuple[int, ...], haystacks: int
) -> dict[str, Any]:
    """The passkey accuracy by length and by fifth of the depth."""
    retrieved = ropepatch.passkey(
        model, tokenizer, lengths=lengths, haystacks=haystacks, seed=SEED
    )
    cells: dict[str, Any] = {}
    for length in lengths:
        answers = [answer for answer in retrieved.answers if answer.length == length]
        answers.sort(key=lambda answer: answer.depth)
        size = len(answers) // len(FIFTHS)
        parts = (
            answers[first : first + size] for first in range(0, len(answers), size)
        )
        cells[str(length)] = {
            name: {"correct": sum(answer.found for answer in part), "n": len(part)}
            for name, part in zip(FIFTHS, parts, strict=True)
        }
    return cells


def measure(case: Row, given: Namespace) -> Row:
    """All measurements, in one row."""
    model, tokenizer = checkpoint("tiny", 8).loaded
    return {
        "trained": model.config.max_position_embeddings,
        "tales": tales(model, tokenizer, length=256, count=400),
        "worth": worth(tokenizer, length=2048, count=100),
        "passkey_seed": SEED,
        "passkey": retrieval(model, tokenizer, INSIDE, 200)
        | retrieval(model, tokenizer, BEYOND, 100),
    }


STUDY = Study(
    name="tiny-checkpoint",
    about=__doc__,
    cases=lambda given: [{"model": "tiny"}],
    measure=measure,
)

if __name__ == "__main__":
    STUDY.main()
