"""The kinds of questions that a model answers within its original context length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ropepatch.data.haystack import Haystacks
from ropepatch.data.questions import TAUGHT
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.retrieval import ask, why_not_counted
from ropepatch.progress import Progress, no_bar
from ropepatch.settings import seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENS = 2**16  # approximate tokens of the all prompts
MOST, LEAST = 32, 4  # prompts
# Prompts have at least this share of the original length, and so many tokens
SHORTER, SHORTEST = (
    8,
    512,
)
KEYS = 8  # questions of each kind per prompt


def answerable(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    window: int,
    *,
    seed: int,
    most: int = TOKENS,
    progress: Progress = no_bar,
) -> list[str]:
    """The kinds of training questions that a model answers better than by guessing within its original length.

    Passkeys, one per prompt, are tried only if it answers none of the other kinds. The prompts have about
    ``most`` tokens; they are shorter than the original length where even `LEAST` prompts would have more.
    """
    length = window
    while LEAST * length > most and length > max(window // SHORTER, SHORTEST):
        length //= 2
    count = max(LEAST, min(MOST, min(most, TOKENS) // length))
    several = [kind for kind in TAUGHT if TAUGHT[kind].most > 1]
    for keys, kinds in ((KEYS, several), (1, ["passkey"])):
        try:
            plan, _ = Haystacks.by_default(
                tokenizer,
                length,
                kinds,
                lengths=(length,),
                count=count,
                keys=keys,
                seed=seed_of("answerable", seed),
                pool=TAUGHT,
            )
            haystacks = list(plan.make(tokenizer))
        except RopepatchError:  # no room, or a tokenizer that cannot encode the keys
            continue
        with progress("questions within the original length") as advance:
            answers = ask(model, haystacks, progress=advance)
        found = []
        for kind in plan.kinds:
            shares = {length: answers.found(length, kind)}
            if why_not_counted(shares, kind=kind, keys=keys, trained=window) is None:
                found.append(kind)
        if found:
            return found
    return []
