"""`extend`: write a checkpoint or a GGUF file with a longer context."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropepatch.attention import Remapping
from ropepatch.errors import RopepatchError, argument, printable
from ropepatch.extension import gguf_writing, writing
from ropepatch.extension import record as records
from ropepatch.extension.planning import Plan, check_bare
from ropepatch.extension.planning import plan as plan_of
from ropepatch.files import absent, check_secrets, from_here
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.gguf import GgufModel
from ropepatch.probing.making import add_fingerprint, check_fingerprint
from ropepatch.processes import join
from ropepatch.progress import (
    WEIGHTS,
    Progress,
    Say,
    bar,
    interruptible,
    no_bar,
    say_on_stderr,
)
from ropepatch.scaling import Scaling
from ropepatch.settings import Length, short_length

if TYPE_CHECKING:
    from ropepatch.training.forecast import Forecast


@dataclass(frozen=True, eq=False, repr=False)
class Extension:
    """An extended checkpoint. You can use it wherever a path is expected.

    `str(extension)` and `os.fspath(extension)` are those of its folder, so `from_pretrained(extension)`
    loads it.

    Args:
        folder: The folder of the checkpoint, or of the adapter for a recipe with `save: adapter`; for a GGUF
            model the new file.
        plan: The change.
        record: The content of its `ropepatch.json`; empty after a dry run, which writes nothing.
        check: The short-context check: the loss within the original context length before and after the
            training; None without training.
        forecast: After a dry run of `train`, the forecast of the training.
        obstacles: After a dry run, the errors that would stop the same call.
    """

    folder: Path
    plan: Plan
    record: dict[str, Any] = field(default_factory=dict)
    check: records.ShortContextCheck | None = None
    forecast: Forecast | None = None
    obstacles: tuple[RopepatchError, ...] = ()

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    def __str__(self) -> str:
        return str(self.folder)

    def outcome(self) -> str:
        """The lengths, the method and the verification as text; after a dry run the plan and forecast."""
        if not self.record:
            folder = printable(str(absolute(self.folder)))
            parts = self.plan, self.forecast, f"to be written: {folder}"
            return "\n\n".join(str(part) for part in parts if part is not None)
        place, method = printable(from_here(self.folder)), self.plan.method.name
        reach = self.plan.source.config.reach
        lines = [f"{place}: {reach} -> {self.plan.target} tokens, {method}"]
        verified = self.record.get("verified")
        if verified and self.folder.suffix == ".gguf":
            lines.append(f"read back: {verified['logits']}")
        elif verified:
            how = "reloaded with" if verified["compared"] else "checked with"
            lines.append(
                f"{how} stock transformers: frequencies {verified['frequencies']}, logits {verified['logits']}"
            )
        return "\n".join(lines)

    __repr__ = outcome

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-ready data; after a dry run the plan, and with a recipe its `training`."""
        if self.record:
            return self.record
        return self.plan.to_dict() | (
            {"training": self.forecast.to_dict()} if self.forecast else {}
        )


def extend(
    model: str | os.PathLike[str] | Plan,
    out: str | Path | None = None,
    *,
    to: Length | None = None,
    method: str | Scaling | Remapping = "yarn",
    original: Length | None = None,
    link_weights: bool = False,
    reading: bool | None = None,
    include: Sequence[str] = (),
    revision: str | None = None,
    command: str | None = None,
    say: Say = say_on_stderr,
    progress: Progress = bar,
    **parameters: Any,
) -> Extension:
    """Write a checkpoint with a longer context; stock transformers loads it.

    Nothing is trained: the weights are copied, and the result is reloaded with stock transformers and
    compared. A checkpoint that the same call has written before is kept.

    Args:
        model: A checkpoint folder, a Hub id, tiny, or a GGUF file, which is copied with other RoPE
            parameters.
        out: The folder or GGUF file to write. Default: MODEL-METHOD-TO in the working folder, or next to
            MODEL if that is the working folder.
        to: The target length in tokens, e.g. 32k, or 4x the original length. Default: that of
            the factor.
        method: A name from `ropepatch methods`.
        original: The original context length, if config.json contains another one: 32k for Qwen3, whose
            config.json contains 40960.
        link_weights: Hard-link the weight files instead of copying them. This is instant, but a program that
            later rewrites one of them in place also changes the source.
        reading: Write the fingerprint reading.json, with which `ropepatch probe` checks a server. Default:
            write it if that takes at most a minute or two.
        include: Also copy these files, such as examples/*.
        revision: The branch, tag or commit of a Hub id.
        command: The command line, for ropepatch.json.
        say: A function that takes lines of progress.
        progress: See `ropepatch.progress.bar`.
        **parameters: A parameter of the method; see `ropepatch methods NAME`.

    Raises:
        RopepatchError: If an argument is invalid, the model, target or method does not allow it, the folder
            exists with other content or cannot be written, or the result differs from the plan. Nothing
            half-written is left behind.
    """
    if isinstance(model, Plan):
        stated = None if method == "yarn" else method
        check_bare(to, stated, original, revision, parameters)
        plan = model
        check_unchanged(plan)
    else:
        plan = plan_of(
            model,
            to,
            method=method,
            original=original,
            revision=revision,
            **parameters,
        )
        say_warnings(plan, say)
    place = output_of(plan, out)
    more = {"command": command} if command else {}
    if isinstance(plan.source, GgufModel):
        if link_weights or reading or include:
            options = ", ".join(map(argument, ("link_weights", "reading", "include")))
            raise RopepatchError(
                f"{options} do not apply to a GGUF file",
                hint="leave them out, or use the checkpoint that the file was converted from",
            )
        with (
            interruptible(say, lambda: "nothing is kept"),
            progress(WEIGHTS) as advance,
        ):
            written = gguf_writing.write(plan, plan.source, place, advance)
        return Extension(written.path, plan, written.record.to_dict() | more)
    processes, folder = join(), absolute(place)
    if reading:
        check_fingerprint(plan)

    def finish(written: writing.Written) -> dict[str, Any]:
        if reading is not False:
            asked, device = bool(reading), processes.device
            add_fingerprint(
                plan, written, asked=asked, device=device, say=say, progress=no_bar
            )
        return written.record.to_dict()

    with interruptible(say, lambda: _kept(place)):
        if writing.is_written(plan, folder):
            made = processes.write_once(
                lambda: finish(_complete(plan, folder, include, say))
            )
        else:
            copy = writing.check(plan, place, link=link_weights, include=include)
            say_left_out(copy.source, copy.files, say)
            with progress(WEIGHTS) as advance:
                made = processes.write_once(
                    lambda: finish(copy.write(advance, link=link_weights, **more))
                )
        return Extension(folder, plan, made)


def output_of(plan: Plan, out: str | Path | None, recipe: str = "") -> Path:
    """The file or folder to write: ``out``, or one named after model, method, target and recipe."""
    if out is not None:
        return Path(out)
    parts = plan.method.name, short_length(plan.target), recipe
    if isinstance(plan.source, GgufModel):
        return Path(f"{default_folder(plan.source.file.stem, *parts)}.gguf")
    return default_folder(plan.source.name, *parts)


def absolute(place: Path) -> Path:
    """The absolute path of an output."""
    try:
        return place.expanduser().absolute()
    except RuntimeError as error:  # ~ of an unknown user
        raise RopepatchError(
            f"cannot write {place}: {error}", hint=f"choose another {argument('out')}"
        ) from error


def check_unchanged(plan: Plan) -> None:
    """Refuse a plan whose config.json has changed since."""
    if isinstance(plan.source, Checkpoint):
        plan.source.check_unchanged()


def say_warnings(plan: Plan, say: Say) -> None:
    """Say the warnings of a plan."""
    for warning in plan.warnings:
        say(f"warning: {warning}")


def check_carried(
    source: Checkpoint, include: Sequence[str], say: Say
) -> dict[str, Path]:
    """Refuse secrets in the files to copy, say which files are not copied, and return those to add."""
    files = writing.small_files(source.folder, include)
    check_secrets(files)
    say_left_out(source, files, say)
    added = writing.included_files(source.folder, include)
    return {name: files[name] for name in added if name in files}


def say_left_out(source: Checkpoint, files: Collection[str], say: Say) -> None:
    """Say which files of a checkpoint are not copied, and which of them its tokenizer needs."""
    if others := writing.left_out(source, files):
        say(
            f"not copied: {', '.join(others)} ({argument('include')} copies more files)"
        )
    for code in writing.tokenizer_of_copy(source.folder, files)[1]:
        say(
            f"warning: the tokenizer needs {code}; add {argument('include', code)} to copy it"
        )


def _complete(
    plan: Plan, folder: Path, include: Sequence[str], say: Say
) -> writing.Written:
    """Add this call's files to a checkpoint from an earlier one, unless it has other weights."""
    source, record = plan.checkpoint(include), records.read(folder)
    if not record.weights == Checkpoint(folder).fingerprint == source.fingerprint:
        absent(folder)
    say(f"{from_here(folder)} is already written")
    writing.copy_files(check_carried(source, include, say), folder)
    return writing.Written(folder, record)


def _kept(place: Path) -> str:
    """What an interrupted call leaves."""
    if absolute(place).exists():
        return f"{place} is written; the same command resumes"
    return "nothing is kept; the same command starts again"


def default_folder(model: str, *parts: str) -> Path:
    """Return where a command writes by default: MODEL and the parts in the working folder.

    If the working folder is in the checkpoint itself, it is next to the checkpoint.
    """
    source = Path(model)
    with suppress(RuntimeError):  # ~ of an unknown user
        source = source.expanduser()
    source = Path(os.path.normpath(source.absolute()))
    name = "-".join(filter(None, (source.name, *parts)))
    if source.is_dir() and Path.cwd().is_relative_to(source.resolve()):
        return source.parent / name
    return Path(name)
