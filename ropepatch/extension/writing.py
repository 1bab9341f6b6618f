"""Write an extended checkpoint or GGUF file: check, copy, change, reload, verify, record."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from ropepatch.attention import Remapping
from ropepatch.errors import RopepatchError, argument
from ropepatch.extension import record as records
from ropepatch.extension.changes import Change
from ropepatch.extension.planning import Plan
from ropepatch.extension.record import Record, Verdict, without_paths
from ropepatch.extension.remapping_code import other_code
from ropepatch.extension.verification import (
    patched_logits,
    trained_logits,
    verify,
)
from ropepatch.files import (
    absent,
    check_inside,
    check_outside,
    check_secrets,
    check_space,
    new_folder,
    read_json,
    write_json,
)
from ropepatch.model.checkpoint import (
    ADAPTER,
    NESTED,
    READING,
    RECORD,
    Checkpoint,
    code_of,
    included,
    is_carried,
    saving,
)
from ropepatch.model.config import DUAL_CHUNK, KEY
from ropepatch.model.loading import check_weights
from ropepatch.model.weights import Progress, checksums, clone_files

TOKENIZER = "tokenizer_config.json"
GENERATION = "generation_config.json"
SENTENCES = "sentence_bert_config.json"  # of sentence-transformers
# Never copied: other formats of the weights, which may be another model's, and files that are rewritten.
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx"}
WRITTEN = {
    "config.json",
    TOKENIZER,
    GENERATION,
    SENTENCES,
    RECORD,
    READING,
    "README.md",
    "evaluation.html",
}


@dataclass(frozen=True)
class Written:
    """What was written and verified.

    Args:
        path: The folder of the checkpoint, or the GGUF file.
        record: The content of its `ropepatch.json`; of a GGUF file, which has none, what it would contain.
        model: The reloaded model; None if it was not reloaded.
    """

    path: Path
    record: Record
    model: PreTrainedModel | None = None


@dataclass(frozen=True)
class Copy:
    """A checkpoint that can be written.

    Args:
        plan: The plan, made from ``source``.
        source: The source with its weights and all its files.
        folder: The folder to write.
        files: The files that are neither weights nor rewritten, by their paths in the folder.
        origin: The record's keys about the source.
    """

    plan: Plan
    source: Checkpoint
    folder: Path
    files: Mapping[str, Path]
    origin: Mapping[str, Any]

    @classmethod
    def of(
        cls, plan: Plan, source: Checkpoint, folder: Path, files: Mapping[str, Path]
    ) -> Self:
        """Prepare a new folder; the plan may be that of a model in memory."""
        if source is not plan.source:
            plan = replace(plan, source=source)
        return cls(plan, source, folder, files, origin_of(source))

    def write(
        self, progress: Progress | None = None, *, link: bool = False, **record: Any
    ) -> Written:
        """Write the checkpoint, and compare it with the patched source by reloading it.

        After an error, nothing is left.

        Args:
            progress: Called with the bytes copied and of all.
            link: Hard-link the weights instead of copying them, which leaves them without checksums.
            **record: Further keys of the record.
        """
        expected, change = patched_logits(self.source, self.plan)
        weights = self.source.weights.files
        with new_folder(self.folder) as partial:
            clone_files(weights, partial, link=link, progress=progress)
            return self._completed(partial, change, expected, record, linked=link)

    def write_trained(self, model: PreTrainedModel, **record: Any) -> Written:
        """Write a trained model that is patched with the plan, and verify it by reloading it."""
        with new_folder(self.folder) as partial:
            with saving(self.folder):
                model.save_pretrained(partial)
            (partial / GENERATION).unlink(missing_ok=True)
            expected = trained_logits(model, self.plan)
            return self._completed(partial, self.plan.change, expected, record)

    def _completed(
        self,
        folder: Path,
        change: Change,
        expected: Tensor | str,
        record: Mapping[str, Any],
        *,
        linked: bool = False,
    ) -> Written:
        """Add all files to the weights, verify them, and write the record."""
        copy_files(self.files, folder)
        write_configuration(self.source, folder, self.plan, change)
        written = Checkpoint(folder)
        verdict, model = verify(written, self.plan, expected)
        keys = {"config_changes": dict(change.keys), **self.origin, **record}
        made = Record.of(self.plan, **keys, **proof_of(written, verdict, linked=linked))
        records.write(folder, made)
        return Written(self.folder, made, model)


def check(
    plan: Plan, out: str | Path, *, link: bool = False, include: Sequence[str] = ()
) -> Copy:
    """Check all that can be known before a plan is written, from JSON files and weight headers.

    Raises:
        RopepatchError: If the folder exists or lies inside the source, the disk is too small, a file contains
            a secret or leads out of the source, the weights do not fit config.json, or no checkpoint of this
            model can contain the method.
    """
    if isinstance(plan.method, Remapping) and not plan.change.code:
        raise RopepatchError(
            f"{plan.config.model_type} cannot be saved with a position remapping: it is a part of a larger "
            "model, its weights are quantised, or it has code of its own",
            hint="use it in memory: ropepatch.patch(model, plan)",
        )
    folder, source = absent(out), plan.checkpoint(include)
    check_outside(source.folder, folder)
    files = small_files(source.folder, [*include, *source.code])
    copy = Copy.of(plan, source, folder, files)
    check_secrets(files)
    if not source.config.unloaded:
        check_weights(source.weights, source.config.skeleton)
    if plan.change.code:
        for name in other_code(source.folder, files):
            raise RopepatchError(
                f"{name} contains other code, which trust_remote_code=True would run as well",
                hint="remove it (or its auto_map, if transformers has the class), or patch the model in memory",
            )
    if not link:
        disk = next(above for above in folder.parents if above.is_dir())
        hint = f"free some space, or use {argument('link_weights')} on the file system of the source"
        check_space("the copy", disk, source.weights.num_bytes, hint=hint)
    return copy


def is_written(plan: Plan, folder: Path) -> bool:
    """Return whether a folder contains the untrained, verified checkpoint of a plan."""
    # No name or home, or other content
    with suppress(OSError, RuntimeError, RopepatchError):
        if records.exists(folder):
            record = records.read(folder)
            held, made = record.to_dict(), without_paths(plan.to_dict())
            for content in (held, made):
                # Of a remapping, with the layers that are known once the model has run
                content["config_changes"].pop(KEY, None)
            untrained = record.verified is not None and record.training is None
            return untrained and made.items() <= held.items()
    return False


def proof_of(
    checkpoint: Checkpoint, verdict: Verdict, *, linked: bool = False
) -> dict[str, Any]:
    """Return the record's keys about the verified weights.

    Linked weights are not read, so they have no checksums.
    """
    proof: dict[str, Any] = {
        "weights": checkpoint.fingerprint,
        "verified": verdict.to_dict(),
    }
    if code := code_of(checkpoint.folder):
        proof["code"] = code
    return proof if linked else proof | {"checksums": checksums(checkpoint.weights)}


def origin_of(source: Checkpoint) -> dict[str, Any]:
    """Return the record's keys about the source checkpoint: `base` and `earlier`."""
    if (source.folder / ADAPTER).exists():
        raise RopepatchError(
            f"{source.name} contains a model and a PEFT adapter, which stock transformers would apply",
            hint="merge it (merge_and_unload) and save the result, or remove adapter_config.json",
        )
    check_inside([source.folder / name for name in WRITTEN], source.folder)
    return records.history(source.folder)


def small_files(source: Path, include: Sequence[str] = ()) -> dict[str, Path]:
    """Return the files of a checkpoint that are copied unchanged, by their paths in it.

    Args:
        source: Its folder.
        include: Patterns of further files, each of which must match.
    """
    entries = sorted(source.iterdir())
    files = {
        file.name: file
        for file in entries
        if is_carried(file.name) and file.name not in WRITTEN
    }
    nested = [file for pattern in NESTED for file in sorted(source.glob(pattern))]
    files |= {file.relative_to(source).as_posix(): file for file in nested}
    files |= included_files(source, include)
    check_inside(files.values(), source)
    return {name: file for name, file in files.items() if file.is_file()}


def included_files(source: Path, patterns: Sequence[str]) -> dict[str, Path]:
    """Return the files that match patterns, without weights and files that are rewritten."""
    if not patterns:
        return {}
    weights = {
        file.name
        for file in source.iterdir()
        if file.suffix in WEIGHTS or file.name.endswith(".index.json")
    }
    return included(source, patterns, but=WRITTEN | weights)


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy files to their paths in a folder."""
    for name, file in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)


def write_configuration(
    source: Checkpoint, folder: Path, plan: Plan, change: Change
) -> None:
    """Write the JSON files that contain the context length, and the code files of a change."""
    config = dict(source.config.changed(change.keys).raw)
    if not source.config.stand_in and not change.code:
        config.pop("auto_map", None)
    if plan.method.changes_frequencies:
        config.pop(DUAL_CHUNK, None)  # with it, vLLM and SGLang ignore a scaling
    write_json(folder / "config.json", config)
    for name, text in change.code.items():
        (folder / name).write_bytes(text.encode())
    if (source.folder / TOKENIZER).exists():
        tokenizer, _ = tokenizer_of_copy(
            source.folder, [file.name for file in folder.iterdir()]
        )
        write_json(folder / TOKENIZER, tokenizer | {"model_max_length": plan.target})
    for name, key in ((GENERATION, "max_length"), (SENTENCES, "max_seq_length")):
        if (source.folder / name).exists():
            content = read_json(source.folder / name)
            stated = content.get(key)
            if stated and (name == SENTENCES or stated == source.config.window):
                content[key] = plan.target
            write_json(folder / name, content)


def left_out(source: Checkpoint, carried: Collection[str]) -> list[str]:
    """Return the files of a checkpoint that are not copied, without hidden ones."""
    carried = {name.partition("/")[0] for name in carried} | WRITTEN
    carried |= {file.name for file in source.weights.files}
    others = {entry.name for entry in source.folder.iterdir()} - carried
    return sorted(name for name in others if not name.startswith("."))


def tokenizer_of_copy(
    source: Path, carried: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
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
