"""The trainable weights: a low-rank adapter or all of them; and loading an adapter onto its base."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.errors import RopepatchError
from ropepatch.extension import record as records
from ropepatch.extension.patching import active, plan_of_record, put
from ropepatch.extension.record import Record
from ropepatch.files import read_json
from ropepatch.model.checkpoint import ADAPTER, Checkpoint
from ropepatch.model.config import find_rotary, stock_code
from ropepatch.model.precision import best_device
from ropepatch.model.rotary import base_model
from ropepatch.model.weights import read_header
from ropepatch.training.recipe import Lora

if TYPE_CHECKING:
    from peft import PeftModel

WEIGHTS = "adapter_model.safetensors"


def trainable(model: Any, lora: Lora | None) -> nn.Module:
    """Return the model with its adapter, or with all weights trainable.

    Trainable weights are float32: bfloat16 has 8 bits of precision and loses steps of 2e-5. Frozen weights
    keep their dtype.
    """
    if lora is None:
        full: nn.Module = model.float().requires_grad_(True)
        return full
    ends = {
        path.rpartition(".")[2]
        for path, module in model.named_modules()
        if module in _ends(model)
    }
    if _is_tied(model) and ends & {*lora.target_modules}:
        raise RopepatchError(
            "embeddings and head share their weights, so an adapter on one would change both",
            hint="use train_embeddings: true instead",
        )
    peft = _peft()
    try:
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            modules_to_save=_saved_whole(model, lora) or None,
            ensure_weight_tying=lora.train_embeddings and _is_tied(model),
            **lora.model_dump(
                mode="json",
                exclude={"train_embeddings", "train_norms"},
                exclude_none=True,
            ),
        )
        with without_deprecations():
            fine_tuned: nn.Module = peft.get_peft_model(model, config)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # RuntimeError: not enough memory for the rank
        names = (
            lora.target_modules
            if isinstance(lora.target_modules, str)
            else ", ".join(lora.target_modules)
        )
        raise RopepatchError(
            f"this model cannot have an adapter on {names}: {' '.join(str(error).split())[:200]}",
            hint="name linear layers of the model in lora.target_modules, or all-linear",
        ) from error
    for parameter in fine_tuned.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return fine_tuned


@dataclass(frozen=True)
class Weights:
    """Counts of the weights of a model."""

    all: int
    linear: int  # in linear layers but the head, which can be kept in 4 bits
    trained: int = 0  # with those of the adapter

    @classmethod
    def before(cls, model: Any) -> Weights:
        """Count the weights of a model, which may be on the meta device."""
        head = model.get_output_embeddings()
        linear = 0
        for part in model.modules():
            if isinstance(part, nn.Linear) and part is not head:
                linear += part.weight.numel()
        return cls(sum(weights.numel() for weights in model.parameters()), linear)

    @classmethod
    def of(cls, model: Any, lora: Lora | None) -> Weights:
        """Count them and those of the adapter; raises `RopepatchError` if the model cannot have it."""
        counted = cls.before(model)
        # PEFT initialises the adapter at random.
        with torch.random.fork_rng(devices=[]):
            parameters = list(trainable(model, lora).parameters())
        trained = sum(one.numel() for one in parameters if one.requires_grad)
        return replace(counted, trained=trained)


def load_in_4_bits(source: Checkpoint, dtype: str, device: str) -> PreTrainedModel:
    """Load a checkpoint with the weights of its linear layers in bitsandbytes' NF4 (arXiv:2305.14314)."""
    kind = getattr(torch, dtype)
    how = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=kind,
    )
    return source.load(kind, {"": device}, how)


def _peft() -> Any:
    try:
        return import_module("peft")
    except ImportError as error:
        raise RopepatchError(
            "peft is needed for an adapter", hint='pip install "ropepatch[train]"'
        ) from error


@contextmanager
def without_deprecations() -> Iterator[None]:
    """Hide transformers' deprecation warnings about PEFT, which a user cannot fix."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        yield


def recompute_activations(model: Any) -> None:
    """Enable gradient checkpointing of a transformers model."""
    name = "activation_checkpointing_enable"  # since transformers 5.19
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _saved_whole(model: Any, lora: Lora) -> list[str]:
    """Return the last parts of the names of the modules whose weights are all trained."""
    names = set()
    embeddings = _ends(model) if _is_tied(model) else [model.get_input_embeddings()]
    for path, module in model.named_modules():
        is_norm, is_embedding = (
            type(module).__name__.endswith("Norm"),
            module in embeddings,
        )
        if (is_norm and lora.train_norms) or (is_embedding and lora.train_embeddings):
            names.add(path.rpartition(".")[2])
    return sorted(names)


def _ends(model: Any) -> list[nn.Module]:
    return [model.get_input_embeddings(), model.get_output_embeddings()]


def _is_tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def load_adapter(
    folder: str | Path,
    model: PreTrainedModel | None = None,
    *,
    base: str | Path | None = None,
) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """Load an adapter onto its base model, with the RoPE that it was trained with.

    Args:
        folder: The adapter's folder, with adapter_config.json, its weights and ropepatch.json.
        model: The base model with the same RoPE: patched with the same plan, or loaded from the extended
            checkpoint; None to load and patch it.
        base: The base checkpoint, if it is no longer at its original place.

    Returns:
        The model with the adapter, in eval mode, and the tokenizer.

    Raises:
        RopepatchError: If the folder contains no such adapter, PEFT is missing, the base model does not have
            the weights that the adapter was trained on, or ``model`` has another RoPE.
    """
    if not isinstance(folder, str | os.PathLike):
        raise RopepatchError(
            f"the first argument of load_adapter must be the adapter's folder, got {type(folder).__name__}",
            hint="ropepatch.load_adapter(folder, model)",
        )
    place = Path(folder)
    record = records.read(place) if records.exists(place) else None
    if not (place / ADAPTER).is_file() or record is None or record.base_weights is None:
        raise RopepatchError(
            f"{place} contains no adapter of ropepatch",
            hint="use `ropepatch.load` for a whole model",
        )
    # PEFT's; the record has no path
    local = read_json(place / ADAPTER).get("base_model_name_or_path")
    known = local if isinstance(local, str) and Path(local).is_dir() else record.model
    name = str(base or known)
    revision = None if base or Path(name).is_dir() else record.revision
    source = Checkpoint.find(name, revision, original=record.original, weights=True)
    if source.fingerprint != record.base_weights:
        raise RopepatchError(
            f"{source.name} does not have the weights that the adapter was trained on",
            hint="use the checkpoint that it was trained on",
        )
    if model is None:
        loaded: Any = source.load()
        model = loaded.to(best_device())
        put(model, plan_of_record(record, source))
    _check_rope(model, record)
    return _with_adapter(model, place), source.tokenizer


def _with_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """Load the adapter of a folder onto a model; a missing tensor is an error."""
    peft, hint = _peft(), "copy the adapter again from its original place"
    read_header(folder / WEIGHTS)  # without this file PEFT would load a pickle
    # PEFT draws initial weights, which it then replaces
    seeded = torch.random.fork_rng(devices=[])
    with stock_code(f"load the adapter {folder}", hint), without_deprecations(), seeded:
        warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
        fine_tuned: PeftModel = peft.PeftModel.from_pretrained(
            model, str(folder)
        ).eval()
    return fine_tuned


def _check_rope(model: PreTrainedModel, record: Record) -> None:
    handle = active(model)
    if handle is None:
        base = base_model(model)
        site = find_rotary(base)
        rotary: Any = base.get_submodule(site.path)
        inv_freq, a = (
            getattr(rotary, site.attribute(name))
            for name in ("inv_freq", "attention_scaling")
        )
        has, hint = (
            "another RoPE",
            "drop the model argument, or call ropepatch.patch(model, plan) first",
        )
    else:
        inv_freq, a = handle.plan.frequencies()
        has = f"{handle.plan.method.name} to {handle.plan.target}"
        hint = "remove that patch, or drop the model argument"
    if inv_freq.tolist() != record.inv_freq or a != record.attention_factor:
        raise RopepatchError(
            f"the adapter was trained with {record.method} at {record.target} tokens; this model has {has}",
            hint=hint,
        )
