"""What was done: in a sentence, as a plan, as a command, and what it took."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import yaml

from ropepatch.model.legacy import LEGACY_KEYS
from ropepatch.publishing.card.markdown import code, fenced, link, plain, text
from ropepatch.publishing.card.names import shown_command
from ropepatch.publishing.card.papers import address, bibtex, entry
from ropepatch.scaling import METHODS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ropepatch.extension.record import Adaptation
    from ropepatch.publishing.card.extended import Extended

PLANNED = (
    "method",
    "factor",
    "parameters",
    "original_max_position_embeddings",
    "target",
    "rope_theta",
    "layer_type",
    "attention_factor",
)
SHORT = 8  # numbers of a list that is printed


def summary(model: Extended) -> str:
    """What was done, with its numbers."""
    record, trained = model.record, model.record.adaptation
    base = plain(model.base_name)
    if model.base_id:
        base = f"{link(model.base_id, _hub(model.base_id))} at revision {code(record.revision)}"
    training = "without training"
    if trained:
        training = f"trained for {trained.steps:,} steps on {trained.tokens:,} tokens{model.folded}"
    what = "An adapter for " if model.is_adapter else ""
    needs = "; it loads without ropepatch" if record.verified else ""
    return (
        f"{what}{base}, extended from a context of {record.original_max_position_embeddings:,} tokens to "
        f"{record.target:,} with {code(record.method)}{_paper(model)}, a factor of {record.factor:g}, "
        f"{training}. Made with ropepatch {plain(record.versions.get('ropepatch', ''))}{needs}."
    )


def _paper(model: Extended) -> str:
    """The paper in brackets; one that a record alone names leads nowhere: a stranger may have written it."""
    if model.known_paper is None:
        return f" ({code(model.record.paper)})" if model.record.paper.strip() else ""
    where = address(model.known_paper)
    return f" ({link(model.known_paper, where)})" if where else ""


def sections(model: Extended) -> Iterator[str]:
    """The command, the plan, the cost, the proof."""
    record = model.record
    if record.command is not None:
        yield fenced(shown_command(record.command), "bash")
    else:
        yield fenced("\n".join(_python(model)), "python")
    planned = {key: value for key in PLANNED if (value := getattr(record, key)) not in (None, {})}
    changes = {key: value for key, value in record.config_changes.items() if key not in LEGACY_KEYS}
    plan = _readable(planned | ({} if model.is_adapter else {"config_changes": changes}))
    yield fenced(yaml.safe_dump(plan, sort_keys=False, allow_unicode=True), "yaml")
    facts = [*_facts(model)]
    yield "\n".join(f"- {fact}" for fact in facts)


def _facts(model: Extended) -> Iterator[str]:
    record, trained, versions = model.record, model.record.adaptation, model.record.versions
    if trained:
        yield f"Training{model.folded}: {', '.join(_cost(trained))}."
    if trained and "adaptation" in model.files:
        yield "The recipe and the history of the training are in [adaptation](adaptation)."
    if record.folded_attention_factor is not None:
        factor = record.folded_attention_factor
        yield f"The attention factor, {factor:.4f}, was folded into the query weights afterwards."
    if verdict := record.verified:
        seen = f"frequencies {plain(verdict.frequencies)}, logits {plain(verdict.logits)}"
        stock = f"stock transformers {plain(versions.get('transformers', ''))}"
        yield f"Reloaded with {stock} and compared with the model it was written from: {seen}."
    if versions:
        yield f"Versions: {', '.join(plain(f'{name} {version}') for name, version in versions.items())}."
    if earlier := record.earlier:
        method, target = code(earlier.method), earlier.target
        yield f"The base model had itself been extended by ropepatch, with {method} to {target:,} tokens."
    for warning in record.warnings:
        yield f"Warning: {plain(warning)}."


def _cost(trained: Adaptation) -> Iterator[str]:
    yield f"{trained.steps:,} steps"
    yield f"{trained.tokens:,} tokens"
    if trained.seconds is not None:
        yield f"{trained.seconds:,} seconds"
    if trained.processes > 1:
        yield f"{trained.processes:,} processes"
    if trained.device is not None:
        yield f"on {plain(trained.device)}"


def _python(model: Extended) -> Iterator[str]:
    """The lines that make it from Python."""
    record = model.record
    parameters = _not_default(record.method, record.parameters)
    arguments = [
        text(model.base_id or model.base_name),
        f"to={record.target}",
        f"method={text(record.method)}",
    ]
    if record.revision is not None:
        arguments.append(f"revision={text(record.revision)}")
    if record.factor != record.target / record.original_max_position_embeddings:
        arguments.append(f"factor={record.factor!r}")
    if any(_is_long(value) for value in parameters.values()):
        yield "import json"
        yield "from pathlib import Path"
        yield ""
        arguments.append('**json.loads(Path("ropepatch.json").read_text())["parameters"]')
    else:
        arguments += [f"{name}={value!r}" for name, value in parameters.items()]
    yield "import ropepatch"
    yield ""
    yield f"plan = ropepatch.plan({', '.join(arguments)})"
    out = text(model.short_name)
    if record.adaptation:
        yield f'ropepatch.adapt(plan, ropepatch.read_recipe("adaptation/recipe.yaml"), {out})'
    else:
        yield f"ropepatch.extend(plan, {out})"


def _not_default(method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    settings = fields(METHODS[method]) if method in METHODS else ()
    defaults = {field.name: field.default for field in settings}
    return {name: value for name, value in parameters.items() if defaults.get(name) != value}


def _readable(value: Any) -> Any:
    """A value without what is not set, and without long lists."""
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items() if item is not None}
    if _is_long(value):
        return "a list, see ropepatch.json"
    return [*map(_readable, value)] if isinstance(value, list) else value


def _is_long(value: Any) -> bool:
    return isinstance(value, list) and len(value) > SHORT


def citation(model: Extended) -> str:
    """BibTeX of the method, the base model and ropepatch."""
    entries = [bibtex(model.known_paper) if model.known_paper else None]
    if model.base_id:
        owner, _, name = model.base_id.rpartition("/")
        about = {"title": f"{{{_latex(name)}}}"} | ({"author": f"{{{_latex(owner)}}}"} if owner else {})
        where = {"note": f"revision {model.record.revision}", "url": _hub(model.base_id)}
        entries.append(entry("base-model", about | where))
    about = {"title": "{ropepatch: longer context for LLaMA-family checkpoints}"}
    if version := model.record.versions.get("ropepatch"):
        about["note"] = f"version {version}"
    return fenced("\n\n".join(filter(None, [*entries, entry("ropepatch", about)])), "bibtex")


def _hub(model: str) -> str:
    return f"https://huggingface.co/{model}"


def _latex(name: str) -> str:
    return name.replace("_", r"\_")
