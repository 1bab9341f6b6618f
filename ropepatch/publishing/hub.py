"""Push a checkpoint to the Hub in one commit, and check the result."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from ropepatch.files import json_text, read_json
from ropepatch.model.checkpoint import ADAPTER, ADAPTER_BASE, RECORD, UNPARSED
from ropepatch.publishing.card.writing import (
    CARD,
    card_text,
    is_others,
    read_folder,
    write_card,
)
from ropepatch.publishing.contents import (
    REPLACED,
    WEIGHTS,
    judge,
    matching,
    read_contents,
)

AGAIN = "run the same command again: it resumes the upload"


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
    card: str | None

    @property
    def num_bytes(self) -> int:
        """The size of the files."""
        return sum(self.files.values())


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
    api, card = HfApi(library_name="ropepatch"), None
    there, is_new = None, True
    with _hub_errors(repo, token):
        validate_repo_id(repo)
    try:
        with _hub_errors(repo, token):
            repo = repo if "/" in repo else f"{api.whoami()['name']}/{repo}"
            there, is_new = _look(api, repo, branch)
    except RopepatchError as error:
        if not dry_run:
            raise
        notes.append(f"could not look at the Hub: {error}")
    held = _names(there)
    if there is not None and private and not there.private:
        raise RopepatchError(
            f"{repo} exists and is public",
            hint="make it private in its settings on the Hub, or use another repository",
        )
    others = sorted(matching(held, WEIGHTS))
    if others and not (force or is_new or RECORD in held):
        raise RopepatchError(
            f"{repo} contains other weights: {', '.join(others)[:200]}",
            hint="use a new branch or repository, or replace them with `ropepatch push --force`",
        )
    with _hub_errors(repo, token):
        if judgement.allows_card and not is_others(place / CARD):
            named = None if branch == "main" else branch
            if (
                there is not None
                and CARD in held
                and not is_new
                and is_others(Path(api.hf_hub_download(repo, CARD, revision=there.sha)))
            ):
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
        replaced = REPLACED if RECORD in held else WEIGHTS
        deleted = sorted(matching(held, replaced) - files.keys())
        commit = there.sha if there else None
        if not dry_run:
            if there is None:
                api.create_repo(repo, private=private or None, exist_ok=True)
            if branch != "main":
                api.create_branch(repo, branch=branch, exist_ok=True)
            commit = _send(api, repo, branch, commit, files, deleted)
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
    logger.addFilter(_without_signatures)
    try:
        yield
    except (HttpxError, OSError, ValueError, RuntimeError, *UNPARSED) as error:
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


def _look(api: HfApi, repo: str, branch: str) -> tuple[ModelInfo | None, bool]:
    """Look at a branch, or at main, from which it would be created; None without the repository.

    The second value is whether the branch holds nothing that main does not keep.
    """
    try:
        main = api.model_info(repo)
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        return None, True
    if branch == "main":
        return main, False
    with suppress(RevisionNotFoundError):
        info = api.model_info(repo, revision=branch)
        return info, info.sha == main.sha
    return main, True


def _names(info: ModelInfo | None) -> frozenset[str]:
    siblings = info.siblings if info else None
    return frozenset(file.rfilename for file in siblings or ())


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
    if isinstance(config.get(ADAPTER_BASE), str):
        config[ADAPTER_BASE] = shown_name(config[ADAPTER_BASE])
    return json_text(config).encode()
