"""Compute a checkpoint's fingerprint: its predictions with the right RoPE and with each common error.

Shapes: T tokens of the text, P positions, K most probable tokens, V vocabulary.
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
from ropepatch.model.config import Config, find_rotary, scaled_twin, stock_code
from ropepatch.model.cost import HOUR, forward_operations, kind_of, layer_bytes
from ropepatch.model.head import decoded_once, decoder_of, input_device
from ropepatch.model.precision import available_bytes
from ropepatch.model.reading_file import RIGHT, Reading, Tops
from ropepatch.model.rotary import rotating_by
from ropepatch.probing.judging import FEWEST, divergence, typical
from ropepatch.probing.mistakes import ropes
from ropepatch.probing.text import draw_source, source_ids
from ropepatch.scaling import METHODS
from ropepatch.scaling.rope import Frequencies

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SIDE = 24  # positions within, and as many beyond, the original context length
CANDIDATES = 16  # per position; the one with the least certain next token is chosen
TOP = 20
DIGITS = 4
PLACES = 6
UNIT = 2**-8  # relative error of a number in bfloat16, and of a weight in 8 bits
TOLD_APART = 4e-3  # nats: an error with a smaller effect is negligible
MOST_WORK = {
    "cpu": 1e13,
    "cuda": 1e16,
}  # operations that `extend` spends at most: a minute or two
IN_FLOAT32 = 2  # times as long as in the precision of `HOUR`

Say = Callable[[str], None]


def why_none(config: Config, method: str, window: int, target: int) -> str | None:
    """Return why a checkpoint cannot have a fingerprint; None if it can.

    Args:
        config: The configuration of the checkpoint, or of the one it is made from.
        method: The method that extends it.
        window: The original context length, in tokens.
        target: The target length, in tokens.
    """
    if config.kind != "stock" or method in REMAPPINGS:
        return "it needs ropepatch's own code, which no engine runs"
    if method in METHODS and METHODS[method].length_dependent:
        return f"{method} changes with the prompt length, differently in each engine"
    if config.is_quantised:
        return "its weights are quantised"
    if target - window < SIDE:
        return (
            f"the target length is less than {SIDE} tokens beyond the original length"
        )
    return None


def _why_none(checkpoint: Checkpoint, record: Record) -> str | None:
    return why_none(
        checkpoint.config,
        record.method,
        record.original_max_position_embeddings,
        record.target,
    )


def affordable(
    checkpoint: Checkpoint, record: Record, device: str
) -> tuple[str, ...] | str:
    """Return the hypotheses that `extend` has time to compute, or why it computes no fingerprint."""
    if reason := _why_none(checkpoint, record):
        return reason
    needed, there = _bytes_needed(checkpoint, record), available_bytes()
    if needed > there and _shares_memory(device):
        return f"it needs {needed / 1e9:.1f} GB of memory, {there / 1e9:.1f} GB are available"
    names, work = tuple(ropes(record)), _operations(checkpoint, record)
    for some in (names, names[:FEWEST]):
        if (len(some) + 1) * work <= MOST_WORK[_kind(device)]:  # once more in 16 bits
            return some
    return f"computing it takes {duration(checkpoint, record, device)}; {argument('reading')} does it anyway"


def duration(checkpoint: Checkpoint, record: Record, device: str) -> str:
    """Estimate how long all hypotheses take, as text."""
    work = (len(ropes(record)) + 1) * _operations(checkpoint, record)
    minutes = max(1, round(60 * IN_FLOAT32 * work / HOUR[_kind(device)]))
    return f"about {minutes:,} min at {record.target} tokens"


def _kind(device: str) -> str:
    return kind_of(torch.device(device).type)


def _shares_memory(device: str) -> bool:
    """Return whether a device computes in the machine's memory, as CPUs and Apple's GPUs do."""
    return torch.device(device).type in ("cpu", "mps")


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
    """Compute the fingerprint of an extended checkpoint with stock transformers, once per hypothesis.

    Args:
        checkpoint: The extended checkpoint.
        device: Where the model runs.
        hypotheses: The names of the hypotheses to compute; None for all.
        seed: Seed of the text.
        progress: Called with the number of hypotheses done and of all.
        record: The checkpoint's record; read from its folder if not given.
        model: The loaded model, which is cast and moved in place; loaded if not given.
    """
    record = record or records.read(checkpoint.folder)
    if reason := _why_none(checkpoint, record):
        raise RopepatchError(f"{checkpoint.folder.name} cannot be probed: {reason}")
    window, length = record.original_max_position_embeddings, record.target
    small = 2 * _bytes_needed(
        checkpoint, record
    ) < available_bytes() or not _shares_memory(device)
    if model is None:
        model = checkpoint.load(torch.float32 if small else None)
    model = (model.float() if small else model).to(device)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    tokenizer = tokenizer_of(checkpoint)
    source = draw_source(tokenizer, vocabulary, length, seed)
    ids = source_ids(source, tokenizer, vocabulary, checkpoint.folder.name)
    candidates = _candidates(ids, tokenizer, window, length)
    tables = {
        name: table
        for name, table in ropes(record).items()
        if name in (hypotheses or (name,))
    }
    positions, tops = list[int](), dict[str, Tops]()
    with torch.inference_mode(), stock_code(f"run {checkpoint.folder.name}"):
        tokens = torch.tensor([ids[:-1]], device=input_device(model))
        for done, (name, table) in enumerate(tables.items()):
            progress(done, len(tables) + 1)
            with (
                _rotating(model, None if name == RIGHT else table),
                _logits_of(model, tokens) as logits_at,
            ):
                if not positions:
                    positions = _least_certain(logits_at, candidates)
                tops[name] = _tops(
                    _log_probs(logits_at, positions), checkpoint.folder.name
                )
        progress(len(tables), len(tables) + 1)
        with _in_16_bits(model, seed), _logits_of(model, tokens) as logits_at:
            inexact = _tops(_log_probs(logits_at, positions), checkpoint.folder.name)
    progress(len(tables) + 1, len(tables) + 1)
    pairs = zip(tops[RIGHT].rows(), inexact.rows(), strict=True)
    rounded = [round(divergence(*pair), PLACES) for pair in pairs]
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
        rounded=rounded,
        versions={
            library: importlib.metadata.version(library) for library in libraries
        },
    )


def tokenizer_of(checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    """Return the checkpoint's tokenizer, or None."""
    try:
        return checkpoint.tokenizer
    except RopepatchError:
        return None


def _candidates(
    ids: list[int], tokenizer: PreTrainedTokenizerBase | None, window: int, length: int
) -> list[list[int]]:
    """Return groups of candidate positions, at the ends of words if there are any.

    A prompt that ends with a word is tokenized like the beginning of the whole text.
    """
    pieces = (
        tokenizer.convert_ids_to_tokens(ids) if tokenizer is not None else [""] * length
    )
    begins = [str(piece)[:1] in ("Ġ", "▁", " ") for piece in pieces]
    groups = []
    for first, last in (
        (max(2, window // 4), window),
        (window + 1 + (length - window) // 32, length - 1),
    ):
        edges = (
            torch.linspace(first, last + 1, min(SIDE, last + 1 - first) + 1)
            .long()
            .tolist()
        )
        for begin, end in pairwise(edges):
            words = [position for position in range(begin, end) if begins[position]]
            groups.append((words or list(range(begin, end)))[:CANDIDATES])
    return groups


@contextmanager
def _rotating(model: PreTrainedModel, table: Frequencies | None) -> Iterator[None]:
    """Run the model with other frequencies within the block; None for its own."""
    if table is None:
        yield
        return
    site = find_rotary(model)
    stock = model.get_submodule(site.path)
    here = table._replace(inv_freq=table.inv_freq.to(input_device(model)))
    with rotating_by(model, site.path, scaled_twin(stock, site, here)):
        yield


@contextmanager
def _logits_of(
    model: PreTrainedModel, ids: Tensor
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Compute the logits [P, V] at positions, which count prompt tokens, in one pass over ids [1, T]."""
    decoder = decoder_of(model)
    if decoder is None:
        logits = model(input_ids=ids, use_cache=False).logits[0]
        yield lambda positions: logits[positions - 1]
        return
    with decoded_once(model, decoder, ids) as (logits_at, _):
        yield lambda positions: logits_at(positions - 1)[0]


def _log_probs(logits_at: Callable[[Tensor], Tensor], positions: list[int]) -> Tensor:
    return logits_at(torch.tensor(positions)).float().log_softmax(-1).cpu()


def _tops(log_probs: Tensor, name: str) -> Tops:
    """Keep the most probable of log-probabilities [P, V]."""
    if not log_probs.isfinite().any(-1).all():
        raise RopepatchError(f"{name} computes logits that are NaN or infinite")
    values, top = log_probs.topk(min(TOP, log_probs.shape[1]))
    numbers = [[round(value, DIGITS) for value in row] for row in values.tolist()]
    return Tops(ids=top.tolist(), log_probs=numbers)


@contextmanager
def _in_16_bits(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Change the outputs of all modules within the block by errors as large as those of bfloat16."""
    generator = torch.Generator(input_device(model)).manual_seed(seed)

    def inexact(value: Any) -> Any:
        if type(value) is tuple:  # of cosines and sines, or with attention weights
            return tuple(map(inexact, value))
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        errors = (
            torch.rand(value.shape, generator=generator, device=value.device) * 2 - 1
        )
        return (value * (1 + UNIT * errors)).to(value.dtype)

    def change(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return inexact(output)

    hooks = [module.register_forward_hook(change) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _least_certain(
    logits_at: Callable[[Tensor], Tensor], groups: list[list[int]]
) -> list[int]:
    """Choose the position with the greatest entropy in each group: certain predictions hide errors."""
    chosen = []
    for group in groups:
        log_probs = _log_probs(logits_at, group)
        entropy = -(log_probs.exp() * log_probs).nan_to_num().sum(-1)
        chosen.append(group[int(entropy.argmax())])
    return chosen


def _told_apart(tops: dict[str, Tops], beyond: list[bool]) -> dict[str, Tops]:
    """Drop the errors that cannot be distinguished from the right RoPE beyond the original length."""
    right = [
        row
        for row, is_beyond in zip(tops[RIGHT].rows(), beyond, strict=True)
        if is_beyond
    ]

    def apart(other: Tops) -> float:
        rows = [
            row
            for row, is_beyond in zip(other.rows(), beyond, strict=True)
            if is_beyond
        ]
        return typical([divergence(*pair) for pair in zip(right, rows, strict=True)])

    return {
        name: top
        for name, top in tops.items()
        if name == RIGHT or apart(top) > TOLD_APART
    }


def _operations(checkpoint: Checkpoint, record: Record) -> int:
    """Count the operations of one pass."""
    config: Any = checkpoint.config.text
    weights = sum(map(math.prod, checkpoint.weights.shapes.values()))
    return forward_operations(config, weights, record.target)


def _bytes_needed(checkpoint: Checkpoint, record: Record) -> int:
    """Estimate the memory of one pass: the weights, and the activations of one layer."""
    return checkpoint.weights.num_bytes + layer_bytes(
        checkpoint.config.text, record.target, 4
    )
