"""Retrieval: a haystack is processed once, and its KV cache answers the questions of every length.

A question never enters the cache: its keys and values are appended for one forward pass and dropped. So the
cache grows from one length to the next, no question attends to another, and layers with a sliding window
are as exact as others.

Shapes: B questions of a batch, T tokens of its longest with its answer, A tokens of an answer, N of a
haystack, H heads of D dimensions, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ropepatch.columns import as_text, columns, data_frame
from ropepatch.data.haystack import QUOTE, Haystack, Haystacks, Question
from ropepatch.data.questions import TAUGHT
from ropepatch.data.texts import digest
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.intervals import Mean, summed
from ropepatch.model.config import switches
from ropepatch.model.head import (
    cache_keyword,
    evaluating,
    gives_positions,
    input_device,
)
from ropepatch.processes import ALONE, join
from ropepatch.progress import Advance, Progress, advancing, deal_resumed, no_bar
from ropepatch.settings import Length, listed, parse_length, seed_of

if TYPE_CHECKING:
    from pandas import DataFrame

logger = logging.getLogger(__name__)

THRESHOLD = 0.856  # the accuracy at an effective length, RULER's (arXiv:2404.06654)
MOST_ROWS = 16  # questions of a batch
# Tokens of a haystack per forward pass on a CPU; four times as many elsewhere
CHUNK = 2048
# Longest prompt that a CPU processes whole as a check, except at the least length
MOST_WHOLE = 2**14
# Nats of a token that a model forbids
LEAST = -1e4
# More than any model predicts of a text's tokens by the few before them
GUESSED = 0.5
# Prompts of `answerable`: how many, and about how many tokens they have together
EXAM_LEAST, EXAM_MOST, EXAM_TOKENS = 4, 32, 2**16
# Each has at least this share of the original length, and so many tokens
EXAM_SHARE, EXAM_SHORTEST = 8, 512

# The length, kind, depth, number of right parts, log-prob and number of parts of an answer
Scored = tuple[int, str, float, int, float, int]


class Answer(NamedTuple):
    """The answer of a model to one question.

    Args:
        haystack: The index of its haystack.
        length: The length of the prompt in tokens.
        kind: The kind of the question.
        depth: The end of the last needle that the answer needs, from 0 to 1 of the prompt.
        found: 1 if greedy decoding gives the answer, to the last token, else 0; of a quote, the number of
            tokens that are the most probable after the true ones before them.
        log_prob: The mean log-prob of the answer's tokens, in nats.
        parts: What `found` is counted of: 1, or the tokens of a quote.
    """

    haystack: int
    length: int
    kind: str
    depth: float
    found: int
    log_prob: float
    parts: int = 1


@dataclass(frozen=True)
class Retrieval:
    """All answers of a model. Haystacks are drawn independently, so each is a cluster of every mean.

    Attributes:
        answers: The answers, by haystack and length.
    """

    answers: tuple[Answer, ...]

    @property
    def lengths(self) -> list[int]:
        """The lengths of the prompts in tokens, ascending."""
        return sorted({answer.length for answer in self.answers})

    @property
    def kinds(self) -> list[str]:
        """The kinds of questions, in the order of the answers."""
        return list(dict.fromkeys(answer.kind for answer in self.answers))

    def found(
        self, length: int, kind: str | None = None, depths: tuple[float, float] = (0, 1)
    ) -> Mean:
        """The retrieval accuracy, a `Mean`: the share of correct answers, or of correct tokens of quotes.

        Args:
            length: The length of the prompts in tokens.
            kind: The kind of the questions; None for all.
            depths: The bounds of the depth of their needles, the second included.

        Raises:
            RopepatchError: If there are no such questions.
        """
        return self._mean("found", length, kind, depths)

    def log_prob(
        self, length: int, kind: str | None = None, depths: tuple[float, float] = (0, 1)
    ) -> Mean:
        """The answer log-prob: the mean over the answers' tokens, in nats, as a `Mean`; see `found`.

        It is continuous, so it distinguishes models long before the accuracy does.
        """
        return self._mean("log_prob", length, kind, depths)

    def _mean(
        self, measure: str, length: int, kind: str | None, depths: tuple[float, float]
    ) -> Mean:
        low, high = depths
        values: defaultdict[int, list[float]] = defaultdict(list)
        parts: Counter[int] = Counter()
        for answer in self.answers:
            within = low < answer.depth <= high
            if answer.length == length and kind in (None, answer.kind) and within:
                values[answer.haystack].append(getattr(answer, measure))
                parts[answer.haystack] += answer.parts if measure == "found" else 1
        if not values:
            raise RopepatchError(
                f"no questions at {length} tokens, kind {kind or 'any'}, depths {depths}",
                hint=f"lengths: {self.lengths}; kinds: {', '.join(self.kinds)}",
            )
        clusters = [
            (math.fsum(values[key]), float(parts[key])) for key in sorted(values)
        ]
        return Mean(tuple(clusters), share=measure == "found")

    def __repr__(self) -> str:
        heads = ("tokens", "kind", "correct", "(95 %)", "log-prob (nats/token)")
        rows = []
        for length, kind in product(self.lengths, self.kinds):
            found = self.found(length, kind)
            low, high = found.interval()
            share = f"{found.value * found.weight:.0f}/{found.weight:.0f}"
            log_prob = f"{self.log_prob(length, kind).value:.2f}"
            rows.append(
                (f"{length}", kind, share, f"({low:.0%} to {high:.0%})", log_prob)
            )
        return as_text([columns(rows, heads, right=range(5))])

    def to_pandas(self) -> DataFrame:
        """A pandas frame with a row for every answer.

        Raises:
            RopepatchError: If pandas is not installed.
        """
        return data_frame(answer._asdict() for answer in self.answers)


def why_not_counted(
    found: Mapping[int, Mean], *, kind: str, keys: int, trained: int
) -> str | None:
    """The reason why a kind of question does not count; None if it counts.

    It counts if the unscaled model answers it better than by guessing within its original context length: the
    interval of its accuracy, over all lengths within it, is above that of a guess among the keys; of quotes,
    above half of the tokens.

    Args:
        found: The accuracy of the unscaled model, by length in tokens.
        kind: The kind of the questions.
        keys: The number of questions of the kind at every length.
        trained: The original context length in tokens.
    """
    within = [share for length, share in found.items() if length <= trained]
    if not within:
        return f"no such questions within {trained:,} tokens"
    chance = 1 / keys if keys > 1 else 0.0
    if kind == QUOTE:
        chance = GUESSED
    share = summed(within)
    low, high = share.interval()
    if low > chance:
        return None
    if share.missing:
        return f"too few prompts for an interval: {len(share.clusters)}"
    return (
        f"within {trained:,} tokens the unscaled model answers {share.value * share.weight:.0f} of "
        f"{share.weight:.0f} (95 % interval {low:.0%} to {high:.0%}), no better than guessing ({chance:.0%})"
    )


def effective_length(found: Mapping[int, float]) -> int | None:
    """The greatest length up to which the accuracy is at least `THRESHOLD` at all lengths."""
    reached = None
    for length in sorted(found):
        if found[length] < THRESHOLD:
            break
        reached = length
    return reached


def retrieve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lengths: str | Iterable[Length],
    haystacks: int = 10,
    keys: int = 8,
    kinds: Sequence[str] | None = None,
    seed: int = 0,
    texts: Sequence[str] | None = None,
    chat: bool = False,
    split: bool = False,
    progress: Advance | bool | None = None,
) -> Retrieval:
    """Measure retrieval from long prompts, at several lengths and at all depths.

    The model processes each prompt once, up to the greatest length. At every length the questions are asked
    on its KV cache, by teacher forcing: an answer is correct if each of its tokens is the most probable one,
    as in greedy decoding. Of a quote, each token counts by itself, after the true tokens before it. The first
    answer of a run is checked against that to a whole prompt, at the least and the greatest length (on a CPU,
    the greatest up to 16,384 tokens); with one key, at every length. If they differ, or if the frequencies
    depend on the input length (stock `dynamic`, `longrope` with two sets of factors), every prompt is
    processed whole, with a warning.

    Args:
        model: A causal language model of transformers, patched or not; put in eval mode, and back into its
            earlier mode.
        tokenizer: The tokenizer of the model.
        lengths: The lengths of the prompts in tokens, answer included: `[4096, 8192]` or `"4k,8k"`.
        haystacks: The number of prompts; an interval needs at least three.
        keys: Questions of each kind per prompt and length.
        kinds: Names from `ropepatch.data.haystack.KINDS`. None for `quote`, `number` and `sentence` with
            texts, else for `number`, `sentence`, `chain` and `fact`; without those that the tokenizer cannot
            write or the least length is too short for, which a warning names.
        seed: The random seed of the prompts.
        texts: The text around the needles; None for the built-in filler.
        chat: Put prompt and question into the tokenizer's chat template.
        split: Share the prompts among the processes that torchrun or accelerate started, if any; every
            process passes the same arguments and gets the same result.
        progress: A function of (tokens done, tokens in total), both of this process. True for a progress bar,
            in a terminal or in a notebook with ipywidgets.

    Returns:
        The answers, with accuracies and log-probs by length and kind, as a `Retrieval`.

    Raises:
        RopepatchError: If the arguments fit no prompt (see `Haystacks`), or logits are NaN.
    """
    tokens = [parse_length(str(length)) for length in listed(lengths)]
    plan, left_out = plan_haystacks(
        tokenizer,
        kinds,
        min(tokens, default=0),
        lengths=tokens,
        count=haystacks,
        keys=keys,
        seed=seed,
        texts=texts,
        chat=chat,
    )
    for kind, reason in left_out.items():
        logger.warning("no questions of kind %s: %s", kind, reason)
    return ask(model, list(plan.make(tokenizer)), split=split, progress=progress)


def plan_haystacks(
    tokenizer: PreTrainedTokenizerBase,
    kinds: Sequence[str] | None,
    within: int,
    *,
    chat: bool,
    **settings: Any,
) -> tuple[Haystacks, dict[str, str]]:
    """The plan of haystacks with these kinds, or with the default ones and the reason for each left out.

    See `Haystacks.by_default`.
    """
    if chat:
        settings["chat"] = chat_parts(tokenizer)
    if kinds is None:
        return Haystacks.by_default(tokenizer, within, **settings)
    return Haystacks(**settings, kinds=tuple(kinds)), {}


def passkey(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lengths: str | Iterable[Length],
    haystacks: int = 20,
    **options: Any,
) -> Retrieval:
    """Measure passkey accuracy: `retrieve` with a single key per prompt.

    Args:
        model: See `retrieve`, also for the options.
        tokenizer: The tokenizer of the model.
        lengths: The lengths of the prompts in tokens: `[4096, 8192]` or `"4k,8k"`.
        haystacks: Prompts per length.
        **options: Further arguments of `retrieve`, such as `seed`, `texts`, `chat`, `split` and `progress`.

    Returns:
        The answers, as a `Retrieval`.

    Raises:
        RopepatchError: See `retrieve`.
    """
    return retrieve(
        model,
        tokenizer,
        lengths=lengths,
        haystacks=haystacks,
        keys=1,
        kinds=("passkey",),
        **options,
    )


def ask(
    model: PreTrainedModel,
    haystacks: Sequence[Haystack],
    *,
    keep: Path | None = None,
    split: bool = False,
    progress: Advance | bool | None = None,
) -> Retrieval:
    """The answers of a model to the questions of these haystacks, with the options of `retrieve`.

    In the folder ``keep`` are the answers to finished haystacks, from which the next call resumes.
    """
    processes = join(str(input_device(model))) if split else ALONE
    _check_vocabulary(model, haystacks)
    with (
        evaluating(model),
        advancing(progress, "haystacks") as advance,
        torch.inference_mode(),
    ):
        answered = deal_resumed(
            processes,
            haystacks,
            Reader(model).answers,
            keys=[digest([haystack.ids]) for haystack in haystacks],
            sizes=[len(haystack.ids) for haystack in haystacks],
            keep=keep,
            advance=advance,
        )
    answers = []
    for index, of_one in enumerate(answered):
        answers += [Answer(index, *answer) for answer in of_one]
    return Retrieval(tuple(answers))


def answerable(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    window: int,
    *,
    seed: int,
    most: int = EXAM_TOKENS,
    progress: Progress = no_bar,
) -> list[str]:
    """The kinds of training questions that a model answers better than by guessing within its original length.

    Passkeys, one per prompt, are tried only if it answers none of the other kinds. The prompts have about
    ``most`` tokens; they are shorter than the original length where even `EXAM_LEAST` prompts would have more.
    """
    length = window
    shortest = max(window // EXAM_SHARE, EXAM_SHORTEST)
    while EXAM_LEAST * length > most and length > shortest:
        length //= 2
    fitting = min(most, EXAM_TOKENS) // length
    count = max(EXAM_LEAST, min(EXAM_MOST, fitting))
    several = [kind for kind in TAUGHT if TAUGHT[kind].most > 1]
    for keys, kinds in ((8, several), (1, ["passkey"])):
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


def chat_parts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The parts of the chat template before a user's message, and between the message and the answer."""
    if not tokenizer.chat_template:
        raise RopepatchError(
            "the tokenizer has no chat template", hint="use chat=False"
        )
    mark = "THE USER'S MESSAGE"
    message = [{"role": "user", "content": mark}]
    text = tokenizer.apply_chat_template(
        message, tokenize=False, add_generation_prompt=True
    )
    before, *after = str(text).split(mark)
    if len(after) != 1:
        raise RopepatchError(
            f"the chat template repeats the user's message {len(after)} times, expected once",
            hint="use chat=False",
        )
    return before, after[0]


def _follows_length(model: PreTrainedModel) -> bool:
    """Whether its frequencies depend on the input length: stock ``dynamic``, or two sets of factors."""
    for module in model.modules():
        kind = str(getattr(module, "rope_type", ""))  # may be a dict by layer
        if "dynamic" in kind:
            return True
        if "longrope" in kind:
            config = getattr(module, "config", None)
            parameters = getattr(config, "rope_parameters", None) or {}
            by_layer = [one for one in parameters.values() if isinstance(one, dict)]
            sets = [one for one in (parameters, *by_layer) if "long_factor" in one]
            if not sets or any(map(switches, sets)):
                return True
    return False


class Reader:
    """Computes the answers of one model.

    Args:
        model: The model, in eval mode.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._device = model, input_device(model)
        self._on_cpu = self._device.type == "cpu"
        # Tokens that the questions of a batch see together
        self._tokens = 2**14 if self._on_cpu else 2**18
        # Any: PEFT passes keywords on
        self._gives_positions = any(map(gives_positions, model.modules()))
        self._cache = cache_keyword(model)
        # The lengths at which a whole prompt confirmed the cache
        self._checked: set[int] = set()
        # Else every question is a prompt of its own
        self._read_once = True
        if reason := self._reason():
            self._read_whole(reason)

    def answers(self, haystack: Haystack) -> list[Scored]:
        """Score every answer."""
        if self._read_once:
            scored = self._cached(haystack)
            if scored is not None:
                return scored
        return [
            self._scored(
                haystack, length, question, self._whole(haystack.ids[:stop], question)
            )
            for length, stop in haystack.stops.items()
            for question in haystack.asked[length]
        ]

    def _cached(self, haystack: Haystack) -> list[Scored] | None:
        """The answers from the cache; None if the first ones differ from those to whole prompts."""
        pages = DynamicCache(config=self._model.config)
        lengths = [length for length in haystack.stops if haystack.asked[length]]
        most = MOST_WHOLE if self._on_cpu else math.inf
        ends = {lengths[0], *[length for length in lengths if length <= most][-1:]}
        scored, read = [], 0
        for length in lengths:
            stop, questions = haystack.stops[length], haystack.asked[length]
            self._read(haystack.ids[read:stop], pages)
            read = stop
            size = max(1, min(MOST_ROWS, self._tokens // stop))
            logits: list[Tensor] = []
            for first in range(0, len(questions), size):
                logits += self._batch(questions[first : first + size], pages)
            if length in ends - self._checked:
                if not _same(logits[0], self._whole(haystack.ids[:stop], questions[0])):
                    self._read_whole(
                        f"its answers at {length} tokens differ from those to whole prompts"
                    )
                    return None
                self._checked.add(length)
            scored += [
                self._scored(haystack, length, *one)
                for one in zip(questions, logits, strict=True)
            ]
        return scored

    def _read(self, ids: Tensor, pages: DynamicCache) -> None:
        """Append tokens to the cache."""
        chunk = CHUNK if self._on_cpu else 4 * CHUNK
        for begin in range(0, len(ids), chunk):
            self._logits(ids[None, begin : begin + chunk], 1, pages)

    def _batch(
        self, questions: Sequence[Question], pages: DynamicCache
    ) -> Iterator[Tensor]:
        """The logits [A, V] of each answer; no question attends to another."""
        rows = [torch.cat([asked.ids, asked.answer]) for asked in questions]
        width, first = max(map(len, rows)), min(len(one.ids) for one in questions) - 1
        # In a causal model no token attends to the padding after it.
        padded = [torch.cat([row, row[-1:].expand(width - len(row))]) for row in rows]
        logits = self._logits(torch.stack(padded), width - first, _appended(pages))
        for row, asked in zip(logits, questions, strict=True):
            begin = len(asked.ids) - 1 - first
            yield _checked(row[begin : begin + len(asked.answer)], self._model)

    def _whole(self, ids: Tensor, question: Question) -> Tensor:
        """The logits [A, V] of an answer, from the whole prompt."""
        row = torch.cat([ids, question.ids, question.answer])[None]
        return _checked(
            self._logits(row, len(question.answer) + 1, None)[0, :-1], self._model
        )

    def _logits(self, ids: Tensor, count: int, cache: DynamicCache | None) -> Tensor:
        """The logits of the last ``count`` tokens of ids [B, T]."""
        options: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            options[str(self._cache)] = cache
        if self._gives_positions:
            options["logits_to_keep"] = count
        logits: Tensor = self._model(input_ids=ids.to(self._device), **options).logits
        return logits[:, -count:]

    def _scored(
        self, haystack: Haystack, length: int, question: Question, logits: Tensor
    ) -> Scored:
        answer = question.answer.to(logits.device)
        log_probs = logits.float().log_softmax(-1).gather(-1, answer[:, None])
        log_probs = log_probs.clamp(min=LEAST)
        right, parts = int((logits.argmax(-1) == answer).sum()), len(answer)
        if question.kind != QUOTE:
            right, parts = right // parts, 1
        depth = round(question.end / haystack.stops[length], 6)
        return length, question.kind, depth, right, log_probs.mean().item(), parts

    def _reason(self) -> str | None:
        """The reason why the cache cannot be used; None if none is known."""
        if self._cache is None:
            return "it has no cache"
        if _follows_length(self._model):
            return "its frequencies depend on the input length"
        try:
            layers = DynamicCache(config=self._model.config).layers
        except AttributeError as error:
            # A model made of several, each with its own cache
            return f"there is no cache for its config ({error})"
        for layer in layers:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                return f"its cache has layers of the kind {type(layer).__name__}"
        return None

    def _read_whole(self, reason: str) -> None:
        name = type(self._model).__name__
        logger.warning(
            "%s: every prompt is processed whole, which is slower: %s", name, reason
        )
        self._read_once = False


class _Appended(DynamicLayer):  # type: ignore[no-untyped-call]
    """Returns the keys and values of another layer followed by new ones, which it does not keep."""

    def __init__(self, layer: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer = layer
        self.is_sliding = layer.is_sliding
        self.is_initialized = layer.is_initialized
        self.keys, self.values = layer.keys, layer.values
        self.get_mask_sizes = layer.get_mask_sizes  # type: ignore[method-assign]
        self.get_seq_length = layer.get_seq_length  # type: ignore[method-assign]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        def appended(kept: Any, new: Tensor) -> Tensor:
            kept = kept.expand(len(new), -1, -1, -1)
            return torch.cat([kept, new], dim=-2)  # [B, H, N + T, D]

        return appended(self.keys, key_states), appended(self.values, value_states)


def _appended(pages: DynamicCache) -> DynamicCache:
    """A cache for questions after the tokens of another cache, which does not change."""
    cache = DynamicCache()
    cache.layers = [_Appended(layer) for layer in pages.layers]
    return cache


def _checked(logits: Tensor, model: PreTrainedModel) -> Tensor:
    if logits.isnan().any():
        raise RopepatchError(
            f"{type(model).__name__} returned NaN logits",
            hint="load the model in float32 or bfloat16; check its weights and its RoPE scaling",
        )
    return logits


def _same(logits: Tensor, expected: Tensor) -> bool:
    """Whether the two greatest logits of every token differ only by rounding.

    Matrix products of different shapes round differently, most of all in TF32; a wrong position has a far
    greater effect. A model may forbid tokens with the lowest logits of the dtype, so the others are ignored.
    Under autocast the logits are float32 with values of 16 bits.
    """
    greatest, tokens = expected.topk(2)
    dtype = expected.dtype
    for narrow in (torch.float16, torch.bfloat16):
        if torch.equal(greatest, greatest.to(narrow).float()):
            dtype = narrow
    tolerance = max(4 * torch.finfo(dtype).eps, 1e-3) * greatest.abs().max()
    return bool((logits.gather(-1, tokens) - greatest).abs().max() <= tolerance)


def _check_vocabulary(model: PreTrainedModel, haystacks: Sequence[Haystack]) -> None:
    embedding: Any = model.get_input_embeddings().weight
    largest = 0
    for haystack in haystacks:
        parts = [haystack.ids]
        for questions in haystack.asked.values():
            parts += [ids for one in questions for ids in (one.ids, one.answer)]
        largest = max(largest, int(torch.cat(parts).max()))
    if (vocabulary := len(embedding)) <= largest:
        raise RopepatchError(
            f"the tokenizer returns token {largest}, the model has 0 to {vocabulary - 1}",
            hint="use the tokenizer of the model",
        )
