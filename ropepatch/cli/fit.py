"""`ropepatch fit`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ropepatch.cli.arguments import (
    AsJson,
    Device,
    Model,
    Original,
    Quiet,
    Revision,
    TextField,
    TextSource,
    TextSplit,
    a_length,
    command_line,
    feedback,
)
from ropepatch.cli.listing import print_text
from ropepatch.errors import RopepatchError
from ropepatch.files import json_text
from ropepatch.pipeline.running import device as best_device
from ropepatch.pipeline.running import interruptible, is_first, say_on_stderr

FILE = ".json"  # the end of the name of a scaling file
EXAMPLES = """\b
Examples:
  ropepatch fit tiny --to 2k
  ropepatch fit ./llama-2-7b --to 16k --out fitted.json
  ropepatch fit ./llama-2-7b --to 16k --text books/ --out ./llama-2-7b-16k
  ropepatch extend ./llama-2-7b --method fitted.json --recipe llama2-7b-yarn-32k"""


def fit(
    model: Model,
    to: Annotated[str, typer.Option(help="The target context, 32k or 4x.", callback=a_length)],
    original: Original = None,
    text: TextSource = None,
    field: TextField = "text",
    split: TextSplit = "train",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|FILE.json",
            help="A checkpoint folder, or a small file that stands for a method everywhere; "
            "MODEL-fit-TO here if not given.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of gradient descent.")] = 100,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="End after about so much time with the best until then; a third is for the starts."
        ),
    ] = None,
    init: Annotated[
        str,
        typer.Option(
            help="Methods to start from, separated by commas, yarn say, which is quick; auto tries all and "
            "mixtures."
        ),
    ] = "auto",
    teacher: Annotated[
        str,
        typer.Option(
            help="The attention map under which the base model teaches; auto: rerope, where the model can "
            "have a map; none: the text's own tokens."
        ),
    ] = "auto",
    queries: Annotated[
        bool,
        typer.Option(
            "--queries/--no-queries",
            help="Learn an amplitude and a phase for each query head and rotary pair, too, which are folded "
            "into the query weights; without, no weight changes.",
        ),
    ] = True,
    seed: Annotated[
        int, typer.Option(min=0, help="The seed of random starts and of the order of the text.")
    ] = 0,
    link_weights: Annotated[
        bool, typer.Option("--link-weights", help="As in `ropepatch extend`; for a checkpoint folder.")
    ] = False,
    revision: Revision = None,
    device: Device = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Learn the frequencies, the attention factor and the phases by which a model reads at a target.

    Nothing but the query weights changes, and no text is needed: the model learns to expect what it expects
    under an attention map, on text that it writes itself. Windows that nothing is learned from validate, so
    that on them the outcome is no worse than any published method that reads the trained context as well as
    YaRN. The same command resumes an interrupted fit.
    """
    from ropepatch.fitting import fit as learn
    from ropepatch.pipeline.extension import extend
    from ropepatch.pipeline.inputs import in_tokens
    from ropepatch.pipeline.learned import kept_by_fit
    from ropepatch.settings import short_length

    target = in_tokens(to, model, revision, original)
    out = out or Path(f"{Path(model).name}-fit-{short_length(target)}")
    place = _new_place(out, model, revision, link_weights=link_weights)
    work = place.with_name(f"{place.name}.fit")
    with interruptible(say_on_stderr, lambda: kept_by_fit(work)):
        fitted = learn(
            model,
            to=target,
            original=original,
            text=text,
            field=field,
            split=split,
            steps=steps,
            init=init,
            teacher=teacher,
            queries=queries,
            seed=seed,
            revision=revision,
            device=device or best_device(),
            work=work,
            minutes=minutes,
            **feedback(quiet),
        )
        if not is_first():
            return
        if place.suffix == FILE:
            fitted.save(place)
        else:
            record = {"fit": fitted.record, "command": command_line()}
            extend(fitted.plan, place, link_weights=link_weights, record=record, **feedback(quiet))
    shutil.rmtree(work, ignore_errors=True)
    if as_json:
        print(json_text(fitted.record | {"out": str(place)}))
        return
    use = "a checkpoint" if place.is_dir() else f"--method {place}"
    print_text(f"{fitted}\n{place}: use it as {use}")


def _new_place(out: Path, model: str, revision: str | None, *, link_weights: bool) -> Path:
    """The absolute path of what is to be made, refused where it exists or could not be written."""
    from ropepatch.extension.writing import check_room
    from ropepatch.files import absent
    from ropepatch.fitting.fitting import remove_finished
    from ropepatch.model.source import find_source
    from ropepatch.model.weights import read_headers
    from ropepatch.pipeline.inputs import check_writable

    try:
        place = absent(out)
    except RopepatchError:
        remove_finished(out.with_name(f"{out.name}.fit"))
        raise
    check_writable(place, "choose another `out`")
    if place.suffix == FILE and link_weights:
        raise RopepatchError("`link_weights` beside a scaling file, which has none", hint="leave it out")
    if place.suffix != FILE and not link_weights:
        check_room(read_headers(find_source(model, revision, weights=True).folder), place)
    return place
