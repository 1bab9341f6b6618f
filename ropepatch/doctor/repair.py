"""Write a repaired copy of a checkpoint into a new folder."""

from __future__ import annotations

from pathlib import Path

from ropepatch.doctor.diagnosis import Diagnosis
from ropepatch.doctor.findings import CONFIG, TOKENIZER
from ropepatch.doctor.rules import repaired
from ropepatch.doctor.weights import look_at_weights
from ropepatch.errors import RopepatchError, argument
from ropepatch.files import absent, check_inside, new_folder, read_json, write_json
from ropepatch.model.checkpoint import READING
from ropepatch.model.checkpoint import RECORD as RECORD
from ropepatch.model.weights import INDEX, PICKLES, Progress, clone_files


def repair(
    diagnosis: Diagnosis, out: str | Path, *, progress: Progress | None = None
) -> Path:
    """Write a copy of the checkpoint with every repair that needs no guess.

    The copy contains the files of the folder, without subfolders and pickled weights. If config.json
    changes, ropepatch.json loses `verified`.

    Raises:
        RopepatchError: If nothing can be repaired, or the output folder exists or lies inside the checkpoint.
    """
    source, facts = diagnosis.folder, diagnosis.facts
    if (
        source is None
        or facts is None
        or not any(finding.fixable for finding in diagnosis.findings)
    ):
        raise RopepatchError(
            f"{diagnosis.name} has no problem that can be fixed automatically",
            hint=f"drop {argument('fix')}",
        )
    folder = absent(out)
    if folder.resolve().is_relative_to(source.resolve()):
        raise RopepatchError(
            f"{folder} lies inside the checkpoint",
            hint=f"choose an {argument('out')} outside it",
        )
    after, changed = repaired(facts), {}
    if after.tokenizer is not facts.tokenizer:
        changed[TOKENIZER] = after.tokenizer
    files = [file for file in sorted(source.iterdir()) if _is_carried(file)]
    if after.raw is not facts.raw:
        changed[CONFIG] = after.raw
        # The model may compute something else now
        files = [file for file in files if file.name != READING]
        if (source / RECORD).is_file():
            record = read_json(source / RECORD)
            changed[RECORD] = {
                key: value for key, value in record.items() if key != "verified"
            }
    weights, _ = look_at_weights(source, facts.config)
    for file in files:
        if not weights or file not in weights.files or file.name == INDEX:
            check_inside([file], source)
    with new_folder(folder) as partial:
        unchanged = tuple(file for file in files if file.name not in changed)
        clone_files(unchanged, partial, link=False, progress=progress)
        for name, content in changed.items():
            write_json(partial / name, content)
    return folder


def _is_carried(file: Path) -> bool:
    pickled = file.name in PICKLES or file.suffix in (".bin", ".pt", ".pth")
    return file.is_file() and not file.name.startswith(".") and not pickled
