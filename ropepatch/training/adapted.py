"""Adapters that were trained under a plan, on models that carry its patch and on no others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropepatch.errors import RopepatchError
from ropepatch.extension.patching import active, patch
from ropepatch.extension.planning import plan as make_plan
from ropepatch.files import read_json
from ropepatch.model.loading import load_model, load_tokenizer
from ropepatch.model.source import find_source
from ropepatch.model.weights import fingerprint, read_headers

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_adapter(
    folder: str | Path, model: PreTrainedModel | None = None, *, base: str | Path | None = None
) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """An adapter that `adapt` saved, on its base model with the rope it was trained under.

    Args:
        folder: Of the adapter: adapter_config.json, its weights and ropepatch.json.
        model: The base model, already patched with the same plan; None to load and patch it.
        base: The base checkpoint, if it is not where the adapter was trained.

    Returns:
        The model with the adapter, in eval mode, and the tokenizer.

    Raises:
        RopepatchError: If the folder is no such adapter, PEFT is missing, the base has other weights than the
            adapter was trained on, or the model given has no patch or another one.
    """
    place = Path(folder)
    record = read_json(place / "ropepatch.json")
    if not (place / "adapter_config.json").is_file() or "base_weights" not in record:
        raise RopepatchError(
            f"{place} holds no adapter of ropepatch", hint="`ropepatch.load` loads a whole model"
        )
    name = str(base or record["model"])
    revision = None if base or Path(name).is_dir() else record["revision"]
    source = find_source(name, revision, weights=True)
    if fingerprint(read_headers(source.folder)) != record["base_weights"]:
        raise RopepatchError(
            f"{name} has other weights than the adapter was trained on",
            hint="get the checkpoint it was made from",
        )
    if model is None:
        model = load_model(source.folder)
        made = make_plan(
            name,
            to=record["target"],
            method=record["method"],
            revision=revision,
            factor=record["factor"],
            **record["parameters"],
        )
        patch(model, made)
    _check_rope(model, record)
    try:
        from peft import PeftModel
    except ImportError as error:
        raise RopepatchError(
            "peft is needed for an adapter", hint='pip install "ropepatch[train]"'
        ) from error
    adapted = PeftModel.from_pretrained(model, str(place)).eval()
    return adapted, load_tokenizer(source.folder)


def _check_rope(model: PreTrainedModel, record: dict[str, Any]) -> None:
    handle = active(model)
    if handle is None:
        raise RopepatchError(
            f"the adapter was trained under {record['method']} to {record['target']} tokens; "
            "this model has no patch",
            hint="leave the model out, or ropepatch.patch(model, plan) it first",
        )
    made = handle.plan
    wanted = record["inv_freq"], record["attention_factor"]
    frequencies = made.frequencies()
    if (frequencies.inv_freq.tolist(), frequencies.attention_factor) != wanted:
        raise RopepatchError(
            f"the adapter was trained under {record['method']} to {record['target']} tokens; "
            f"this model has {made.scaling.name} to {made.target}",
            hint="remove that patch, or leave the model out",
        )
