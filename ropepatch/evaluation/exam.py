"""The kinds of questions that a model answers within its original context length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ropepatch.data.haystack import Haystacks
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.retrieval import ask, why_not_counted
from ropepatch.progress import Progress, no_bar
from ropepatch.settings import seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENS = 2**16  # approximate tokens of the all prompts
MOST, LEAST = 32, 4  # prompts
SHORTER, SHORTEST = (
    8,
    512,
)  # prompts have at least this share of the original length, and so many tokens
KEYS = 8  # questions of each kind per prompt
FALLBACK = "passkey"  # one per prompt; used only if no other kind is possible


def answerable(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    window: int,
    *,
    seed: int,
    most: int = TOKENS,
    progress: Progress = no_bar,
) -> list[str]:
    """The kinds of questions that a model answers better than by guessing within its original length.

    Passkeys, one per prompt, are tried only if it answers none of the other kinds. The prompts have about
    ``most`` tokens; they are shorter than the original length where even `LEAST` prompts would have more.
    """
    length = window
    while LEAST * length > most and length > max(window // SHORTER, SHORTEST):
        length //= 2
    settings = _settings(length, seed_of("answerable", seed), most)
    for keys in (KEYS, 1):
        try:
            if keys == 1:
                plan = Haystacks(**settings, keys=keys, kinds=[FALLBACK])
            else:
                plan, _ = Haystacks.by_default(tokenizer, length, **settings, keys=keys)
            haystacks = list(plan.make(tokenizer))
        except RopepatchError:  # no room, or a tokenizer that cannot encode the keys
            continue
        with progress("questions within the original length") as advance:
            answers = ask(model, haystacks, progress=advance)
        shares = {kind: {length: answers.found(length, kind)} for kind in plan.kinds}
        if found := [
            k
            for k in shares
            if why_not_counted(shares[k], keys=keys, trained=window) is None
        ]:
            return found
    return []


def _settings(length: int, seed: int, most: int) -> dict[str, Any]:
    count = max(LEAST, min(MOST, min(most, TOKENS) // length))
    return {"lengths": [length], "count": count, "seed": seed}
