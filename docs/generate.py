"""The generated parts of the pages on methods, remappings, encodings, tasks, commands and functions.

`docs/tables.py` writes it into the pages; figures and the explorer are made when the site is built.
"""

import inspect
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import LlamaConfig

import ropepatch
from ropepatch.attention import REMAPPINGS
from ropepatch.cli import GROUPS, app
from ropepatch.cli.listing import describe_encoding, describe_method
from ropepatch.encodings import ENCODINGS
from ropepatch.evaluation.tasks import TASKS
from ropepatch.extension.engines import VERSIONS
from ropepatch.extension.planning import plan
from ropepatch.report.plots import figures_of_plans
from ropepatch.report.plots.style import house_style
from ropepatch.report.printers import markdown_rows
from ropepatch.scaling import METHODS
from ropepatch.settings import Named, Settings, meanings

ROOT = Path(__file__).parents[1]
Rows = list[list[str]]


# Figures


def draw_figures(folder: Path) -> None:
    """Draw the figures of the page on concepts, as `ropepatch plot` does, where they are not there yet."""
    if folder.exists():
        return
    from encoding_gallery import plot_encoding_gallery

    gallery = plot_encoding_gallery()
    plans = [plan("tiny", to="4x", method=name) for name in ("linear", "ntk", "yarn", "self-extend")]
    drawn = figures_of_plans(plans) | {
        name: gallery[name] for name in ("sinusoidal-table", "sinusoidal-distances", "rope-turns", "biases")
    }
    folder.mkdir()
    with house_style():
        for name, figure in drawn.items():
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


# Tables


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table in Markdown."""
    return markdown_rows(head, [[cell.replace("|", r"\|") for cell in row] for row in rows])


def block(page: str, name: str) -> str:
    """The text of a page between `<!-- name -->` and `<!-- /name -->`, which is tested."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]


def tables_of(text: str) -> Iterator[tuple[str, Rows]]:
    """The tables of a text, each with the words in bold that stand above it."""
    caption, rows = "", Rows()
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            yield caption, rows
            rows = []
        if bold := re.fullmatch(r"\*\*(.+)\*\*.*", line):
            caption = bold[1]


def measured(name: str, sources: Mapping[str, tuple[str, str, str]]) -> Iterator[str]:
    """What was measured of an entry: its rows of tables, below the first row."""
    for what, (page, mark, study) in sources.items():
        for caption, (head, _, first, *others) in tables_of(block(page, mark)):
            own = [row for row in others if name in re.split(r"[`, ]+", row[0])]
            floor = [row for row in others if row[0] == "floor"]
            if own:
                yield f"{', '.join(filter(None, (what, caption)))} ([the study](../../eval/{study})):"
                yield table(head, [first, *own, *floor])


GIVEN: dict[str, dict[str, Any]] = {  # what methods without a default are set to, at 64 rotary pairs
    "abf": {"rope_theta": 8e6},
    "custom": {"divisors": [1 + i / 21 for i in range(64)]},
    "longrope": {"long_factor": [1 + i / 12.6 for i in range(64)]},
    "longrope-switch": {"long_factor": [1 + i / 12.6 for i in range(64)], "short_factor": [1.0] * 64},
}


def engines() -> str:
    """Tabulate how each engine runs each scaling of a LLaMA at 4 times its 4,096 tokens, with notes."""
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, max_position_embeddings=4096)
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

RESULTS = {  # by caption: the page and the block of a table, and the study it is from
    "methods": {"tiny, training-free": ("eval/studies/README.md", "training-free", "studies/README.md")},
    "remappings": {
        "Four checkpoints": (
            "docs/guides/remappings.md",
            "remappings-measured",
            "studies/remappings/remappings.md",
        )
    },
    "encodings": {
        "Loss above the floor, trained on 128 tokens": (
            "eval/studies/encodings/encodings.md",
            "loss",
            "studies/encodings/encodings.md",
        ),
        "Properties": ("eval/studies/encodings/encodings.md", "properties", "studies/encodings/encodings.md"),
    },
}


def source(paper: str) -> str:
    """A link to a paper."""
    if paper.startswith("arXiv:"):
        return f"[{paper}](https://arxiv.org/abs/{paper.removeprefix('arXiv:')})"
    return f"[{paper}](https://{paper})" if "/" in paper else paper


def contract(kind: type) -> str:
    """The docstring of a class up to its arguments."""
    return re.split(r"\n\n(?:Args|Raises):", inspect.getdoc(kind) or "")[0]


def arguments(kind: type, defaults: Mapping[str, Any]) -> Iterator[str]:
    """A table of the arguments of a class, if it has any."""
    texts = {key: text for base in reversed(kind.__mro__) for key, text in meanings(base).items()}
    rows = [[f"`{key}`", f"`{value}`", texts.get(key, "")] for key, value in defaults.items()]
    if rows:
        yield table(["parameter", "default", ""], rows)


def entry(kind: type, described: Mapping[str, Any], facts: Mapping[str, str], results: str) -> Iterator[str]:
    """The section of an entry: what it is, its facts and parameters, and what was measured of it."""
    yield f"## `{kind.name}`"
    yield contract(kind)
    yield "\n".join(f"- {name}: {text}" for name, text in facts.items())
    yield from arguments(kind, described["parameters"])
    yield from list(measured(kind.name, RESULTS[results])) or ["Not measured here."]


def methods() -> Iterator[str]:
    """A section for every scaling."""
    for kind in METHODS.values():
        facts = {
            "Frequencies": f"`{kind.formula}`",
            "Source": source(kind.paper),
            "Saved as": "not saved" if kind.saved_as == "–" else f"rope type `{kind.saved_as}`",
            "Follows the length": "yes" if kind.length_dependent else "no",
        }
        yield from entry(kind, describe_method(kind), facts, "methods")


def position_remappings() -> Iterator[str]:
    """A section for every position remapping."""
    for kind in REMAPPINGS.values():
        facts = {"A distance D is read as": f"`{kind.formula}`", "Source": source(kind.paper)}
        yield from entry(kind, describe_method(kind), facts, "remappings")


def encodings() -> Iterator[str]:
    """A section for every position encoding."""
    for kind in ENCODINGS.values():
        facts = {"Family": kind.family, "Scores": f"`{kind.formula}`", "Source": source(kind.paper)}
        yield from entry(kind, describe_encoding(kind), facts, "encodings")


def tasks() -> Iterator[str]:
    """A section for every task of a suite."""
    for name, kind in TASKS.items():
        yield f"## `{name}`"
        yield contract(kind)
        defaults = {
            key: "required" if one.is_required() else one.get_default(call_default_factory=True)
            for key, one in kind.model_fields.items()
        }
        yield from arguments(kind, defaults)


# The command line and the functions


def commands() -> Iterator[str]:
    """A section for every command, in the order of `ropepatch --help`."""
    for heading, room in GROUPS.items():
        yield f"## {heading}"
        for name in sorted(name for name in app if room.GROUP in app[name].group):
            text = io.StringIO()
            app.help_print([name], console=Console(file=text, width=100))
            yield f"### ropepatch {name}"
            yield "```text\n" + re.sub(r" +$", "", text.getvalue().strip(), flags=re.MULTILINE) + "\n```"


API = {
    "Plan, try and write": "plan patch active extend load Plan Patch Remapped Extension",
    "Measure": "perplexity retrieve passkey evaluate compare choose read_results plot Results Choice",
    "Scalings and position remappings": "make_scaling make_remapping Scaling Rope Frequencies Remapping",
    "Learn frequencies": "fit Fitted",
    "Train": "adapt read_recipe load_adapter",
    "Other encodings": "swap make_encoding Swap Encoding",
    "Look and publish": "explore diagnose push probe Probed ProbeCallback fold_attention",
    "Errors": "RopepatchError",
}
REGISTRIES = {"METHODS", "REMAPPINGS", "ENCODINGS"}


SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):\n((?:    .*\n?|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\*{0,2}\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def api() -> Iterator[str]:
    """A section for every public name, from its docstring."""
    listed = {name for names in API.values() for name in names.split()}
    if listed | REGISTRIES != set(ropepatch.__all__):
        raise ValueError(
            f"API and ropepatch.__all__ differ in {(listed | REGISTRIES) ^ set(ropepatch.__all__)}"
        )
    for heading, names in API.items():
        yield f"## {heading}"
        for name in names.split():
            found = getattr(ropepatch, name)
            yield f"### ropepatch.{name}"
            if inspect.isclass(found):
                yield described(found)
                yield "\n".join(members(found))
            else:
                yield f"```text\nropepatch.{name}{signature(found)}\n```"
                yield described(found)


def described(thing: Any) -> str:
    """A docstring in Markdown, its arguments as a list."""

    def listed(section: re.Match[str]) -> str:
        entries = ENTRY.findall(section[2])
        items = [f"- `{name}`: {' '.join(text.split())}" for name, text in entries]
        return (
            f"**{section[1].replace('Args', 'Arguments')}**\n\n"
            + ("\n".join(items) or inspect.cleandoc(section[2]))
            + "\n\n"
        )

    return SECTION.sub(listed, f"{inspect.getdoc(thing)}\n").strip()


def members(kind: type) -> Iterator[str]:
    """The public methods and properties of a class and of those that it extends, each in a line."""
    own = [one for one in kind.__mro__ if one.__module__.startswith("ropepatch.")]
    shown = [one for one in own if one not in (Settings, Named)]
    found = {name: member for one in reversed(shown) for name, member in vars(one).items()}
    for name, member in found.items():
        text = (inspect.getdoc(member) or "").partition("\n\n")[0]
        if name.startswith("_") or not text or not (callable(member) or isinstance(member, MEMBERS)):
            continue
        call = (
            re.sub(r"^\((self|cls)(, )?", "(", signature(member, one_line=True)) if callable(member) else ""
        )
        yield f"- `{name}{call}`: {' '.join(text.split())}"


MEMBERS = (property, cached_property, classmethod, staticmethod)


class _Plain(str):
    """An annotation or a default as written."""

    __repr__ = str.__str__


def signature(function: Any, *, one_line: bool = False) -> str:
    """The parameters of a function, one in a line where one line has no room for them all."""
    written, starred = [], False
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.KEYWORD_ONLY and not starred:
            written.append("*")
        starred |= one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        default = _Plain("...") if inspect.isfunction(one.default) else one.default
        annotation = one.annotation if one.annotation is one.empty else _Plain(one.annotation)
        written.append(str(one.replace(annotation=annotation, default=default)))
    line = f"({', '.join(written)})"
    return line if one_line or len(line) < 80 else "(\n    " + ",\n    ".join(written) + ",\n)"


# The explorer

EXPLORER = "ropepatch-explorer.html"


def explorer() -> str:
    """A link to the explorer, which is made when the site is built."""
    return f'<p><a class="explorer" href="{EXPLORER}">Open the explorer</a></p>'


# What Sphinx calls


def fill_in(app: Any, page: str, text: list[str]) -> None:
    """Put the link to the explorer into its page."""
    text[0] = text[0].replace("<!-- at build: explorer -->", explorer())


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
