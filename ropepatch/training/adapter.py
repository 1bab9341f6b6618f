"""The trainable weights: a low-rank adapter or all of them; and loading an adapter onto its base."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.errors import RopepatchError, requiring
from ropepatch.extension import record as records
from ropepatch.extension.patching import plan_of_record, put
from ropepatch.files import read_json
from ropepatch.model.checkpoint import (
    ADAPTER,
    ADAPTER_BASE,
    ADAPTER_WEIGHTS,
    Checkpoint,
)
from ropepatch.model.config import stock_code
from ropepatch.model.precision import best_device
from ropepatch.model.weights import read_header
from ropepatch.training.recipe import Lora

if TYPE_CHECKING:
    from peft import PeftModel


def trainable(model: Any, lora: Lora | None) -> nn.Module:
    """Return the model with its adapter, or with all weights trainable.

    Trainable weights are float32: bfloat16 has 8 bits of precision and loses steps of 2e-5. Frozen weights
    keep their dtype.
    """
    if lora is None:
        full: nn.Module = model.float().requires_grad_(True)
        return full
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embeddings.weight
    ends = _names(model, lambda part: part is embeddings or (is_tied and part is head))
    if is_tied and ends & {*lora.target_modules}:
        raise RopepatchError(
            "embeddings and head share their weights, so an adapter on one would change both",
            hint="use train_embeddings: true instead",
        )
    whole = set[str]()  # modules whose weights are all trained
    if lora.train_embeddings:
        whole |= ends
    if lora.train_norms:
        whole |= _names(model, lambda part: type(part).__name__.endswith("Norm"))
    peft = _peft()
    ours = {"train_embeddings", "train_norms"}
    try:
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            modules_to_save=sorted(whole) or None,
            ensure_weight_tying=lora.train_embeddings and is_tied,
            **lora.model_dump(mode="json", exclude=ours, exclude_none=True),
        )
        with without_deprecations():
            fine_tuned: nn.Module = peft.get_peft_model(model, config)
    # RuntimeError: not enough memory for the rank
    except (TypeError, ValueError, RuntimeError) as error:
        raise RopepatchError(
            f"this model cannot have this adapter: {' '.join(str(error).split())[:200]}",
            hint="name linear layers of the model in lora.target_modules, or all-linear",
        ) from error
    for parameter in fine_tuned.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return fine_tuned


def _names(model: nn.Module, chosen: Callable[[nn.Module], bool]) -> set[str]:
    """Return the last parts of the names of some modules."""
    return {
        path.rpartition(".")[2] for path, part in model.named_modules() if chosen(part)
    }


@dataclass(frozen=True)
class Weights:
    """Counts of the weights of a model."""

    all: int
    linear: int  # in linear layers but the head, which can be kept in 4 bits
    trained: int  # with those of the adapter

    @classmethod
    def of(cls, skeleton: Any, lora: Lora | None) -> Weights:
        """Count them on the meta device; raises `RopepatchError` if the model cannot have the adapter."""
        model, linear = copy.deepcopy(skeleton), 0
        head = model.get_output_embeddings()
        for part in model.modules():
            if isinstance(part, nn.Linear) and part is not head:
                linear += part.weight.numel()
        whole = model.num_parameters()
        # PEFT initialises the adapter at random.
        with torch.random.fork_rng(devices=[]):
            parameters = list(trainable(model, lora).parameters())
        trained = sum(one.numel() for one in parameters if one.requires_grad)
        return cls(whole, linear, trained)


def _peft() -> Any:
    with requiring("an adapter", "ropepatch[train]"):
        return import_module("peft")


@contextmanager
def without_deprecations() -> Iterator[None]:
    """Hide transformers' deprecation warnings about PEFT, which a user cannot fix."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        yield


def can_offload() -> bool:
    """Return whether transformers can hold on the host what gradient checkpointing keeps."""
    enable = getattr(PreTrainedModel, "activation_checkpointing_enable", None)
    return enable is not None and "offload" in signature(enable).parameters


def recompute_activations(model: Any, *, offload: bool = False) -> None:
    """Enable gradient checkpointing of a transformers model, also with what it keeps on the host."""
    name = "activation_checkpointing_enable"  # since transformers 5.19
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    more = {"offload": True} if offload else {}
    enable({"use_reentrant": False}, **more)


def load_adapter(
    folder: str | Path, *, base: str | Path | None = None
) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """Load an adapter onto its base model, with the RoPE that it was trained with.

    Args:
        folder: The adapter's folder, with adapter_config.json, its weights and ropepatch.json.
        base: The base checkpoint, if it is no longer at its original place.

    Returns:
        The model with the adapter, in eval mode, and the tokenizer.

    Raises:
        RopepatchError: If the folder contains no such adapter, PEFT is missing, or the base does not have the
            weights and the RoPE of the one that it was trained on.
    """
    place = Path(folder)
    record = records.read(place) if records.exists(place) else None
    if not (place / ADAPTER).is_file() or record is None or record.base_weights is None:
        raise RopepatchError(
            f"{place} contains no adapter of ropepatch",
            hint="use `ropepatch.load` for a whole model",
        )
    # PEFT's; the record has no path
    local = read_json(place / ADAPTER).get(ADAPTER_BASE)
    known = local if isinstance(local, str) and Path(local).is_dir() else record.model
    name = str(base or known)
    revision = None if base or Path(name).is_dir() else record.revision
    source = Checkpoint.find(name, revision, original=record.original, weights=True)
    plan = plan_of_record(record, source)
    inv_freq, a = plan.frequencies()
    is_same = inv_freq.tolist() == record.inv_freq and a == record.attention_factor
    if source.fingerprint != record.base_weights or not is_same:
        raise RopepatchError(
            f"{source.name} does not have the weights and the RoPE that the adapter was trained on",
            hint="use the checkpoint that it was trained on",
        )
    peft, hint = _peft(), "copy the adapter again from its original place"
    read_header(place / ADAPTER_WEIGHTS)  # without this file PEFT would load a pickle
    loaded: Any = source.load()
    model = loaded.to(best_device())
    put(model, plan)
    # PEFT draws initial weights, which it then replaces
    seeded = torch.random.fork_rng(devices=[])
    with stock_code(f"load the adapter {place}", hint), without_deprecations(), seeded:
        warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
        fine_tuned = peft.PeftModel.from_pretrained(model, str(place))
    return fine_tuned.eval(), source.tokenizer
