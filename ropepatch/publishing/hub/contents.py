"""What of a checkpoint folder goes to the Hub, and what speaks against it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from safetensors import SafetensorError

from ropepatch.errors import RopepatchError
from ropepatch.extension import record as records
from ropepatch.files import read_json
from ropepatch.model.record_file import needs_ropepatch
from ropepatch.model.source import CHECKPOINT_FILES
from ropepatch.model.weights import fingerprint, read_header, read_headers

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
# Beside the weights, which their index names. What no pattern names stays: pickles, code, a trainer's state.
CARRIED = {
    "": [*(set(CHECKPOINT_FILES) - {"*.safetensors"}), "evaluation.html"],
    "additional_chat_templates": ["*.jinja"],
    "evaluation": ["*.json", "*.png"],
    "adaptation": ["*.json", "*.yaml"],
}
TRAINERS = {"trainer_state.json", "training_args.json"}
LICENCE = re.compile(
    r"(LICENSE|NOTICE)[^.]*(\.(\d+|txt|md|rst|html|pdf))*"
)  # LICENSE-2.0.txt, not LICENSE.bin
# Of an earlier push. What decides which weights are loaded is replaced as a whole; evidence if it was ours.
WEIGHTS = re.compile(
    r"(adapter_)?model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|adapter_config\.json"
)
EVIDENCE = re.compile(r"(evaluation|adaptation)/[^/]+\.(json|yaml|png)|evaluation\.html")
TOKEN = re.compile(rb"hf_[A-Za-z0-9]{34}")


@dataclass(frozen=True)
class Judgement:
    """What the record says for and against a folder.

    Args:
        against: Why it should not be pushed.
        notes: What its reader should know.
        allows_card: Whether a card can be written from the record.
    """

    against: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    allows_card: bool = False


def read_contents(folder: Path, token: str | None = None) -> tuple[dict[str, Path], tuple[str, ...]]:
    """The files of a checkpoint or an adapter, its weights checked by their headers.

    Args:
        folder: Of the checkpoint.
        token: That of the user, which no file may hold.

    Returns:
        What is pushed, by the names in the repository; and the folder's other entries, hidden ones apart.

    Raises:
        RopepatchError: If it is no checkpoint, its weights are unsound or pickled, or a file is a link that
            leads out of the folder, or holds an access token.
    """
    names = {path.name for path in _weights(folder)}
    files = {}
    for part, patterns in CARRIED.items():
        place = folder / part
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            carried = any(fnmatchcase(path.name, pattern) for pattern in patterns) and not _stays(path.name)
            if (carried or (not part and path.name in names)) and (path.is_file() or path.is_symlink()):
                files[f"{part}/{path.name}" if part else path.name] = path
    for name, path in files.items():
        if not (path.is_file() and path.resolve().is_relative_to(folder.resolve())):
            raise RopepatchError(
                f"{name} is a link to no file within {folder}", hint="put the file itself there, or remove it"
            )
        if name not in names and _holds_token(path, token):
            raise RopepatchError(
                f"{name} holds an access token of the Hub",
                hint="remove it there, and revoke it at https://hf.co/settings/tokens if others have seen it",
            )
    for name in _unnamed_figures(files):
        del files[name]
    taken = {name.partition("/")[0] for name in files}
    rest = (entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    return dict(sorted(files.items())), tuple(sorted(set(rest) - taken))


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds a PEFT adapter rather than a model."""
    return (folder / ADAPTER[0]).is_file() and not (folder / "config.json").exists()


def judge(folder: Path) -> Judgement:
    """What speaks against pushing a folder: nothing verified it, it has changed since, or its gate is red.

    Raises:
        RopepatchError: If `config.json` or the weights cannot be read.
    """
    if not records.exists(folder):
        return Judgement(("nothing has verified it (no ropepatch.json)",))
    if not is_adapter(folder) and needs_ropepatch(folder):
        return Judgement(
            ("its position encoding is swapped: only ropepatch loads it, and nothing verified it",)
        )
    try:
        record = records.read(folder)
    except RopepatchError as error:
        return Judgement((str(error),))
    against, notes = [], []
    if is_adapter(folder):
        notes.append("an adapter: ropepatch puts it on its base, with the rope it was trained under")
    else:
        verdict = record.verified
        if verdict is None:
            against.append("nothing has verified it (no `verified` in ropepatch.json)")
        elif verdict.frequencies != "equal":
            against.append(f"its frequencies after reloading are {verdict.frequencies}, expected equal")
        elif not verdict.compared:
            notes.append(f"logits {verdict.logits}")
        elif verdict.difference is None:
            against.append(f"its logits after reloading are {verdict.logits}, expected equal")
        config = read_json(folder / "config.json")
        part = config.get("text_config")
        stated = part if isinstance(part, dict) and part else config
        changes = record.config_changes.items()
        if changed := next((key for key, value in changes if stated.get(key) != value), None):
            against.append(f"config.json has changed since it was verified ({changed})")
        if record.weights is None:
            notes.append(
                "its weights may have changed since they were verified (no `weights` in ropepatch.json)"
            )
        elif record.weights != fingerprint(read_headers(folder)):
            against.append("its weights have changed since they were verified")
    gate = record.adaptation and record.adaptation.gate
    if gate and not gate.passed:
        rise = f"rose by {gate.increase:.1%}, allowed {gate.most:.1%}"
        against.append(f"its gate is red: the loss within the old context {rise}")
    return Judgement(tuple(against), tuple(notes), allows_card=True)


def is_stale(name: str, files: dict[str, Path], *, ours: bool) -> bool:
    """Whether a file is left from an earlier push, though none of these replaces it, and now misleads.

    Evidence is only deleted from a repository of ours, which ropepatch wrote.
    """
    return name not in files and (is_weights(name) or (ours and EVIDENCE.fullmatch(name) is not None))


def is_weights(name: str) -> bool:
    """Whether a file of a repository is weights, or decides which are loaded."""
    return WEIGHTS.fullmatch(name) is not None


def _stays(name: str) -> bool:
    """Whether a file is no part of a checkpoint though a pattern names it."""
    if name.startswith(("LICENSE", "NOTICE")):
        return not LICENCE.fullmatch(name)
    return name.startswith(".") or name.endswith(".index.json") or name in TRAINERS


def _unnamed_figures(files: dict[str, Path]) -> list[str]:
    """The figures of an earlier card, which the one there is does not show; none beside the user's own."""
    figures = [name for name in files if name.startswith("evaluation/") and name.endswith(".png")]
    if not figures or "README.md" not in files:
        return []
    from ropepatch.publishing.card import MARKER

    card = files["README.md"].read_text(encoding="utf-8", errors="replace")
    return [name for name in figures if MARKER in card and f"({name})" not in card]


def _weights(folder: Path) -> tuple[Path, ...]:
    if not is_adapter(folder):
        read_json(folder / "config.json")
        return read_headers(folder).files
    weights = folder / ADAPTER[1]
    try:
        read_header(weights)
    except (SafetensorError, OSError) as error:
        raise RopepatchError(
            f"{weights.name} is missing, truncated or damaged: {error}", hint="save or copy the adapter again"
        ) from error
    return (weights,)


def _holds_token(path: Path, token: str | None) -> bool:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RopepatchError(
            f"cannot read {path}: {error.strerror or error}", hint="make the file readable, or remove it"
        ) from error
    return bool(TOKEN.search(data)) or bool(token and token.encode() in data)
