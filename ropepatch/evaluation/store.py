"""Losses kept on disk as they are measured, so that a killed measurement goes on where it was."""

from __future__ import annotations

import glob
import hashlib
import logging
import secrets
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ropepatch.errors import RopepatchError
from ropepatch.files import whole_file

logger = logging.getLogger(__name__)


class LossStore:
    """A folder with one file per batch, ``<key>.safetensors``.

    A file is written whole or not at all, and holds a checksum.

    Args:
        folder: Made if it is absent. Whoever names it guarantees that it belongs to one model.

    Raises:
        RopepatchError: The folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _disk_error(folder, error) from error

    def find(self, key: str, counts: list[int]) -> list[Tensor] | None:
        """The losses under a key, float32, so many in each row; None if they are not there or damaged."""
        file = self._folder / f"{key}.safetensors"
        if not file.exists():
            return None
        try:
            with safe_open(file, framework="pt") as opened:
                nll, metadata = opened.get_tensor("nll"), opened.metadata() or {}
            if nll.shape != (sum(counts),) or metadata.get("sha256") != _checksum(nll):
                raise ValueError("it does not hold what was written")
        except (OSError, ValueError, SafetensorError) as error:
            logger.warning("%s is damaged (%s); measuring again", file, error)
            return None
        return [row.clone() for row in torch.split(nll, counts)]

    def write(self, key: str, losses: list[Tensor]) -> None:
        """Keep the losses of a batch.

        Raises:
            RopepatchError: The disk does not take them.
        """
        file = self._folder / f"{key}.safetensors"
        nll = torch.cat(losses)
        try:
            with whole_file(file) as partial:
                save_file({"nll": nll}, partial, metadata={"sha256": _checksum(nll)})
        except (OSError, SafetensorError) as error:
            raise _disk_error(self._folder, error) from error


def claim_folder(job: Path, digest: str, held: ExitStack) -> Path:
    """A folder beside ``job`` for this process alone: one that a dead process left, or a new one.

    Args:
        job: The beginning of its name.
        digest: Sixteen characters that tell apart what must not be resumed from one another.
        held: No other process claims or removes the folder until it is closed.

    Raises:
        RopepatchError: The folder cannot be made or locked.
    """
    try:
        while True:
            for folder in _folders(job, digest):
                if _lock(folder, held):
                    return folder
            job.with_name(f"{job.name}.{digest}-{secrets.token_hex(4)}.partial").mkdir()
    except (OSError, NotImplementedError) as error:  # the latter where files cannot be locked
        raise _disk_error(job.parent, error) from error


def remove_folders(job: Path) -> None:
    """Remove what was claimed for a job, with any digest, and no live process holds."""
    for folder in _folders(job, "?" * 16):
        with suppress(OSError, NotImplementedError), ExitStack() as held:
            if _lock(folder, held):
                shutil.rmtree(folder, ignore_errors=True)


def _folders(job: Path, digest: str) -> list[Path]:
    return sorted(job.parent.glob(f"{glob.escape(job.name)}.{digest}-{'?' * 8}.partial"))


def _lock(folder: Path, held: ExitStack) -> bool:
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except (Timeout, FileNotFoundError):  # a live process has it, or has just removed it
        return False
    held.callback(lock.release)
    return folder.exists()


def _checksum(nll: Tensor) -> str:
    return hashlib.sha256(nll.numpy().tobytes()).hexdigest()


def _disk_error(folder: Path, error: Exception) -> RopepatchError:
    return RopepatchError(f"cannot keep losses in {folder}: {error}", hint="name a folder you may write to")
