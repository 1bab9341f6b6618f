"""The code file in a checkpoint with a position remapping, which transformers runs with trust_remote_code.

It is `attention/modeling_position_remapping.py` with the class names of the model family instead of LLaMA's:
one fixed text per family, whose sha256 is in the record.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ropepatch.attention import Remapping, modeling_position_remapping
from ropepatch.attention.interchange import POSITIONS_SLOT
from ropepatch.files import read_json
from ropepatch.model.checkpoint import CODE
from ropepatch.model.config import (
    KEY,
    REMAPPED,
    Config,
    no_progress_bars,
    stock_code,
)

PREFIX = "Remapped"  # of the class names
WRITTEN = "ropepatch_written_map"  # module name of the written file
GENERATE = "custom_generate/generate.py"  # transformers runs it with trust_remote_code


def remapping_code(model_type: str, rotary: str) -> str:
    """Return the code for a model family.

    Args:
        model_type: The family, as transformers names it.
        rotary: The path of its rotary module.
    """
    config, model = _classes(model_type)
    text = Path(modeling_position_remapping.__file__).read_text(encoding="utf-8")
    for ours, theirs in {
        "LlamaConfig": config,
        "LlamaForCausalLM": model,
        f'"llama{REMAPPED}"': f'"{model_type}{REMAPPED}"',
        "not `llama`": f"not `{model_type}`",
        '"model.rotary_emb"': f'"{rotary}"',
    }.items():
        text = text.replace(ours, theirs)
    return text


def remapping_keys(config: Config, remapping: Remapping, target: int) -> dict[str, Any]:
    """Return the keys of config.json for a remapping of all layers.

    Args:
        config: The model.
        remapping: The remapping, with all its parameters.
        target: The target length, in tokens.
    """
    of_config, of_model = _classes(config.model_type)
    module = CODE.removesuffix(".py")
    described = {
        "name": remapping.name,
        "parameters": remapping.parameters(),
        "window": config.window,
        "target": target,
        "layers": None,
        "layer_type": config.layer_type,
    }
    return {
        "model_type": f"{config.model_type}{REMAPPED}",
        "architectures": [PREFIX + of_model],
        "auto_map": {
            "AutoConfig": f"{module}.{PREFIX}{of_config}",
            "AutoModelForCausalLM": f"{module}.{PREFIX}{of_model}",
        },
        KEY: described,
    }


def other_code(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the files, besides config.json, that would run other code with trust_remote_code.

    Args:
        folder: The folder of the checkpoint, or of its source.
        names: The paths of its additional files.
    """
    naming = [
        file.name
        for file in sorted(folder.glob("*_config.json"))
        if read_json(file).get("auto_map")
    ]
    return [GENERATE] * (GENERATE in names) + naming


def remapped_layers(model: PreTrainedModel) -> list[int] | None:
    """Return the layers that a model's remapping applies to; None for all."""
    slots: dict[Any, object] = {
        module.layer_idx: vars(module)[POSITIONS_SLOT]
        for module in model.modules()
        if POSITIONS_SLOT in vars(module)
    }
    layers = [layer for layer, slot in slots.items() if slot is not None]
    return None if len(layers) == len(slots) else layers


def load_remapped(folder: Path) -> PreTrainedModel:
    """Load a checkpoint in float32 with the code file that was just written, without ropepatch's code."""
    code = ModuleType(WRITTEN)
    hint = "nothing was written; please report the model type and the method"
    with stock_code("run the written checkpoint", hint), no_progress_bars():
        sys.modules[WRITTEN] = code
        exec(compile((folder / CODE).read_bytes(), CODE, "exec"), vars(code))
        (name,) = read_json(folder / "config.json")["architectures"]
        load: Any = getattr(code, name).from_pretrained
        loaded: Any = load(
            folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
    model: PreTrainedModel = loaded.eval()
    model.config.return_dict = True
    return model


def _classes(model_type: str) -> tuple[str, str]:
    """Return the class names of a family's configuration and model."""
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return CONFIG_MAPPING[model_type].__name__, str(model)
