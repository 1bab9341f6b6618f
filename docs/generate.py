"""The generated parts of the pages on methods, remappings, encodings, tasks, commands and functions.

`docs/tables.py` writes them into the pages and draws the figures. Sphinx makes the explorer.
"""

import inspect
import io
import re
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from registries import meanings
from rich.console import Console
from transformers import LlamaConfig

import ropepatch
from ropepatch.attention import REMAPPINGS
from ropepatch.cli import app, listing, look, make, measure
from ropepatch.cli.derive import Command
from ropepatch.cli.listing import defaults_of
from ropepatch.doctor.diagnosis import Diagnosis
from ropepatch.doctor.findings import Finding
from ropepatch.encodings import ENCODINGS
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.perplexity import LossCurve
from ropepatch.evaluation.ranking import Ranking
from ropepatch.evaluation.results import Result
from ropepatch.evaluation.retrieval import Retrieval
from ropepatch.evaluation.tasks import TASKS
from ropepatch.extension.engines import VERSIONS
from ropepatch.extension.planning import plan
from ropepatch.probing.judging import Judgement
from ropepatch.report.plots.changes import plot_effective_distances, plot_wavelengths
from ropepatch.report.plots.style import save_figure
from ropepatch.report.printers import markdown_rows
from ropepatch.scaling import METHODS
from ropepatch.settings import Named, Settings

ROOT = Path(__file__).parents[1]
Rows = list[list[str]]


# Figures


@cache
def concept_figures() -> dict[str, str]:
    """The figures of the page on concepts, by name."""
    from encoding_gallery import plot_encoding_gallery

    plans = [
        plan("tiny", to="4x", method=name)
        for name in ("linear", "ntk", "yarn", "self-extend")
    ]
    drawn = plot_encoding_gallery() | {"distances": plot_effective_distances(plans)}
    for plan_of in plans[:3]:
        drawn[f"wavelengths-{plan_of.method.name}"] = plot_wavelengths(plan_of)
    return {name: svg(drawn[name]) for name in CONCEPTS}


CONCEPTS = (
    *("sinusoidal-table", "sinusoidal-distances", "rope-turns", "rope-arcs", "biases"),
    *("wavelengths-linear", "wavelengths-ntk", "wavelengths-yarn", "distances"),
)


def svg(figure: Any) -> str:
    """A figure as it is saved."""
    with tempfile.TemporaryDirectory() as folder:
        _, file = save_figure(figure, Path(folder) / "figure")
        return file.read_text(encoding="utf-8")


# Tables


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table in Markdown."""
    return markdown_rows(
        head, [[cell.replace("|", r"\|") for cell in row] for row in rows]
    )


GIVEN: dict[
    str, dict[str, Any]
] = {  # what methods without a default are set to, at 64 rotary pairs
    "abf": {"rope_theta": 8e6},
    "custom": {"divisors": [1 + i / 21 for i in range(64)]},
    "longrope": {"long_factor": [1 + i / 12.6 for i in range(64)]},
    "longrope-switch": {
        "long_factor": [1 + i / 12.6 for i in range(64)],
        "short_factor": [1.0] * 64,
    },
}


def engines() -> str:
    """Tabulate how each engine runs each scaling of a LLaMA at 4 times its 4,096 tokens, with notes."""
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=1, max_position_embeddings=4096
    )
    notes: dict[str, int] = {}
    rows = []
    for name in METHODS:
        made = plan(config, to="4x", method=name, **GIVEN.get(name, {}))
        cells = [f"{line.reads}, {line.how}" for line in made.engines]
        for index, line in enumerate(made.engines):
            if line.note:
                cells[index] += f" ({notes.setdefault(line.note, len(notes) + 1)})"
        rows.append([f"`{name}`", f"`{made.rope_parameters['rope_type']}`", *cells])
    numbered = "\n".join(f"{number}. {note}" for note, number in notes.items())
    return f"{table(['method', 'saved as', *VERSIONS], rows)}\n\n{numbered}"


# One section per entry of a registry

UNMEASURED = (
    "longrope",
    "longrope-switch",
)  # their factors come from a search that is not part of ropepatch


def source(paper: str) -> str:
    """A link to a paper."""
    if paper.startswith("arXiv:"):
        return f"[{paper}](https://arxiv.org/abs/{paper.removeprefix('arXiv:')})"
    return f"[{paper}](https://{paper})" if "/" in paper else paper


def contract(kind: type) -> str:
    """The docstring of a class up to its arguments."""
    return re.split(r"\n\n(?:Args|Raises):", inspect.getdoc(kind) or "")[0]


def arguments(
    kind: type, defaults: Mapping[str, Any], head: str = "parameter"
) -> Iterator[str]:
    """A table of the arguments of a class, if it has any."""
    texts = {
        key: text
        for base in reversed(kind.__mro__)
        for key, text in meanings(base).items()
    }
    rows = [
        [f"`{key}`", f"`{value}`", texts.get(key, "")]
        for key, value in defaults.items()
    ]
    if rows:
        yield table([head, "default", "meaning"], rows)


def entry(
    kind: type, parameters: Mapping[str, Any], facts: Mapping[str, str]
) -> Iterator[str]:
    """The section of an entry: what it is, its facts and its parameters."""
    yield f"## `{kind.name}`"
    yield contract(kind)
    yield "\n".join(f"- {name}: {text}" for name, text in facts.items())
    yield from arguments(kind, parameters)


def methods() -> Iterator[str]:
    """A section for every scaling."""
    for kind in METHODS.values():
        facts = {
            "Frequencies": f"`{kind.formula}`",
            "Source": source(kind.paper),
            "Saved as": "not saved"
            if kind.saved_as == "–"
            else f"RoPE type `{kind.saved_as}`",
        }
        if kind.name in UNMEASURED:
            facts["Results"] = (
                "none; a search outside ropepatch has to find its factors"
            )
        if kind.length_dependent:
            facts["Frequencies change with the length of the input"] = "yes"
        yield from entry(kind, defaults_of(kind), facts)


def position_remappings() -> Iterator[str]:
    """The parameters that all position remappings have, and a section for each."""
    shared = meanings(ropepatch.Remapping)
    for index, kind in enumerate(REMAPPINGS.values()):
        parameters = defaults_of(kind)
        if not index:
            common = {key: value for key, value in parameters.items() if key in shared}
            yield from arguments(kind, common, "parameter of all")
        facts = {
            "Distance Δ becomes": f"`{kind.formula}`",
            "Source": source(kind.paper),
        }
        yield from entry(
            kind,
            {key: parameters[key] for key in parameters if key not in shared},
            facts,
        )


def encodings() -> Iterator[str]:
    """A section for every position encoding."""
    for kind in ENCODINGS.values():
        facts = {
            "Family": kind.family,
            "Scores": f"`{kind.formula}`",
            "Source": source(kind.paper),
        }
        yield from entry(kind, defaults_of(kind), facts)


def tasks() -> Iterator[str]:
    """A section for every task of a suite."""
    for name, kind in TASKS.items():
        yield f"## `{name}`"
        yield contract(kind)
        defaults = {
            key: "required"
            if one.is_required()
            else one.get_default(call_default_factory=True)
            for key, one in kind.model_fields.items()
        }
        yield from arguments(kind, defaults)


# The command line and the functions


def commands() -> Iterator[str]:
    """A section for every command, in the order of `ropepatch --help`."""
    for room in (make, measure, look, listing):
        yield f"## {room.GROUP.name}"
        for name in sorted(name for name in app if room.GROUP in app[name].group):
            text = io.StringIO()
            app.help_print([name], console=Console(file=text, width=100))
            yield f"### ropepatch {name}"
            yield (
                "```text\n"
                + re.sub(r" +$", "", text.getvalue().strip(), flags=re.MULTILINE)
                + "\n```"
            )


API = {
    "Plan, try and write": "plan patch active extend load Plan Patch Remapped Extension",
    "Measure": "perplexity retrieve passkey difference evaluate compare read_results plot Results Choice",
    "Scalings and position remappings": "make_scaling make_remapping Scaling Rope Frequencies Remapping",
    "Train": "train read_recipe load_adapter",
    "Other encodings": "swap make_encoding Swap Encoding",
    "Look and publish": "explore diagnose push probe Probed ProbeCallback fold_attention",
    "Errors": "RopepatchError",
}
REGISTRIES = {"METHODS", "REMAPPINGS", "ENCODINGS"}
RETURNED = (LossCurve, Retrieval, Mean, Result, Ranking, Judgement, Diagnosis, Finding)


SECTION = re.compile(
    r"^(Args|Attributes|Returns|Raises):\n((?:    .*\n?|\n)+)", re.MULTILINE
)
ENTRY = re.compile(r"^    (\*{0,2}\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def api() -> Iterator[str]:
    """A section for every public name, from its docstring; of a command, what the command does not have."""
    public = {name for names in API.values() for name in names.split()}
    if public | REGISTRIES != set(ropepatch.__all__):
        raise ValueError(
            f"API and ropepatch.__all__ differ in {(public | REGISTRIES) ^ set(ropepatch.__all__)}"
        )
    commands = {}
    for name in app:
        command = app[name].default_command
        if isinstance(command, Command):
            commands[command.verb] = command
    for heading, names in API.items():
        yield f"## {heading}"
        for name in names.split():
            found = getattr(ropepatch, name)
            yield f"### ropepatch.{name}"
            if inspect.isclass(found):
                yield described(found)
                yield "\n".join(members(found))
                continue
            returned = inspect.signature(found).return_annotation
            called = f"{name}{signature(found)} -> {returned}"
            yield f"```text\n{textwrap.fill(called, 100, subsequent_indent='    ')}\n```"
            if name in commands:
                yield from of_command(found, commands[name])
            else:
                yield described(found)
    yield "## What they return"
    for kind in RETURNED:
        yield f"### {kind.__name__}"
        yield described(kind)
        yield "\n".join(members(kind))


def of_command(function: Any, command: Command) -> Iterator[str]:
    """What a function does in short, where its options are described, and what only Python has."""
    sections = (inspect.getdoc(function) or "").split("\n\n")
    yield sections[0]
    place = f"commands.md#ropepatch-{command.name}"
    yield f"The arguments are the options of [`ropepatch {command.name}`]({place})."
    python_only = {
        name: text
        for name, text in meanings(function).items()
        if name not in command.names and name != "parameters"
    }
    if python_only:
        items = [f"- `{name}`: {text}" for name, text in python_only.items()]
        yield "Only in Python:\n\n" + "\n".join(items)
    for section in sections:
        if section.startswith(("Returns:", "Raises:")):
            yield SECTION.sub(listed, f"{section}\n").strip()


def described(thing: Any) -> str:
    """A docstring in Markdown, its arguments as a list."""
    return SECTION.sub(listed, f"{inspect.getdoc(thing)}\n").strip()


def listed(section: re.Match[str]) -> str:
    """A section of a docstring in Markdown."""
    title = section[1].replace("Args", "Arguments")
    entries = [
        (name, " ".join(text.split())) for name, text in ENTRY.findall(section[2])
    ]
    if title == "Raises" and len(entries) == 1:
        [(name, text)] = entries
        return f"**Raises** `{name}`: {text}\n\n"
    items = [f"- `{name}`: {text}" for name, text in entries]
    return (
        f"**{title}**\n\n" + ("\n".join(items) or inspect.cleandoc(section[2])) + "\n\n"
    )


def members(kind: type) -> Iterator[str]:
    """The public methods and properties of a class and of those that it extends, each in a line."""
    own = [one for one in kind.__mro__ if one.__module__.startswith("ropepatch.")]
    shown = [one for one in own if one not in (Settings, Named)]
    found = {
        name: member for one in reversed(shown) for name, member in vars(one).items()
    }
    for name, member in found.items():
        text = (inspect.getdoc(member) or "").partition("\n\n")[0]
        if (
            name.startswith("_")
            or not text
            or not (callable(member) or isinstance(member, MEMBERS))
        ):
            continue
        call = (
            re.sub(r"^\((self|cls)(, )?", "(", signature(member))
            if callable(member)
            else ""
        )
        yield f"- `{name}{call}`: {' '.join(text.split())}"


MEMBERS = (property, cached_property, classmethod, staticmethod)


class _Plain(str):
    """An annotation or a default as written."""

    __repr__ = str.__str__


def signature(function: Any) -> str:
    """The parameters of a function in one line."""
    shown, keyword_only = [], False
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.KEYWORD_ONLY and not keyword_only:
            shown.append("*")
        keyword_only |= one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        default = _Plain("...") if inspect.isfunction(one.default) else one.default
        annotation = (
            one.annotation if one.annotation is one.empty else _Plain(one.annotation)
        )
        shown.append(str(one.replace(annotation=annotation, default=default)))
    return f"({', '.join(shown)})"


# The explorer

EXPLORER = "ropepatch-explorer.html"


def explorer() -> str:
    """A link to the explorer, which is made when the site is built."""
    return f'<p><a class="explorer" href="{EXPLORER}">Open the explorer</a></p>'


# What Sphinx calls


SUBPAGES = {  # by page: those below it in the navigation
    "docs/guides/fine-tune": ("several-gpus", "trainers"),
    "docs/guides/serve": ("gguf",),
    "eval/studies/README": (
        "*/*",
        "../benchmarks/README",
        "../../ropepatch/data/tiny/checkpoint/README",
    ),
}


def fill_in(app: Any, page: str, text: list[str]) -> None:
    """Put the link to the explorer into its page, and subpages below their page."""
    text[0] = text[0].replace("<!-- at build: explorer -->", explorer())
    if page in SUBPAGES:
        listed = "\n".join(SUBPAGES[page])
        text[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{listed}\n```\n"


ACCESSIBLE = {  # what the theme writes, and what a screen reader needs
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<th class="head"><p></p></th>': '<td class="head"></td>',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="All pages">',
    '<div id="search-results">': '<h1>Search</h1>\n<div id="search-results">',
    '<aside class="toc-drawer': '<aside aria-label="This page" class="toc-drawer',
}
FIRST_PAGE = """<!doctype html>
<html lang="en"><title>ropepatch</title><meta http-equiv="refresh" content="0; url=docs/index.html">
<a href="docs/index.html">ropepatch</a></html>
"""


def finish(app: Any, failure: Exception | None) -> None:
    """Mend the pages for screen readers; add the explorer, and a first page that leads to that of docs/."""
    if failure is not None:
        return
    out = Path(app.outdir)
    for page in out.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for written, mended in ACCESSIBLE.items():
            text = text.replace(written, mended)
        page.write_text(text, encoding="utf-8")
    (out / "index.html").write_text(FIRST_PAGE, encoding="utf-8")
    (out / "docs" / EXPLORER).unlink(missing_ok=True)
    ropepatch.explore(out=out / "docs" / EXPLORER)
