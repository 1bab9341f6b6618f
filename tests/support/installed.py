"""Engines that are installed only for the tests, outside their environment."""

import contextlib
import getpass
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
Answers = dict[str, dict[str, Tensor]]  # by the name of a checkpoint's folder


def installed(*packages: str) -> Path:
    """Install packages without their dependencies in a folder named after the first, once; return the folder.

    If pip fails, the test is skipped, or fails in CI.
    """
    python = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    folder = _cache() / f"{packages[0].replace('==', '-')}-{python}"
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
            pip = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
            ]
            done = subprocess.run(
                [*pip, "--no-compile", "--no-deps", "--target", partial, *packages],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                shutil.rmtree(partial)
                missing = (
                    f"pip cannot install {packages[0]}: {done.stderr.strip()[-300:]}"
                )
                if os.environ.get("ROPEPATCH_REQUIRE_SHARED"):
                    pytest.fail(missing)
                pytest.skip(missing)
            partial.rename(folder)
    return folder


def _cache() -> Path:
    beside = ROOT / ".venv"
    with contextlib.suppress(OSError):
        beside.mkdir(exist_ok=True)
        if os.access(beside, os.W_OK):
            return beside
    elsewhere = Path(tempfile.gettempdir()) / f"ropepatch-tests-of-{getpass.getuser()}"
    elsewhere.mkdir(exist_ok=True)
    return elsewhere


def read_by(
    script: Path, packages: tuple[str, ...], folders: list[Path], scratch: Path
) -> Answers:
    """The results of a script for checkpoints, in a process that imports these packages before all others.

    Args:
        script: A script that takes the output file and the folders of the checkpoints.
        packages: The engine with its version, and dependencies that the environment of the tests lacks.
        folders: The checkpoints.
        scratch: A folder for the file.
    """
    out = scratch / f"{script.stem}.pt"
    environment = os.environ | {
        "PYTHONPATH": str(installed(*packages)),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, script, out, *folders],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: Answers = torch.load(out)
    assert answers.pop("version") == packages[0].split("==")[1]
    return answers
