"""The files of a checkpoint folder that a push uploads, and reasons against a push."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ropepatch.errors import RopepatchError
from ropepatch.extension import record as records
from ropepatch.extension.record import Record
from ropepatch.extension.remapping_code import other_code
from ropepatch.files import check_secrets
from ropepatch.model.checkpoint import (
    ADAPTER,
    CODE,
    READING,
    RECORD,
    TEMPLATES,
    Checkpoint,
    code_of,
    included,
    is_adapter,
    is_carried,
)
from ropepatch.model.weights import changed, fingerprint, read_header
from ropepatch.probing import reading as readings

CARD = "README.md"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# In addition to the weights and the files of `is_carried`.
CARRIED = {
    "": [CARD, "evaluation.html", RECORD, READING, ADAPTER],
    TEMPLATES: ["*.jinja"],
    "evaluation": ["*.json", "*.png"],
    "training": ["*.json", "*.yaml"],
}
# Files of an earlier push: those that select the weights are replaced together; evidence only if it is ours.
WEIGHTS = re.compile(
    r"(adapter_)?model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|adapter_config\.json"
)
EVIDENCE = re.compile(
    rf"(evaluation|training)/[^/]+\.(json|yaml|png)|evaluation\.html|{re.escape(CODE)}|reading\.json"
)


@dataclass(frozen=True)
class Contents:
    """The pushed files by their names in the repository, the other files, and remarks."""

    files: dict[str, Path]
    left_out: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """Reasons against a push, remarks, and whether a card can be written from the record."""

    against: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    allows_card: bool = False


def read_contents(
    folder: Path, token: str | None = None, include: Sequence[str] = ()
) -> Contents:
    """Collect the files of a checkpoint or an adapter, and those that match the patterns of `include`.

    Raises `RopepatchError` for damaged or pickled weights, links out of the folder, and files that contain a
    secret, such as the user's `token`.
    """
    checkpoint = None if is_adapter(folder) else Checkpoint(folder)
    weights = (
        checkpoint.weights.files
        if checkpoint
        else read_header(folder / ADAPTER_WEIGHTS).files
    )
    names = {path.name for path in weights}
    # Other code is not pushed.
    own = names | ({CODE} if checkpoint and checkpoint.kind == "mapped" else set())
    files, others = {}, []
    for part, patterns in CARRIED.items():
        place = folder / part
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            name = f"{part}/{path.name}" if part else path.name
            if path.name.startswith(".") or name in CARRIED:
                continue
            carried = any(fnmatchcase(path.name, pattern) for pattern in patterns)
            carried |= not part and (path.name in own or is_carried(path.name))
            if carried and (path.is_file() or path.is_symlink()):
                files[name] = path
            else:
                others.append(name)
    files |= included(folder, include)
    for name, path in files.items():
        if not (path.is_file() and path.resolve().is_relative_to(folder.resolve())):
            raise RopepatchError(
                f"{name} links to a file outside {folder}, or to none",
                hint="copy the file there, or remove the link",
            )
    large = check_secrets(
        {name: path for name, path in files.items() if name not in names}, token
    )
    notes = (
        [f"too large to be searched for secrets: {', '.join(large)}"] if large else []
    )
    pushed = {name.partition("/")[0] for name in files} | files.keys()
    return Contents(
        dict(sorted(files.items())), tuple(sorted(set(others) - pushed)), tuple(notes)
    )


def judge(folder: Path, names: Iterable[str] = ()) -> Judgement:
    """Find reasons against a push: not verified, changed since, or failed the short-context check."""
    if not records.exists(folder):
        return Judgement(("it was not verified (no ropepatch.json)",))
    checkpoint = None if is_adapter(folder) else Checkpoint(folder)
    if checkpoint and checkpoint.kind == "swapped":
        reason = "its position encoding is swapped: only ropepatch loads it, and it was not verified"
        return Judgement((reason,))
    try:
        record = records.read(folder)
    except RopepatchError as error:
        return Judgement((str(error),))
    if checkpoint is None:
        against: list[str] = []
        notes = [
            "this is an adapter: load it with ropepatch, which also applies the RoPE it was trained with"
        ]
    else:
        remarks = [*_verified(record), *_unchanged(checkpoint, record, names)]
        against = [line for line, prevents in remarks if prevents]
        notes = [line for line, prevents in remarks if not prevents]
    if record.evaluation == {}:
        notes.append(
            "its evaluation is incomplete: run the same `ropepatch extend` again to resume it"
        )
    check = record.training and record.training.short_context
    if check and not check.passed:
        rise = f"rose by {check.increase:.1%}, allowed {check.most:.1%}"
        against.append(
            f"the short-context check failed: the loss within the original context length {rise}"
        )
    return Judgement(tuple(against), tuple(notes), allows_card=True)


def _verified(record: Record) -> Iterator[tuple[str, bool]]:
    """Yield remarks on the verification of a checkpoint, and whether each prevents a push."""
    verdict = record.verified
    if verdict is None:
        yield "it was not verified (no `verified` in ropepatch.json)", True
    elif verdict.frequencies != "equal":
        yield (
            f"its frequencies after reloading are {verdict.frequencies}, expected equal",
            True,
        )
    elif not verdict.compared:
        yield f"logits {verdict.logits}", False
    elif verdict.difference is None:
        yield f"its logits after reloading are {verdict.logits}, expected equal", True


def _unchanged(
    checkpoint: Checkpoint, record: Record, names: Iterable[str]
) -> Iterator[tuple[str, bool]]:
    """Yield differences from the record, and whether each prevents a push."""
    part = checkpoint.raw.get("text_config")
    stated = part if isinstance(part, dict) and part else checkpoint.raw
    changes = record.config_changes.items()
    if key := next((key for key, value in changes if stated.get(key) != value), None):
        yield f"config.json has changed since it was verified ({key})", True
    if checkpoint.kind == "mapped":
        for name in other_code(checkpoint.folder, names):
            yield (
                f"{name} contains other code, which trust_remote_code=True would run as well",
                True,
            )
        code = code_of(checkpoint.folder)
        if not code or record.code != code:
            yield f"its code has changed since it was verified ({CODE})", True
    weights, changed_weights = (
        checkpoint.weights,
        "its weights have changed since they were verified",
    )
    if record.checksums is not None:
        if differing := changed(weights, record.checksums):
            yield f"{changed_weights} ({', '.join(differing)[:200]})", True
    elif record.weights != fingerprint(weights):
        yield changed_weights, True
    else:
        yield (
            "only samples of its weights were compared (no `checksums` in ropepatch.json)",
            False,
        )
    if readings.exists(checkpoint.folder) and (
        readings.read(checkpoint.folder).weights != checkpoint.fingerprint
    ):
        yield f"{READING} belongs to other weights", True


def is_stale(name: str, files: dict[str, Path], *, ours: bool) -> bool:
    """Whether a file from an earlier push is outdated and not replaced by these files.

    Evidence counts only in a repository of ours, which ropepatch wrote.
    """
    return name not in files and (
        is_weights(name) or (ours and EVIDENCE.fullmatch(name) is not None)
    )


def is_weights(name: str) -> bool:
    """Whether a file of a repository contains weights, or selects those that are loaded."""
    return WEIGHTS.fullmatch(name) is not None
