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


def summary(made: Extended) -> str:
    """What was done, with its numbers."""
    record, trained = made.record, made.record.adaptation
    base = link(made.base_id, _hub(made.base_id)) if made.base_id else plain(made.base_name)
    revision = f" at revision {code(record.revision)}" if made.base_id else ""
    training = "without training"
    if trained:
        training = f"trained for {trained.steps:,} steps on {trained.tokens:,} tokens{made.folded}"
    what = "An adapter for " if made.is_adapter else ""
    needs = "; it loads without ropepatch" if record.verified else ""
    return (
        f"{what}{base}{revision}, extended from a context of {made.window:,} tokens to {made.target:,} with "
        f"{code(record.method)}{_paper(made)}, a factor of {record.factor:g}, {training}. "
        f"Made with ropepatch {plain(record.versions.get('ropepatch', ''))}{needs}."
    )


def _paper(made: Extended) -> str:
    """The paper in brackets; one that a record alone names leads nowhere: a stranger may have written it."""
    if made.known_paper is None:
        return f" ({code(made.record.paper)})" if made.record.paper.strip() else ""
    where = address(made.known_paper)
    return f" ({link(made.known_paper, where)})" if where else ""


def sections(made: Extended) -> Iterator[str]:
    """The command, the plan, the cost, the proof."""
    record = made.record
    if record.command is not None:
        yield fenced(shown_command(record.command), "bash")
    else:
        yield fenced("\n".join(_python(made)), "python")
    planned = {key: value for key in PLANNED if (value := getattr(record, key)) not in (None, {})}
    changes = {key: value for key, value in record.config_changes.items() if key not in LEGACY_KEYS}
    plan = _readable(planned | ({} if made.is_adapter else {"config_changes": changes}))
    yield fenced(yaml.safe_dump(plan, sort_keys=False, allow_unicode=True), "yaml")
    facts = [*_facts(made)]
    yield "\n".join(f"- {fact}" for fact in facts)


def _facts(made: Extended) -> Iterator[str]:
    record, trained, versions = made.record, made.record.adaptation, made.record.versions
    if trained:
        yield f"Training{made.folded}: {', '.join(_cost(trained))}."
    if trained and "adaptation" in made.files:
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


def _python(made: Extended) -> Iterator[str]:
    """The lines that make it from Python."""
    record = made.record
    given = _not_default(record.method, record.parameters)
    arguments = [
        text(made.base_id or made.base_name),
        f"to={made.target}",
        f"method={text(record.method)}",
    ]
    if record.revision is not None:
        arguments.append(f"revision={text(record.revision)}")
    if record.factor != made.target / made.window:
        arguments.append(f"factor={record.factor!r}")
    if any(_is_long(value) for value in given.values()):
        yield "import json"
        yield "from pathlib import Path"
        yield ""
        arguments.append('**json.loads(Path("ropepatch.json").read_text())["parameters"]')
    else:
        arguments += [f"{name}={value!r}" for name, value in given.items()]
    yield "import ropepatch"
    yield ""
    yield f"plan = ropepatch.plan({', '.join(arguments)})"
    out = text(made.short_name)
    if record.adaptation:
        yield f'ropepatch.adapt(plan, ropepatch.read_recipe("adaptation/recipe.yaml"), {out})'
    else:
        yield f"ropepatch.extend(plan, {out})"


def _not_default(method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    known = fields(METHODS[method]) if method in METHODS else ()
    defaults = {field.name: field.default for field in known}
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


def citation(made: Extended) -> str:
    """BibTeX of the method, the base model and ropepatch."""
    entries = [bibtex(made.known_paper) if made.known_paper else None]
    if made.base_id:
        owner, _, name = made.base_id.rpartition("/")
        about = {"title": f"{{{_latex(name)}}}"} | ({"author": f"{{{_latex(owner)}}}"} if owner else {})
        where = {"note": f"revision {made.record.revision}", "url": _hub(made.base_id)}
        entries.append(entry("base-model", about | where))
    about = {"title": "{ropepatch: longer context for LLaMA-family checkpoints}"}
    if version := made.record.versions.get("ropepatch"):
        about["note"] = f"version {version}"
    return fenced("\n\n".join(filter(None, [*entries, entry("ropepatch", about)])), "bibtex")


def _hub(model: str) -> str:
    return f"https://huggingface.co/{model}"


def _latex(name: str) -> str:
    return name.replace("_", r"\_")
