"""The files of a checkpoint folder that a push uploads, and reasons against a push."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from ropepatch.errors import RopepatchError
from ropepatch.extension import record as records
from ropepatch.extension.record import Record
from ropepatch.extension.remapping_code import other_code
from ropepatch.files import check_inside, check_secrets
from ropepatch.model.architectures import SPECULATED, WRAPPED
from ropepatch.model.checkpoint import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    CODE,
    NESTED,
    READING,
    RECORD,
    Checkpoint,
    code_of,
    included,
    is_adapter,
    is_carried,
)
from ropepatch.model.weights import changed, read_header
from ropepatch.probing import reading as readings
from ropepatch.publishing.card.writing import BOARDS, CARD

# What ropepatch writes about a checkpoint
EVIDENCE = (
    "evaluation.html",
    "evaluation/*.json",
    "evaluation/*.png",
    "training/*.json",
    "training/*.yaml",
    f"{BOARDS}/*.yaml",
    READING,
)
# In addition to the weights and the files of `is_carried`
CARRIED = (*EVIDENCE, CARD, RECORD, ADAPTER, *NESTED)
# What selects the weights is replaced together
WEIGHTS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    ADAPTER_WEIGHTS,
    ADAPTER,
)
# What a push to a repository of ours replaces
REPLACED = (*WEIGHTS, *EVIDENCE, CODE)


class Contents(NamedTuple):
    """The pushed files by their names in the repository, the other files, and remarks."""

    files: dict[str, Path]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


class Judgement(NamedTuple):
    """Reasons against a push, remarks, and whether a card can be written from the record."""

    against: list[str]
    notes: list[str]
    allows_card: bool = False


def read_contents(folder: Path, token: str | None, include: Sequence[str]) -> Contents:
    """Collect the files of a checkpoint or an adapter, and those that match the patterns of `include`.

    Raises `RopepatchError` for damaged or pickled weights, links out of the folder, and files that contain a
    secret, such as the user's `token`.
    """
    own: set[str] = set()  # our code; other code is not pushed
    if is_adapter(folder):
        weights = read_header(folder / ADAPTER_WEIGHTS)
    else:
        checkpoint = Checkpoint(folder)
        weights = checkpoint.weights
        if checkpoint.kind == "mapped":
            own.add(CODE)
    names = {path.name for path in weights.files}
    found = [path for pattern in CARRIED for path in folder.glob(pattern)]
    for path in folder.iterdir():
        if path.name in names | own or is_carried(path.name):
            found.append(path)
    files = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(found)
        if path.is_file() and not path.name.startswith(".")
    }
    files |= included(folder, include)
    check_inside(files.values(), folder)
    small = {name: path for name, path in files.items() if name not in names}
    notes = []
    if large := check_secrets(small, token):
        notes.append(f"too large to be searched for secrets: {', '.join(large)}")
    pushed = {name.partition("/")[0] for name in files}
    others = {path.name for path in folder.glob("[!.]*")} - pushed
    return Contents(files, tuple(sorted(others)), tuple(notes))


def judge(folder: Path, names: Iterable[str] = ()) -> Judgement:
    """Find reasons against a push: not verified, changed since, or failed the short-context check."""
    try:
        record = records.read(folder)
    except RopepatchError as error:
        return Judgement([str(error)], [])
    against, notes = list[str](), list[str]()
    if is_adapter(folder):
        notes.append(
            "this is an adapter: load it with ropepatch, which also applies the RoPE it was trained with"
        )
    else:
        if record.verified is None:
            against.append("it was not verified (no `verified` in ropepatch.json)")
        elif not record.verified.compared:
            notes.append(f"logits {record.verified.logits}")
        against += _changed(Checkpoint(folder), record, names)
    if record.evaluation == {}:
        notes.append(
            "its evaluation is incomplete: run the same `ropepatch eval` again to resume it"
        )
    check = record.training and record.training.short_context
    if check and not check.passed:
        rise = f"rose by {check.increase:.1%}, allowed {check.most:.1%}"
        against.append(
            f"the short-context check failed: the loss within the original context length {rise}"
        )
    return Judgement(against, notes, allows_card=True)


def _changed(
    checkpoint: Checkpoint, record: Record, names: Iterable[str]
) -> Iterator[str]:
    """Yield differences of a checkpoint from its record."""
    raw = checkpoint.raw
    parts = (raw.get(name) for name in ("text_config", WRAPPED, SPECULATED))
    stated = next((part for part in parts if part and isinstance(part, dict)), raw)
    if not record.config_changes.items() <= stated.items():
        yield "config.json has changed since it was verified"
    if checkpoint.kind == "mapped":
        for name in other_code(checkpoint.folder, names):
            yield f"{name} contains other code, which trust_remote_code=True would run as well"
        code = code_of(checkpoint.folder)
        if not code or record.code != code:
            yield f"its code has changed since it was verified ({CODE})"
    differing = [] if record.weights == checkpoint.fingerprint else ["by samples"]
    if record.checksums is not None:  # which linked weights lack
        differing = changed(checkpoint.weights, record.checksums)
    if differing:
        yield f"its weights have changed since they were verified ({', '.join(differing)[:200]})"
    if readings.exists(checkpoint.folder) and (
        readings.read(checkpoint.folder).weights != checkpoint.fingerprint
    ):
        yield f"{READING} belongs to other weights"


def matching(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Return the names of files that match one of the patterns."""
    return {
        name
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
