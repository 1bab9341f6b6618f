"""What was done: as a command, as a plan, and whom to cite for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from ropepatch.attention import MAPS
from ropepatch.extension.record import Adaptation
from ropepatch.model.config import LEGACY_KEYS
from ropepatch.publishing.card.extended import Extended
from ropepatch.publishing.card.markdown import code, fenced, link, text
from ropepatch.publishing.card.names import shown_command
from ropepatch.publishing.card.papers import address, bibtex, entry
from ropepatch.scaling import METHODS

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


def paper(model: Extended) -> str:
    """The method's paper; one that a record alone names leads nowhere: a stranger may have written it."""
    if model.known_paper is None:
        return code(model.record.paper) if model.record.paper.strip() else ""
    where = address(model.known_paper)
    return link(model.known_paper, where) if where else ""


def recipe(model: Extended) -> str:
    """The command that made it, or the lines of Python."""
    if model.record.command is not None:
        return fenced(shown_command(model.record.command), "bash")
    return fenced("\n".join(_python(model)), "python")


def plan(model: Extended) -> str:
    """What the record says of the plan, as YAML."""
    record = model.record
    planned = {key: value for key in PLANNED if (value := getattr(record, key)) not in (None, {})}
    changes = {key: value for key, value in record.config_changes.items() if key not in LEGACY_KEYS}
    content = _readable(planned | ({} if model.is_adapter else {"config_changes": changes}))
    return fenced(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), "yaml")


def _python(model: Extended) -> Iterator[str]:
    """The lines that make it from Python."""
    record = model.record
    if moved := record.transfer:
        names = ", ".join(map(text, (moved.adapted, moved.base, model.base_id or model.base_name)))
        yield "import ropepatch"
        yield ""
        yield f"ropepatch.transfer({names}, {text(model.short_name)}, text=held_out_text)"
        return
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


def teaching(adaptation: Adaptation | None) -> str:
    """From what a distilled model learned; nothing of any other."""
    distil = adaptation.recipe.get("distil") if adaptation else None
    if not isinstance(distil, dict):
        return ""
    named = distil.get("map")
    named = named.get("name") if isinstance(named, dict) else named
    mixed = f", with {share:.0%} of cross-entropy" if (share := _number(distil, "cross_entropy", 0)) else ""
    sharp = f" at temperature {t:g}" if (t := _number(distil, "temperature", 1)) != 1 else ""
    return (
        f"It was distilled from the base model: trained on what that expects{sharp}{mixed}, "
        "in place of the tokens of a text; "
        f"texts longer than its context the base read under {code(str(named))}."
    )


def _number(content: Mapping[str, Any], key: str, usual: float) -> float:
    value = content.get(key)
    return value if isinstance(value, int | float) else usual


def _not_default(method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    kind = METHODS.get(method) or MAPS.get(method)
    defaults = kind.defaults() if kind is not None else {}
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
        where = {"note": f"revision {model.record.revision}", "url": model.base_address}
        entries.append(entry("base-model", about | where))
    about = {"title": "{ropepatch: longer context for LLaMA-family checkpoints}"}
    if version := model.record.versions.get("ropepatch"):
        about["note"] = f"version {version}"
    return fenced("\n\n".join(filter(None, [*entries, entry("ropepatch", about)])), "bibtex")


def _latex(name: str) -> str:
    return name.replace("_", r"\_")
