"""The small files of a folder, as the checks look at them."""

from __future__ import annotations

from pathlib import Path

from ropepatch.errors import RopepatchError
from ropepatch.extension.record import sound_keys
from ropepatch.files import read_json
from ropepatch.model.checks.case import Case
from ropepatch.model.checks.findings import ADAPTER, CONFIG, GENERATION, TOKENIZER
from ropepatch.model.record_file import FILE as RECORD

SIDE_FILES = (TOKENIZER, GENERATION, RECORD, ADAPTER)


def read_case(name: str, folder: Path) -> Case:
    """Read the small files of a folder.

    Raises:
        RopepatchError: If config.json, or of an adapter adapter_config.json, is missing or unreadable.
    """
    files, unreadable = {}, {}
    for file in SIDE_FILES:
        if (folder / file).exists():
            try:
                files[file] = read_json(folder / file)
            except RopepatchError as error:
                unreadable[file] = str(error).replace(f"{folder}/", "")
    if ADAPTER not in files or (folder / CONFIG).exists():
        files[CONFIG] = read_json(folder / CONFIG)
    return Case(name, folder, files, unreadable, sound_keys(files.get(RECORD, {})))
