"""Run all checks on one checkpoint, adapter or loaded model."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ropepatch.doctor.adapters import adapter_findings
from ropepatch.doctor.findings import (
    CONFIG,
    MEMORY,
    SEVERITIES,
    TOKENIZER,
    Finding,
    Problem,
    Rule,
    Severity,
    by_severity,
    has_errors,
)
from ropepatch.doctor.rules import Facts, check
from ropepatch.doctor.weights import look_at_weights, not_finite
from ropepatch.errors import RopepatchError, argument, printable
from ropepatch.files import json_text, read_json
from ropepatch.model.checkpoint import ADAPTER, CODE, Checkpoint, code_of, is_adapter
from ropepatch.model.checkpoint import RECORD as RECORD
from ropepatch.model.config import kind_of
from ropepatch.model.in_memory import Difference, rope_differences, write_ropes
from ropepatch.model.rotary import base_model
from ropepatch.model.weights import Progress

GENERATION = "generation_config.json"
VOCABULARY = "tokenizer.json"
SMALL_FILES = (TOKENIZER, GENERATION, RECORD, ADAPTER, VOCABULARY)
CHAT_NAME = re.compile(r"(?<![a-z])(?:instruct|chat)(?![a-z])", re.IGNORECASE)
# eos_token of chat models
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|eot|>",
)
COPY_AGAIN = "make it readable, or copy it again from the original checkpoint"

GITHUB = "https://github.com"
UNREADABLE = Rule(
    "file-unreadable",
    "error",
    "the checkpoint does not load, or silently uses defaults instead of the file",
    f"{GITHUB}/sgl-project/sglang/pull/32279",
)
NO_TOKENIZER = Rule(
    "tokenizer-missing",
    "warning",
    "measuring and training need a tokenizer, and pipeline() fails without one",
    "",
)
NO_TEMPLATE = Rule(
    "chat-template-missing",
    "remark",
    "chat APIs fail, or format messages differently than in training",
    f"{GITHUB}/vllm-project/vllm/issues/39279",
)
OTHER_CODE = Rule(
    "remapping-code-changed",
    "error",
    "loading the checkpoint with trust_remote_code=True runs this code",
    "",
)
RESCALED = Rule(
    "rope-rescaled",
    "error",
    "the model computes other frequencies than the config.json that it saves",
    f"{GITHUB}/MakazhanAlpamys/Soup/issues/793",
)
ROUNDED = Rule(
    "rope-rounded",
    "warning",
    "the position error grows with the distance",
    f"{GITHUB}/huggingface/transformers/issues/25681",
)


@dataclass(frozen=True)
class Diagnosis:
    """The problems of one checkpoint, or of a loaded model's RoPE.

    Args:
        name: The name that the user gave, or the class of a loaded model.
        findings: The problems, errors first.
        looked_at: What was checked: names of files or modules.
        repaired: The problems of a loaded model that `repair=True` repaired.
        folder: The folder; None for a loaded model or an adapter.
        facts: What config.json and tokenizer_config.json contain.
    """

    name: str
    findings: tuple[Finding, ...]
    looked_at: tuple[str, ...]
    repaired: tuple[Finding, ...] = ()
    folder: Path | None = field(default=None, repr=False)
    facts: Facts | None = field(default=None, repr=False)

    @property
    def has_errors(self) -> bool:
        """Whether any finding is an error."""
        return has_errors(self.findings)

    def to_json(self) -> str:
        """Return the findings as a JSON list of objects."""
        return json_text([finding.to_dict() for finding in self.findings])

    def __str__(self) -> str:
        name, looked = (
            printable(self.name),
            f"checked: {printable(', '.join(self.looked_at))}",
        )
        if self.repaired:
            now = ", ".join(f"{one.key} ({one.code})" for one in self.repaired)
            looked = f"{looked}\nrepaired: {now}"
        if not self.findings:
            return f"{name}: no problems found\n{looked}"
        counts = Counter(finding.severity for finding in self.findings)
        words = [f"{counts[one]} {one}" for one in SEVERITIES if counts[one] == 1]
        words += [f"{counts[one]} {one}s" for one in SEVERITIES if counts[one] > 1]
        return "\n\n".join(
            [f"{name}: {', '.join(words)}\n{looked}", *map(str, self.findings)]
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def diagnose(
    model: str | Path | nn.Module,
    revision: str | None = None,
    *,
    measure: bool = True,
    repair: bool = False,
    progress: Progress | None = None,
) -> Diagnosis:
    """Find mistakes in the RoPE configuration of a checkpoint or an adapter.

    Args:
        model: A checkpoint folder, an adapter's folder, a Hub id, or tiny.
        revision: The branch, tag or commit of a Hub id.
        measure: Read all weights, and look for NaN and infinity. Without it only config.json of a Hub id is
            downloaded.
        repair: Recompute the rotary modules of a loaded model from its configuration, in float32 and in
            place. `findings` are then those that are left, `repaired` those that were fixed. The model may be
            within PEFT, torch.compile or FSDP. Another RoPE than the configuration's is an error: with it
            nothing is measured or patched. Rounding to 16 bits is a warning, as `model.to(torch.bfloat16)`
            causes it. Skipped are RoPE modules patched by ropepatch, modules not built from a configuration,
            and tensors on the meta device or sharded over processes.
        progress: A function of (bytes read, bytes in total).

    Returns:
        The findings, as a `Diagnosis`.

    Raises:
        RopepatchError: If there is no such checkpoint, its config.json is not a JSON object, or the module
            contains no transformers model.
    """
    if isinstance(model, nn.Module):
        return _diagnose_loaded(model, repair)
    if repair:
        hint = (
            "use `ropepatch doctor --fix OUT` to write a repaired copy of a checkpoint"
        )
        raise RopepatchError(
            f"{argument('repair')} needs a loaded model, got {model}", hint=hint
        )
    if folder := _adapter_folder(model):
        return _diagnose_adapter(str(model), folder)
    source = Checkpoint.find(model, revision, weights=measure, include=(CODE,))
    if _adapter_folder(source.folder):  # from the Hub
        return _diagnose_adapter(source.name, source.folder)
    return _diagnose_checkpoint(source, measure, progress)


def _diagnose_checkpoint(
    source: Checkpoint, measure: bool, progress: Progress | None
) -> Diagnosis:
    folder = source.folder
    files, findings = read_small_files(folder)
    unreadable = [finding.file for finding in findings]
    facts = Facts(source.config, files.get(TOKENIZER, {}))
    weights, of_weights = look_at_weights(folder, source.config)
    findings += [*check(facts), *of_weights]
    if measure or source.revision is None:  # else only config.json was downloaded
        findings += _changed_code(source, files.get(RECORD, {}))
        if weights and not {TOKENIZER, VOCABULARY} & {*unreadable}:
            findings += _of_tokenizer(source, files.get(RECORD, {}))
    if measure and weights:
        findings += not_finite(weights, progress)
    looked_at = [CONFIG, *files, *unreadable]
    if (folder / CODE).is_file():
        looked_at.append(CODE)
    looked_at += (
        [file.name for file in weights.files] if weights else ["no readable weights"]
    )
    return Diagnosis(
        source.name, by_severity(findings), tuple(looked_at), folder=folder, facts=facts
    )


def _diagnose_loaded(model: nn.Module, repair: bool) -> Diagnosis:
    differences, looked_at = rope_differences(model)
    repaired = differences if repair else []
    if repaired:
        write_ropes(model, repaired)
        differences, looked_at = rope_differences(model)
    return Diagnosis(
        type(base_model(model)).__name__,
        by_severity(map(_difference, differences)),
        tuple(looked_at),
        by_severity(map(_difference, repaired)),
    )


def _difference(one: Difference) -> Finding:
    path = (one.path, one.name)
    if one.rounded:
        remedy = "from_pretrained(dtype=...) keeps it in float32, where .to(dtype) and .half() do not"
        return ROUNDED.finding(
            Problem(path, f"rounded to {one.rounded}", remedy, file=MEMORY)
        )
    remedy = "change rope_parameters before the model is built; after to_empty, write the frequencies anew"
    severity: Severity | None = None if one.is_used else "warning"
    return RESCALED.finding(
        Problem(path, str(one), remedy, severity=severity, file=MEMORY)
    )


def _diagnose_adapter(name: str, folder: Path) -> Diagnosis:
    files, findings = read_small_files(folder)
    unreadable = [finding.file for finding in findings]
    adapter, record = read_json(folder / ADAPTER), files.get(RECORD, {})
    findings += adapter_findings(adapter, record, files.get(TOKENIZER, {}))
    return Diagnosis(name, by_severity(findings), (*files, *unreadable, "the base"))


def _adapter_folder(model: str | Path) -> Path | None:
    """Return the folder if it contains an adapter and no model."""
    try:
        folder = Path(model).expanduser()
        return folder if is_adapter(folder) else None
    except (
        OSError,
        RuntimeError,
        TypeError,
    ):  # too long, an unknown user's ~, no name: not a path
        return None


def read_small_files(folder: Path) -> tuple[dict[str, dict[str, Any]], list[Finding]]:
    """Read the JSON files beside config.json, and report those that cannot be read."""
    files: dict[str, dict[str, Any]] = {}
    findings = list[Finding]()
    for name in SMALL_FILES:
        if not (folder / name).exists():
            continue
        try:
            files[name] = read_json(folder / name)
        except RopepatchError as error:
            reason = str(error).replace(f"{folder}/", "")
            findings.append(
                UNREADABLE.finding(Problem((), reason, COPY_AGAIN, file=name))
            )
    files.pop(VOCABULARY, None)  # its content is not checked
    return files, findings


def _of_tokenizer(source: Checkpoint, record: dict[str, Any]) -> Iterator[Finding]:
    """Report a missing or broken tokenizer, or chat template; a broken config.json is another finding."""
    try:
        _ = source.stock.whole
    except RopepatchError:
        return
    try:
        tokenizer = source.tokenizer
    except RopepatchError as error:
        yield NO_TOKENIZER.finding(
            Problem((), str(error), error.hint or "", file=VOCABULARY)
        )
        return
    sign = _sign_of_chat([source.name, record.get("model")], tokenizer.eos_token)
    if sign and not tokenizer.chat_template:
        remedy = "copy chat_template.jinja from the original model, or the key from its tokenizer_config.json"
        problem = Problem(
            ("chat_template",),
            f"no chat template, although {sign}",
            remedy,
            file=TOKENIZER,
        )
        yield NO_TEMPLATE.finding(problem)


def _sign_of_chat(names: list[Any], end: str | None) -> str | None:
    """Return what shows that a model was trained on chats; base models have other ends of texts."""
    if end in TURN_ENDS:
        return f"{end}, the end of a chat turn, ends its texts"
    for name in names:
        if isinstance(name, str) and (word := CHAT_NAME.search(Path(name).name)):
            return f"its name contains {word[0]}"
    return None


def _changed_code(source: Checkpoint, record: dict[str, Any]) -> Iterator[Finding]:
    """Report missing or changed code of a position remapping; never runs the code."""
    recorded = record.get("code")
    if (
        recorded
        and kind_of(source.raw) == "mapped"
        and code_of(source.folder) != recorded
    ):
        problem = f"the sha256 of {CODE} is not the one in {RECORD}"
        remedy = f"do not load it with trust_remote_code=True; {COPY_AGAIN}"
        yield OTHER_CODE.finding(Problem((), problem, remedy, file=CODE))
