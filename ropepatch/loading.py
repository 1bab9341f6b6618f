"""Checkpoints into memory, by stock transformers: safetensors only, no remote code, no network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from ropepatch.adapters import load_config
from ropepatch.encodings.saving import swap_again
from ropepatch.errors import RopepatchError
from ropepatch.source import find_source, needs_ropepatch, read_config
from ropepatch.stock import no_progress_bars, stock_code

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAFELY: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load(model: str | Path, revision: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A checkpoint with its tokenizer; on the CPU, in the dtype it asks for and in eval mode.

    Args:
        model: A checkpoint folder, a Hub id, or `tiny`, the checkpoint that comes with ropepatch.
        revision: Of a Hub id.

    Raises:
        RopepatchError: If there is no such checkpoint, or transformers cannot load it.
    """
    folder = find_source(model, revision, weights=True).folder
    return load_model(folder), load_tokenizer(folder)


def load_model(folder: Path) -> PreTrainedModel:
    """The model of a checkpoint folder, in the dtype of config.json, else of its weights, and in eval mode.

    One that was saved with a swapped position encoding has it.

    Raises:
        RopepatchError: If transformers cannot load it, or its weights are not those of config.json.
    """
    load: Any = AutoModelForCausalLM.from_pretrained
    hint = "mend config.json or the weights so that transformers loads them"
    how = SAFELY | {"dtype": "auto", "use_safetensors": True, "output_loading_info": True}
    is_swapped = needs_ropepatch(folder)
    if is_swapped:
        how["config"] = load_config(read_config(folder))
    with stock_code(f"load {folder}", hint), no_progress_bars():
        model, report = load(folder, **how)
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            raise RopepatchError(
                f"the weights are not those of config.json: {len(report[problem])} "
                f"{problem.replace('_', ' ')}, for instance {min(map(str, report[problem]))}",
                hint="put config.json and the weights of the same checkpoint together",
            )
    if is_swapped:
        swap_again(model, folder)
    loaded: PreTrainedModel = model.eval()
    return loaded


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder.

    Raises:
        RopepatchError: If there is none that transformers can load.
    """
    with stock_code(f"load the tokenizer of {folder}", hint="copy the tokenizer's files into the folder"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **SAFELY)
    return tokenizer
