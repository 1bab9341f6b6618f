"""A mended copy of a checkpoint: a new folder, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ropepatch.doctor.diagnosis import Diagnosis
from ropepatch.doctor.tensors import read_shards
from ropepatch.errors import RopepatchError
from ropepatch.extension.record import FILE as RECORD
from ropepatch.files import absent, new_folder, read_json, write_json
from ropepatch.model.checks import mended
from ropepatch.model.checks.findings import CONFIG
from ropepatch.model.source import check_inside
from ropepatch.model.weights import INDEX, PICKLES, Progress, clone_files, read_header


def mend(diagnosis: Diagnosis, out: str | Path, *, progress: Progress | None = None) -> Path:
    """Write a copy of the checkpoint in which everything is mended that needs no guess.

    The files of the folder itself are copied, not its folders and not pickled weights. Where config.json or
    weights change, `verified` is left out of ropepatch.json: it was said of the checkpoint as it was, and
    nothing has verified the mended one.

    Args:
        diagnosis: What `diagnose` found.
        out: The folder to make; it must not exist.
        progress: Called with the bytes copied so far and in all.

    Returns:
        The folder.

    Raises:
        RopepatchError: If nothing can be mended, or the folder exists, lies in the checkpoint or cannot be
            written, or a file that is not weights is a link out of the checkpoint; nothing is left behind
            then.
    """
    case = diagnosis.case
    mends = [finding.mend for finding in diagnosis.findings if finding.mend]
    if not mends:
        raise RopepatchError(f"nothing in {case.name} can be mended without guessing", hint="leave --fix out")
    folder = absent(out)
    if folder.resolve().is_relative_to(case.folder.resolve()):
        raise RopepatchError(f"{folder} lies inside the checkpoint", hint="choose an --out beside it")
    after = mended(case)
    # By identity: what differs may be 4 and 4.0.
    changed = {name: content for name, content in after.files.items() if content is not case.files.get(name)}
    without, reindex = (
        frozenset().union(*(mend.without for mend in mends)),
        any(mend.reindex for mend in mends),
    )
    record = after.files.get(RECORD, {})
    if "verified" in record and (CONFIG in changed or without or reindex):
        changed[RECORD] = {key: value for key, value in record.items() if key != "verified"}
    files = [file for file in sorted(case.folder.iterdir()) if _is_carried(file)]
    weights, _ = read_shards(case.folder)
    for file in files:
        if file.name not in weights:
            check_inside(file, case.folder)
    unchanged = tuple(file for file in files if file.name not in changed)
    with new_folder(folder) as partial:
        clone_files(unchanged, partial, link=False, progress=progress)
        for name, content in changed.items():
            write_json(partial / name, content)
        for file in sorted(partial.glob("*.safetensors")) if without else ():
            if without & read_header(file).tensors.keys():
                _rewrite(file, without)
        if reindex:
            write_json(partial / INDEX, _index(sorted(partial.glob("model-*.safetensors"))))
        elif without and (partial / INDEX).exists():
            named = {*read_json(partial / INDEX)["weight_map"].values()}
            write_json(partial / INDEX, _index([partial / name for name in sorted(named)]))
    return folder


def _is_carried(file: Path) -> bool:
    pickled = file.name in PICKLES or file.suffix in (".bin", ".pt", ".pth")
    return file.is_file() and not file.name.startswith(".") and not pickled


def _rewrite(file: Path, without: frozenset[str]) -> None:
    """The file without some of its tensors."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(file, framework="pt") as opened:
        others = {name: opened.get_tensor(name).clone() for name in set(opened.keys()) - without}
        metadata = opened.metadata()
    save_file(others, file, metadata)


def _index(shards: list[Path]) -> dict[str, Any]:
    """The index that belongs to the shards of one save.

    Raises:
        RopepatchError: If a tensor is in two of them: nobody knows which is meant.
    """
    places: dict[str, str] = {}
    total = 0
    for file in shards:
        tensors = read_header(file).tensors
        if twice := places.keys() & tensors.keys():
            raise RopepatchError(
                f"{min(twice)} is in {places[min(twice)]} and in {file.name}",
                hint="keep the files of one save, and copy its index too",
            )
        places |= dict.fromkeys(tensors, file.name)
        total += sum(entry.num_bytes for entry in tensors.values())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
