"""Tales that the bundled checkpoint has not been trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ropepatch.data.tiny.corpus import Narrator
from ropepatch.settings import seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ropepatch.data.documents import GeneratedDocument


def held_out_tales(tokenizer: PreTrainedTokenizerBase, *, length: int, count: int) -> list[GeneratedDocument]:
    """``count`` tales of ``length`` tokens each, always the same; a shorter one begins a longer one."""
    narrator = Narrator(tokenizer)
    return [narrator.tale(length, seed_of("held out", index)) for index in range(count)]
