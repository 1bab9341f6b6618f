"""Write a repaired copy of a checkpoint into a new folder."""

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
    """Write a copy of the checkpoint with every repair that needs no guess.

    The copy contains the files of the folder, without subfolders and pickled weights. If config.json
    changes, ropepatch.json loses `verified`.

    Raises:
        RopepatchError: If nothing can be repaired, or the output folder exists or lies inside the checkpoint.
    """
    case = diagnosis.case
    if not any(finding.fixable for finding in diagnosis.findings):
        raise RopepatchError(
            f"{case.name} has no problem that can be fixed automatically", hint=f"drop {argument('fix')}"
        )
    folder = absent(out)
    if folder.resolve().is_relative_to(case.folder.resolve()):
        raise RopepatchError(
            f"{folder} lies inside the checkpoint", hint=f"choose an {argument('out')} outside it"
        )
    after = repaired(case)
    # Compare by identity, since 4 == 4.0.
    changed = {name: content for name, content in after.files.items() if content is not case.files.get(name)}
    record = after.files.get(RECORD, {})
    if "verified" in record and CONFIG in changed:
        changed[RECORD] = {key: value for key, value in record.items() if key != "verified"}
    files = [file for file in sorted(case.folder.iterdir()) if _is_carried(file)]
    if CONFIG in changed:  # the model may compute something else now
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
