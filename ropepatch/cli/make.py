"""The commands that write a checkpoint or publish it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cyclopts import Group

import ropepatch
from ropepatch.cli.derive import command
from ropepatch.cli.screen import command_line, feedback, print_text
from ropepatch.errors import RopepatchError, argument, printable
from ropepatch.files import json_text
from ropepatch.processes import is_first
from ropepatch.progress import WEIGHTS, bar, say_on_stderr

if TYPE_CHECKING:
    from ropepatch.publishing.hub import Pushed
    from ropepatch.verbs.extend import Extension

GROUP = Group("Make", sort_key=1)


@command(
    GROUP,
    """\
  ropepatch extend ./llama-2-7b --to 32k
  ropepatch extend ./llama-2-7b --to 16k --method ntk --out ./llama-2-7b-16k
  ropepatch extend meta-llama/Llama-2-7b-hf --to 32k --link-weights
  ropepatch extend ./llama-2-7b.Q4_K_M.gguf --to 16k""",
    "extend",
)
def extend(
    model: str,
    *,
    method: str = "yarn",
    settings: list[str] | None = None,
    quiet: bool = False,
    as_json: bool = False,
    **asked: Any,
) -> None:
    """`ropepatch eval` measures the checkpoint, and `ropepatch push` publishes it."""
    from ropepatch.cli.parameters import parse_settings

    parameters = parse_settings(method, settings or ())
    how = feedback(quiet) | {"command": command_line()}
    _show(
        ropepatch.extend(model, method=method, **asked, **parameters, **how),
        quiet,
        as_json,
    )


@command(
    GROUP,
    """\
  ropepatch train tiny --recipe tiny
  ropepatch train ./llama-2-7b --recipe distil --to 16k
  ropepatch train ./llama-2-7b --recipe distil --to 16k --text books/
  ropepatch train meta-llama/Llama-2-7b-hf --recipe llama2-7b-yarn-32k""",
    "train",
)
def train(
    model: str, *, recipe: str, quiet: bool = False, as_json: bool = False, **asked: Any
) -> int:
    """Exit 1 if the short-context check fails; the checkpoint is written all the same."""
    how = feedback(quiet) | {"command": command_line()}
    trained = ropepatch.train(model, recipe=recipe, **asked, **how)
    _show(trained, quiet, as_json)
    return int(trained.check is not None and not trained.check.passed)


def _show(extension: Extension, quiet: bool, as_json: bool) -> None:
    """Print a checkpoint, or the plan of a dry run, and the errors that would stop it."""
    if not is_first():
        return
    print(json_text(extension.to_dict())) if as_json else print_text(
        extension.outcome()
    )
    if found := extension.obstacles:
        hints = dict.fromkeys(obstacle.hint for obstacle in found if obstacle.hint)
        raise RopepatchError("; ".join(map(str, found)), hint="; ".join(hints))
    if extension.record and not as_json and not quiet:
        say_on_stderr("\n".join(_next_steps(extension)))


def _next_steps(extension: Extension) -> Iterator[str]:
    """How to load, measure and publish a checkpoint."""
    from ropepatch.model.config import generates
    from ropepatch.model.loading import load_tokenizer
    from ropepatch.publishing.loading import call

    folder = str(extension.folder)
    quoted = shlex.quote(folder)
    if folder.lower().endswith(".gguf"):
        yield f"serve:   llama-server -m {quoted} -c {extension.plan.target}"
        return
    if not (extension.folder / "config.json").exists():
        code = f"import ropepatch; model, tokenizer = {call('ropepatch.load_adapter', folder)}"
        yield f"load:    python -c {shlex.quote(code)}"
        yield "merge:   model.merge_and_unload().save_pretrained(FOLDER)"
        return
    plan = extension.plan
    loader = plan.config.loader
    if loader:
        runs_code = bool(plan.change.code or plan.config.stand_in)
        loading = call(f"{loader}.from_pretrained", folder, code=runs_code)
        shown = f"{loading}.config.get_text_config().max_position_embeddings"
        code = f"from transformers import {loader}; print({shown})"
        yield f"load:    python -c {shlex.quote(code)}"
    try:
        load_tokenizer(extension.folder, plan.config.whole)
        if loader and generates(plan.config.whole):
            yield f"measure: ropepatch eval {quoted} --text FILE, or --suite SUITE"
    except RopepatchError:
        yield "warning: no tokenizer was copied: the source has none that can be loaded"
    yield f"publish: ropepatch push {quoted} ME/NAME"


@command(
    GROUP,
    """\
  ropepatch export ./llama-2-7b-yarn-32k --fold-attention --out ./folded""",
)
def export(
    model: str,
    *,
    fold_attention: bool = False,
    out: str | None = None,
    revision: str | None = None,
    as_json: bool = False,
) -> None:
    """Write a checkpoint for engines that do not support all RoPE parameters, such as mlx-lm.

    Args:
        model: A checkpoint folder, a Hub id, or tiny.
        fold_attention: Fold the attention factor into the query weights, for engines that ignore it.
        out: The folder to write. Default: MODEL-folded in the working folder.
        revision: The branch, tag or commit of a Hub id.
    """
    from ropepatch.extension import record as records
    from ropepatch.verbs.extend import default_folder

    if not fold_attention:
        raise RopepatchError(
            "nothing to write", hint=f"add {argument('fold_attention')}"
        )
    place = out or default_folder(model, "folded")
    with bar(WEIGHTS) as progress:
        folder = ropepatch.fold_attention(
            model, place, revision=revision, progress=progress
        )
    record = records.read(folder)
    if as_json:
        print(json_text(record.to_dict()))
        return
    assert record.verified is not None
    print_text(f"{folder}: attention factor {record.folded_attention_factor:.4f} -> 1")
    print(f"reloaded with stock transformers: logits {record.verified.logits}")


@command(
    GROUP,
    """\
  ropepatch push ./llama-2-7b-yarn-32k me/llama-2-7b-32k --private
  ropepatch push ./llama-2-7b-yarn-32k me/llama-2-7b-32k --dry-run
  ropepatch push ./llama-2-7b-yarn-32k me/llama-2-7b-32k --revision longer""",
    "push",
)
def push(folder: str, repo: str, *, as_json: bool = False, **asked: Any) -> None:
    """Run the same command again to resume an interrupted push."""
    pushed = ropepatch.push(folder, repo, **asked)
    if as_json:
        print(json_text(asdict(pushed) | {"bytes": pushed.num_bytes}))
    else:
        _print_pushed(pushed)


def _print_pushed(pushed: Pushed) -> None:
    """Print the outcome of a push on stdout, and notes on stderr."""
    notes = list(pushed.notes)
    if pushed.left_out:
        left = ", ".join(pushed.left_out)
        notes.append(f"not uploaded: {left} (--include uploads more files)")
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    if pushed.card is not None:
        print_text(pushed.card)
    for name, size in pushed.files.items():
        print(f"  {size / 1e6:>10.3f} MB  {printable(name)}")
    for name in pushed.deleted:
        print(f"  {'deleted':>13}  {printable(name)}")
    counts = f"{len(pushed.files)} files, {pushed.num_bytes / 1e6:.1f} MB, {len(pushed.deleted)} deleted"
    if pushed.dry_run:
        print(f"{counts} in a push to {pushed.url}; nothing was sent")
    else:
        print(f"{pushed.url}\ncommit {pushed.commit}: {counts}")
