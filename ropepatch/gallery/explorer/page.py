"""The explorer: one HTML file that shows why RoPE fails past the trained length, and what fixes it."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

from ropepatch.errors import RopepatchError
from ropepatch.files import absent, json_text, whole_file
from ropepatch.gallery.explorer.content import content

HERE = Path(__file__).parent
SCRIPTS = (  # in the order of execution
    "rope.js",
    "remappings.js",
    "checkpoint.js",
    "chart.js",
    "drawings.js",
    "live.js",
    "state.js",
    "sections.js",
    "reading.js",
    "study.js",
    "page.js",
)


def explore(
    model: str | os.PathLike[str] | None = None,
    *,
    out: str | Path = "explorer.html",
    tiny: bool = True,
    revision: str | None = None,
) -> Path:
    """Write an interactive page on why RoPE fails beyond the original context length, and what fixes it.

    It is one HTML file that needs no network.

    Args:
        model: A checkpoint folder, a Hub id, or tiny, to start with; only its config.json is read.
        out: The HTML file to write.
        tiny: Include the bundled model, which runs in the page; adds 2.7 MB.
        revision: The branch, tag or commit of a Hub id.

    Returns:
        The file.

    Raises:
        RopepatchError: If the file exists or cannot be written, or the model's RoPE cannot be extended.
    """
    file = absent(out)
    name = None if model is None else os.fspath(model)
    text = _page(content(name, revision=revision), tiny)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file, new=True) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RopepatchError(
            f"cannot write {out}: {error.strerror}", hint="name another file"
        ) from error
    return file


def _page(known: dict[str, Any], tiny: bool) -> str:
    reading = None
    if tiny:
        # Imports transformers: seconds
        from ropepatch.gallery.explorer.tiny import reading as read_tiny

        reading = read_tiny()
    version = importlib.metadata.version("ropepatch")
    parts = {
        "style": _static("explorer.css"),
        "data": _inert(json_text(known | {"version": version}, indent=None)),
        "tiny": _inert(json_text(reading, indent=None)),
        "worker": _static("tiny_worker.js") if reading else "",
        "scripts": "\n".join(map(_static, SCRIPTS)),
        "version": version,
    }
    return re.sub(
        r"\[\[(\w+)\]\]", lambda place: parts[place[1]], _static("explorer.html")
    )


def _static(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _inert(text: str) -> str:
    """Return JSON that cannot end a script element."""
    return text.replace("<", "\\u003c")
