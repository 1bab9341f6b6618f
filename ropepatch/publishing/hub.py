"""Push a checkpoint to the Hub: compare, upload changed files in one commit, and check the result."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    hf_raise_for_status,
    validate_repo_id,
)
from huggingface_hub.utils.sha import git_hash

from ropepatch.errors import RopepatchError, argument
from ropepatch.extension import record as records
from ropepatch.extension.planning import Plan
from ropepatch.extension.writing import extend
from ropepatch.files import read_json, write_json
from ropepatch.model.source import shown_name
from ropepatch.model.weights import sha256
from ropepatch.publishing import hub_client
from ropepatch.publishing.contents import ADAPTER, is_stale, is_weights, judge, read_contents
from ropepatch.publishing.hub_client import AGAIN, LOG_IN, hub_errors

CARD = "README.md"
BRANCH = re.compile(r"(?!refs/)(?!.*(\.\.|//|/\.|\.lock$|/$|\.$))[\w][\w./-]{0,199}")


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
        uploaded: New and changed files, and their sizes in bytes.
        unchanged: Files that the Hub already has.
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
    uploaded: dict[str, int]
    unchanged: tuple[str, ...]
    deleted: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    card: str | None = None

    @property
    def num_bytes(self) -> int:
        """The size of the uploaded files."""
        return sum(self.uploaded.values())


@dataclass(frozen=True)
class Branch:
    """A branch on the Hub; if `exists` is False, the content of main, from which it would be created."""

    hub: HfApi
    repo: str
    private: bool
    exists: bool
    head: str
    files: dict[str, RepoSibling]

    def holds(self, name: str, path: Path) -> bool:
        """Whether the branch has the same file under a name, by size and git or LFS hash."""
        if (entry := self.files.get(name)) is None:
            return False
        if path.stat().st_size != (entry.lfs.size if entry.lfs else entry.size):
            return False
        if entry.lfs is None:
            return git_hash(path.read_bytes()) == entry.blob_id
        return sha256(path) == entry.lfs.sha256

    def text(self, name: str, token: str | None) -> str:
        """Download a text file."""
        headers = build_hf_headers(token=token or False, library_name="ropepatch")
        address = f"{self.hub.endpoint}/{self.repo}/resolve/{self.head}/{name}"
        response = get_session().get(address, headers=headers)
        hf_raise_for_status(response)
        return str(response.content.decode("utf-8", errors="replace"))

    def is_on_main(self, branch: str) -> bool:
        """Whether the branch is new or still equal to main."""
        main = None if branch == "main" else fetch_branch(self.hub, self.repo, "main")
        return main is not None and main.head == self.head


def fetch_branch(hub: HfApi, repo: str, branch: str) -> Branch | None:
    """Fetch a branch or commit, or main if it does not exist; None without the repository."""
    options: dict[str, Any] = {"files_metadata": True, "timeout": hub_client.TIME_LIMIT}
    try:
        try:
            info, exists = hub.model_info(repo, revision=branch, **options), True
        except RevisionNotFoundError:
            info, exists = hub.model_info(repo, **options), False
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        return None
    files = {file.rfilename: file for file in info.siblings or ()}
    return Branch(hub, repo, bool(info.private), exists, str(info.sha), files)


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
    """Push a checkpoint or an adapter, with its card, to the Hub."""
    options: Any = {"private": private, "revision": revision, "dry_run": dry_run, "force": force}
    if isinstance(folder, Plan):
        check_repo(repo, private=private)
        with TemporaryDirectory(prefix="ropepatch-") as temporary:
            written = extend(folder, Path(temporary) / repo.rpartition("/")[2], include=include)
            return push(written, repo, **options, card=card, include=include, say=say, api=api)
    place, branch = Path(folder).expanduser(), revision or "main"
    if not place.is_dir():
        raise RopepatchError(f"no folder {place}", hint="give the folder that `ropepatch extend` wrote")
    _check_name(repo)
    if not BRANCH.fullmatch(branch):
        raise RopepatchError(
            f"{branch!r} is not a valid branch name", hint=f"use e.g. {argument('revision', 'long-context')}"
        )
    token = api.token if api and isinstance(api.token, str) else get_token()
    contents = read_contents(place, token, include)
    judgement = judge(place, contents.files)
    if judgement.against and not force:
        raise RopepatchError(
            f"{place} is not pushed: {'; '.join(judgement.against)}",
            hint="use `ropepatch push --force` to push it anyway",
        )
    notes = [*judgement.notes, *(f"pushed by force: {reason}" for reason in judgement.against)]
    if token is None and not dry_run:
        raise RopepatchError("no token for the Hub", hint=LOG_IN)
    hub = api or HfApi(token=token, library_name="ropepatch")
    there, created = None, False
    try:
        with hub_errors(repo, token):
            repo = _full_name(hub, repo)
            there = fetch_branch(hub, repo, branch)
            created = there is None
    except RopepatchError as error:
        if not dry_run:
            raise
        notes.append(f"could not compare with the Hub, so all files count as new: {error}")
    with TemporaryDirectory(prefix="ropepatch-") as temporary, hub_errors(repo, token):
        _check_private(there, repo, private)
        if there is not None and not force:
            _check_weights(there, branch, contents.files)
        has_card = card and judgement.allows_card
        if has_card and not dry_run:
            from ropepatch.publishing.card import write_card

            write_card(place, repo, None if branch == "main" else branch)
            contents = read_contents(place, token, include)
        if not dry_run:
            there = _created(hub, repo, branch, there, private=private, say=say)
        elif there is not None and not there.exists:
            notes.append(f"the branch {branch} would be created from main")
        files, held = _shown(contents.files, Path(temporary)), there.files if there else {}
        same = {name for name, path in files.items() if there and there.holds(name, path)}
        differs = CARD in held and CARD not in same and (has_card or CARD in files)
        if there and differs and _has_own_card(there, branch, token):
            files.pop(CARD, None)
            has_card = False
            notes.append(
                f"{CARD} on the Hub is not from ropepatch and is kept; delete it there to push this one"
            )
        preview = None
        if dry_run and has_card:
            from ropepatch.publishing.card import preview_card

            preview = preview_card(place, repo, None if branch == "main" else branch)
            notes.append(f"{CARD}, the model card, is written when it is pushed, unless it is your own")
        planned = Pushed(
            repo=repo,
            url=f"{hub.endpoint}/{repo}" + (f"/tree/{branch}" if revision else ""),
            branch=branch,
            commit=there.head if there else None,
            created=created,
            dry_run=dry_run,
            uploaded={name: path.stat().st_size for name, path in files.items() if name not in same},
            unchanged=tuple(sorted(same)),
            deleted=tuple(sorted(n for n in held if is_stale(n, files, ours=records.FILE in held))),
            left_out=contents.left_out,
            notes=(*contents.notes, *notes),
            card=preview,
        )
        if dry_run or there is None or not (planned.uploaded or planned.deleted):
            return planned
        say(f"uploading {len(planned.uploaded)} files, {planned.num_bytes / 1e6:.1f} MB, to {repo}")
        return _send(there, planned, files, say)


def _shown(files: dict[str, Path], temporary: Path) -> dict[str, Path]:
    """Replace an adapter's config by a copy in which its base has no local path."""
    name, key = ADAPTER[0], "base_model_name_or_path"
    config = read_json(files[name]) if name in files else {}
    base = config.get(key)
    if not isinstance(base, str) or shown_name(base) == base:
        return files
    write_json(temporary / name, config | {key: shown_name(base)})
    return files | {name: temporary / name}


def check_repo(repo: str, *, private: bool = False) -> None:
    """Raise `RopepatchError` for an invalid name, a rejected token, or a public repository if `private`."""
    _check_name(repo)
    token = get_token()
    if token is None:
        raise RopepatchError("no token for the Hub", hint=LOG_IN)
    hub = HfApi(token=token, library_name="ropepatch")
    with hub_errors(repo, token):
        hub.whoami()
        if private:
            repo = _full_name(hub, repo)
            _check_private(fetch_branch(hub, repo, "main"), repo, private)


def _check_name(repo: str) -> None:
    try:
        validate_repo_id(repo)
        repo.encode("ascii")  # older validators do not check this
    except (HFValidationError, UnicodeEncodeError) as error:
        raise RopepatchError(
            f"{repo!r} is not a valid repository name: {' '.join(str(error).split())[:200]}",
            hint="use owner/name, or name for your own namespace",
        ) from error


def _full_name(hub: HfApi, repo: str) -> str:
    return repo if "/" in repo else f"{hub.whoami()['name']}/{repo}"


def _check_private(there: Branch | None, repo: str, private: bool) -> None:
    if private and there is not None and not there.private:
        raise RopepatchError(
            f"{repo} exists and is public",
            hint="make it private in its settings on the Hub, or use another repository",
        )


def _check_weights(there: Branch, branch: str, files: dict[str, Path]) -> None:
    """Raise `RopepatchError` if the push would replace weights that ropepatch did not write."""
    weights = () if records.FILE in there.files else filter(is_weights, there.files)
    others = [name for name in weights if name not in files or not there.holds(name, files[name])]
    if others and not there.is_on_main(branch):
        raise RopepatchError(
            f"{there.repo} contains other weights: {', '.join(others)[:200]}",
            hint="use a new branch or repository, or replace them with `ropepatch push --force`",
        )


def _has_own_card(there: Branch, branch: str, token: str | None) -> bool:
    """Whether the Hub has a README.md that is not from ropepatch and not on main."""
    from ropepatch.publishing.card import MARKER

    return MARKER not in there.text(CARD, token) and not there.is_on_main(branch)


def _created(
    hub: HfApi, repo: str, branch: str, there: Branch | None, *, private: bool, say: Callable[[str], None]
) -> Branch:
    """Create the branch and its repository if necessary."""
    if there is not None and there.exists:
        return there
    if there is None:
        say(f"creating {repo}" + (", private" if private else ""))
        hub.create_repo(repo, private=private or None, exist_ok=True)
    if branch != "main":
        say(f"creating the branch {branch}")
        hub.create_branch(repo, branch=branch, exist_ok=True)
    there = fetch_branch(hub, repo, branch)
    if there is None or not there.exists:
        raise RopepatchError(f"the Hub made no branch {branch} of {repo}", hint=AGAIN)
    _check_private(there, repo, private)
    return there


def _send(before: Branch, planned: Pushed, files: dict[str, Path], say: Callable[[str], None]) -> Pushed:
    """Upload one commit, and check the files: the Hub skips those that a .gitignore there names."""
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
    say("checking the files on the Hub")
    after = fetch_branch(hub, repo, commit)
    now = after.files.keys() if after and after.exists else set()
    if wrong := sorted((files.keys() - now) | (now & {*planned.deleted})):
        raise RopepatchError(
            f"{repo} lacks uploaded files: {', '.join(wrong)[:200]}",
            hint=f"look for a .gitignore there that names it; then {AGAIN}",
        )
    newest = hub.model_info(repo, revision=planned.branch, timeout=hub_client.TIME_LIMIT).sha
    moved = [] if newest == commit else [f"{planned.branch} has a newer commit by now, {newest}"]
    return replace(planned, commit=commit, notes=(*planned.notes, *moved))
