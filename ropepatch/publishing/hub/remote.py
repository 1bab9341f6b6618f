"""A branch as the Hub has it, and whether a file here is the one there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_session
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]
from huggingface_hub.utils.sha import git_hash

from ropepatch.model.weights import sha256
from ropepatch.publishing.hub import explaining


@dataclass(frozen=True)
class Remote:
    """A branch as the Hub has it.

    Args:
        hub: The Hub.
        repo: The repository, with its namespace.
        private: Whether the repository is private.
        has_branch: False for what the branch would be made from.
        head: The newest commit of the branch.
        files: By name.
    """

    hub: HfApi
    repo: str
    private: bool
    has_branch: bool
    head: str
    files: dict[str, RepoSibling]

    def holds(self, name: str, path: Path) -> bool:
        """Whether the file of a name is this one: by size, then by what git or LFS calls its content."""
        if (entry := self.files.get(name)) is None:
            return False
        if path.stat().st_size != (entry.lfs.size if entry.lfs else entry.size):
            return False
        if entry.lfs is None:
            return git_hash(path.read_bytes()) == entry.blob_id
        return sha256(path) == entry.lfs.sha256

    def text(self, name: str, token: str | None) -> str:
        """What a file says."""
        headers = build_hf_headers(token=token or False, library_name="ropepatch")
        address = f"{self.hub.endpoint}/{self.repo}/resolve/{self.head}/{name}"
        response = get_session().get(address, headers=headers)
        hf_raise_for_status(response)
        return str(response.content.decode("utf-8", errors="replace"))

    def is_kept_by_main(self, branch: str) -> bool:
        """Whether the branch is to be made, or holds nothing yet that main does not keep."""
        main = None if branch == "main" else look(self.hub, self.repo, "main")
        return main is not None and main.head == self.head


def look(hub: HfApi, repo: str, branch: str) -> Remote | None:
    """The branch (or a commit), or main if it is not there; None without the repository."""
    options: dict[str, Any] = {"files_metadata": True, "timeout": explaining.TIME_LIMIT}
    try:
        try:
            info, has_branch = hub.model_info(repo, revision=branch, **options), True
        except RevisionNotFoundError:
            info, has_branch = hub.model_info(repo, **options), False
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        return None
    files = {file.rfilename: file for file in info.siblings or ()}
    return Remote(hub, repo, bool(info.private), has_branch, str(info.sha), files)
