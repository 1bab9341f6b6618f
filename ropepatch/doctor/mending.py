"""A mended copy of a checkpoint: a new folder, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropepatch.checkpoint import write_json
from ropepatch.doctor.diagnosis import Diagnosis, mended
from ropepatch.errors import RopepatchError
from ropepatch.folders import absent, new_folder
from ropepatch.source import check_inside
from ropepatch.weights import INDEX, PICKLES, clone_files

if TYPE_CHECKING:
    from ropepatch.weights import Progress


def mend(diagnosis: Diagnosis, out: str | Path, *, progress: Progress | None = None) -> Path:
    """Write a copy of the checkpoint in which everything is mended that needs no guess.

    The files of the folder itself are copied, not its folders and not pickled weights.

    Args:
        diagnosis: What `diagnose` found.
        out: The folder to make; it must not exist.
        progress: Called with the bytes copied so far and in all.

    Returns:
        The folder.

    Raises:
        RopepatchError: If nothing can be mended, or the folder exists, lies in the checkpoint or cannot be
            written; nothing is left behind then.
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
    without = frozenset().union(*(one.without for one in mends))
    files = [file for file in sorted(case.folder.iterdir()) if _carried(file)]
    for file in files:
        check_inside(file, case.folder)
    with new_folder(folder) as partial:
        clone_files(
            tuple(file for file in files if file.name not in changed), partial, link=False, progress=progress
        )
        for name, content in changed.items():
            write_json(partial / name, content)
        for name in _holding(partial, without):
            _rewrite(partial / name, without)
        if any(one.reindex for one in mends) or (without and (partial / INDEX).exists()):
            write_json(partial / INDEX, _index(partial))
    return folder


def _carried(file: Path) -> bool:
    pickled = file.name in PICKLES or file.suffix in (".bin", ".pt", ".pth")
    return file.is_file() and not file.name.startswith(".") and not pickled


def _holding(folder: Path, tensors: frozenset[str]) -> list[str]:
    """The files that hold one of these tensors."""
    from safetensors import safe_open

    names = []
    for file in sorted(folder.glob("*.safetensors")) if tensors else ():
        with safe_open(file, framework="np") as opened:
            if tensors & set(opened.keys()):
                names.append(file.name)
    return names


def _rewrite(file: Path, without: frozenset[str]) -> None:
    """The file without some of its tensors."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(file, framework="pt") as opened:
        kept = {name: opened.get_tensor(name).clone() for name in set(opened.keys()) - without}
        metadata = opened.metadata()
    save_file(kept, file, metadata)


def _index(folder: Path) -> dict[str, Any]:
    """The index that belongs to the shards of a folder."""
    from safetensors import safe_open

    places: dict[str, str] = {}
    total = 0
    for file in sorted(folder.glob("model-*.safetensors")):
        with safe_open(file, framework="np") as opened:
            places |= dict.fromkeys(opened.keys(), file.name)
        header = int.from_bytes(file.open("rb").read(8), "little")
        total += file.stat().st_size - 8 - header
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
