"""Write an extended checkpoint into a new folder."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from ropepatch.errors import RopepatchError, argument
from ropepatch.extension import record as records
from ropepatch.extension.planning import Plan
from ropepatch.extension.remapping_code import (
    check_holds_remapping,
    check_no_other_code,
    remapping_code,
)
from ropepatch.extension.verification import read_source, read_trained, verify
from ropepatch.files import absent, check_space, new_folder, read_json, write_json
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import DUAL_CHUNK, stated_class
from ropepatch.model.kinds import CODE, code_of
from ropepatch.model.loading import check_weights
from ropepatch.model.reading_file import FILE as READING
from ropepatch.model.source import (
    ADAPTER,
    TEMPLATES,
    check_inside,
    included,
    is_carried,
    stated_by_card,
)
from ropepatch.model.stock import saving
from ropepatch.model.weights import (
    NAMED,
    Progress,
    Weights,
    checksums,
    clone_files,
)

TOKENIZER = "tokenizer_config.json"
# Never copied: other formats of the weights, which may be another model's, and files that are rewritten.
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx"}
WRITTEN = {
    "config.json",
    TOKENIZER,
    "generation_config.json",
    records.FILE,
    READING,
    "README.md",
    "evaluation.html",
}
# Receives the written checkpoint, its record and the reloaded model
Finish = Callable[[Checkpoint, records.Record, PreTrainedModel | None], object]


def extend(
    plan: Plan,
    out: str | Path,
    *,
    link_weights: bool = False,
    include: Sequence[str] = (),
    progress: Progress | None = None,
    record: Mapping[str, Any] | None = None,
    source: Checkpoint | None = None,
    finish: Finish = lambda written, record, model: None,
) -> Path:
    """Write the checkpoint of a plan, and verify it by reloading it with stock transformers.

    Copied weights are read once for the checksums of the record. ``finish`` is called with the complete
    checkpoint before its folder is renamed. After an error, nothing is left.
    """
    check_savable(plan)
    folder = absent(out)
    source = source or source_of(plan, out=folder, include=include)
    if source is not plan.source:  # of a model in memory
        if source.rope != plan.rope:
            raise source.changed_since()
        plan = replace(plan, source=source)
    origin, carried = check_copy(plan, source, folder, link_weights=link_weights, include=include)
    plan, expected = read_source(source, plan)
    with new_folder(folder) as partial:
        copy_files(small_files(source.folder) | carried, partial)
        write_configuration(source.folder, source.raw, partial, plan)
        clone_files(source.weights.files, partial, link=link_weights, progress=progress)
        written = Checkpoint(partial)
        verdict, model = verify(written, plan, expected)
        proof = proof_of(written, verdict, linked=link_weights)
        made = records.Record.of(plan, **proof | origin | dict(record or {}))
        records.write(partial, made)
        finish(written, made, model)
    return folder


def check_copy(
    plan: Plan, source: Checkpoint, folder: Path, *, link_weights: bool, include: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Check from its JSON files and weight headers that a source can be copied to a folder.

    Returns:
        The results of `origin_of` and `included_files`.
    """
    origin = origin_of(source)
    try:
        check_weights(source.weights, source.skeleton)
    except RopepatchError as error:
        if (kind := stated_class(source.whole_config)) is None:
            raise
        raise RopepatchError(
            f"architectures in config.json names {kind.__name__}, which has no language model head",
            hint="ropepatch extends causal language models",
        ) from error
    carried = included_files(source.folder, include)
    if plan.remapping is not None:
        check_no_other_code(source.folder, carried)
    if not link_weights:
        check_room(source.weights, folder.parent)
    return origin, carried


def check_savable(plan: Plan) -> None:
    """Raise if no checkpoint of this model can contain the plan's position remapping."""
    if plan.remapping is not None:
        check_holds_remapping(plan.checkpoint, plan.remapping)


def proof_of(checkpoint: Checkpoint, verdict: records.Verdict, *, linked: bool = False) -> dict[str, Any]:
    """Return the record's keys about the verified weights.

    Linked weights are not read, so they have no checksums.
    """
    code = {"code": named} if (named := code_of(checkpoint.folder)) else {}
    proof = {"weights": checkpoint.fingerprint, "verified": verdict} | code
    return proof if linked else proof | {"checksums": checksums(checkpoint.weights)}


def check_room(weights: Weights, place: Path) -> None:
    """Raise if the disk of a folder, which may not exist yet, has no space for a copy of the weights."""
    existing = next(folder for folder in (place, *place.absolute().parents) if folder.is_dir())
    hint = f"free some space, or use {argument('link_weights')} on the file system of the source"
    check_space("the copy", existing, weights.num_bytes, hint=hint)


def save_trained(
    plan: Plan,
    model: PreTrainedModel,
    out: Path,
    *,
    record: dict[str, Any],
    finish: Finish = lambda written, record, model: None,
) -> Path:
    """Write a trained, patched model, and verify it by reloading it with stock transformers.

    Args:
        plan: The plan that the model is patched with.
        model: The model, without adapters.
        out: The output folder; it must not exist.
        record: Further keys of the record.
        finish: See `extend`.
    """
    folder = absent(out)
    source = source_of(plan, out=folder)
    origin = origin_of(source)
    with new_folder(folder) as partial:
        with saving(folder):
            model.save_pretrained(partial)
        (partial / "generation_config.json").unlink(missing_ok=True)
        copy_small_files(source.folder, partial)
        write_configuration(source.folder, source.raw, partial, plan)
        written = Checkpoint(partial)
        verdict, reloaded = verify(written, plan, read_trained(model, plan, written.folder.name))
        proof = proof_of(written, verdict)
        made = records.Record.of(plan, **proof | record | origin)
        records.write(partial, made)
        finish(written, made, reloaded)
    return folder


def source_of(plan: Plan, *, out: Path, include: Sequence[str] = ()) -> Checkpoint:
    """Return the checkpoint of a plan with its weights; raise if the output folder lies inside it."""
    source = plan.checkpoint.complete(include)
    if out.resolve().is_relative_to(source.folder.resolve()):
        raise RopepatchError(
            f"{out} lies inside the source checkpoint", hint=f"choose an {argument('out')} outside it"
        )
    return source


def origin_of(source: Checkpoint) -> dict[str, Any]:
    """Return the record's keys about the source checkpoint: `base` and `earlier`."""
    if (source.folder / ADAPTER).exists():
        raise RopepatchError(
            f"{source.name} contains a model and a PEFT adapter, which stock transformers would apply",
            hint="merge it (merge_and_unload) and save the result, or remove adapter_config.json",
        )
    for name in WRITTEN:
        check_inside(source.folder / name, source.folder)
    history = {"earlier": records.read(source.folder)} if records.exists(source.folder) else {}
    return {"base": stated_by_card(source.folder)} | history


def copy_small_files(source: Path, partial: Path) -> None:
    """Copy the files that are neither weights nor rewritten."""
    copy_files(small_files(source), partial)


def small_files(source: Path) -> dict[str, Path]:
    """Return the files of a checkpoint that are copied unchanged, by their paths in it."""
    files = [file for file in sorted(source.iterdir()) if is_carried(file.name) and file.name not in WRITTEN]
    files += sorted(source.glob(f"{TEMPLATES}/*.jinja"))
    return _checked({file.relative_to(source).as_posix(): file for file in files}, source)


def included_files(source: Path, patterns: Sequence[str]) -> dict[str, Path]:
    """Return the additional files to copy, by their paths in the checkpoint."""
    weights = {file.name for file in source.iterdir() if _is_weights(file)}
    return _checked(included(source, patterns, but=WRITTEN | weights), source)


def left_out(source: Checkpoint, carried: Iterable[str]) -> tuple[str, ...]:
    """Return the files of a checkpoint that are not copied, without hidden ones."""
    names = {name.partition("/")[0] for name in carried} | WRITTEN
    names |= {file.name for file in source.weights.files}
    others = (entry.name for entry in source.folder.iterdir() if not entry.name.startswith("."))
    return tuple(sorted(set(others) - names))


def _is_weights(file: Path) -> bool:
    return file.suffix in WEIGHTS or file.name.endswith(".index.json")


def _checked(files: dict[str, Path], source: Path) -> dict[str, Path]:
    for file in files.values():
        check_inside(file, source)
    return {name: file for name, file in files.items() if file.is_file()}


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy files to their paths in a folder."""
    for name, file in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)


def write_configuration(source: Path, raw: dict[str, Any], partial: Path, plan: Plan) -> None:
    """Write the JSON files that contain the context length, as changed by the plan."""
    dropped = ["auto_map", NAMED]
    if plan.scaling.name != "none":
        dropped.append(DUAL_CHUNK)  # with it, vLLM and SGLang ignore a scaling
    others = {key: value for key, value in raw.items() if key not in dropped}
    write_json(partial / "config.json", plan.apply(others))
    if plan.remapping is not None:
        code = remapping_code(plan.model_type, plan.site.path)
        (partial / CODE).write_bytes(code.encode())
    if (source / TOKENIZER).exists():
        tokenizer, _ = tokenizer_of_copy(source, [file.name for file in partial.iterdir()])
        write_json(partial / TOKENIZER, tokenizer | {"model_max_length": plan.target})
    if (source / "generation_config.json").exists():
        generation = read_json(source / "generation_config.json")
        if generation.get("max_length") == plan.source.window:
            generation["max_length"] = plan.target
        write_json(partial / "generation_config.json", generation)


def tokenizer_of_copy(source: Path, carried: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the tokenizer_config.json of a copied checkpoint, and the code files it needs but lacks.

    If such files are missing but transformers has the tokenizer class, `auto_map` is dropped.
    """
    file = source / TOKENIZER
    content = read_json(file) if file.exists() else {}
    codes = re.findall(r'"(\w+)\.\w+"', json.dumps(content.get("auto_map")))
    missing = sorted({f"{code}.py" for code in codes} - {*carried})
    if missing and tokenizer_class_from_name(str(content.get("tokenizer_class"))):
        return {key: value for key, value in content.items() if key != "auto_map"}, []
    return content, missing
