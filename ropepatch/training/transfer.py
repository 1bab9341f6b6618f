"""Put the adaptation of one model onto its sibling: instruct + (adapted - base), weight by weight.

Task arithmetic (arXiv:2212.04089): what the adaptation changed is added to what the fine-tuning changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ropepatch.data.texts import Texts
from ropepatch.data.tokens import default_cache, tokenised
from ropepatch.errors import RopepatchError
from ropepatch.extension import record as records
from ropepatch.extension.patching import patch
from ropepatch.extension.planning import Plan
from ropepatch.extension.record import Adaptation, Gate, Record, Transfer
from ropepatch.extension.verification import available_bytes
from ropepatch.extension.writing import check_weights, copy_files, save_trained
from ropepatch.files import absent
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import blueprint, load_config, text_config
from ropepatch.model.loading import load_model, load_tokenizer
from ropepatch.model.precision import best_device
from ropepatch.model.source import check_inside, find_source
from ropepatch.model.survey import survey_checkpoint
from ropepatch.model.weights import changed, read_header, read_headers
from ropepatch.settings import short_length
from ropepatch.training.adaptation import ADAPTATION, RECIPE
from ropepatch.training.adapter import (
    WEIGHTS,
    check_trained_from,
    holds_adapter,
    load_adapter,
    plan_of_record,
)
from ropepatch.training.recipe import Watch
from ropepatch.training.rows import held_out
from ropepatch.training.trainer import HISTORY
from ropepatch.training.watching import Watcher

PAPER = "arXiv:2212.04089"
SAMPLE = "It's 1 of 23 answers:\n\n  Où est-il? {x_1} = 4.56 % ☃"  # split alike by tokenizers that are alike


@dataclass(frozen=True)
class Transferred:
    """The outcome of `transfer`; losses are of the last half of the target, in nats per token."""

    folder: Path
    gate: Gate  # the loss within the old context, of the sibling as it was and now
    training_free: float  # with the sibling's rope scaled alone
    target_loss: float

    def __str__(self) -> str:
        losses = f"{self.training_free:.4f} training-free, {self.target_loss:.4f} now"
        return f"{self.gate}\nloss in the last half of the target: {losses}"


def transfer(
    adapted: str | Path,
    base: str | Path,
    instruct: str | Path,
    out: str | Path | None = None,
    *,
    text: str | Path,
    field: str = "text",
    split: str = "test",
    max_short_loss_increase: float | None = None,
    device: str | None = None,
    record: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Transferred:
    """Write a sibling of an adapted model with its longer context: instruct + (adapted - base).

    The three models are in memory at the same time, the differences are taken in float64, and weights that
    the adaptation left alone stay as they are to the bit.

    Args:
        adapted: What `adapt` made of the base, merged or an adapter.
        base: What it was made from.
        instruct: A model that was fine-tuned from the same base.
        out: The folder to make, which must not exist; None for INSTRUCT-METHOD-TO here.
        text: Held-out text that is read before and after, as the recipe's `watch` would: a file, a folder, a
            `datasets` id or a saved set.
        field: The column or key of a document's text.
        split: Which part of a `datasets` id or a saved set is read.
        max_short_loss_increase: By how much the loss within the old context may rise, as a share; None for
            what the recipe of the adaptation says.
        device: Where the models read it; None for the GPU, if there is one.
        record: Further keys of `ropepatch.json`.
        say: Called with lines that tell how far it is.

    Raises:
        RopepatchError: If the first is no adaptation of the second, the third has other shapes, another
            tokenizer or another rope, they do not fit into memory, or the outcome cannot be written. A
            checkpoint whose loss rose too far is written, and its gate has not passed.
    """
    own = records.read(Path(adapted))
    folder = absent(out or f"{Path(instruct).name}-{own.method}-{short_length(own.target)}")
    device, texts = device or best_device(), Texts(text=os.fspath(text), field=field, split=split)
    if own.adaptation is None or own.base_weights is None:
        raise RopepatchError(
            f"{adapted} was extended without training: there is nothing to transfer",
            hint=f"ropepatch extend {instruct} --to {own.target} --method {own.method} does the same to it",
        )
    origin, sibling = (find_source(name, None, weights=True) for name in (base, instruct))
    check_trained_from(own, origin)
    check_siblings(origin, sibling)
    _check_adapted(Path(adapted), own, origin)
    history = _history(Path(adapted))
    plan = plan_of_record(own, instruct)
    _check_rope(plan, own, sibling)
    _check_memory(Path(adapted), origin, sibling)
    watcher = _watcher(own.adaptation, plan, load_tokenizer(sibling.folder), texts)
    limit = max_short_loss_increase
    limit = _watch(own.adaptation).max_short_loss_increase if limit is None else limit

    say(f"measuring {sibling.name} within its context, and with its rope scaled")
    model: Any = load_model(sibling)
    model.to(device)
    short = watcher.short_loss(model)
    patch(model, plan)
    training_free = watcher.measure(model)["target_loss"]
    say(f"adding what the adaptation changed ({PAPER})")
    add_difference(model.cpu(), *_weights(Path(adapted), own, origin))
    now = watcher.measure(model.to(device))
    gate = Gate.of(short, now["short_loss"], limit)
    transferred = Transferred(folder, gate, training_free, now["target_loss"])
    extras = dict(record or {}) | {
        "adaptation": own.adaptation.to_dict() | {"gate": gate.to_dict()},
        "base_weights": sibling.fingerprint,
        "transfer": Transfer(
            adapted=str(adapted),
            base=own.model,
            base_weights=own.base_weights,
            training_free=training_free,
            target_loss=now["target_loss"],
        ).to_dict(),
    }
    say("saving, and reloading with stock transformers")
    save_trained(plan, model.cpu(), folder, record=extras, enclose=partial(copy_files, history))
    return transferred


@torch.no_grad()
def add_difference(model: Any, adapted: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> None:
    """Add adapted - base to the weights of a model, in place."""
    changed = False
    for name, weight in model.named_parameters():
        if not torch.equal(adapted[name], base[name].to(adapted[name].dtype)):
            weight.copy_(weight.double() + (adapted[name].double() - base[name].double()))
            changed = True
    if not changed:
        raise RopepatchError(
            "the adapted model has the same weights as its base: there is nothing to transfer"
        )


def _weights(adapted: Path, record: Record, base: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those of the adapted model and of its base under the same scaling; of an adapter merged in float32."""
    is_adapter = holds_adapter(adapted)
    whole = load_model(base, dtype=torch.float32 if is_adapter else None)
    patch(whole, plan_of_record(record, base.folder))  # some scalings are folded into weights
    if not is_adapter:
        return load_model(Checkpoint(adapted)).state_dict(), whole.state_dict()
    before = {name: weight.clone() for name, weight in whole.state_dict().items()}
    merged: Any = load_adapter(adapted, whole, base=base.folder)[0].merge_and_unload()
    return merged.state_dict(), before


def check_siblings(base: Checkpoint, instruct: Checkpoint) -> None:
    """Refuse two checkpoints that are not fine-tunings of one: before any weight is read."""
    shapes = []
    for source in (base, instruct):
        raw = survey_checkpoint(source).raw
        if "quantization_config" in raw:
            raise RopepatchError(
                f"{source.name} has quantised weights, to which nothing is added",
                hint="give the checkpoint that it was quantised from",
            )
        model = blueprint(load_config(raw))
        check_weights(source.weights, model)
        shapes.append({name: tuple(weight.shape) for name, weight in model.named_parameters()})
    names = f"{instruct.name} is no sibling of {base.name}"
    if differing := [
        name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name)
    ]:
        name = min(differing)
        has, other = (list(one[name]) if name in one else "none" for one in reversed(shapes))
        raise RopepatchError(
            f"{names}: {len(differing)} of its tensors have other shapes, for instance {name}: {has}, "
            f"expected {other}",
            hint="give a model that was fine-tuned from the same base, without new tokens",
        )
    tokenizers = [load_tokenizer(source.folder) for source in (base, instruct)]
    if difference := _other_tokens(*tokenizers):
        raise RopepatchError(
            f"{names}: its tokenizer {difference}",
            hint="the adaptation was trained on the tokens of the base; give a model with the same",
        )


def _check_adapted(adapted: Path, record: Record, base: Checkpoint) -> None:
    """Refuse weights that are no longer those that were recorded, or are of another model than the base."""
    is_adapter = holds_adapter(adapted)
    weights = read_header(adapted / WEIGHTS) if is_adapter else read_headers(adapted)
    if record.checksums and (differing := changed(weights, record.checksums)):
        raise RopepatchError(
            f"the weights of {adapted} have changed since they were recorded ({', '.join(differing)[:200]})",
            hint="copy it again from where it came from",
        )
    if not is_adapter:
        check_siblings(base, Checkpoint(adapted))


def _other_tokens(base: PreTrainedTokenizerBase, instruct: PreTrainedTokenizerBase) -> str | None:
    """What a tokenizer does otherwise; tokens that were added, such as those of a chat, may differ."""
    before, now = base.get_vocab(), instruct.get_vocab()
    added = base.get_added_vocab().keys() | instruct.get_added_vocab().keys()
    other = [
        token for token in {**before, **now} if token not in added and before.get(token) != now.get(token)
    ]
    if other:
        token = min(other)
        return f"has {token!r} as {now.get(token, 'no token')}, expected {before.get(token, 'no token')}"
    split = [tokenizer(SAMPLE, add_special_tokens=False).input_ids for tokenizer in (base, instruct)]
    return None if split[0] == split[1] else "splits the same text into other tokens"


def _check_rope(plan: Plan, record: Record, instruct: Checkpoint) -> None:
    window, inv_freq = plan.rope.original_max_position_embeddings, plan.rope.inv_freq().tolist()
    if (window, inv_freq) == (record.original_max_position_embeddings, record.inv_freq_before):
        return
    has = f"{window} tokens and theta {plan.rope.rope_theta:g}"
    expected = f"{record.original_max_position_embeddings} and {record.rope_theta:g}"
    raise RopepatchError(
        f"{instruct.name} has another rope than the base that was adapted: {has}, expected {expected}",
        hint="give a model with the rope of the base",
    )


def _check_memory(adapted: Path, base: Checkpoint, instruct: Checkpoint) -> None:
    base_bytes = base.weights.num_bytes
    others = 4 * base_bytes if holds_adapter(adapted) else base_bytes + read_headers(adapted).num_bytes
    needed = instruct.weights.num_bytes + others
    if needed > available_bytes():
        raise RopepatchError(
            f"the three models take {needed / 1e9:.1f} GB of memory; there are {available_bytes() / 1e9:.1f}",
            hint="transfer on a machine with more memory",
        )


def _watch(adaptation: Adaptation) -> Watch:
    return Watch.model_validate(adaptation.recipe.get("watch", {}))


def _watcher(adaptation: Adaptation, plan: Plan, tokenizer: PreTrainedTokenizerBase, text: Texts) -> Watcher:
    windows, trained = _watch(adaptation).windows, plan.rope.original_max_position_embeddings
    store = tokenised(
        text,
        tokenizer,
        trained=trained,
        vocabulary=text_config(plan.survey.config).vocab_size,
        tokens=windows * plan.target,
        cache=default_cache(),
    )
    pieces, _ = held_out(store, plan.target, windows)
    return Watcher(tokenizer, pieces, trained, plan.target, trials=0, split=False)


def _history(adapted: Path) -> dict[str, Path]:
    """The recipe and the history of the adaptation, by their paths in a checkpoint."""
    files = {name: adapted / name for name in (f"{ADAPTATION}/{RECIPE}", f"{ADAPTATION}/{HISTORY}")}
    for file in files.values():
        check_inside(file, adapted)
    return {name: file for name, file in files.items() if file.is_file()}
