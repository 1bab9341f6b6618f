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
    load_config,
    loader_of,
    no_progress_bars,
    quantization_of,
    stand_in,
    stock_code,
    text_config,
)
from ropepatch.model.weights import MISFIT, Weights

AUTO = "auto"  # as device: accelerate places every layer
NUMBERED = re.compile(r"(.*?)\.\d+\.")  # the name of a weight in one of several layers
SAFELY: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load_model(
    folder: Path,
    raw: dict[str, Any],
    config: PreTrainedConfig | None = None,
    dtype: torch.dtype | None = None,
    device_map: str | dict[str, str] | None = None,
    quantization: Any = None,
    name: str = "",
) -> PreTrainedModel:
    """Load a folder's model in eval mode, with its config.json ``raw`` or with another ``config``.

    Raises a `RopepatchError` if the weights do not fit config.json or the dtype does not support computation.
    Unused weights outside the layers are logged under the ``name`` that the user gave.
    """
    if dtype is not None and dtype.itemsize < 2:  # float8 is for storage only
        stated = str(dtype).removeprefix("torch.")
        raise RopepatchError(
            f"no model computes in {stated}",
            hint="dtype is float32, bfloat16 or float16",
        )
    how = SAFELY | {
        "dtype": dtype or "auto",
        "use_safetensors": True,
        "output_loading_info": True,
        "device_map": device_map,
        "quantization_config": quantization,
    }
    own = config or load_config(raw)
    # Else stock transformers parses config.json itself
    if config is not None or stand_in(raw):
        how["config"] = own
    load: Any = loader_of(own).from_pretrained
    hint = "fix config.json or the weights so that transformers loads them"
    # transformers initialises missing weights at random, before they raise an error below.
    with (
        stock_code(f"load {folder}", hint),
        no_progress_bars(),
        torch.random.fork_rng(devices=[]),
    ):
        model, report = load(folder, **how)
    model.config.return_dict = True
    unused = check_report(model, report)
    if unused and name:
        warn_once(
            f"{name}: its model does not use {len(unused)} of the weights, for instance {unused[0]}"
        )
    loaded: PreTrainedModel = model.eval()
    return loaded


# A checkpoint may be loaded several times
warn_once = lru_cache(logging.getLogger(__name__).warning)


def check_weights(weights: Weights, model: PreTrainedModel) -> list[str]:
    """Load weights by their headers only into a model on the meta device; see `check_report`.

    Quantised weights are not checked: their names and shapes differ from the model's.
    """
    config = copy.deepcopy(model.config)
    if quantization_of(config):
        if weights.quantised:
            return []
        for part in (config, text_config(config)):
            vars(part).pop("quantization_config", None)
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
    lists = {found[1] for name in model.state_dict() if (found := NUMBERED.match(name))}
    in_layers = [
        name for name in unused if (found := NUMBERED.match(name)) and found[1] in lists
    ]
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
        # '' recurses forever
        _ = (
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.unk_token_id,
        )
        if not isinstance(tokenizer.model_max_length, int | float):
            raise TypeError(f"model_max_length is {tokenizer.model_max_length!r}")
    # Without a vocabulary, some classes contain only their special tokens.
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder) + 1:
        raise RopepatchError(
            f"no tokenizer in {folder}: transformers would use an empty one",
            hint=hint,
        )
    return tokenizer
