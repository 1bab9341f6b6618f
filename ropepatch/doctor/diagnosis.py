"""Run all checks on one checkpoint, adapter or loaded model."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from ropepatch.doctor.adapters import adapter_findings, base_name, no_base
from ropepatch.doctor.weights import look_at_weights, not_finite
from ropepatch.errors import RopepatchError, argument, printable
from ropepatch.extension.record import sound_keys
from ropepatch.extension.remapping_code import code_of
from ropepatch.files import json_text, read_json
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.checks import check, has_errors
from ropepatch.model.checks.case import Case
from ropepatch.model.checks.findings import ADAPTER, CONFIG, GENERATION, SEVERITIES, TOKENIZER, Finding, Key
from ropepatch.model.in_memory import rope_findings, write_ropes
from ropepatch.model.kinds import CODE, kind_of
from ropepatch.model.record_file import FILE as RECORD
from ropepatch.model.rotary import base_model

SIDE_FILES = (TOKENIZER, GENERATION, RECORD, ADAPTER)
VOCABULARY = "tokenizer.json"  # its content is not checked
CHAT_NAME = re.compile(r"(?<![a-z])(?:instruct|chat)(?![a-z])", re.IGNORECASE)
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eot|>")  # eos_token of chat models
COPY_AGAIN = "make it readable, or copy it again from the original checkpoint"


@dataclass(frozen=True)
class Diagnosis:
    """The problems of one checkpoint, or of a loaded model's RoPE.

    Args:
        case: The checkpoint.
        findings: The problems, errors first.
        looked_at: What was checked: names of files or modules.
        repaired: The problems of a loaded model that `repair=True` repaired.
    """

    case: Case = field(repr=False)
    findings: tuple[Finding, ...]
    looked_at: tuple[str, ...]
    repaired: tuple[Finding, ...] = ()

    @property
    def has_errors(self) -> bool:
        """Whether any finding is an error."""
        return has_errors(self.findings)

    def to_json(self) -> str:
        """Return the findings as a JSON list of objects."""
        return json_text([finding.to_dict() for finding in self.findings])

    def __str__(self) -> str:
        name, looked = printable(self.case.name), f"checked: {printable(', '.join(self.looked_at))}"
        if self.repaired:
            now = ", ".join(f"{one.key} ({one.code})" for one in self.repaired)
            looked = f"{looked}\nrepaired: {now}"
        if not self.findings:
            return f"{name}: no problems found\n{looked}"
        counts = Counter(finding.severity for finding in self.findings)
        words = ", ".join(
            f"{counts[one]} {one}{'s' if counts[one] > 1 else ''}" for one in SEVERITIES if counts[one]
        )
        return "\n\n".join([f"{name}: {words}\n{looked}", *map(str, self.findings)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def diagnose(
    model: str | Path | nn.Module,
    revision: str | None = None,
    *,
    measure: bool = True,
    repair: bool = False,
) -> Diagnosis:
    """Check the RoPE of a checkpoint, an adapter or a loaded model."""
    if isinstance(model, nn.Module):
        return _diagnose_loaded(model, repair)
    if repair:
        hint = "use `ropepatch doctor --fix OUT` to write a repaired copy of a checkpoint"
        raise RopepatchError(f"{argument('repair')} needs a loaded model, got {model}", hint=hint)
    if folder := _adapter_folder(model):
        return _diagnose_adapter(read_case(Checkpoint(folder, str(model))))
    source = Checkpoint.find(model, revision, weights=measure, include=(CODE,))
    case = read_case(source)
    if _adapter_folder(source.folder):  # from the Hub
        return _diagnose_adapter(case)
    weights, of_weights = look_at_weights(case)
    findings = [*check(case), *unreadable_files(case), *of_weights]
    if measure or source.revision is None:  # else only config.json was downloaded
        findings += changed_code(case)
        findings += (
            of_tokenizer(case, source) if weights and not {TOKENIZER, VOCABULARY} & {*case.unreadable} else []
        )
    if measure and weights:
        findings += not_finite(weights)
    names = [file.name for file in weights.files] if weights else ["no readable weights"]
    code = [CODE] if (case.folder / CODE).is_file() else []
    return Diagnosis(case, by_severity(findings), (*case.files, *case.unreadable, *code, *names))


def _diagnose_loaded(model: nn.Module, repair: bool) -> Diagnosis:
    findings, looked_at = rope_findings(model)
    repaired = findings if repair else []
    if repaired:
        write_ropes(model, repaired)
        findings, looked_at = rope_findings(model)
    case = Case(type(base_model(model)).__name__, Path(), {}, {})
    return Diagnosis(case, by_severity(findings), tuple(looked_at), by_severity(repaired))


def _diagnose_adapter(case: Case) -> Diagnosis:
    try:
        name, revision = base_name(case)
        source = Checkpoint.find(name, revision)
        findings = [*adapter_findings(case, read_case(source), source)]
    except (RopepatchError, OSError) as error:  # OSError: a name that is too long
        findings = [no_base(case, error)]
    findings = [*unreadable_files(case), *findings]
    return Diagnosis(case, by_severity(findings), (*case.files, *case.unreadable, "the base"))


def _adapter_folder(model: str | Path) -> Path | None:
    """Return the folder if it contains an adapter and no model."""
    try:
        folder = Path(model).expanduser()
        return folder if (folder / ADAPTER).is_file() and not (folder / CONFIG).is_file() else None
    except (OSError, RuntimeError, TypeError):  # too long, an unknown user's ~, no name: not a path
        return None


def read_case(checkpoint: Checkpoint) -> Case:
    """Read the small files of a checkpoint or an adapter."""
    folder, files, unreadable = checkpoint.folder, {}, {}
    for file in (*SIDE_FILES, VOCABULARY):
        if (folder / file).exists():
            try:
                files[file] = read_json(folder / file)
            except RopepatchError as error:
                unreadable[file] = str(error).replace(f"{folder}/", "")
    files.pop(VOCABULARY, None)
    if ADAPTER not in files or (folder / CONFIG).exists():
        files[CONFIG] = checkpoint.raw
    return Case(checkpoint.name, folder, files, unreadable, sound_keys(files.get(RECORD, {})))


def unreadable_files(case: Case) -> list[Finding]:
    """Report files that cannot be read, or that contain no JSON object."""
    return [
        Key(file, ()).finding("file-unreadable", reason, COPY_AGAIN)
        for file, reason in case.unreadable.items()
    ]


def of_tokenizer(case: Case, source: Checkpoint) -> list[Finding]:
    """Report a missing or broken tokenizer, or chat template; a broken config.json is another finding."""
    try:
        _ = source.stock.whole_config
    except RopepatchError:
        return []
    try:
        tokenizer = source.tokenizer
    except RopepatchError as error:
        return [Key(VOCABULARY, ()).finding("tokenizer-missing", str(error), error.hint or "")]
    sign = None if tokenizer.chat_template else _sign_of_chat(case, tokenizer.eos_token)
    if sign is None:
        return []
    problem = f"no chat template, although {sign}"
    remedy = "copy chat_template.jinja from the original model, or the key from its tokenizer_config.json"
    return [Key(TOKENIZER, ("chat_template",)).finding("chat-template-missing", problem, remedy)]


def _sign_of_chat(case: Case, end: str | None) -> str | None:
    """Return what shows that a model was trained on chats; base models have other ends of texts."""
    names = (one for one in (case.name, case.record.get("model")) if isinstance(one, str))
    named = next((word for name in names if (word := CHAT_NAME.search(Path(name).name))), None)
    if end in TURN_ENDS:
        return f"{end}, the end of a chat turn, ends its texts"
    return f"its name contains {named[0]}" if named else None


def changed_code(case: Case) -> list[Finding]:
    """Report missing or changed code of a position remapping; never runs the code."""
    recorded = case.record.get("code")
    if not recorded or kind_of(case.raw) != "mapped" or code_of(case.folder) == recorded:
        return []
    problem = f"the sha256 of {CODE} is not the one in ropepatch.json"
    remedy = f"do not load it with trust_remote_code=True; {COPY_AGAIN}"
    return [Key(CODE, ()).finding("remapping-code-changed", problem, remedy)]


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings, errors first."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))
