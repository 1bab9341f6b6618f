"""One push: look, compare, send what changed in one commit, look again."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ropepatch.errors import RopepatchError
from ropepatch.extension import record as records
from ropepatch.extension.planning import Plan
from ropepatch.extension.writing import extend
from ropepatch.publishing.hub import explaining
from ropepatch.publishing.hub.contents import is_stale, is_weights, judge, read_contents
from ropepatch.publishing.hub.explaining import AGAIN, LOG_IN, talking
from ropepatch.publishing.hub.remote import Remote, look

CARD = "README.md"
BRANCH = re.compile(r"(?!refs/)(?!.*(\.\.|//|/\.|\.lock$|/$|\.$))[\w][\w./-]{0,199}")


@dataclass(frozen=True)
class Pushed:
    """What a push did, or would do.

    Args:
        repo: The repository, with its namespace.
        url: Where a browser finds it.
        branch: What was pushed to.
        commit: The newest commit of the branch; None where there is none yet.
        created: Whether the repository was not there before.
        dry_run: Whether nothing was sent.
        uploaded: The files that are new or have changed, and their sizes in bytes.
        unchanged: The files that the Hub has already.
        deleted: What an earlier push left there and no longer holds.
        left_out: What of the folder is no part of a checkpoint.
        notes: What the user should know.
    """

    repo: str
    url: str
    branch: str
    commit: str | None
    created: bool
    dry_run: bool
    uploaded: dict[str, int]
    unchanged: tuple[str, ...]
    deleted: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """The size of what was uploaded."""
        return sum(self.uploaded.values())


def push(
    folder: str | Path | Plan,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    card: bool = True,
    include: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
    api: HfApi | None = None,
) -> Pushed:
    """Bring a checkpoint or an adapter to the Hub: what changed, in one commit, checked afterwards.

    An interrupted push is gone on with by the same call: files that arrived are not sent again. A README.md
    on the Hub that ropepatch did not write stays as it is.

    Args:
        folder: Of the checkpoint: `ropepatch.json` says that it was verified. Or a plan, whose checkpoint is
            written into a temporary folder.
        repo: `owner/name`, or `name` in the user's own namespace; made if it is not there.
        private: Make it private.
        revision: The branch, made from main if it is not there; None for main.
        dry_run: Only say what would be done.
        force: Push what was not verified, or failed its gate, and replace weights that ropepatch did not
            bring there.
        card: Write the model card into the folder first, unless its README.md is the user's own.
        include: Patterns of paths in the folder (of a plan: in its source) that are pushed beside the
            checkpoint.
        say: Takes lines that tell how far it is.
        api: Whom to talk to; None for the Hub, with the user's token.

    Raises:
        RopepatchError: If the folder holds no sound checkpoint or nothing speaks for it, a name is no name,
            there is no token, a file holds a secret, the repository is public but should be private or
            holds weights of others, or the Hub does not play along.
    """
    options: Any = {"private": private, "revision": revision, "dry_run": dry_run, "force": force}
    if isinstance(folder, Plan):
        check_repo(repo)
        with TemporaryDirectory(prefix="ropepatch-") as temporary:
            written = extend(folder, Path(temporary) / repo.rpartition("/")[2], include=include)
            return push(written, repo, **options, card=card, include=include, say=say, api=api)
    place, branch = Path(folder).expanduser(), revision or "main"
    if not place.is_dir():
        raise RopepatchError(f"no folder {place}", hint="DIR is the folder that `ropepatch extend` wrote")
    _check_name(repo)
    if not BRANCH.fullmatch(branch):
        raise RopepatchError(f"{branch!r} is no name of a branch", hint="--revision long-context, say")
    token = api.token if api and isinstance(api.token, str) else get_token()
    contents = read_contents(place, token, include)
    judgement = judge(place, contents.files)
    if judgement.against and not force:
        raise RopepatchError(
            f"{place} is not pushed: {'; '.join(judgement.against)}",
            hint="`ropepatch push --force` pushes it all the same",
        )
    notes = [*judgement.notes, *(f"pushed by force: {reason}" for reason in judgement.against)]
    if token is None and not dry_run:
        raise RopepatchError("no token for the Hub", hint=LOG_IN)
    hub = api or HfApi(token=token, library_name="ropepatch")
    remote, created = None, False
    try:
        with talking(repo, token, hub.endpoint):
            repo = repo if "/" in repo else f"{hub.whoami()['name']}/{repo}"
            remote = look(hub, repo, branch)
            created = remote is None
    except RopepatchError as error:
        if not dry_run:
            raise
        notes.append(f"not compared with the Hub, all files count as new: {error}")
    with talking(repo, token, hub.endpoint):
        _check_private(remote, repo, private)
        if remote is not None and not force:
            _check_weights(remote, branch, contents.files)
        has_card = card and judgement.allows_card
        if has_card and not dry_run:
            from ropepatch.publishing.card import write_card

            write_card(place, repo, None if branch == "main" else branch)
            contents = read_contents(place, token, include)
        if not dry_run:
            remote = _created(hub, repo, branch, remote, private=private, say=say)
        elif remote is not None and not remote.has_branch:
            notes.append(f"the branch {branch} would be made from main")
        files, there = contents.files, remote.files if remote else {}
        same = {name for name, path in files.items() if remote and remote.holds(name, path)}
        differs = CARD in there and CARD not in same and (has_card or CARD in files)
        if remote and differs and _has_own_card(remote, branch, token):
            files.pop(CARD, None)
            has_card = False
            notes.append(f"{CARD} on the Hub is not ropepatch's and stays; delete it there to have this one")
        if dry_run and has_card:
            notes.append(f"{CARD}, the model card, is written when it is pushed, unless it is your own")
        stale = {name for name in there if is_stale(name, files, ours=records.FILE in there)}
        planned = Pushed(
            repo=repo,
            url=f"{hub.endpoint}/{repo}" + (f"/tree/{branch}" if revision else ""),
            branch=branch,
            commit=remote.head if remote else None,
            created=created,
            dry_run=dry_run,
            uploaded={name: path.stat().st_size for name, path in files.items() if name not in same},
            unchanged=tuple(sorted(same)),
            deleted=tuple(sorted(stale)),
            left_out=contents.left_out,
            notes=(*contents.notes, *notes),
        )
        if dry_run or remote is None or not (planned.uploaded or planned.deleted):
            return planned
        say(f"uploading {len(planned.uploaded)} files, {planned.num_bytes / 1e6:.1f} MB, to {repo}")
        return _send(remote, planned, files, say)


def check_repo(repo: str) -> None:
    """Refuse before hours of work what could not be pushed after them.

    Args:
        repo: `owner/name`, or `name` in the user's own namespace.

    Raises:
        RopepatchError: If that is no name of a repository, there is no token, or the Hub does not know it.
    """
    _check_name(repo)
    token = get_token()
    if token is None:
        raise RopepatchError("no token for the Hub", hint=LOG_IN)
    with talking(repo, token):
        HfApi(token=token, library_name="ropepatch").whoami()


def _check_name(repo: str) -> None:
    try:
        validate_repo_id(repo)
        repo.encode("ascii")  # which older validators do not ask for
    except (HFValidationError, UnicodeEncodeError) as error:
        raise RopepatchError(
            f"{repo!r} is no name of a repository: {' '.join(str(error).split())[:200]}",
            hint="REPO is owner/name, or name in your own namespace",
        ) from error


def _check_private(remote: Remote | None, repo: str, private: bool) -> None:
    if private and remote is not None and not remote.private:
        raise RopepatchError(
            f"{repo} exists and is public", hint="make it private in its settings on the Hub, or name another"
        )


def _check_weights(remote: Remote, branch: str, files: dict[str, Path]) -> None:
    """Refuse to replace weights that ropepatch did not bring there."""
    if records.FILE in remote.files:
        return
    weights = filter(is_weights, remote.files)
    others = [name for name in weights if name not in files or not remote.holds(name, files[name])]
    if others and not remote.is_kept_by_main(branch):
        raise RopepatchError(
            f"{remote.repo} holds other weights: {', '.join(others)[:200]}",
            hint="`ropepatch push --force` replaces them; a new branch or repository leaves them",
        )


def _has_own_card(remote: Remote, branch: str, token: str | None) -> bool:
    """Whether the README.md there is not ropepatch's: written or edited there."""
    from ropepatch.publishing.card import MARKER

    return MARKER not in remote.text(CARD, token) and not remote.is_kept_by_main(branch)


def _created(
    hub: HfApi, repo: str, branch: str, remote: Remote | None, *, private: bool, say: Callable[[str], None]
) -> Remote:
    """The branch, made where it was not there."""
    if remote is not None and remote.has_branch:
        return remote
    if remote is None:
        say(f"creating {repo}" + (", private" if private else ""))
        hub.create_repo(repo, private=private or None, exist_ok=True)
    if branch != "main":
        say(f"creating the branch {branch}")
        hub.create_branch(repo, branch=branch, exist_ok=True)
    remote = look(hub, repo, branch)
    if remote is None or not remote.has_branch:
        raise RopepatchError(f"the Hub made no branch {branch} of {repo}", hint=AGAIN)
    _check_private(remote, repo, private)
    return remote


def _send(before: Remote, planned: Pushed, files: dict[str, Path], say: Callable[[str], None]) -> Pushed:
    """One commit, which the Hub takes whole or not at all; but a .gitignore there may swallow files."""
    hub, repo = before.hub, before.repo
    additions = [CommitOperationAdd(name, files[name]) for name in planned.uploaded]
    deletions = [CommitOperationDelete(name, is_folder=False) for name in planned.deleted]
    commit = hub.create_commit(
        repo,
        [*additions, *deletions],
        commit_message=f"Push with ropepatch {importlib.metadata.version('ropepatch')}",
        revision=planned.branch,
        parent_commit=before.head,
    ).oid
    say("checking what the Hub has")
    after = look(hub, repo, commit)
    now = after.files.keys() if after and after.has_branch else set()
    if wrong := sorted((files.keys() - now) | (now & {*planned.deleted})):
        raise RopepatchError(
            f"{repo} does not hold what was sent: {', '.join(wrong)[:200]}",
            hint=f"look for a .gitignore there that names it; then {AGAIN}",
        )
    newest = hub.model_info(repo, revision=planned.branch, timeout=explaining.TIME_LIMIT).sha
    moved = [] if newest == commit else [f"{planned.branch} has since moved on to {newest}"]
    return replace(planned, commit=commit, notes=(*planned.notes, *moved))
