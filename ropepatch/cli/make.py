"""The commands that write a checkpoint or publish it."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cyclopts import Group

from ropepatch import api
from ropepatch.cli.derive import command
from ropepatch.cli.screen import command_line, feedback, print_text
from ropepatch.errors import RopepatchError, argument, printable
from ropepatch.pipeline.running import say_on_stderr
from ropepatch.processes import is_first
from ropepatch.progress import WEIGHTS, bar

if TYPE_CHECKING:
    from ropepatch.pipeline.extension import Extension
    from ropepatch.publishing.hub import Pushed

GROUP = Group("Make", sort_key=1)


@command(
    GROUP,
    """\
  ropepatch extend ./llama-2-7b --to 32k
  ropepatch extend ./llama-2-7b --to 16k --method ntk --out ./llama-2-7b-16k
  ropepatch extend meta-llama/Llama-2-7b-hf --to 32k --link-weights
  ropepatch extend ./llama-2-7b --to 16k --distil
  ropepatch extend ./llama-2-7b.Q4_K_M.gguf --to 16k
  ropepatch extend tiny --to 2k --recipe tiny --eval demo --push me/tiny-2k
  ropepatch extend ./llama-2-7b --recipe llama2-7b-yarn-32k --max-short-loss-increase 2%""",
    api.extend,
)
def extend(
    model: str,
    *,
    quiet: bool = False,
    as_json: bool = False,
    **asked: Any,
) -> int:
    """Exit 1 if the loss exceeds `max_short_loss_increase`, 2 if a dry run fails."""
    screen = _Screen(as_json)
    try:
        extension = api.extend(
            model,
            **asked,
            record={"command": command_line()},
            show=screen.show,
            **feedback(quiet),
        )
        screen.show_last(extension)
        if extension.record and not as_json and not quiet:
            screen.show_next(extension)
    finally:  # also if the push failed: the checkpoint is written
        screen.close()
    failed = extension.gate is not None and not extension.gate.passed
    return int(failed and (bool(asked.get("push")) or "max_short_loss_increase" in asked))


@dataclass
class _Screen:
    """Prints the outcome of `extend`, as text at once or as JSON at the end."""

    as_json: bool
    record: dict[str, Any] | None = None

    def show(self, outcome: Extension) -> None:
        """Print the checkpoint on stdout."""
        from ropepatch.report import print_results

        if is_first():
            self.record = outcome.record
            if not self.as_json:
                if outcome.results:
                    print_results(outcome.results)
                print_text(outcome.outcome())

    def show_next(self, extension: Extension) -> None:
        """Print on stderr how to load, measure and publish the checkpoint."""
        from ropepatch.model.checkpoint import Checkpoint
        from ropepatch.publishing.loading import call

        folder, by_code = str(extension.folder), extension.plan.remapping is not None
        if not is_first():
            return
        if folder.lower().endswith(".gguf"):
            target = extension.plan.target
            say_on_stderr(f"serve:   llama-server -m {shlex.quote(folder)} -c {target}")
            return
        if not (extension.folder / "config.json").exists():
            code = f"import ropepatch; model, tokenizer = {call('ropepatch.load_adapter', folder)}"
            say_on_stderr(f"load:    python -c {shlex.quote(code)}")
            say_on_stderr("merge:   model.merge_and_unload().save_pretrained(FOLDER)")
            return
        written = Checkpoint(extension.folder)
        loading = call(f"{written.auto_class}.from_pretrained", folder, code=by_code)
        shown = f"{loading}.config.get_text_config().max_position_embeddings"
        code = f"from transformers import {written.auto_class}; print({shown})"
        say_on_stderr(f"load:    python -c {shlex.quote(code)}")
        try:
            _ = written.tokenizer
        except RopepatchError:
            say_on_stderr("warning: no tokenizer was copied: the source has none that can be loaded")
        else:
            if not extension.results:
                say_on_stderr("measure: the same command with --eval SUITE, which `push` then shows")
        if not extension.pushed:
            say_on_stderr(f"publish: ropepatch push {shlex.quote(folder)} ME/NAME")

    def show_last(self, extension: Extension) -> None:
        """Print the plan of a dry run, or what was pushed."""
        if not extension.record:
            print(extension.to_json()) if self.as_json else print_text(extension.outcome())
            if found := extension.obstacles:
                hints = dict.fromkeys(obstacle.hint for obstacle in found if obstacle.hint)
                raise RopepatchError("; ".join(map(str, found)), hint="; ".join(hints))
        elif extension.pushed and self.record is not None:
            self.record |= {"pushed": _pushed_data(extension.pushed)}
            if not self.as_json:
                _print_pushed(extension.pushed, str(extension))

    def close(self) -> None:
        """Print the record if JSON was asked for."""
        from ropepatch.files import json_text

        if self.as_json and self.record is not None:
            print(json_text(self.record))


@command(
    GROUP,
    """\
  ropepatch export ./llama-2-7b-yarn-32k --fold-attention --out ./llama-2-7b-32k-folded""",
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
    from ropepatch.files import json_text
    from ropepatch.pipeline.inputs import default_place

    if not fold_attention:
        raise RopepatchError("nothing to write", hint=f"add {argument('fold_attention')}")
    place = out or default_place(model, "folded")
    with bar(WEIGHTS) as progress:
        folder = api.fold_attention(model, place, revision=revision, progress=progress)
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
    api.push,
)
def push(folder: str, repo: str, *, as_json: bool = False, **asked: Any) -> None:
    """Run the same command again to resume an interrupted push."""
    from ropepatch.files import json_text

    pushed = api.push(folder, repo, **asked, say=say_on_stderr)
    if as_json:
        print(json_text(_pushed_data(pushed)))
    else:
        _print_pushed(pushed, folder)


def _pushed_data(pushed: Pushed) -> dict[str, Any]:
    """The outcome of a push as JSON-ready data."""
    return asdict(pushed) | {"bytes": pushed.num_bytes}


def _print_pushed(pushed: Pushed, folder: str) -> None:
    """Print the outcome of a push on stdout, and notes on stderr."""
    notes = list(pushed.notes)
    if pushed.left_out:
        left = ", ".join(pushed.left_out)
        notes.append(f"not uploaded: {left} (--include uploads more files)")
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    deleted = f", {_files(len(pushed.deleted))} deleted" if pushed.deleted else ""
    counts = f"{_files(len(pushed.files))}, {pushed.num_bytes / 1e6:.1f} MB{deleted}"
    if pushed.card is not None:
        print_text(pushed.card)
    if pushed.dry_run and pushed.created:
        print(f"{pushed.repo} would be created")
    if not pushed.dry_run:
        print(pushed.url)
    for name, size in pushed.files.items():
        print(f"  {size / 1e6:>10.3f} MB  {printable(name)}")
    for name in pushed.deleted:
        print(f"  {'deleted':>13}  {printable(name)}")
    if pushed.dry_run:
        print(f"{counts} in a push to {pushed.url}; nothing was sent")
        return
    print(f"commit {pushed.commit}: {counts}")
    print(_how_to_load(pushed, folder))


def _how_to_load(pushed: Pushed, folder: str) -> str:
    from ropepatch.model.checkpoint import Checkpoint
    from ropepatch.publishing.loading import call, load_adapter

    branch = None if pushed.branch == "main" else pushed.branch
    if "adapter_model.safetensors" in pushed.files:
        return load_adapter(pushed.repo, branch=branch, module="huggingface_hub.")
    code = "modeling_position_remapping.py" in pushed.files
    loading = f"{Checkpoint.find(folder).auto_class}.from_pretrained"
    return call(loading, pushed.repo, branch=branch, code=code)


def _files(count: int) -> str:
    return f"{count} file" + ("" if count == 1 else "s")
