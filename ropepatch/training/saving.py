"""What a run leaves behind: a merged checkpoint, or an adapter with the plan it needs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ropepatch.checkpoint import plan_record, save_trained
from ropepatch.evaluation.results import as_read
from ropepatch.folders import absent, new_folder
from ropepatch.loading import load_model
from ropepatch.patching import patch
from ropepatch.source import Source, read_json
from ropepatch.training.adapter import merged
from ropepatch.training.trainer import HISTORY
from ropepatch.weights import fingerprint, read_headers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ropepatch.planning import Plan
    from ropepatch.training.recipe import Recipe

ADAPTATION = "adaptation"  # the folder within the checkpoint: recipe, history, the tracker's files
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def save_adaptation(
    plan: Plan, recipe: Recipe, source: Source, trained: Path, out: Path, adaptation: dict[str, Any]
) -> None:
    """Write the outcome of a run, whole or not at all.

    Args:
        plan: The plan it trained under.
        recipe: The recipe, which says in which form.
        source: The base checkpoint.
        trained: The folder that the trainer left.
        out: The folder to make.
        adaptation: What `ropepatch.json` says of the training.

    Raises:
        RopepatchError: If it cannot be written, or stock transformers computes something else from it.
    """
    record = {"adaptation": adaptation, "base_weights": fingerprint(read_headers(source.folder))}

    def enclose(folder: Path) -> None:
        _enclose(recipe, trained.parent, folder / ADAPTATION)

    if recipe.save == "merged":
        model = merged_model(plan, recipe, source, trained)
        save_trained(plan, model, out, record=record, enclose=enclose)
        return
    with new_folder(absent(out)) as folder:
        folder_files = ((trained / name, folder / name) for name in ADAPTER_FILES)
        for origin, target in folder_files:
            shutil.copyfile(origin, target)
        config = read_json(folder / "adapter_config.json")
        config |= {"base_model_name_or_path": plan.model, "revision": plan.revision}
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        enclose(folder)
        text = json.dumps(plan_record(plan) | record, indent=2, ensure_ascii=False)
        (folder / "ropepatch.json").write_text(text + "\n", encoding="utf-8")


def merged_model(plan: Plan, recipe: Recipe, source: Source, trained: Path) -> PreTrainedModel:
    """The trained model, patched, its adapter merged, in the dtype of the base checkpoint."""
    model: Any = load_model(source.folder)
    dtype = model.dtype
    if recipe.lora is None:
        # What the trainer saved describes the patched model; the patch wants the rope of the base.
        shutil.copyfile(source.folder / "config.json", trained / "config.json")
        model = load_model(trained)
    patch(model, plan)
    if recipe.lora is not None:
        from peft import PeftModel

        model = merged(PeftModel.from_pretrained(model, str(trained)))
    whole: PreTrainedModel = model.to(dtype)
    return whole


def _enclose(recipe: Recipe, run: Path, folder: Path) -> None:
    folder.mkdir()
    shutil.copyfile(run / HISTORY, folder / HISTORY)
    text = yaml.safe_dump(as_read(recipe.to_dict()), sort_keys=False, allow_unicode=True)
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    for tracked in (file for file in run.glob("runs/*/*") if file.is_file()):
        shutil.copyfile(tracked, folder / tracked.name)
