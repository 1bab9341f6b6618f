"""Write the GGUF file of a plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ropepatch.errors import RopepatchError, argument
from ropepatch.extension.gguf import TABLES
from ropepatch.extension.planning import Plan
from ropepatch.files import absent, check_space, disk_error, whole_file
from ropepatch.model.gguf import GgufModel, same_frequencies
from ropepatch.model.gguf_file import GgufFile
from ropepatch.model.weights import Progress


def check_place(plan: Plan, out: str | Path) -> Path:
    """Return the absolute path of a new file.

    Raises:
        RopepatchError: If the file exists, or its folder is missing or has too little space.
    """
    file = absent(out)
    if file.suffix.lower() != ".gguf":
        raise RopepatchError(
            f"{argument('out')} of a GGUF file must end in .gguf, got {out}",
            hint=argument("out", f"{out}.gguf"),
        )
    if not file.parent.is_dir():
        raise RopepatchError(f"no folder {file.parent}", hint=f"mkdir -p {file.parent}")
    needed = plan.gguf.file.num_bytes
    check_space("the file", file.parent, needed, hint="free some space, or use another folder")
    return file


def extend(plan: Plan, out: str | Path, progress: Progress | None = None) -> tuple[Path, str]:
    """Write the file of a plan, and compare it with the source before renaming it.

    Returns:
        The file, and a description of the comparison.

    Raises:
        RopepatchError: If the file exists or cannot be written, or the source has changed.
    """
    file = check_place(plan, out)
    source = GgufModel.find(plan.model, plan.source.original)
    keys, tensors = {}, {}
    for name, value in plan.changes.items():
        if name in TABLES:
            tensors[name] = None if value is None else np.array(value, dtype=np.float32)
        else:
            keys[name] = value
    if source.rope != plan.rope or source.file.fields.keys() != plan.gguf.file.fields.keys():
        raise RopepatchError(f"{plan.model} changed since it was planned", hint="plan it again")
    try:
        with whole_file(file, new=True) as partial:
            source.file.copy(partial, keys, tensors, progress)
            written = GgufFile.open(partial)
            source.file.check_copy(written, keys, tensors)
            reloaded = GgufModel.of(written)
            if not same_frequencies(reloaded.gguf_rope.frequencies(reloaded.rotary_dim), plan.frequencies()):
                raise RopepatchError(f"{file} does not have the planned RoPE", hint="the file was deleted")
    except OSError as error:
        raise disk_error(error, file) from error
    kept = len(written.fields) - sum(value is not None for value in keys.values())
    same = len(written.tensors.keys() - tensors.keys())
    return file, f"{same} tensors and {kept} keys are byte-identical, {len(keys) + len(tensors)} changed"
