"""Write an extended checkpoint beside its source; no weights change but those that hold the method."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from ropepatch.errors import RopepatchError, argument
from ropepatch.extension import record as records
from ropepatch.extension.planning import Plan
from ropepatch.extension.queries import HINT, QueryLayers
from ropepatch.extension.remapping_code import (
    check_holds_remapping,
    check_no_other_code,
    code_of,
    remapping_code,
)
from ropepatch.extension.verification import read_source, read_trained, verify
from ropepatch.files import absent, check_space, new_folder, read_json, write_json
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import quantization_of, text_config
from ropepatch.model.kinds import CODE
from ropepatch.model.loading import rehearse
from ropepatch.model.reading_file import FILE as READING
from ropepatch.model.source import (
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
    check_fit,
    checksums,
    clone_files,
)

TOKENIZER = "tokenizer_config.json"
# Never carried over: other forms of the weights, which may be another model's, and what is written anew.
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
Finish = Callable[[Checkpoint, records.Record, PreTrainedModel | None], object]  # what is written, reloaded


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
    """Write the checkpoint of a plan, proven by reloading it with stock transformers.

    Copies of weights, cloned ones too, are read once from end to end for the checksums of the record. With
    ``link_weights`` files in which weights change are copied. ``finish`` is called with the complete
    checkpoint before its folder gets its name; whatever fails leaves nothing behind.
    """
    check_savable(plan)
    folder = absent(out)
    source = source or source_of(plan, beside=folder, include=include)
    if source is not plan.source:  # of a model in memory
        if source.rope != plan.rope:
            raise source.changed_since()
        plan = replace(plan, source=source)
    origin, carried, changes = check_copy(plan, source, folder, link_weights=link_weights, include=include)
    plan, expected = read_source(source, plan)
    with new_folder(folder) as partial:
        copy_files(small_files(source.folder) | carried, partial)
        write_configuration(source.folder, source.raw, partial, plan)
        clone_files(source.weights.files, partial, link=link_weights, progress=progress, changes=changes)
        written = Checkpoint(partial)
        verdict, model = verify(written, plan, expected)
        proof = proof_of(written, verdict, linked=link_weights and not changes)
        made = records.Record.of(plan, **proof | origin | dict(record or {}))
        records.write(partial, made)
        finish(written, made, model)
    return folder


def check_copy(
    plan: Plan, source: Checkpoint, folder: Path, *, link_weights: bool, include: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Path], dict[str, Callable[[Tensor], Tensor]]]:
    """Refuse by its small files and the headers of its weights a source that cannot be copied to a folder.

    Returns:
        What `origin_of`, `included_files` and `changed_weights` say of it.
    """
    origin, changes = origin_of(source), changed_weights(source, plan)
    check_weights(source.weights, source.skeleton)
    carried = included_files(source.folder, include)
    if plan.remapping is not None:
        check_no_other_code(source.folder, carried)
    if not link_weights:
        check_room(source.weights, folder.parent)
    return origin, carried, changes


def check_savable(plan: Plan) -> None:
    """Refuse a plan whose position remapping no checkpoint of this model can hold."""
    if plan.remapping is not None:
        check_holds_remapping(plan.source)


def changed_weights(source: Checkpoint, plan: Plan) -> dict[str, Callable[[Tensor], Tensor]]:
    """What a plan does to weights of a checkpoint, by their names, in the dtype in which they are loaded."""
    if not plan.queries:
        return {}
    if source.is_quantised:
        raise RopepatchError(f"{source.name} has quantised weights, which are not rewritten", hint=HINT)
    layers = QueryLayers(source.skeleton, source)
    layers.check_held(source)
    dtype = getattr(source.config, "dtype", None)

    def loaded(fold: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda weight: fold(weight.to(dtype or weight.dtype))

    return {name: loaded(fold) for name, (fold, _) in layers.changes(plan.queries).items()}


def proof_of(checkpoint: Checkpoint, verdict: records.Verdict, *, linked: bool = False) -> dict[str, Any]:
    """Of the record of a checkpoint, the keys that say which weights were verified, and how.

    Weights that are linked are those of the source, of which no byte is read.
    """
    code = {"code": named} if (named := code_of(checkpoint.folder)) else {}
    proof = {"weights": checkpoint.fingerprint, "verified": verdict} | code
    return proof if linked else proof | {"checksums": checksums(checkpoint.weights)}


def check_room(weights: Weights, place: Path) -> None:
    """Refuse a disk that has no room for a copy of weights in a folder, which need not exist yet."""
    there = next(folder for folder in (place, *place.absolute().parents) if folder.is_dir())
    hint = f"free some space, or use {argument('link_weights')} on the file system of the source"
    check_space("the copy", there, weights.num_bytes, hint=hint)


def check_weights(weights: Weights, model: PreTrainedModel) -> list[str]:
    """Refuse weights that are not those of a model on the meta device; the names of those that it leaves out.

    Quantised ones have other shapes and names than the model.
    """
    quantisation = quantization_of(model.config)
    if quantisation and weights.quantised:
        return []
    configs = model.config, text_config(model.config)
    tie = any(getattr(config, "tie_word_embeddings", False) for config in configs)
    tied = dict(model._tied_weights_keys or {}) if tie else {}
    # Transformers fills either side of a pair from the other.
    copies = {*tied, *(source for copy, source in tied.items() if copy in weights.tensors)}
    check_fit(weights, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, copies)
    return [] if quantisation else rehearse(model, weights)


def save_trained(
    plan: Plan,
    model: PreTrainedModel,
    out: Path,
    *,
    record: dict[str, Any],
    finish: Finish = lambda written, record, model: None,
) -> Path:
    """Write a model trained under a plan, proven by reloading it with stock transformers.

    Args:
        plan: Whose patch is on the model.
        model: The model, all of its weights its own.
        out: The folder to make; it must not exist.
        record: Further keys of the record.
        finish: As that of `extend`.
    """
    folder = absent(out)
    source = source_of(plan, beside=folder)
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


def source_of(plan: Plan, *, beside: Path, include: Sequence[str] = ()) -> Checkpoint:
    """The checkpoint of a plan with its weights, whose folder the one to be made must not lie in."""
    source = plan.source.complete(include)
    if beside.resolve().is_relative_to(source.folder.resolve()):
        raise RopepatchError(
            f"{beside} lies inside the source checkpoint", hint=f"choose an {argument('out')} beside it"
        )
    return source


def origin_of(source: Checkpoint) -> dict[str, Any]:
    """Of the record of a checkpoint, the keys that tell of the one it is made from: `base` and `earlier`."""
    if (source.folder / "adapter_config.json").exists():
        raise RopepatchError(
            f"{source.name} holds a PEFT adapter beside a model, and stock transformers would apply it",
            hint="merge it (merge_and_unload) and save that, or remove adapter_config.json",
        )
    for name in WRITTEN:
        check_inside(source.folder / name, source.folder)
    history = {"earlier": records.read(source.folder)} if records.exists(source.folder) else {}
    return {"base": stated_by_card(source.folder)} | history


def copy_small_files(source: Path, partial: Path) -> None:
    """Carry over what is neither weights nor written anew."""
    copy_files(small_files(source), partial)


def small_files(source: Path) -> dict[str, Path]:
    """The files of a checkpoint that are carried over as they are, by their paths in it."""
    files = [file for file in sorted(source.iterdir()) if is_carried(file.name) and file.name not in WRITTEN]
    files += sorted(source.glob(f"{TEMPLATES}/*.jinja"))
    return _checked({file.relative_to(source).as_posix(): file for file in files}, source)


def included_files(source: Path, patterns: Sequence[str]) -> dict[str, Path]:
    """What a user wants carried over beside a checkpoint, by the paths in it."""
    weights = {file.name for file in source.iterdir() if _is_weights(file)}
    return _checked(included(source, patterns, but=WRITTEN | weights), source)


def left_out(source: Checkpoint, carried: Iterable[str]) -> tuple[str, ...]:
    """What of a checkpoint stays behind, hidden entries apart."""
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
    """The three files that say how long the context is, as they are after the plan."""
    others = {key: value for key, value in raw.items() if key not in ("auto_map", NAMED)}
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
    """The tokenizer_config.json of a copy of a checkpoint, and files of code that it asks for in vain.

    Without its `auto_map` where that names files that are not carried and transformers has the class.
    """
    file = source / TOKENIZER
    content = read_json(file) if file.exists() else {}
    codes = re.findall(r'"(\w+)\.\w+"', json.dumps(content.get("auto_map")))
    missing = sorted({f"{code}.py" for code in codes} - {*carried})
    if missing and tokenizer_class_from_name(str(content.get("tokenizer_class"))):
        return {key: value for key, value in content.items() if key != "auto_map"}, []
    return content, missing
