"""What of a checkpoint folder goes to the Hub, and what speaks against it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ropepatch.errors import RopepatchError
from ropepatch.extension import record as records
from ropepatch.extension.map_code import code_of, map_code, other_code
from ropepatch.files import read_json
from ropepatch.model.checkpoint import CODE, Checkpoint
from ropepatch.model.source import TEMPLATES, included, is_carried
from ropepatch.model.survey import survey
from ropepatch.model.weights import changed, fingerprint, read_header, read_headers
from ropepatch.publishing.scanning import check_secrets

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
# Beside the weights, which their index names, and what `is_carried`.
CARRIED = {
    "": ["README.md", "evaluation.html", records.FILE, ADAPTER[0]],
    TEMPLATES: ["*.jinja"],
    "evaluation": ["*.json", "*.png"],
    "adaptation": ["*.json", "*.yaml"],
}
# Of an earlier push. What decides which weights are loaded is replaced as a whole; evidence if it was ours.
WEIGHTS = re.compile(
    r"(adapter_)?model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|adapter_config\.json"
)
EVIDENCE = re.compile(rf"(evaluation|adaptation)/[^/]+\.(json|yaml|png)|evaluation\.html|{re.escape(CODE)}")


@dataclass(frozen=True)
class Contents:
    """What of a folder is pushed.

    Args:
        files: By their names in the repository.
        left_out: What else is there, hidden entries apart.
        notes: What the user should know of them.
    """

    files: dict[str, Path]
    left_out: tuple[str, ...]
    notes: tuple[str, ...] = ()


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


def read_contents(folder: Path, token: str | None = None, include: Sequence[str] = ()) -> Contents:
    """The files of a checkpoint or an adapter, its weights checked by their headers.

    Args:
        folder: Of the checkpoint.
        token: That of the user, which no file may hold.
        include: Patterns of what is pushed beside it.

    Raises:
        RopepatchError: If it is no checkpoint, its weights are unsound or pickled, or a file is a link that
            leads out of the folder, or holds a secret.
    """
    names = {path.name for path in _weights(folder)}
    own = names | ({CODE} if holds_map(folder) else set())  # code of any other kind stays here
    files, others = {}, []
    for part, patterns in CARRIED.items():
        place = folder / part
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            name = f"{part}/{path.name}" if part else path.name
            known = path.name in own or is_carried(path.name) if not part else False
            carried = known or any(fnmatchcase(path.name, pattern) for pattern in patterns)
            if path.name.startswith(".") or name in CARRIED:
                continue
            if carried and (path.is_file() or path.is_symlink()):
                files[name] = path
            else:
                others.append(name)
    for name in _unnamed_figures(files):
        del files[name]
        others.append(name)
    files |= included(folder, include)
    for name, path in files.items():
        if not (path.is_file() and path.resolve().is_relative_to(folder.resolve())):
            raise RopepatchError(
                f"{name} is a link to no file within {folder}", hint="put the file itself there, or remove it"
            )
    large = check_secrets({name: path for name, path in files.items() if name not in names}, token)
    notes = [f"too large to be searched for secrets: {', '.join(large)}"] if large else []
    whole = {name.partition("/")[0] for name in files} | files.keys()
    return Contents(dict(sorted(files.items())), tuple(sorted(set(others) - whole)), tuple(notes))


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds a PEFT adapter rather than a model."""
    return (folder / ADAPTER[0]).is_file() and not (folder / "config.json").exists()


def judge(folder: Path, names: Iterable[str] = ()) -> Judgement:
    """What speaks against pushing a folder: nothing verified it, it has changed since, or it failed its gate.

    Args:
        folder: Of a checkpoint or an adapter.
        names: Of the files that are pushed.

    Raises:
        RopepatchError: If `config.json` or the weights cannot be read.
    """
    if not records.exists(folder):
        return Judgement(("nothing has verified it (no ropepatch.json)",))
    if not is_adapter(folder) and Checkpoint(folder).kind == "swapped":
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
        if key := next((key for key, value in changes if stated.get(key) != value), None):
            against.append(f"config.json has changed since it was verified ({key})")
        if holds_map(folder):
            others = other_code(folder, names)
            against += [f"{name} brings code of others, which trust in the map would run" for name in others]
            if record.code != code_of(folder):
                against.append(f"its code has changed since it was verified ({CODE})")
            elif (folder / CODE).read_text(encoding="utf-8") != _own_code(folder):
                notes.append(
                    f"{CODE} is not what this version of ropepatch writes: read it before you push it"
                )
        weights, changed_weights = read_headers(folder), "its weights have changed since they were verified"
        if record.checksums is not None:
            if differing := changed(weights, record.checksums):
                against.append(f"{changed_weights} ({', '.join(differing)[:200]})")
        elif record.weights is None:
            notes.append(
                "its weights may have changed since they were verified (no `weights` in ropepatch.json)"
            )
        elif record.weights != fingerprint(weights):
            against.append(changed_weights)
        else:
            notes.append("of its weights samples alone were compared (no `checksums` in ropepatch.json)")
    gate = record.adaptation and record.adaptation.gate
    if gate and not gate.passed:
        rise = f"rose by {gate.increase:.1%}, allowed {gate.most:.1%}"
        against.append(f"its check failed: the loss within the old context {rise}")
    return Judgement(tuple(against), tuple(notes), allows_card=True)


def holds_map(folder: Path) -> bool:
    """Whether a folder holds a checkpoint with an attention map, which its code goes with."""
    return not is_adapter(folder) and Checkpoint(folder).kind == "mapped"


def _own_code(folder: Path) -> str:
    stock = Checkpoint(folder).stock_raw
    return map_code(str(stock["model_type"]), survey(stock).site.path)


def is_stale(name: str, files: dict[str, Path], *, ours: bool) -> bool:
    """Whether a file is left from an earlier push, though none of these replaces it, and now misleads.

    Evidence is only deleted from a repository of ours, which ropepatch wrote.
    """
    return name not in files and (is_weights(name) or (ours and EVIDENCE.fullmatch(name) is not None))


def is_weights(name: str) -> bool:
    """Whether a file of a repository is weights, or decides which are loaded."""
    return WEIGHTS.fullmatch(name) is not None


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
    return read_header(folder / ADAPTER[1]).files
