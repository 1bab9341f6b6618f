"""Push a checkpoint to the Hub in one commit, and check the result."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    get_token,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ropepatch.errors import RopepatchError
from ropepatch.extension.record import shown_name
from ropepatch.files import read_json, write_json
from ropepatch.model.checkpoint import ADAPTER, RECORD
from ropepatch.progress import Say, silent
from ropepatch.publishing import hub_client
from ropepatch.publishing.card.writing import CARD, MARKER, preview_card, write_card
from ropepatch.publishing.contents import (
    Contents,
    Judgement,
    is_stale,
    is_weights,
    judge,
    read_contents,
)
from ropepatch.publishing.hub_client import AGAIN, LOG_IN, hub_errors


@dataclass(frozen=True)
class Pushed:
    """The result of a push, or of its dry run.

    Args:
        repo: The repository, with its namespace.
        url: Its page.
        branch: The branch.
        commit: The newest commit of the branch; None if there is none yet.
        created: Whether the push created the repository.
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
    created: bool
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


def _look(hub: HfApi, repo: str, branch: str) -> _Branch | None:
    """Look at a branch; None without the repository."""
    try:
        main = hub.model_info(repo, timeout=hub_client.TIME_LIMIT)
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        return None
    info: ModelInfo = main
    exists = True
    if branch != "main":
        try:
            info = hub.model_info(repo, revision=branch, timeout=hub_client.TIME_LIMIT)
        except RevisionNotFoundError:
            exists = False
    files = frozenset(file.rfilename for file in info.siblings or ())
    is_main = branch != "main" and info.sha == main.sha
    return _Branch(str(info.sha), exists, bool(info.private), files, is_main)


def push(
    folder: str | Path,
    repo: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    force: bool = False,
    card: bool = True,
    include: Sequence[str] = (),
    say: Say = silent,
    api: HfApi | None = None,
) -> Pushed:
    """Push a checkpoint or an adapter, with its card, to the Hub.

    It uploads what ropepatch wrote and what transformers and engines load: the changed files, in one commit,
    checked afterwards. The same call resumes an interrupted push, without sending files again. A README.md on
    the Hub that ropepatch did not write stays. The token is that of `hf auth login` or HF_TOKEN.

    Args:
        folder: A checkpoint that `extend` or `train` wrote and verified.
        repo: owner/name on the Hub, or name in your own namespace; created if it does not exist.
        private: Make the repository private.
        dry_run: Print the files to upload and the card; send and write nothing.
        revision: The branch, created from main if it does not exist. Default: main.
        force: Push a checkpoint that was not verified or failed the short-context check, and replace weights
            there that ropepatch did not write.
        card: Write the model card into the folder first, unless its README.md is your own.
        include: Also upload these files, such as examples/*.
        say: A function that takes lines of progress.
        api: The Hub client. Default: the usual one, with your token.

    Raises:
        RopepatchError: If the folder contains no sound checkpoint or it is not verified, a name is invalid,
            there is no token, a file contains a secret, the repository is public but should be private or
            contains weights of others, or the Hub refuses.
    """
    _check_name(repo)
    token = api.token if api and isinstance(api.token, str) else get_token()
    hub = api or HfApi(token=token, library_name="ropepatch")
    branch = revision or "main"
    with TemporaryDirectory(prefix="ropepatch-") as temporary:
        place = Path(folder).expanduser()
        contents, judgement = _checked(place, token, include, force)
        if token is None and not dry_run:
            raise RopepatchError("no token for the Hub", hint=LOG_IN)
        notes = [
            *judgement.notes,
            *(f"pushed by force: {reason}" for reason in judgement.against),
        ]
        there, is_new = None, False
        try:
            with hub_errors(repo, token):
                repo = repo if "/" in repo else f"{hub.whoami()['name']}/{repo}"
                there = _look(hub, repo, branch)
                is_new = there is None
        except RopepatchError as error:
            if not dry_run:
                raise
            notes.append(f"could not look at the Hub: {error}")
        with hub_errors(repo, token):
            preview = None
            _check_private(there, repo, private)
            if not force:
                _check_weights(there, repo)
            if _holds_other_card(hub, repo, there, contents.files.get(CARD), temporary):
                if contents.files.pop(CARD, None) or card:
                    notes.append(
                        f"{CARD} on the Hub is not from ropepatch and is kept; delete it there first"
                    )
            elif card and judgement.allows_card:
                named = None if branch == "main" else branch
                if dry_run:
                    preview = preview_card(place, repo, named)
                else:
                    write_card(place, repo, named)
                    contents = read_contents(place, token, include)
            files = _shown(contents.files, Path(temporary))
            held = there.files if there else frozenset()
            deleted = sorted(
                name for name in held if is_stale(name, files, ours=RECORD in held)
            )
            commit = there.head if there else None
            if not dry_run:
                commit = _send(
                    hub, repo, branch, there, files, deleted, private=private, say=say
                )
            elif there is not None and not there.exists:
                notes.append(f"the branch {branch} would be created from main")
        return Pushed(
            repo=repo,
            url=f"{hub.endpoint}/{repo}" + (f"/tree/{branch}" if revision else ""),
            branch=branch,
            commit=commit,
            created=is_new,
            dry_run=dry_run,
            files={name: path.stat().st_size for name, path in files.items()},
            deleted=tuple(deleted),
            left_out=contents.left_out,
            notes=(*contents.notes, *notes),
            card=preview,
        )


def _checked(
    place: Path, token: str | None, include: Sequence[str], force: bool
) -> tuple[Contents, Judgement]:
    """Collect and judge the files of a folder; raise a `RopepatchError` if they cannot be pushed."""
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
    return contents, judgement


def _shown(files: dict[str, Path], temporary: Path) -> dict[str, Path]:
    """Replace an adapter's config by a copy in which its base has no local path."""
    name, key = ADAPTER, "base_model_name_or_path"
    config = read_json(files[name]) if name in files else {}
    base = config.get(key)
    if not isinstance(base, str) or shown_name(base) == base:
        return files
    write_json(temporary / name, config | {key: shown_name(base)})
    return files | {name: temporary / name}


def _check_name(repo: str) -> None:
    try:
        validate_repo_id(repo)
        repo.encode("ascii")  # older validators do not check this
    except (HFValidationError, UnicodeEncodeError) as error:
        raise RopepatchError(
            f"{repo!r} is not a valid repository name: {' '.join(str(error).split())[:200]}",
            hint="use owner/name, or name for your own namespace",
        ) from error


def _check_private(there: _Branch | None, repo: str, private: bool) -> None:
    if private and there is not None and not there.private:
        raise RopepatchError(
            f"{repo} exists and is public",
            hint="make it private in its settings on the Hub, or use another repository",
        )


def _check_weights(there: _Branch | None, repo: str) -> None:
    """Raise `RopepatchError` if the push would replace weights that ropepatch did not write."""
    if there is None or there.is_main or RECORD in there.files:
        return
    if others := sorted(filter(is_weights, there.files)):
        raise RopepatchError(
            f"{repo} contains other weights: {', '.join(others)[:200]}",
            hint="use a new branch or repository, or replace them with `ropepatch push --force`",
        )


def _holds_other_card(
    hub: HfApi, repo: str, there: _Branch | None, ours: Path | None, temporary: str
) -> bool:
    """Return whether the branch has a README.md that is neither from ropepatch, nor main's, nor this one."""
    if there is None or there.is_main or CARD not in there.files:
        return False
    card = Path(
        hub.hf_hub_download(repo, CARD, revision=there.head, local_dir=temporary)
    ).read_bytes()
    return MARKER.encode() not in card and (ours is None or card != ours.read_bytes())


def _send(
    hub: HfApi,
    repo: str,
    branch: str,
    there: _Branch | None,
    files: Mapping[str, Path],
    deleted: Sequence[str],
    *,
    private: bool,
    say: Say,
) -> str:
    """Create what is missing, send one commit, and return it.

    `upload_folder` sends several commits, so a checkpoint whose upload breaks would be half replaced.
    """
    if there is None:
        say(f"creating {repo}" + (", private" if private else ""))
        hub.create_repo(repo, private=private or None, exist_ok=True)
    if branch != "main" and (there is None or not there.exists):
        say(f"creating the branch {branch}")
        hub.create_branch(repo, branch=branch, exist_ok=True)
    if there is None or not there.exists:
        there = _look(hub, repo, branch)
        _check_private(there, repo, private)
    assert there is not None
    say(f"uploading {len(files)} files, as far as they are new, to {repo}")
    additions = [CommitOperationAdd(name, path) for name, path in files.items()]
    deletions = [CommitOperationDelete(name, is_folder=False) for name in deleted]
    commit = hub.create_commit(
        repo,
        [*additions, *deletions],
        commit_message=f"Push with ropepatch {importlib.metadata.version('ropepatch')}",
        revision=branch,
        parent_commit=there.head,
    ).oid
    now = {
        file.rfilename for file in hub.model_info(repo, revision=commit).siblings or ()
    }
    if wrong := sorted((files.keys() - now) | (now & {*deleted})):
        raise RopepatchError(
            f"{repo} lacks uploaded files: {', '.join(wrong)[:200]}",
            hint=f"look for a .gitignore there that names it; then {AGAIN}",
        )
    return str(commit)
