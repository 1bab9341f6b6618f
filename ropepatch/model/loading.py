"""Loading of checkpoints by stock transformers: safetensors only, no remote code, no network."""

from __future__ import annotations

import copy
import logging
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ropepatch.errors import RopepatchError
from ropepatch.model.config import (
    no_progress_bars,
    quantization_of,
    stock_code,
    text_config,
)
from ropepatch.model.weights import MISFIT, Weights

AUTO = "auto"  # as device: accelerate places every layer
NUMBERED = re.compile(r"(.*?)\.\d+\.")  # the name of a weight in one of several layers
SAFELY: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


# A checkpoint may be loaded several times
warn_once = lru_cache(logging.getLogger(__name__).warning)


def check_weights(weights: Weights, model: PreTrainedModel) -> list[str]:
    """Load weights by their headers only into a model on the meta device; see `check_report`.

    Quantised weights are not checked: their names and shapes differ from the model's.
    """
    config = copy.deepcopy(model.config)
    if quantization_of(config):
        return []
    state = {
        name: torch.empty(entry.shape, device="meta")
        for name, entry in weights.tensors.items()
    }
    load: Any = type(model).from_pretrained
    with (
        stock_code("load weights of these names and shapes", MISFIT),
        no_progress_bars(),
    ):
        _, report = load(
            None,
            config=config,
            state_dict=state,
            device_map={"": "meta"},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    return check_report(model, report)


def check_report(model: PreTrainedModel, report: dict[str, Any]) -> list[str]:
    """Return the names of unused weights from transformers' loading report.

    Raises:
        RopepatchError: If weights are missing, have other shapes, or belong to an unused layer, e.g. one more
            than config.json states.
    """
    unused = sorted(map(str, report["unexpected_keys"]))
    lists = {_list_of(name) for name in model.state_dict()} - {""}
    in_layers = [name for name in unused if _list_of(name) in lists]
    # Layers of multi-token prediction
    if getattr(text_config(model.config), "num_nextn_predict_layers", 0):
        in_layers = []
    for problem, names in (
        ("missing keys", report["missing_keys"]),
        ("mismatched keys", report["mismatched_keys"]),
        ("unexpected keys", in_layers),
    ):
        if names:
            raise RopepatchError(
                f"the weights are not those of config.json: {len(names)} {problem}, "
                f"for instance {min(map(str, names))}",
                hint=MISFIT,
            )
    return unused


def _list_of(weight: str) -> str:
    """Return the name of the list of layers that a weight is in; empty outside."""
    found = NUMBERED.match(weight)
    return found[1] if found else ""


def load_tokenizer(folder: Path, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder; some depend on the architecture, some on the model's name.

    Raises:
        RopepatchError: If transformers cannot load it, or the folder contains none.
    """
    hint = "copy the tokenizer's files into the folder"
    named = copy.deepcopy(config)
    named.name_or_path = folder
    how = SAFELY | {"config": named}
    with stock_code(f"load the tokenizer of {folder}", hint):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, **how
        )
    # Without a vocabulary, some classes contain only their special tokens.
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder) + 1:
        raise RopepatchError(
            f"no tokenizer in {folder}: transformers would use an empty one",
            hint=hint,
        )
    return tokenizer
