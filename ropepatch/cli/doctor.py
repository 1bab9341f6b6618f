"""`ropepatch doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropepatch.cli.arguments import AsJson, Model, Revision
from ropepatch.cli.listing import print_text
from ropepatch.pipeline.running import bar, say_on_stderr

EXAMPLES = """\b
Examples:
  ropepatch doctor ./llama-2-7b-32k
  ropepatch doctor ./llama-2-7b-32k --fix ./repaired
  ropepatch doctor Qwen/Qwen2.5-7B --no-measure --json"""


def doctor(
    model: Model,
    fix: Annotated[Path | None, typer.Option(help="Write a repaired copy (unambiguous fixes only).")] = None,
    measure: Annotated[
        bool,
        typer.Option(
            help="Look for NaN and infinity among the weights. "
            "Of a Hub id without it only config.json is downloaded."
        ),
    ] = True,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Look for what is wrong with a checkpoint's rope: exit 0 no error, 1 errors.

    With --fix, the exit code is that of the repaired copy.
    """
    from ropepatch.doctor import diagnose, repair

    diagnosis = left = diagnose(model, revision, measure=measure)
    print(diagnosis.to_json()) if as_json else print_text(str(diagnosis))
    fixable = [finding for finding in diagnosis.findings if finding.fixable]
    if fix is not None and fixable:
        with bar("copying") as copied:
            folder = repair(diagnosis, fix, progress=copied)
        left = diagnose(folder, measure=False)
        codes = ", ".join(dict.fromkeys(finding.code for finding in fixable))
        say_on_stderr(f"fixed in {folder}: {codes}")
        folders = [path.name for path in sorted(diagnosis.case.folder.iterdir()) if path.is_dir()]
        if shown := [name for name in folders if not name.startswith(".")]:
            say_on_stderr(f"not copied, as they tell of what it was before: {', '.join(shown)}")
        if codes := ", ".join(dict.fromkeys(finding.code for finding in left.findings)):
            say_on_stderr(f"left for you to decide: {codes}")
    elif fix is not None:
        say_on_stderr(f"nothing to fix without guessing: {fix} was not made")
    if left.has_errors:
        raise typer.Exit(1)
