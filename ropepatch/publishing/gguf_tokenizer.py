"""A tokenizer in the words of GGUF, as far as llama.cpp splits every text as it does.

llama.cpp knows byte-level BPE by the name of its pre-tokenizer, and SentencePiece by one score per token.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropepatch.errors import RopepatchError
from ropepatch.model.loading import load_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # gguf.TokenType
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # GGUF's words
SPACE = "▁"
PREPEND = {"type": "Prepend", "prepend": SPACE}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = WORDS + r"\p{N}{1,3}" + REST
QWEN_2 = WORDS + r"\p{N}" + REST


def _bytes(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}


def _split(pattern: str) -> tuple[dict[str, Any], ...]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return cut, _bytes(use_regex=False)


# The steps that cut a text into words, and whether whole words skip the merges, by the names in llama.cpp,
# src/llama-vocab.cpp; those that it only approximates are left out.
PRE_TOKENIZERS = {
    "gpt-2": ((_bytes(use_regex=True),), False),
    "smollm": (({"type": "Digits", "individual_digits": True}, _bytes(use_regex=True)), False),
    "llama-bpe": (_split(LLAMA_3), True),
    "smaug-bpe": (_split(LLAMA_3), False),
    "qwen2": (_split(QWEN_2), False),
}


class UnfaithfulError(Exception):
    """Why llama.cpp would read texts otherwise."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in GGUF's words: `llama` (SentencePiece), `gpt2` (byte-level BPE) or `no_vocab`."""

    model: str
    pre: str = "default"  # llama.cpp's name of the pre-tokenizer
    tokens: tuple[str, ...] = ()
    types: tuple[int, ...] = ()  # as gguf.TokenType numbers them
    scores: tuple[float, ...] = ()  # of SentencePiece: the best pair is merged first
    merges: tuple[str, ...] = ()  # of byte-level BPE, first to last
    flags: dict[str, bool] = field(default_factory=dict)
    special: dict[str, int] = field(default_factory=dict)  # the ids of bos, eos, unk and pad
    chat_template: str | None = None
    notes: tuple[str, ...] = ()

    def write(self, writer: GGUFWriter) -> None:
        """Put it among the keys of a GGUF file."""
        writer.add_tokenizer_model(self.model)
        if self.model == "no_vocab":
            return
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(self.merges)
        for name, flag in self.flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", flag)
        for name, token in self.special.items():
            writer.add_uint32(f"tokenizer.ggml.{SPECIAL[name]}_token_id", token)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """The tokenizer of a checkpoint, or `no_vocab` with the reason; llama.cpp wants `size` tokens."""
    try:
        return _vocabulary(load_tokenizer(folder), size)
    except (UnfaithfulError, RopepatchError) as error:
        note = f"no tokenizer in the file ({error}): llama.cpp can run it on token ids only"
        return Vocabulary("no_vocab", notes=(note,))


def _vocabulary(tokenizer: Any, size: int) -> Vocabulary:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnfaithfulError("its tokenizer has no tokenizer.json")
    stated = json.loads(backend.to_str())
    model = stated["model"]
    if model["type"] != "BPE" or any(
        model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        raise UnfaithfulError(f"a {model['type']} tokenizer of a form that llama.cpp does not have")
    special = {
        name: token
        for name in SPECIAL
        if (token := getattr(tokenizer, f"{name}_token_id")) is not None and token < size
    }
    tokens, types = _tokens(stated, size, special.get("unk"))
    flags = _added_around(tokenizer, special)
    added = stated["added_tokens"]
    notes = [
        f"left out {one['content']}: it has no row in the embedding" for one in added if one["id"] >= size
    ]
    if any(one["lstrip"] or one["rstrip"] or one["single_word"] for one in added):
        notes.append("llama.cpp keeps spaces around special tokens that this tokenizer strips")
    kind: dict[str, Any]
    if model.get("byte_fallback"):
        flags["add_space_prefix"], more = _space_prefix(stated)
        normal = {text for text, type_ in zip(tokens, types, strict=True) if type_ == NORMAL}
        scores = _scores(backend, model, normal)
        least = min(scores.values(), default=0.0) - 1
        kind = {"model": "llama", "scores": tuple(scores.get(text, least) for text in tokens)}
    else:
        pre, more = _pre_tokenizer(stated)
        if not model["merges"]:
            raise UnfaithfulError("it has no merges, without which llama.cpp does not load it")
        kind = {"model": "gpt2", "pre": pre, "merges": tuple(" ".join(pair) for pair in model["merges"])}
    template = getattr(tokenizer, "chat_template", None)
    return Vocabulary(
        **kind,
        tokens=tokens,
        types=types,
        flags=flags,
        special=special,
        chat_template=template if isinstance(template, str) else None,
        notes=(*notes, *more),
    )


def _tokens(
    stated: dict[str, Any], size: int, unknown: int | None
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The text and the type of every token; without byte tokens none is unknown."""
    entries = {token: (text, NORMAL) for text, token in stated["model"]["vocab"].items()}
    if max(entries, default=-1) >= size:
        raise UnfaithfulError(f"it has {max(entries) + 1} tokens, the embedding {size} rows")
    for added in stated["added_tokens"]:
        entries[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    rows = [entries.get(token, (f"[PAD{token}]", UNUSED)) for token in range(size)]
    texts, types = (list(column) for column in zip(*rows, strict=True))
    if len(set(texts)) < size:  # which llama.cpp takes as a reason to abort
        raise UnfaithfulError("two of its tokens have the same text")
    if stated["model"].get("byte_fallback"):
        types = [
            BYTE if BYTE_TOKEN.fullmatch(text) else kind for text, kind in zip(texts, types, strict=True)
        ]
        if types.count(BYTE) != 256:
            raise UnfaithfulError(f"it has {types.count(BYTE)} of the 256 byte tokens")
        if unknown is not None:
            types[unknown] = UNKNOWN
    return tuple(texts), tuple(types)


def _added_around(tokenizer: Any, special: dict[str, int]) -> dict[str, bool]:
    """Which special tokens stand around every text."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    around = tokenizer.encode("a")
    for bos, eos in itertools.product((False, True), repeat=2):
        if around == [special.get("bos")] * bos + bare + [special.get("eos")] * eos:
            return {"add_bos_token": bos, "add_eos_token": eos}
    raise UnfaithfulError("it puts other special tokens around a text than bos and eos")


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer."""
    if part is None or part["type"] != "Sequence":
        return [part] if part else []
    return list(part.get("normalizers") or part["pretokenizers"])


def _space_prefix(stated: dict[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Whether a text gets a space in front, as SentencePiece tokenizers do it."""
    match _steps(stated["normalizer"]), _steps(stated["pre_tokenizer"]):
        case steps, [] if steps in ([PREPEND, REPLACE], [REPLACE]):
            return len(steps) == 2, ()
        case [], [{"type": "Metaspace", "replacement": "▁", "split": False, "prepend_scheme": "never"}]:
            return False, ()
        case [], [{"type": "Metaspace", "replacement": "▁", "split": False}]:
            note = "llama.cpp puts a space before texts that begin with one and after special tokens"
            return True, (f"{note}; this tokenizer does not",)
    raise UnfaithfulError("llama.cpp has no SentencePiece with its normalisation")


def _scores(backend: Any, model: dict[str, Any], normal: set[str]) -> dict[str, float]:
    """A score for every token that merging makes: llama.cpp merges the pair whose union scores highest.

    It is minus the place of a token's first merge. Where the merges of tokens are mixed that need not be the
    same order, so the two are compared on runs of spaces and on random text.
    """
    merges = [(left, right) for left, right in model["merges"]]
    splits = {
        (text[:cut], text[cut:])
        for text in normal
        for cut in range(1, len(text))
        if all(part in normal or len(part) == 1 for part in (text[:cut], text[cut:]))
    }
    if splits != set(merges):
        raise UnfaithfulError("its merges are not all the ways to make its tokens")
    scores: dict[str, float] = {}
    for left, right in merges:
        scores.setdefault(left + right, float(-len(scores)))
    for text in _probes(sorted(normal)):
        if [token.value for token in backend.model.tokenize(text)] != _merged(text, scores):
            raise UnfaithfulError("llama.cpp merges its tokens in another order")
    return scores


def _merged(text: str, scores: dict[str, float]) -> list[str]:
    """A text cut as llama.cpp's SentencePiece does: the best pair first, the leftmost of equals."""
    parts = list(text)
    while pairs := [
        (-scores[left + right], at)
        for at, (left, right) in enumerate(itertools.pairwise(parts))
        if left + right in scores
    ]:
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _probes(tokens: list[str]) -> Iterator[str]:
    """Runs of spaces, and tokens in random order."""
    yield from (SPACE * length for length in range(1, 50))
    draw = random.Random(0)
    yield from ("".join(draw.choices(tokens, k=8)) for _ in range(200))


def _pre_tokenizer(stated: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """llama.cpp's name for how a byte-level tokenizer cuts a text into words."""
    notes: tuple[str, ...] = ()
    if stated["normalizer"] is not None:
        if stated["normalizer"] != {"type": "NFC"}:
            raise UnfaithfulError("llama.cpp does not normalise texts")
        notes = ("llama.cpp does not normalise texts to NFC, as this tokenizer does",)
    steps = tuple(
        {name: value for name, value in step.items() if name != "trim_offsets"}
        for step in _steps(stated["pre_tokenizer"])
    )
    pre_tokenizer = steps, bool(stated["model"].get("ignore_merges"))
    for name, candidate in PRE_TOKENIZERS.items():
        if candidate == pre_tokenizer:
            return name, notes
    raise UnfaithfulError("llama.cpp has no byte-level BPE with its pre-tokenizer")
