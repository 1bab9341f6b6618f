"""A repaired copy of a checkpoint: a new folder, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from ropepatch.doctor.diagnosis import Diagnosis
from ropepatch.doctor.weights import look_at_weights
from ropepatch.errors import RopepatchError, argument
from ropepatch.extension.record import FILE as RECORD
from ropepatch.files import absent, new_folder, write_json
from ropepatch.model.checks import repaired
from ropepatch.model.checks.findings import CONFIG
from ropepatch.model.reading_file import FILE as READING
from ropepatch.model.source import check_inside
from ropepatch.model.weights import INDEX, PICKLES, Progress, clone_files


def repair(diagnosis: Diagnosis, out: str | Path, *, progress: Progress | None = None) -> Path:
    """Write a copy of the checkpoint in which everything is repaired that needs no guess.

    The files of the folder itself are copied, not its folders and not pickled weights. Where config.json
    changes, `verified` is left out of ropepatch.json: nothing has verified the copy.
    """
    case = diagnosis.case
    if not any(finding.fixable for finding in diagnosis.findings):
        raise RopepatchError(
            f"nothing in {case.name} can be fixed without guessing", hint=f"leave {argument('fix')} out"
        )
    folder = absent(out)
    if folder.resolve().is_relative_to(case.folder.resolve()):
        raise RopepatchError(
            f"{folder} lies inside the checkpoint", hint=f"choose an {argument('out')} beside it"
        )
    after = repaired(case)
    # By identity: what differs may be 4 and 4.0.
    changed = {name: content for name, content in after.files.items() if content is not case.files.get(name)}
    record = after.files.get(RECORD, {})
    if "verified" in record and CONFIG in changed:
        changed[RECORD] = {key: value for key, value in record.items() if key != "verified"}
    files = [file for file in sorted(case.folder.iterdir()) if _is_carried(file)]
    if CONFIG in changed:  # it may compute something else
        files = [file for file in files if file.name != READING]
    weights, _ = look_at_weights(case)
    for file in files:
        if not weights or file not in weights.files or file.name == INDEX:
            check_inside(file, case.folder)
    with new_folder(folder) as partial:
        unchanged = tuple(file for file in files if file.name not in changed)
        clone_files(unchanged, partial, link=False, progress=progress)
        for name, content in changed.items():
            write_json(partial / name, content)
    return folder


def _is_carried(file: Path) -> bool:
    pickled = file.name in PICKLES or file.suffix in (".bin", ".pt", ".pth")
    return file.is_file() and not file.name.startswith(".") and not pickled
