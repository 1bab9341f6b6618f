# /// script
# requires-python = ">=3.11"
# dependencies = ["ropepatch[train] @ git+https://github.com/ropepatch/ropepatch", "huggingface_hub>=1.5,<3"]
# ///
"""Train a model on a machine that may be preempted, and resume where it stopped.

    hf jobs uv run --flavor a100-large --timeout 4h --secrets HF_TOKEN recipes/jobs/train.py USER/RUN \
      USER/NAME ropepatch train meta-llama/Llama-3.1-8B --recipe llama3.1-8b-256k --out DIR

The first argument is a private repository, the second that of the result. The others are a command, which
may also be `torchrun ... -m ropepatch train ...`. The script pushes each complete checkpoint of DIR.run to
the first and, when the command has succeeded, DIR to the second. The same command, run again, resumes from
the newest checkpoint and ends with the same weights.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from huggingface_hub import HfApi

SECONDS = 20  # between two checks of the run folder


def main(repo: str, result: str, *command: str) -> int:
    """Run a command with its run folder in a private repository, push its result; return the exit code."""
    if "--out" not in command:
        sys.stderr.write("give --out DIR: its name is that of the run\n")
        return 2
    out = Path(command[command.index("--out") + 1])
    run, hub = out.with_name(f"{out.name}.run"), HfApi()
    hub.create_repo(repo, private=True, exist_ok=True)
    if not run.exists() and any(
        name.startswith("checkpoint-") for name in hub.list_repo_files(repo)
    ):
        partial = run.with_name(f".{run.name}.partial")
        hub.snapshot_download(
            repo, local_dir=partial, ignore_patterns=[".gitattributes"]
        )
        shutil.rmtree(
            partial / ".cache", ignore_errors=True
        )  # metadata of the download
        partial.rename(run)
    pushed = checkpoints(run)
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            time.sleep(SECONDS)
            if (
                (found := checkpoints(run))
                and found[-1:] != pushed[-1:]
                and push(hub, repo, run, found[-1])
            ):
                pushed = found
    if process.returncode:
        return process.returncode
    return subprocess.run(
        [sys.executable, "-m", "ropepatch", "push", out, result], check=False
    ).returncode


def checkpoints(run: Path) -> list[str]:
    """Return the complete checkpoints of a run, oldest first."""
    names = [folder.name for folder in run.glob("checkpoint-*")]
    return sorted(names, key=lambda name: int(name.removeprefix("checkpoint-")))


def push(hub: HfApi, repo: str, run: Path, checkpoint: str) -> bool:
    """Push the files for resuming from a checkpoint; return False if it was removed meanwhile."""
    with tempfile.TemporaryDirectory(dir=run.parent) as folder:
        try:  # hard links keep the files if the run removes them
            for path in [*run.glob("*.json"), *(run / checkpoint).rglob("*")]:
                if path.is_file():
                    link = Path(folder) / path.relative_to(run)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.hardlink_to(path)
        except FileNotFoundError:
            return False
        older = "checkpoint-*/**"
        hub.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=checkpoint,
            delete_patterns=older,
        )
    return True


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
