"""A long text in pieces that have, one after the other, the tokens of the whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 2**18  # characters; at a time a tokenizer holds some hundred bytes for each
LARGEST = 2**24  # of a text that cannot be divided
NEAR = 256  # characters on either side of a cut, in which it must change nothing
BREAK = re.compile(r"(?<=\S)[ \n](?=\S)")


class Divider:
    """Divides long texts for a tokenizer where that provably changes no token.

    A cut goes before a single space or line break. Where the tokenizer puts a space of its own before each
    text, as LLaMA's do, that of the text is left out. What splits a text into words looks at the characters
    nearby: the tokens of both sides must be those of the whole there. What makes tokens of words may look
    farther, but never over the cut: no token in the vocabulary holds the characters on both sides of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _cuts(self) -> _Cuts:  # reads the whole vocabulary, which takes as long as some long texts
        return _Cuts(self._tokenizer)

    def pieces(self, text: str) -> Iterator[str]:
        """The text, in one piece if it is short.

        Raises:
            RopepatchError: There is no place to cut in more characters than memory should be spent on.
        """
        begin = 0
        while len(text) - begin > PIECE:
            cut = self._cuts.find(text, begin + PIECE // 2, begin + LARGEST)
            if cut is None:
                break
            end, next_begin = cut
            yield text[begin:end]
            begin = next_begin
        if len(text) - begin > LARGEST:
            raise RopepatchError(
                f"a document of {len(text):,} characters has {LARGEST:,} together that cannot be divided for "
                f"the tokenizer: {text[begin : begin + 20]!r} ...",
                hint="is it text? put <|endoftext|> between the documents of a text file, or split the file",
            )
        yield text[begin:] if begin else text


class _Cuts:
    """Where texts may be divided for a tokenizer; nowhere, if how it works is not known."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        model = json.loads(backend.to_str())["model"] if backend is not None else {}
        affixes = (model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"))
        self.usable = model.get("type") in ("BPE", "Unigram") and not any(affixes)
        if self.usable:
            self.added = [added.content for added in backend.get_added_tokens_decoder().values()]
            self.unknown = {model.get("unk_token"), getattr(tokenizer, "unk_token", None)}
            self.joined = "\n".join(backend.get_vocab(with_added_tokens=False))
            self.seen: dict[str, bool] = {}

    def find(self, text: str, begin: int, end: int) -> tuple[int, int] | None:
        """Where one piece ends and the next begins: the first such place from ``begin`` to ``end``."""
        for match in BREAK.finditer(text, begin, min(end, len(text))) if self.usable else ():
            cut = match.start()
            before, after = text[max(cut - NEAR, 0) : cut], text[cut : cut + NEAR]
            if any(word.endswith(before[-1]) or word.startswith(after[0]) for word in self.added):
                continue
            left, right, whole = map(self._encode, (before, after, before + after))
            if not self._apart(whole, len(left)):
                continue
            if left + right == whole:
                return cut, cut
            if left + self._encode(after[1:]) == whole:
                return cut, cut + 1
        return None

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _apart(self, ids: list[int], cut: int) -> bool:
        """Whether no token can hold the last character before and the first after a place between tokens."""
        if not 0 < cut < len(ids):
            return False
        left, right = (str(self.tokenizer.convert_ids_to_tokens(ids[place])) for place in (cut - 1, cut))
        if {left, right} & self.unknown:
            return False
        pair = left[-1] + right[0]
        if pair not in self.seen:
            self.seen[pair] = pair not in self.joined
        return self.seen[pair]
