"""Every generated block, figure and file of the repository, from eval/results and the registries.

    python docs/tables.py            writes what differs
    python docs/tables.py --check    names what differs, and exits 1

A block stands between `<!-- NAME -->` and `<!-- /NAME -->`. One is measured when it is written and
is not here: the families that tests/extension runs.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "eval" / "benchmarks"))
sys.path.append(str(Path(__file__).parents[1] / "recipes" / "tiny"))
sys.path.append(str(Path(__file__).parents[1] / "eval" / "studies"))
sys.path.extend(
    str(folder)
    for folder in (Path(__file__).parents[1] / "eval" / "studies").glob("*/")
)

import distil_study
import encoding_properties
import engine_types
import engines_study
import explorer_numbers
import generate
import gguf_study
import measured
import pages_study
import pages_tables
import pretraining_recipe
import registries
import remappings_study
import short_tables
import students
from measured import RESULTS, result
from registries import DescribedSchema, published_config

import ropepatch
from ropepatch.evaluation.measuring import Suite
from ropepatch.evaluation.ranking import RULE
from ropepatch.evaluation.results import BASELINE
from ropepatch.gallery.explorer.content import MEASURED
from ropepatch.model.architectures import ENGINE_TYPES as FACTS
from ropepatch.report.plots.lines import figures
from ropepatch.settings import RECIPES, find_shipped, shipped_names
from ropepatch.training.recipe import Recipe, read_recipe

Make = Callable[[], str]
ROOT = Path(__file__).parents[1]
STUDIES = "eval/studies"
SMOLLM2 = (8192, 16384)  # original and target length
SMOLLM2_INSTRUCT = "SmolLM2-135M-Instruct (134,515,008 parameters, original length 8,192; de-quantised weights)"
TRIED = "python eval/studies/pages/pages_study.py SMOLLM2 --to 16k --kinds quote,number,sentence --texts OTHERS"
GEMMA = "Gemma 3 270M (268,098,176 parameters, original length 32,768)"
FURTHER = {  # pages of `eval/run.py`, by file, original and target length
    ("smollm2-fact-chain", *SMOLLM2): SMOLLM2_INSTRUCT,
    ("smollm2", 8192, 32768): SMOLLM2_INSTRUCT,
    ("gemma3-270m", 32768, 65536): GEMMA,
    ("gemma3-270m-quote-number-sentence", 32768, 65536): GEMMA,
}


def rows(name: str) -> list[dict[str, object]]:
    """The rows of a study."""
    found: list[dict[str, object]] = result(name)["rows"]
    return found


def in_sections(make: Callable[[], Iterator[str]]) -> Make:
    """The sections of a page, below each other."""
    return lambda: "\n\n".join(make())


def pages_cost() -> str:
    """Tabulate the cost of the study of long prompts on some published models."""
    smol, base, long = (
        "HuggingFaceTB/SmolLM2-135M",
        "meta-llama/Meta-Llama-3-8B",
        "meta-llama/Llama-3.1-8B",
    )
    cases = (
        (smol, *SMOLLM2),
        (base, 8192, 16384),
        (base, 8192, 32768),
        (long, 131072, 262144),
    )
    return pages_study.costs_table(
        [
            pages_study.full_cost(name, published_config(name) or {}, *lengths)
            for name, *lengths in cases
        ]
    )


def measured_line(
    name: str,
    outcome: pages_tables.Outcome,
    model: str,
    command: str = "python eval/run.py",
) -> str:
    """How the rows of a study of long prompts were measured."""
    file = f"`eval/results/{name}.json`"
    return pages_tables.measured(result(name), outcome, model, command, file)


def smollm2_outcome() -> pages_tables.Outcome:
    """The answers of SmolLM2 on long prompts."""
    return pages_tables.Outcome(rows("smollm2"), *SMOLLM2)


def smollm2(make: Callable[[pages_tables.Outcome], str]) -> str:
    """A table of SmolLM2 on long prompts, and under it how it was measured."""
    outcome, model = smollm2_outcome(), f"{SMOLLM2_INSTRUCT}, plain prompts"
    command = (
        "python eval/studies/pages/pages_study.py SMOLLM2 --to 16k --dtype bfloat16"
    )
    return f"{make(outcome)}\n\n{measured_line('smollm2', outcome, model, command)}"


def smollm2_students() -> Iterator[str]:
    """Tabulate what students of SmolLM2 learned, of kinds that were taught and others."""
    name, (window, *_) = "smollm2-quote-number-sentence", SMOLLM2
    scaled = [row for row in rows(name) if row["method"] != BASELINE]
    for target in (SMOLLM2[1], 2 * SMOLLM2[1]):
        yield f"## To {target:,} tokens"
        outcome = pages_tables.Outcome(scaled, window, target)
        for student in outcome.methods:
            if student.startswith("student"):
                yield pages_tables.gains_table(outcome, student)
        yield pages_tables.answers_tables(outcome)
        yield measured_line(name, outcome, f"{SMOLLM2_INSTRUCT}, plain prompts")


def students_tried() -> str:
    """Tabulate trainings of SmolLM2 that were compared on other prompts."""
    name = "smollm2-trials"
    outcome = pages_tables.Outcome(rows(name), *SMOLLM2)
    heads = ["", "rate", "steps", "tokens", "questions", "layers"]
    recipe = read_recipe("distil")
    cells = {
        student: [
            f"`{student}`",
            f"{one.rate or recipe.trainer['learning_rate']:.1e}",
            str(one.steps or recipe.max_steps),
            f"{one.length or SMOLLM2[1]:,}",
            f"{one.questions / (1 + one.questions):.0%}",
            ", ".join(one.modules or ["attention"]),
        ]
        for student, one in students.TRAININGS.items()
    }
    table = pages_tables.trials_table(outcome, heads, cells)
    told = measured_line(name, outcome, f"{SMOLLM2_INSTRUCT}, plain prompts", TRIED)
    return f"{table}\n\n{told}"


def further_pages() -> str:
    """Tabulate the other models and targets that have rows to compare."""
    parts = []
    for (name, window, target), model in FURTHER.items():
        own = rows(name) if (RESULTS / f"{name}.json").exists() else []
        if {BASELINE, pages_tables.REFERENCE} <= {
            row["method"] for row in own if row["target"] == target
        }:
            outcome = pages_tables.Outcome(own, window, target)
            told = measured_line(name, outcome, model)
            tables = pages_tables.all_tables(own, window, target)
            parts.append(
                f"### {model.split(' (')[0]} to {target:,} tokens\n\n{tables}\n\n{told}"
            )
    return "\n\n".join(parts) or "Not measured yet."


def ranking_rule() -> str:
    """The rule by which methods are ranked and recommended."""
    return textwrap.fill(RULE, 120, break_on_hyphens=False)


BLOCKS: Mapping[str, Mapping[str, Make]] = {  # by page and name
    "docs/guides/fine-tune.md": {
        "training": measured.trained_in_short,
        "hardware": registries.hardware,
    },
    "docs/guides/choose.md": {
        "accuracy": lambda: smollm2(short_tables.accuracy),
        "remappings-measured": lambda: remappings_study.short_table(
            rows("position-remappings")
        ),
    },
    "docs/guides/gguf.md": {
        "gguf": registries.gguf_architectures,
        "gguf-asked": lambda: gguf_study.gguf_table(rows("gguf")),
    },
    "docs/guides/serve.md": {"kv-caches": registries.kv_caches},
    "docs/guides/measure.md": {
        "ranking-rule": ranking_rule,
        "suites": registries.suites,
    },
    "docs/reference/api.md": {"every-name": in_sections(generate.api)},
    "docs/reference/remappings.md": {
        "remappings": registries.remappings,
        "every-remapping": in_sections(generate.position_remappings),
    },
    "docs/reference/commands.md": {"every-command": in_sections(generate.commands)},
    "docs/reference/limits.md": {"costs-in-short": measured.costs_in_short},
    "eval/benchmarks/README.md": {
        "costs": measured.costs,
    },
    "docs/reference/engines.md": {
        "by-model": short_tables.models,
        "engine-versions": registries.engine_versions,
        "engines": generate.engines,
        "engines-probed": lambda: engines_study.probed_table(rows("engines")),
        "trainers-probed": lambda: engines_study.trainers_table(rows("trainers")),
        "engine-types": engine_types.table,
    },
    "docs/reference/encodings.md": {
        "encodings": registries.encodings,
        "every-encoding": in_sections(generate.encodings),
    },
    "docs/reference/methods.md": {
        "methods": registries.methods,
        "every-method": in_sections(generate.methods),
    },
    "docs/reference/tasks.md": {"every-task": in_sections(generate.tasks)},
    "eval/README.md": {"ranking-rule": ranking_rule},
    f"{STUDIES}/README.md": {
        "training-free": measured.training_free,
        "fine-tuned": measured.trained,
        "babyllama": measured.babyllama,
    },
    f"{STUDIES}/pages/pages.md": {
        "pages-cost": pages_cost,
        "smollm2-answers": lambda: smollm2(pages_tables.answers_tables),
        "smollm2-contrasts": lambda: smollm2(pages_tables.contrasts_table),
        "smollm2-losses": lambda: smollm2(pages_tables.losses_table),
        "further-pages": further_pages,
    },
    f"{STUDIES}/distil/distil.md": {
        "smollm2-students": in_sections(smollm2_students),
        "students-tried": students_tried,
        "distil": lambda: distil_study.distil_table(rows("distil")),
    },
    f"{STUDIES}/encodings/encodings.md": {
        "properties": encoding_properties.properties_table,
    },
    f"{STUDIES}/remappings/remappings.md": {
        "remappings": lambda: remappings_study.remappings_table(
            rows("position-remappings")
        ),
        "remappings-cost": lambda: remappings_study.cost_table(rows("attention_cost")),
    },
    "recipes/README.md": {
        "models": registries.models,
        "keys": registries.keys,
        "positions": registries.positions,
    },
    "ropepatch/data/tiny/checkpoint/README.md": {"measured": measured.tiny_checkpoint},
}


def schema(kind: type[Suite | Recipe | pretraining_recipe.Recipe]) -> str:
    """The JSON Schema by which editors complete a file."""
    content = {
        "$schema": "https://json-schema.org/draft/2020-12/schema"
    } | kind.model_json_schema(schema_generator=DescribedSchema)
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


FILES: Mapping[str, Make] = {
    "eval/suites/suite.schema.json": partial(schema, Suite),
    "recipes/recipe.schema.json": partial(schema, Recipe),
    "recipes/tiny/pretraining.schema.json": partial(schema, pretraining_recipe.Recipe),
    str(MEASURED.relative_to(ROOT)): explorer_numbers.text,
    str(FACTS.relative_to(ROOT)): engine_types.text,
}


FIGURES: Mapping[str, Make] = {
    "eval/results/demo-loss.svg": lambda: generate.svg(
        figures(ropepatch.read_results(RESULTS / "demo"))["positions"]
    ),
    "eval/results/tiny-suite-perplexity.svg": lambda: generate.svg(
        figures(ropepatch.read_results(RESULTS / "tiny-suite"))["perplexity"]
    ),
    "eval/results/tiny-suite-positions.svg": lambda: generate.svg(
        figures(ropepatch.read_results(RESULTS / "tiny-suite"))["positions"]
    ),
    **{
        f"docs/figures/{name}.svg": lambda name=name: generate.concept_figures()[name]
        for name in generate.CONCEPTS
    },
}


def with_block(page: str, name: str, text: str) -> str:
    """A page with the text of a block.

    Raises:
        ValueError: It has no such block, or several.
    """
    new, count = re.subn(
        rf"(<!-- {name} -->\n).*?\n?(<!-- /{name} -->)",
        lambda marks: f"{marks[1]}{text}\n{marks[2]}",
        page,
        flags=re.DOTALL,
    )
    if count != 1:
        raise ValueError(f"{count} blocks {name}")
    return new


def generated() -> Iterator[tuple[Path, str, str]]:
    """Every file that holds something generated: its place, its text now, and its text as it would be."""
    for page, blocks in BLOCKS.items():
        new = old = (ROOT / page).read_text(encoding="utf-8")
        for name, make in blocks.items():
            new = with_block(new, name, make())
        yield ROOT / page, old, new
    files = dict(FILES)
    for name in shipped_names(RECIPES):
        place = find_shipped(name, RECIPES, "recipe").relative_to(ROOT)
        files[str(place)] = partial(registries.recipe_file, name)
    for place, make in files.items():
        yield ROOT / place, (ROOT / place).read_text(encoding="utf-8"), make()
    for place, make in FIGURES.items():
        yield ROOT / place, (ROOT / place).read_text(encoding="utf-8"), make()


NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
MOVED = 0.01  # pixels by which a point of a figure may move on another processor


def differing() -> Iterator[tuple[Path, str]]:
    """The files that are not what they would be, and what they would be."""
    for file, old, new in generated():
        if old != new and not (file.suffix == ".svg" and drawn_alike(old, new)):
            yield file, new


def drawn_alike(one: str, other: str) -> bool:
    """Whether two SVG files differ only by rounding, or by the names of letters in a release of a font."""
    one, other = (re.sub(r"(DejaVuSans)-\w+", r"\1", text) for text in (one, other))
    if NUMBER.sub("", one) != NUMBER.sub("", other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(
        abs(float(here) - float(there)) <= MOVED
        for here, there in pairs
        if here != there
    )


def main() -> None:
    """Write what differs, or name it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="name what differs, write nothing, exit 1"
    )
    check = parser.parse_args().check
    for _ in range(3):  # a page may quote another one, which has just been written
        if not (found := list(differing())):
            break
        for file, text in found:
            sys.stdout.write(f"{file.relative_to(ROOT)}\n")
            if not check:
                file.write_text(text, encoding="utf-8")
        if check:
            sys.exit(1)
        engine_types.forget()


if __name__ == "__main__":
    main()
