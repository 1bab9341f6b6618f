"""`ropepatch push`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropepatch.cli.arguments import AsJson, Include
from ropepatch.errors import printable
from ropepatch.files import json_text
from ropepatch.pipeline.running import say_on_stderr
from ropepatch.publishing.loading import call, load_adapter

if TYPE_CHECKING:
    from ropepatch.publishing.hub import Pushed

EXAMPLES = """\b
Examples:
  ropepatch push ./llama-2-7b-yarn-32k me/llama-2-7b-32k --private
  ropepatch push ./llama-2-7b-yarn-32k me/llama-2-7b-32k --dry-run
  ropepatch push ./llama-2-7b-yarn-32k me/llama-2-7b-32k --revision longer"""


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint that `extend` wrote.")],
    repo: Annotated[
        str, typer.Argument(metavar="REPO", help="owner/name on the Hub, or name in your own namespace.")
    ],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be uploaded, and send and write nothing.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="The branch, made if it is not there; main.")
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Push what was not verified, has a red gate, or replaces other weights."
        ),
    ] = False,
    include: Include = None,
    as_json: AsJson = False,
) -> None:
    """Bring a checkpoint to the Hub: the files that changed, in one commit.

    What ropepatch wrote goes there, and what transformers and engines read. It is refused where nothing has
    verified the checkpoint, its check of the short-context loss failed, REPO holds weights of others, or a
    file holds a key or a token. The same command goes on where it was interrupted. The token is that
    of `hf auth login` or HF_TOKEN.
    """
    from ropepatch.publishing.hub import push as send

    pushed = send(
        folder,
        repo,
        private=private,
        revision=revision,
        dry_run=dry_run,
        force=force,
        include=include or (),
        say=say_on_stderr,
    )
    if as_json:
        print(json_text(pushed_data(pushed)))
    else:
        print_pushed(pushed)


def pushed_data(pushed: Pushed) -> dict[str, Any]:
    """What a push did, as JSON-ready data."""
    return asdict(pushed) | {"bytes": pushed.num_bytes}


def print_pushed(pushed: Pushed) -> None:
    """What a push did: the outcome on stdout, what the user should know on stderr."""
    notes = list(pushed.notes)
    if pushed.left_out:
        notes.append(
            f"left out, no part of a checkpoint: {', '.join(pushed.left_out)} (--include sends more along)"
        )
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    counts = f"{_files(len(pushed.uploaded))}, {pushed.num_bytes / 1e6:.1f} MB"
    if pushed.dry_run:
        if pushed.created:
            print(f"{pushed.repo} would be created")
        _print_sizes("upload  ", pushed)
        for name in pushed.unchanged:
            print(f"  unchanged  {'':>13}  {printable(name)}")
        for name in pushed.deleted:
            print(f"  delete     {'':>13}  {printable(name)}")
        print(f"{counts} to upload to {pushed.url}; nothing was sent")
        return
    print(pushed.url)
    if pushed.uploaded or pushed.deleted:
        _print_sizes("uploaded", pushed)
        deleted = f", {_files(len(pushed.deleted))} deleted" if pushed.deleted else ""
        print(f"commit {pushed.commit}: {counts}{deleted}, {len(pushed.unchanged)} unchanged")
        for name in pushed.deleted:
            print(f"deleted {printable(name)}")
    else:
        print(f"nothing has changed since commit {pushed.commit}")
    print(_how_to_load(pushed))


def _print_sizes(verb: str, pushed: Pushed) -> None:
    for name, size in pushed.uploaded.items():
        print(f"  {verb}   {size / 1e6:>10.3f} MB  {printable(name)}")


def _how_to_load(pushed: Pushed) -> str:
    branch = None if pushed.branch == "main" else pushed.branch
    names = {*pushed.uploaded, *pushed.unchanged}
    if "adapter_model.safetensors" in names:
        return load_adapter(pushed.repo, branch=branch, module="huggingface_hub.")
    code = "modeling_attention_map.py" in names
    return call("AutoModelForCausalLM.from_pretrained", pushed.repo, branch=branch, code=code)


def _files(count: int) -> str:
    return f"{count} file" + ("" if count == 1 else "s")
