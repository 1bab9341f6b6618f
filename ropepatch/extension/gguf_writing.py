"""Write the GGUF file of a plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ropepatch.errors import RopepatchError, argument
from ropepatch.extension.planning import Plan
from ropepatch.extension.record import Record, Verdict
from ropepatch.extension.writing import Written
from ropepatch.files import absent, check_space, disk_error, whole_file
from ropepatch.model.checkpoint import changed_since
from ropepatch.model.gguf import GgufModel, same_frequencies
from ropepatch.model.gguf_file import GgufFile
from ropepatch.model.weights import Progress


def check_place(source: GgufModel, out: str | Path) -> Path:
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
    needed = source.file.num_bytes
    check_space(
        "the file", file.parent, needed, hint="free some space, or use another folder"
    )
    return file


def write(
    plan: Plan, source: GgufModel, out: str | Path, progress: Progress | None = None
) -> Written:
    """Write the file of a plan for a model, and compare it with the source before renaming it.

    Raises:
        RopepatchError: If the file exists or cannot be written, or the source has changed.
    """
    file, keys, planned = check_place(source, out), plan.change.keys, source
    source = GgufModel.find(planned.name, planned.original)
    tensors = {
        name: None if table is None else np.array(table, dtype=np.float32)
        for name, table in plan.change.tables.items()
    }
    fields = source.file.fields
    if source.rope != planned.rope or fields.keys() != planned.file.fields.keys():
        raise changed_since(planned.name)
    try:
        with whole_file(file, new=True) as partial:
            source.file.copy(partial, keys, tensors, progress)
            written = GgufFile.open(partial)
            source.file.check_copy(written, keys, tensors)
            reloaded = GgufModel.of(written)
            computed = reloaded.gguf_rope.frequencies(reloaded.rotary_dim)
            if not same_frequencies(computed, plan.change.frequencies):
                raise RopepatchError(
                    f"{file} does not have the planned RoPE",
                    hint="the file was deleted",
                )
    except OSError as error:
        raise disk_error(error, file) from error
    verdict = Verdict(
        frequencies="equal",
        logits="all but the planned keys and tables is byte-identical",
        compared=False,
        difference=None,
    )
    return Written(file, Record.of(plan, verified=verdict))
