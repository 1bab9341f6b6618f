"""The commands that measure, and draw measurements."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import Group

import ropepatch
from ropepatch.cli.derive import command
from ropepatch.cli.screen import command_line, feedback, print_text, screen_width
from ropepatch.errors import RopepatchError, argument
from ropepatch.processes import is_first
from ropepatch.progress import warn_on_stderr

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ropepatch.evaluation.results import Row
    from ropepatch.verbs.evaluate import Results
    from ropepatch.verbs.extend import Extension

GROUP = Group("Measure", sort_key=2)


@command(
    GROUP,
    """\
  ropepatch eval tiny --method yarn --to 1k
  ropepatch eval tiny --suite demo --out demo-results --report demo.html
  ropepatch eval ./llama-2-7b --text books/ --lengths 2k,4k,8k
  ropepatch eval ./llama-2-7b --text books/ --methods linear,yarn --to 32k
  ropepatch eval ./llama-2-7b --text books/ --lengths 2k,4k --stride 256""",
    "evaluate",
    name="eval",
)
def evaluate(
    model: str | None = None,
    *,
    settings: list[str] | None = None,
    quiet: bool = False,
    as_json: bool = False,
    **asked: Any,
) -> None:
    """With `out`, the same command resumes an interrupted one.

    Args:
        settings: A parameter of the method, if there is only one; see `ropepatch methods NAME`.
    """
    if settings:
        from ropepatch.cli.parameters import parse_settings
        from ropepatch.settings import listed

        name, *others = listed(asked.get("methods", "yarn"))
        if others:
            hint = "run one command for each method"
            raise RopepatchError(
                f"{argument('settings')} needs exactly one method", hint=hint
            )
        asked["methods"] = [{"name": name} | parse_settings(name, settings)]
    results = ropepatch.evaluate(model, **asked, **feedback(quiet))
    if is_first() and as_json:
        print(results.to_json())
    elif is_first():
        from ropepatch.report.tables import results_text

        print_text(results_text(results, screen_width()))


@command(
    GROUP,
    """\
  ropepatch compare tiny --to 1k
  ropepatch compare ./llama-2-7b --methods yarn,ntk,linear --to 8k --text books/
  ropepatch compare ./llama-2-7b --methods yarn,remappings --to 8k --text books/
  ropepatch compare ./llama-2-7b --methods all --to 8k --text books/ --out out
  ropepatch compare ./llama-2-7b --to 32k --text books/ --report report.html""",
    "compare",
)
def compare(
    model: str, *, to: str, quiet: bool = False, as_json: bool = False, **asked: Any
) -> None:
    """`as_json` also prints the whole rule."""
    from ropepatch.report.tables import ranking_text

    choice = ropepatch.compare(model, to=to, **asked, **feedback(quiet))
    if not is_first():
        return
    if as_json:
        print(choice.to_json())
        return
    print_text(ranking_text(choice.ranking, choice.results, screen_width()))
    if choice.method is not None:
        print_text(f"  {_command(model, to, choice.method, asked)}")


def _command(model: str, to: str, method: str, asked: dict[str, Any]) -> str:
    """The command that writes the recommended checkpoint."""
    given = {key: asked[key] for key in ("original", "revision") if asked.get(key)}
    options = [word for key, value in given.items() for word in (f"--{key}", value)]
    return shlex.join(
        ["ropepatch", "extend", model, "--to", to, "--method", method, *options]
    )


@command(
    GROUP,
    """\
  ropepatch plot results --out figures""",
)
def plot(results: list[str], *, out: str = "figures") -> None:
    """Draw results.

    Args:
        results: A folder of `ropepatch eval --out`, or files of it.
        out: The folder to write.
    """
    from ropepatch.files import absent, new_folder
    from ropepatch.report.plots.lines import figures
    from ropepatch.report.plots.style import save_figure

    measured = [one for name in results for one in ropepatch.read_results(name)]
    drawn = figures(measured)
    with new_folder(absent(out)) as partial:
        for name, figure in drawn.items():
            save_figure(figure, partial / name)
    print_text("\n".join(f"{Path(out) / name}.png, .svg" for name in drawn))


@command(
    GROUP,
    """\
  ropepatch demo
  ropepatch demo --out ./demo""",
)
def demo(*, out: str = "ropepatch-demo", quiet: bool = False) -> None:
    """Extend the bundled model from 256 to 2048 tokens with YaRN, and measure it before and after.

    Takes about a minute on two CPU cores, without network or training. The folder gets the checkpoint, a
    picture, a report and all measurements: those of `ropepatch extend tiny --to 2k` and `ropepatch eval` of
    the result.

    Args:
        out: The folder to write.
    """
    import torch

    torch.set_num_threads(1)  # several wait for each other, on busy cores for minutes
    how = feedback(quiet) | {"say": warn_on_stderr}
    extension = ropepatch.extend("tiny", out, to="2k", command=command_line(), **how)
    results = ropepatch.evaluate(extension, "demo", **how)
    print_text("\n".join(_before_and_after(extension, results)))


def _before_and_after(extension: Extension, results: Results) -> Iterator[str]:
    """The measurements of the demo at both lengths, a conclusion, and the files with all results."""
    from ropepatch.files import from_here
    from ropepatch.report.plots.style import save_figure

    folder, plan = extension.folder, extension.plan
    original, target = plan.source.config.window, plan.target
    found = {}
    for result in results:
        for row in result.rows:
            if row.at.keys() == {"length"}:
                found[row.measure, row.length, result.label] = row
    labels = ("baseline", plan.method.name)
    yield extension.outcome()
    yield f"\n{'':<37}{'before':>8}{'after':>8}"
    for measure, title in (
        ("loss", "loss at {:,} tokens (nats/token)"),
        ("found", "passkeys retrieved at {:,} tokens"),
    ):
        for length in (original, target):
            rows = [found[measure, length, label] for label in labels]
            before, after = (
                _answered(row) if row.measure == "found" else row.text for row in rows
            )
            yield f"{title.format(length):<37}{before:>8}{after:>8}"
    before, after = before.replace("/", " of "), after.replace("/", " of ")
    times = f"{target / original:.0f} times its original context length"
    yield f"\n{plan.source.name} retrieves {after} passkeys at {target:,} tokens, {times}; {before} before.\n"
    try:
        picture, _ = save_figure(results.plot("positions"), folder / "loss-by-position")
        yield f"picture: {from_here(picture)}\nreport:  {from_here(folder / 'evaluation.html')}"
    except RopepatchError as error:
        yield f"results: {from_here(folder / 'evaluation')}; for a picture and a report: {error.hint}"


def _answered(row: Row) -> str:
    return f"{row.mean.value * row.n:.0f}/{row.n}"
