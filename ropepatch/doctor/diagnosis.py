"""Run all checks on one checkpoint or adapter, and write a repaired copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropepatch.doctor.adapters import adapter_findings
from ropepatch.doctor.findings import (
    CONFIG,
    SEVERITIES,
    TOKENIZER,
    Finding,
    Rule,
    by_severity,
    has_errors,
)
from ropepatch.doctor.rules import Facts, check, repaired
from ropepatch.doctor.weights import look_at_weights, not_finite
from ropepatch.errors import RopepatchError, printable
from ropepatch.files import (
    absent,
    check_inside,
    check_outside,
    json_text,
    new_folder,
    read_json,
    write_json,
)
from ropepatch.model.checkpoint import (
    ADAPTER,
    CODE,
    READING,
    RECORD,
    Checkpoint,
    code_of,
    is_adapter,
)
from ropepatch.model.weights import Progress, clone_files

SMALL_FILES = (
    TOKENIZER,
    "generation_config.json",
    RECORD,
    ADAPTER,
    "tokenizer.json",
)
COPY_AGAIN = "make it readable, or copy it again from the original checkpoint"

UNREADABLE = Rule(
    "file-unreadable",
    "error",
    "the checkpoint does not load, or silently uses defaults instead of the file",
    "sgl-project/sglang/pull/32279",
)
OTHER_CODE = Rule(
    "remapping-code-changed",
    "error",
    "loading the checkpoint with trust_remote_code=True runs this code",
    "",
)


@dataclass(frozen=True)
class Diagnosis:
    """The problems of one checkpoint or adapter.

    Args:
        name: The name that the user gave.
        findings: The problems, errors first.
        looked_at: The names of the checked files.
        folder: The folder.
        facts: What config.json and tokenizer_config.json contain; None for an adapter.
    """

    name: str
    findings: tuple[Finding, ...]
    looked_at: tuple[str, ...]
    folder: Path
    facts: Facts | None = field(default=None, repr=False)

    @property
    def has_errors(self) -> bool:
        """Whether any finding is an error."""
        return has_errors(self.findings)

    def to_json(self) -> str:
        """Return the findings as a JSON list of objects."""
        return json_text([finding.to_dict() for finding in self.findings])

    def __str__(self) -> str:
        counts = Counter(finding.severity for finding in self.findings)
        words = [
            f"{counts[one]} {one}{'s' if counts[one] > 1 else ''}"
            for one in SEVERITIES
            if counts[one]
        ]
        head = f"{self.name}: {', '.join(words) or 'no problems found'}"
        looked = f"checked: {', '.join(self.looked_at)}"
        first = f"{printable(head)}\n{printable(looked)}"
        return "\n\n".join([first, *map(str, self.findings)])


def diagnose(
    model: str | Path,
    revision: str | None = None,
    *,
    measure: bool = True,
    progress: Progress | None = None,
) -> Diagnosis:
    """Find mistakes in the RoPE configuration of a checkpoint or an adapter.

    Args:
        model: A checkpoint folder, an adapter's folder, a Hub id, or tiny.
        revision: The branch, tag or commit of a Hub id.
        measure: Read all weights, and look for NaN and infinity. Without it only config.json of a Hub id is
            downloaded.
        progress: A function of (bytes read, bytes in total).

    Returns:
        The findings, as a `Diagnosis`.

    Raises:
        RopepatchError: If there is no such checkpoint, or its config.json is not a JSON object.
    """
    source = Checkpoint.find(model, revision, weights=measure, include=(CODE,))
    folder, facts = source.folder, None
    files, findings = _read_small_files(folder)
    record = files.get(RECORD, {})
    looked_at = [*files, *(finding.file for finding in findings)]
    if is_adapter(folder):
        findings += adapter_findings(read_json(folder / ADAPTER), record)
    else:
        facts = Facts(source.config, files.get(TOKENIZER, {}))
        weights, of_weights = look_at_weights(folder, source.config)
        findings += [*check(facts), *of_weights]
        if measure or source.revision is None:  # else only config.json was downloaded
            findings += _changed_code(source, record)
        if measure and weights:
            findings += not_finite(weights, progress)
        names = [file.name for file in weights.files] if weights else []
        looked_at = [CONFIG, *looked_at, *(names or ["no readable weights"])]
    return Diagnosis(
        source.name, by_severity(findings), tuple(looked_at), folder, facts
    )


def _read_small_files(folder: Path) -> tuple[dict[str, dict[str, Any]], list[Finding]]:
    """Read the JSON files of a folder by name, and report those that cannot be read."""
    files: dict[str, dict[str, Any]] = {}
    findings = list[Finding]()
    for name in SMALL_FILES:
        if not (folder / name).exists():
            continue
        try:
            files[name] = read_json(folder / name)
        except RopepatchError as error:
            finding = Finding((), str(error), COPY_AGAIN, name)
            findings.append(UNREADABLE.found(finding))
    return files, findings


def _changed_code(source: Checkpoint, record: dict[str, Any]) -> Iterator[Finding]:
    """Report missing or changed code of a position remapping; never runs the code."""
    recorded = source.config.kind == "mapped" and record.get("code")
    if recorded and code_of(source.folder) != recorded:
        problem = f"the sha256 of {CODE} is not the one in {RECORD}"
        remedy = f"do not load it with trust_remote_code=True; {COPY_AGAIN}"
        yield OTHER_CODE.found(Finding((), problem, remedy, CODE))


def repair(
    diagnosis: Diagnosis, out: str | Path, *, progress: Progress | None = None
) -> Path:
    """Write a copy of the checkpoint with every repair that needs no guess.

    The copy contains the files of the folder, without subfolders and pickled weights. If config.json
    changes, ropepatch.json loses `verified`.

    Raises:
        RopepatchError: If the output folder exists or lies inside the checkpoint.
    """
    source, before = diagnosis.folder, diagnosis.facts
    assert before is not None
    folder = absent(out)
    check_outside(source, folder)
    after = repaired(before)
    changed = {}
    if after.tokenizer is not before.tokenizer:
        changed[TOKENIZER] = after.tokenizer
    dropped = set()
    if after.raw is not before.raw:
        changed[CONFIG] = after.raw
        dropped.add(READING)  # The model may compute something else now
        if (source / RECORD).is_file():
            record = read_json(source / RECORD)
            record.pop("verified", None)
            changed[RECORD] = record
    files = tuple(
        file
        for file in sorted(source.iterdir())
        if _is_copied(file) and file.name not in {*changed, *dropped}
    )
    # Weights may be linked, as `extend` follows such links too
    check_inside([file for file in files if file.suffix != ".safetensors"], source)
    with new_folder(folder) as partial:
        clone_files(files, partial, link=False, progress=progress)
        for name, content in changed.items():
            write_json(partial / name, content)
    return folder


def _is_copied(file: Path) -> bool:
    is_left = file.name.startswith(".") or file.suffix in (".bin", ".pt", ".pth")
    return file.is_file() and not is_left
