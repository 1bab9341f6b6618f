"""Engines that are installed only for the tests, outside their environment."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from lacking import lacking
from run_recipes import run_python
from torch import Tensor

Answers = dict[str, dict[str, Tensor]]  # by the name of a checkpoint's folder


def installed(*packages):
    """Install packages without their dependencies in a folder named after the first, once; return the folder.

    If pip fails, the test is skipped, or fails in CI.
    """
    python = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    name = f"ropepatch-{os.getuid()}-{packages[0].replace('==', '-')}-{python}"
    folder = Path(tempfile.gettempdir()) / name
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            partial = tempfile.mkdtemp(prefix="partial-", dir=folder.parent)
            pip = [
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-compile",
                "--no-deps",
                "--target",
            ]
            done = run_python(*pip, partial, *packages, check=False)
            if done.returncode:
                shutil.rmtree(partial)
                lacking(f"pip cannot install {packages[0]}: {done.stderr[-300:]}")
            Path(partial).rename(folder)
    return folder


def read_by(script, packages, folders, scratch):
    """The results of a script for checkpoints, in a process that imports these packages before all others.

    Args:
        script: A script that takes the output file and the folders of the checkpoints.
        packages: The engine with its version, and dependencies that the environment of the tests lacks.
        folders: The checkpoints.
        scratch: A folder for the file.
    """
    out = scratch / f"{script.stem}.pt"
    path = str(installed(*packages))
    run_python(script, out, *folders, PYTHONPATH=path, HF_HUB_OFFLINE="1")
    answers = torch.load(out)
    assert answers.pop("version") == packages[0].split("==")[1]
    return answers
