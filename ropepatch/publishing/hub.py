"""Push a checkpoint to the Hub in one commit, and check the result."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    get_token,
)
from huggingface_hub.errors import (
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.errors import HTTPError as HttpxError  # type: ignore[attr-defined]
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    http_backoff,
    validate_repo_id,
)

from ropepatch.errors import RopepatchError
from ropepatch.extension.record import shown_name
from ropepatch.files import json_text, read_json, read_text
from ropepatch.model.checkpoint import ADAPTER, RECORD, hub_answers
from ropepatch.publishing.card.writing import (
    CARD,
    MARKER,
    card_text,
    has_own_card,
    read_folder,
    write_card,
)
from ropepatch.publishing.contents import is_stale, is_weights, judge, read_contents

AGAIN = "run the same command again: it resumes the upload"
BASE = "base_model_name_or_path"


@dataclass(frozen=True)
class Pushed:
    """The result of a push, or of its dry run.

    Args:
        repo: The repository, with its namespace.
        url: Its page.
        branch: The branch.
        commit: The newest commit of the branch; None if there is none yet.
        dry_run: Whether nothing was uploaded.
        files: The files of the push, and their sizes in bytes; the Hub takes those that it does not have.
        deleted: Outdated files of an earlier push.
        left_out: Files of the folder that are no part of a checkpoint.
        notes: Remarks for the user.
        card: After a dry run, the text of the model card without figures, if one would be written.
    """

    repo: str
    url: str
    branch: str
    commit: str | None
    dry_run: bool
    files: dict[str, int]
    deleted: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    card: str | None = None

    @property
    def num_bytes(self) -> int:
        """The size of the files."""
        return sum(self.files.values())


@dataclass(frozen=True)
class _Branch:
    """A branch on the Hub; if it does not exist, main, from which it would be created."""

    head: str
    exists: bool
    private: bool
    files: frozenset[str]
    # Whether it holds what main holds, so that nothing of its own is lost
    is_main: bool


def push(
    folder: str | Path,
    repo: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    force: bool = False,
    include: Sequence[str] = (),
) -> Pushed:
    """Push a checkpoint or an adapter, with its card, to the Hub.

    It uploads what ropepatch wrote and what transformers and engines load: the changed files, in one commit,
    checked afterwards. The same call resumes an interrupted push, without sending files again. The card is
    written into the folder first, unless its README.md is your own. A README.md on the Hub that ropepatch did
    not write stays. The token is that of `hf auth login` or HF_TOKEN.

    Args:
        folder: A checkpoint that `extend` or `train` wrote and verified.
        repo: owner/name on the Hub, or name in your own namespace; created if it does not exist.
        private: Make the repository private.
        dry_run: Print the files to upload and the card; send and write nothing.
        revision: The branch, created from main if it does not exist. Default: main.
        force: Push a checkpoint that was not verified or failed the short-context check, and replace weights
            there that ropepatch did not write.
        include: Also upload these files, such as examples/*.

    Raises:
        RopepatchError: If the folder contains no sound checkpoint or it is not verified, a name is invalid,
            there is no token, a file contains a secret, the repository is public but should be private or
            contains weights of others, or the Hub refuses.
    """
    place, token, branch = Path(folder).expanduser(), get_token(), revision or "main"
    if not place.is_dir():
        raise RopepatchError(
            f"no folder {place}", hint="give the folder that `ropepatch extend` wrote"
        )
    contents = read_contents(place, token, include)
    judgement = judge(place, contents.files)
    if judgement.against and not force:
        raise RopepatchError(
            f"{place} is not pushed: {'; '.join(judgement.against)}",
            hint="use `ropepatch push --force` to push it anyway",
        )
    if token is None and not dry_run:
        raise RopepatchError(
            "no token for the Hub", hint="log in with `hf auth login`, or set HF_TOKEN"
        )
    notes = list(judgement.notes)
    notes += [f"pushed by force: {reason}" for reason in judgement.against]
    api, there, card = HfApi(library_name="ropepatch"), None, None
    with _hub_errors(repo, token):
        validate_repo_id(repo)
    try:
        with _hub_errors(repo, token):
            repo = repo if "/" in repo else f"{api.whoami()['name']}/{repo}"
            there = _look(api, repo, branch)
    except RopepatchError as error:
        if not dry_run:
            raise
        notes.append(f"could not look at the Hub: {error}")
    if there is not None:
        _check_there(there, repo, private=private, force=force)
    with _hub_errors(repo, token):
        if judgement.allows_card and not has_own_card(place):
            named = None if branch == "main" else branch
            if there is not None and _has_other_card(api, repo, there):
                contents.files.pop(CARD, None)
                notes.append(
                    f"{CARD} on the Hub is not from ropepatch and is kept; delete it there first"
                )
            elif dry_run:
                card = card_text(read_folder(place, repo, named))
            else:
                write_card(place, repo, named)
                contents = read_contents(place, token, include)
        files = contents.files
        held = there.files if there else frozenset[str]()
        stale = [name for name in held if is_stale(name, ours=RECORD in held)]
        deleted = sorted({*stale} - files.keys())
        commit = there.head if there else None
        if not dry_run:
            _create(api, repo, branch, there, private=private)
            parent = there.head if there and there.exists else None
            commit = _send(api, repo, branch, parent, files, deleted)
    return Pushed(
        repo=repo,
        url=f"{api.endpoint}/{repo}" + (f"/tree/{branch}" if revision else ""),
        branch=branch,
        commit=commit,
        dry_run=dry_run,
        files={name: path.stat().st_size for name, path in files.items()},
        deleted=tuple(deleted),
        left_out=contents.left_out,
        notes=(*contents.notes, *notes),
        card=card,
    )


@contextmanager
def _hub_errors(repo: str, token: str | None) -> Iterator[None]:
    """Raise the errors of the Hub's client as one line; no token or signature is said or logged."""
    logger = logging.getLogger(http_backoff.__module__)
    with hub_answers(repo):
        logger.addFilter(_without_signatures)
        try:
            yield
        except (HttpxError, OSError, ValueError, RuntimeError) as error:
            # An uploading thread wraps the error in a RuntimeError.
            cause = error.__cause__ if type(error) is RuntimeError else None
            said = _unsigned(" ".join(str(cause or error).split()))
            if token:
                said = said.replace(token, "…")
            raise RopepatchError(
                f"cannot push to {repo}: {said[:300]}",
                hint=f"check the name, `hf auth whoami` and the network; then {AGAIN}",
            ) from error
        finally:
            logger.removeFilter(_without_signatures)


def _unsigned(text: str) -> str:
    """Shorten addresses: the signature in one grants access."""
    return re.sub(r"\?\S+", "?…", text)


def _without_signatures(record: logging.LogRecord) -> bool:
    record.msg, record.args = _unsigned(record.getMessage()), ()
    return True


def _look(api: HfApi, repo: str, branch: str) -> _Branch | None:
    """Look at a branch; None without the repository."""
    try:
        main = api.model_info(repo)
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        return None
    info, exists = main, True
    if branch != "main":
        try:
            info = api.model_info(repo, revision=branch)
        except RevisionNotFoundError:
            exists = False
    is_main = branch != "main" and info.sha == main.sha
    return _Branch(str(info.sha), exists, bool(info.private), _names(info), is_main)


def _names(info: ModelInfo) -> frozenset[str]:
    return frozenset(file.rfilename for file in info.siblings or ())


def _check_there(there: _Branch, repo: str, *, private: bool, force: bool) -> None:
    """Raise `RopepatchError` for a public repository, or weights that ropepatch did not write."""
    if private and not there.private:
        raise RopepatchError(
            f"{repo} exists and is public",
            hint="make it private in its settings on the Hub, or use another repository",
        )
    others = sorted(filter(is_weights, there.files))
    if others and not (force or there.is_main or RECORD in there.files):
        raise RopepatchError(
            f"{repo} contains other weights: {', '.join(others)[:200]}",
            hint="use a new branch or repository, or replace them with `ropepatch push --force`",
        )


def _has_other_card(api: HfApi, repo: str, there: _Branch) -> bool:
    """Return whether the branch has a README.md that is neither from ropepatch nor main's."""
    if there.is_main or CARD not in there.files:
        return False
    card = api.hf_hub_download(repo, CARD, revision=there.head)
    return MARKER not in read_text(Path(card), errors="replace")


def _create(
    api: HfApi, repo: str, branch: str, there: _Branch | None, *, private: bool
) -> None:
    """Create the repository and the branch as far as they are missing."""
    if there is None:
        api.create_repo(repo, private=private or None, exist_ok=True)
    if branch != "main" and not (there and there.exists):
        api.create_branch(repo, branch=branch, exist_ok=True)


def _send(
    api: HfApi,
    repo: str,
    branch: str,
    parent: str | None,
    files: dict[str, Path],
    deleted: Collection[str],
) -> str:
    """Send one commit, and return it.

    `upload_folder` sends several commits, so a checkpoint whose upload breaks would be half replaced.
    """
    additions = [CommitOperationAdd(name, _shown(path)) for name, path in files.items()]
    deletions = [CommitOperationDelete(name, is_folder=False) for name in deleted]
    commit = api.create_commit(
        repo,
        [*additions, *deletions],
        commit_message=f"Push with ropepatch {importlib.metadata.version('ropepatch')}",
        revision=branch,
        parent_commit=parent,
    ).oid
    if missing := {*files} - _names(api.model_info(repo, revision=commit)):
        raise RopepatchError(
            f"{repo} lacks uploaded files: {', '.join(sorted(missing))[:200]}",
            hint=f"look for a .gitignore there that names it; then {AGAIN}",
        )
    return str(commit)


def _shown(path: Path) -> Path | bytes:
    """Return a file, or an adapter's config without the local path of its base."""
    if path.name != ADAPTER:
        return path
    config = read_json(path)
    if isinstance(config.get(BASE), str):
        config[BASE] = shown_name(config[BASE])
    return json_text(config).encode()
