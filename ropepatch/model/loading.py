"""Checkpoints into memory, by stock transformers: safetensors only, no remote code, no network."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ropepatch.errors import RopepatchError
from ropepatch.model.config import text_config
from ropepatch.model.kinds import check_stock
from ropepatch.model.stock import no_progress_bars, stock_code
from ropepatch.model.weights import mismatch

AUTO = "auto"  # in a device's place: accelerate puts every layer where there is room
SAFELY: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def known_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Look up a floating-point dtype by its name; None stays None."""
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise RopepatchError(f"no dtype {dtype!r} of weights", hint="float32, bfloat16 or float16")
    return kind


def check_device(device: str | torch.device) -> None:
    """Refuse a device that this machine lacks, with torch's reason."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise RopepatchError(
            f"no device {str(device)!r} here: {reason}", hint="cpu is always there"
        ) from error


def load_model(
    folder: Path,
    raw: dict[str, Any],
    config: PreTrainedConfig | None = None,
    dtype: torch.dtype | None = None,
    device_map: str | dict[str, str] | None = None,
    quantization: Any = None,
) -> PreTrainedModel:
    """Load the model of a folder whose config.json is ``raw``, or by another ``config``, in eval mode.

    Refused if its weights are not those of config.json, or nothing can be computed in the dtype.
    """
    if dtype is not None and dtype.itemsize < 2:  # float8 stores weights; torch has no default of it
        name = str(dtype).removeprefix("torch.")
        raise RopepatchError(f"no model computes in {name}", hint="dtype is float32, bfloat16 or float16")
    load: Any = AutoModelForCausalLM.from_pretrained
    hint = "fix config.json or the weights so that transformers loads them"
    how = SAFELY | {"dtype": dtype or "auto", "use_safetensors": True, "output_loading_info": True}
    if device_map is not None:
        how["device_map"] = device_map
    if quantization is not None:
        how["quantization_config"] = quantization
    if config is not None:
        how["config"] = config
    else:
        check_stock(raw)
    with stock_code(f"load {folder}", hint), no_progress_bars():
        model, report = load(folder, **how)
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            first = min(map(str, report[problem]))
            raise mismatch(f"{len(report[problem])} {problem.replace('_', ' ')}, for instance {first}")
    loaded: PreTrainedModel = model.eval()
    returning_objects(loaded)
    return loaded


def returning_objects(model: PreTrainedModel) -> None:
    """Let a model return objects with `logits`, whatever `return_dict` in its config.json says."""
    for config in (model.config, text_config(model.config)):
        config.return_dict = True


def load_tokenizer(folder: Path, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder; some go by the architecture, some by the model's name.

    Raises:
        RopepatchError: If transformers cannot load it, or the folder holds none.
    """
    hint = "copy the tokenizer's files into the folder"
    named = copy.deepcopy(config)
    named.name_or_path = folder
    how = SAFELY | {"config": named}
    with stock_code(f"load the tokenizer of {folder}", hint):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **how)
    # Without a vocabulary some classes are made from nothing but their special tokens.
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder) + 1:
        raise RopepatchError(
            f"no tokenizer in {folder}: what transformers makes up knows no words",
            hint=hint,
        )
    return tokenizer
