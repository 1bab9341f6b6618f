"""Read a checkpoint once, as it should be computed and by the commonest mistakes.

Shapes: T tokens of the text, P positions, K tokens of the top, V vocabulary.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ropepatch.attention import REMAPPINGS
from ropepatch.errors import RopepatchError, argument
from ropepatch.extension import record as records
from ropepatch.extension.record import Record
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import forward_operations
from ropepatch.model.head import decoded_once, decoder_of, input_device
from ropepatch.model.precision import available_bytes
from ropepatch.model.reading_file import RIGHT, Reading, Tops
from ropepatch.model.rotary import find_rotary, rotating_by, scaled_twin
from ropepatch.model.stock import stock_code
from ropepatch.probing.judging import divergence, typical
from ropepatch.probing.mistakes import ropes
from ropepatch.probing.text import draw_source, source_ids
from ropepatch.scaling import METHODS
from ropepatch.scaling.rope import Frequencies

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SIDE = 24  # positions on either side of the old window
CANDIDATES = 16  # of which each is the one where the next token is least certain
TOP = 20
DIGITS = 4
TOLD_APART = 4e-3  # nats: a mistake that differs by less is none that anybody would notice
MOST_WORK = {"cpu": 1e13, "cuda": 1e16}  # operations in all that `extend` spends: a minute or two
A_MINUTE = {device: 2 * work / 3 for device, work in MOST_WORK.items()}  # operations, about

Say = Callable[[str], None]


def why_none(source: Checkpoint, method: str, window: int, target: int) -> str | None:
    """Why no reading of a checkpoint can be compared with an engine; None where one can.

    Args:
        source: The checkpoint, or that which it is made from.
        method: By which it is extended.
        window: Its original context, in tokens.
        target: What it is extended to.
    """
    if source.kind != "stock" or method in REMAPPINGS:
        return "ropepatch's own code computes it, which no engine runs"
    if method in METHODS and METHODS[method].length_dependent:
        return f"{method} follows the length, and every engine in its own way"
    if source.is_quantised:
        return "its weights are quantised"
    if target - window < SIDE:
        return "the target is hardly beyond the old window"
    return None


def _why_none(checkpoint: Checkpoint, record: Record) -> str | None:
    return why_none(checkpoint, record.method, record.original_max_position_embeddings, record.target)


def affordable(checkpoint: Checkpoint, record: Record, device: str) -> tuple[str, ...] | str:
    """The hypotheses that `extend` has the time to read; or why there is no reading at all."""
    if reason := _why_none(checkpoint, record):
        return reason
    needed, there = _bytes_needed(checkpoint, record), available_bytes()
    if needed > there and device == "cpu":
        return f"it takes {needed / 1e9:.1f} GB of memory, there are {there / 1e9:.1f}"
    names, work = tuple(ropes(record)), _operations(checkpoint, record)
    kind = "cpu" if device == "cpu" else "cuda"
    for some in (names, names[:2]):
        if len(some) * work <= MOST_WORK[kind]:
            return some
    long = f"about {2 * work / A_MINUTE[kind]:,.0f} minutes, too long to do unasked ({argument('reading')})"
    return f"to read {record.target} tokens takes {long}"


def make_reading(
    checkpoint: Checkpoint,
    *,
    device: str = "cpu",
    hypotheses: tuple[str, ...] | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    record: Record | None = None,
    model: Any = None,
) -> Reading:
    """Read an extended checkpoint by stock transformers, once for every hypothesis; None for all.

    Its ``record`` is read, and its ``model`` loaded, where they are not at hand; the model is changed.
    """
    record = record or records.read(checkpoint.folder)
    if reason := _why_none(checkpoint, record):
        raise RopepatchError(f"{checkpoint.folder.name} cannot be probed: {reason}")
    window, length = record.original_max_position_embeddings, record.target
    small = 2 * _bytes_needed(checkpoint, record) < available_bytes() or device != "cpu"
    if model is None:
        model = checkpoint.load(torch.float32 if small else None)
    model = (model.float() if small else model).to(device)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    tokenizer = tokenizer_of(checkpoint)
    source = draw_source(tokenizer, vocabulary, length, seed)
    ids = source_ids(source, tokenizer, vocabulary, checkpoint.folder.name)
    candidates = _candidates(ids, tokenizer, window, length)
    tables = {name: table for name, table in ropes(record).items() if name in (hypotheses or (name,))}
    positions, tops = list[int](), dict[str, Tops]()
    with torch.inference_mode(), stock_code(f"run {checkpoint.folder.name}"):
        tokens = torch.tensor([ids[:-1]], device=input_device(model))
        for done, (name, table) in enumerate(tables.items()):
            progress(done, len(tables))
            with _rotating(model, None if name == RIGHT else table), _logits_of(model, tokens) as logits_at:
                if not positions:
                    positions = _least_certain(logits_at, candidates)
                log_probs = _log_probs(logits_at, positions)
            if not log_probs.isfinite().any(-1).all():
                raise RopepatchError(f"{checkpoint.folder.name} computes logits that are NaN or infinite")
            values, top = log_probs.topk(min(TOP, vocabulary))
            numbers = [[round(value, DIGITS) for value in row] for row in values.tolist()]
            tops[name] = Tops(ids=top.tolist(), log_probs=numbers)
    progress(len(tables), len(tables))
    apart = _told_apart(tops, [position > window for position in positions])
    alike = [name for name in tops if name not in apart]
    libraries = "ropepatch", "transformers", "torch"
    return Reading(
        version=1,
        weights=checkpoint.fingerprint,
        window=window,
        target=length,
        vocabulary=vocabulary,
        dtype=str(model.dtype).removeprefix("torch."),
        source=source,
        positions=positions,
        tops=apart,
        **({"alike": alike} if alike else {}),
        versions={library: importlib.metadata.version(library) for library in libraries},
    )


def tokenizer_of(checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model, or None."""
    try:
        return checkpoint.tokenizer
    except RopepatchError:
        return None


def _candidates(
    ids: list[int], tokenizer: PreTrainedTokenizerBase | None, window: int, length: int
) -> list[list[int]]:
    """For every position some to choose from, before the beginning of a word where there are any.

    A text that ends there is split into the same tokens as the beginning of the whole text.
    """
    pieces = tokenizer.convert_ids_to_tokens(ids) if tokenizer is not None else [""] * length
    begins = [str(piece)[:1] in ("Ġ", "▁", " ") for piece in pieces]
    groups = []
    for first, last in ((max(2, window // 4), window), (window + 1 + (length - window) // 32, length - 1)):
        edges = torch.linspace(first, last + 1, min(SIDE, last + 1 - first) + 1).long().tolist()
        for begin, end in pairwise(edges):
            words = [position for position in range(begin, end) if begins[position]]
            groups.append((words or list(range(begin, end)))[:CANDIDATES])
    return groups


@contextmanager
def _rotating(model: PreTrainedModel, table: Frequencies | None) -> Iterator[None]:
    """Compute with other frequencies within the block; None for those of the model."""
    if table is None:
        yield
        return
    site = find_rotary(model)
    stock = model.get_submodule(site.path)
    here = table._replace(inv_freq=table.inv_freq.to(input_device(model)))
    with rotating_by(model, site.path, scaled_twin(stock, site, here)):
        yield


@contextmanager
def _logits_of(model: PreTrainedModel, ids: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """Logits [P, V] of positions, which are numbers of tokens read, from one pass over ids [1, T]."""
    decoder = decoder_of(model)
    if decoder is None:
        logits = model(input_ids=ids, use_cache=False).logits[0]
        yield lambda positions: logits[positions - 1]
        return
    with decoded_once(model, decoder, ids) as (logits_at, _):
        yield lambda positions: logits_at(positions - 1)[0]


def _log_probs(logits_at: Callable[[Tensor], Tensor], positions: list[int]) -> Tensor:
    return logits_at(torch.tensor(positions)).float().log_softmax(-1).cpu()


def _least_certain(logits_at: Callable[[Tensor], Tensor], groups: list[list[int]]) -> list[int]:
    """Of every group the position with the greatest entropy: where all is certain no mistake shows."""
    chosen = []
    for group in groups:
        log_probs = _log_probs(logits_at, group)
        entropy = -(log_probs.exp() * log_probs).nan_to_num().sum(-1)
        chosen.append(group[int(entropy.argmax())])
    return chosen


def _told_apart(tops: dict[str, Tops], beyond: list[bool]) -> dict[str, Tops]:
    """Without the mistakes that nobody could tell from the right reading beyond the window."""
    right, rows = tops[RIGHT], [index for index, is_beyond in enumerate(beyond) if is_beyond]

    def apart(other: Tops) -> float:
        return typical([divergence(right.at(row), other.at(row)) for row in rows])

    return {name: top for name, top in tops.items() if name == RIGHT or apart(top) > TOLD_APART}


def _operations(checkpoint: Checkpoint, record: Record) -> int:
    """Count the operations of one reading."""
    config: Any = checkpoint.config
    weights = sum(map(math.prod, checkpoint.weights.shapes.values()))
    return forward_operations(config, weights, record.target)


def _bytes_needed(checkpoint: Checkpoint, record: Record) -> int:
    """Of one reading: the weights, and what a layer computes of all tokens."""
    config: Any = checkpoint.config
    widths = 4 * config.hidden_size + 3 * (getattr(config, "intermediate_size", None) or 0)
    return checkpoint.weights.num_bytes + int(4 * record.target * widths)
