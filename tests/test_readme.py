"""Every command and code block of README and site runs, and every generated block is what its source says."""

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import robustness
import typer
from methods import LENGTH_DEPENDENT, NEED_MORE
from readme import DOCUMENTS, ROOT, block_names, check_block, code_blocks, commands, updating
from retrieval_speed import EACH, ONCE
from tiny_checkpoint import tiny_llama_folder
from transformers import AutoConfig

import ropepatch
from ropepatch import ENCODINGS, MAPS, METHODS
from ropepatch.cli import app, main
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.measuring import measure
from ropepatch.evaluation.results import Result, read_result
from ropepatch.evaluation.suites import Suite
from ropepatch.model.source import TINY
from ropepatch.report.plots import figures, save_figure

RESULTS = ROOT / "eval" / "results"
PROTOCOL = ROOT / "eval" / "README.md"
MEASURED = ROOT / "eval" / "studies" / "README.md"
COSTS = ROOT / "eval" / "benchmarks" / "README.md"


# Programs that are not here: of their lines what they start of ropepatch is parsed.
ELSEWHERE = ("accelerate", "torchrun", "vllm", "llama-cli", "llama-server", "ollama", "mlx_lm.generate")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with the checkpoints and the books that the documents speak of, small and random."""
    folder = tmp_path_factory.mktemp("readme")
    # One head of 16: at 32k tokens attention is all that takes time.
    tiny_llama_folder(
        folder / "llama-2-7b",
        window=4096,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    AutoConfig.for_model("qwen3_5").save_pretrained(folder / "qwen3.5")
    AutoConfig.for_model("qwen3", max_position_embeddings=40_960).save_pretrained(folder / "qwen3-8b")
    shutil.copytree(RESULTS / "tiny-suite", folder / "results")  # so the suite is not measured again
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text("a rope has no end until it is cut. " * 1500)
    return folder


EXTENDED = "llama-2-7b-yarn-32k"


def extended(workplace: Path) -> None:
    """Have the checkpoint that the documents extend, by one of their commands or by this."""
    if not (workplace / EXTENDED).exists():
        ropepatch.extend(ropepatch.plan(workplace / "llama-2-7b", to=32_768), workplace / EXTENDED)


def measure_few(suite: Suite, **options) -> Iterator[Result]:
    """A suite with eight windows and three haystacks."""
    few = {"perplexity": {"windows": 8}, "retrieval": {"haystacks": 3}}
    tasks = tuple(task.model_copy(update=few.get(task.name, {})) for task in suite.tasks)
    return measure(suite.model_copy(update={"tasks": tasks}), **options)


SLOW = ("ropepatch fit", "ropepatch compare tiny")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(line, marks=pytest.mark.slow)
        if line.startswith(SLOW) or "--method auto" in line
        else line
        for line in commands()
        if line.startswith("ropepatch ") and line != "ropepatch demo"  # which tests/cli/test_demo.py runs
    ],
)
def test_a_command_of_the_documents_runs(workplace, monkeypatch, capsys, command):
    words = []
    for word in shlex.split(command):
        words += sorted(str(path) for path in workplace.glob(word)) if "*" in word else [word]
    monkeypatch.chdir(workplace)
    for limit, number in {"examples.TALES": 8, "examples.HELD_OUT": 2, "descent.MIXTURES": 2}.items():
        monkeypatch.setattr(f"ropepatch.fitting.{limit}", number)
    monkeypatch.setattr("ropepatch.fitting.descent.BATCH_TOKENS", 512)
    monkeypatch.setattr("ropepatch.pipeline.choice.candidates", lambda: ("linear", "yarn"))
    for amount, number in {"windows": 8, "haystacks": 3}.items():
        monkeypatch.setitem(ropepatch.choose.__kwdefaults__, amount, number)
    monkeypatch.setitem(ropepatch.fit.__kwdefaults__, "steps", 5)
    if "--suite" not in command:  # what a suite measures is there, if it is the same
        monkeypatch.setattr("ropepatch.evaluation.measuring.measure", measure_few)
    if "--out fitted.json" in command:
        (workplace / "fitted.json").unlink(missing_ok=True)
    elif "--method fitted.json" in command and not (workplace / "fitted.json").exists():
        ropepatch.fit("tiny", to=512, steps=2, init="yarn").save(workplace / "fitted.json")
    if command.startswith("ropepatch extend llama-2-7b --to 32k"):  # another worker may have made it
        shutil.rmtree(workplace / EXTENDED, ignore_errors=True)
    elif EXTENDED in command:
        extended(workplace)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    done = capsys.readouterr()
    assert end.value.code in (None, 0), done.err
    assert done.out


OTHERS = [line for line in commands() if not line.startswith("ropepatch ")]


@pytest.mark.parametrize("command", OTHERS)
def test_every_other_command_could_be_run(command):
    """A target of the Makefile, an extra of the package, Python, or a program that is named above."""
    program, *words = shlex.split(command)
    if program == "make":  # `make test` cannot run itself; CI runs both on a clean checkout
        subprocess.run([program, *words, "--dry-run"], cwd=ROOT, check=True, capture_output=True)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        install, *packages = words
        assert install == "install"
        for package in packages:
            named = re.fullmatch(r"(?:\.|ropepatch)(?:\[([\w,]+)\])?", package)
            assert set((named[1] or "all").split(",")) <= extras.keys()
    elif program == "python":
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)
    else:
        assert program in ELSEWHERE
        if "ropepatch" in words:
            name, *rest = words[words.index("ropepatch") + 1 :]
            typer.main.get_command(app).commands[name].make_context(name, rest)


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(file, id=str(file.relative_to(ROOT)))
        for file, code in code_blocks("python").items()
        if code
    ],
)
def test_the_python_of_a_document_runs(workplace, monkeypatch, capsys, document):
    """Block after block, as a reader would; what they make is removed, so that pages can make the same."""
    extended(workplace)
    there = set(workplace.iterdir())
    monkeypatch.chdir(workplace)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in code_blocks("python")[document]:
        exec(compile(block, str(document), "exec"), names)
    for new in set(workplace.iterdir()) - there:
        shutil.rmtree(new)


def test_every_generated_block_of_the_documents_is_held_against_its_source():
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    unchecked = [name for name in block_names() if not re.search(rf'_block\(\s*"{name}"', tests)]
    assert not unchecked


def test_every_link_of_the_documents_leads_somewhere():
    for document in (*DOCUMENTS, PROTOCOL, MEASURED, COSTS, TINY / "README.md"):
        for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", document.read_text(encoding="utf-8")):
            drawn = document.parent.name == "docs" and link.startswith("figures/")  # by docs/generate.py
            assert drawn or (document.parent / link).exists(), f"{document}: {link}"


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table."""
    head, *lines = (f"| {' | '.join(row)} |" for row in (heads, *rows))
    return "\n".join([head, f"|{'---|' * (head.count(' | ') + 1)}", *lines])


def test_the_tables_of_encodings_methods_and_maps_are_the_registries():
    encodings = [(f"`{e.name}`", e.family, e.formula, e.paper) for e in ENCODINGS.values()]
    check_block("encodings", markdown(("encoding", "family", "scores", "source"), encodings))
    check_block("methods", rows_of(METHODS.values(), "frequencies"))
    check_block("maps", rows_of(MAPS.values(), "D is read as"))


def rows_of(kinds: Iterable[type], head: str) -> str:
    rows = [(f"`{kind.name}`", kind.formula, kind.paper, kind.saved_as) for kind in kinds]
    return markdown(("method", head, "source", "saved as"), rows)


def test_the_babyllama_table_is_its_result_file():
    results = json.loads((RESULTS / "babyllama-4x.json").read_text())
    first = results[0]
    lines = [
        f"Perplexity of the first tokens of {first['parameters']['pieces']} windows of "
        f"{first['parameters']['lengths'][-1]} tokens "
        f"({first['env']['dtype'].removeprefix('torch.')}, {first['env']['device']}):",
        "",
    ]
    by_length = (
        [row for row in result["rows"] if row["measure"] == "loss" and [*row["at"]] == ["length"]]
        for result in results
    )
    rows = [
        [str(same[0]["at"]["length"]), *(f"{math.exp(row['value']):.2f}" for row in same)]
        for same in zip(*by_length, strict=True)
    ]
    table = markdown(["tokens", *(result["label"] for result in results)], rows)
    check_block("babyllama", "\n".join([*lines, table]), MEASURED)


def test_the_llama_cpp_table_is_its_result_file():
    result = json.loads((RESULTS / "llama-cpp.json").read_text())
    lines = [
        f"{result['tokens']} tokens of {result['text']} in windows of {result['window']}; llama-cpp-python "
        f"{result['llama_cpp_python']}, gguf {result['gguf']}, transformers {result['transformers']}:",
        "",
        "| | perplexity, ours | perplexity, llama.cpp | largest difference of a logit |",
        "|---|---|---|---|",
    ]
    for name, row in result["methods"].items():
        assert row["agrees"]
        both = " | ".join(f"{row[key]:.4f}" for key in ("perplexity_ours", "perplexity_llama_cpp"))
        lines.append(f"| `{name}` | {both} | {row['largest_logit_difference']:.1e} |")
    check_block("llama-cpp", "\n".join(lines), MEASURED)


def test_the_figure_of_the_guide_is_drawn_from_the_results(tmp_path):
    drawn = figures([read_result(file) for file in sorted((RESULTS / "tiny-suite").glob("*.json"))])
    _, svg = save_figure(drawn["perplexity"], tmp_path / "tiny-suite-perplexity")
    if updating():
        shutil.copy(svg, RESULTS)
    ours, there = (re.sub(r"(DejaVuSans)-\w+", r"\1", file.read_text()) for file in (RESULTS / svg.name, svg))
    assert ours == there  # but for the numbers of letters, which another release of the font has otherwise


@pytest.fixture(scope="module")
def adaptation() -> dict:
    return json.loads((RESULTS / "adaptation.json").read_text())


ADAPTED = {  # by run: method, and the rows it trains on
    "yarn": "`yarn`, both",
    "linear": "`linear`, both",
    "ntk": "`ntk`, both",
    "short": "`yarn`, rows of 256",
    "true": "`yarn`, rows of 2048",
    "true, time of short": "`yarn`, rows of 2048, the time of rows of 256",
}
LAST = "1024 to 2048"


def test_the_adaptation_tables_are_the_result_file(adaptation):
    runs, floor, free = adaptation["runs"], adaptation["floor"], adaptation["training_free"]
    spans = [span for span in floor if span != "0 to 2048"]
    heads = ["", *(f"nats {span}" for span in spans), "keys at 2048", "short context", "tokens"]
    rows = [heads, ["---"] * len(heads)]
    for key, name in ADAPTED.items():
        run = runs[key]
        change, tokens = f"{run['gate']['increase']:+.1%}", f"{run['tokens'] / 1e6:.2f} M"
        rows.append([name, *_above(run["nats"], floor), found(run), change, tokens])
    for method, run in free.items():
        name = f"`{method}`, not trained"
        rows.append([name, *_above(run["nats"], floor), found(run), "", "0"])
    rows.append(["floor", *(f"{floor[span]:.3f}" for span in spans), "", "", ""])
    stories = runs["babyllama"]
    base = stories["base"]
    text = (
        f"babyllama-361 on {stories['windows']} held-out windows of 2048 tokens, trained on other stories "
        f"by the same settings: {stories['adapted'][LAST]:.3f} nats per token at 1024 to 2048, training-free "
        f"{stories['training-free'][LAST]:.3f}. The base model within its context: {base['0 to 256']:.3f} on "
        f"the first 256 tokens of these windows, {base['1024 to 2048, 256 tokens at a time']:.3f} on the "
        "text of 1024 to 2048, 256 tokens at a time."
    )
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    check_block("adaptation", f"{table}\n\n{text}", MEASURED)


def keys_of(run: dict) -> Mean:
    """The share of the passkeys found at the target, each in a haystack of its own."""
    correct, n = run["keys"]["2048"]
    return Mean.of([(1, 1)] * correct + [(0, 1)] * (n - correct), share=True)


def found(run: dict) -> str:
    """How many keys, with the interval."""
    low, high = keys_of(run).interval()
    return f"{keys_of(run).value:.0%} ({low:.0%} to {high:.0%})"


def _above(nats: dict, floor: dict) -> list[str]:
    """Losses, and how far above the floor they are."""
    spans = [span for span in floor if span != "0 to 2048"]
    return [f"{nats[span]:.3f} ({nats[span] / floor[span] - 1:.1%})" for span in spans]


def test_the_adaptation_of_the_front_page_is_the_result_file(adaptation):
    free, floor = adaptation["training_free"], adaptation["floor"]
    run = adaptation["runs"]["yarn"]
    rows = {"before": free["none"], "scaled, not trained": free["yarn"], "trained": run}
    lines = [
        "| `tiny`, 256 to 2048, YaRN | nats 0 to 256 | nats 1024 to 2048 | keys at 2048 |",
        "|---|---|---|---|",
    ]
    for name, row in rows.items():
        nats = row["nats"]
        lines.append(f"| {name} | {nats['0 to 256']:.3f} | {nats[LAST]:.3f} | {found(row)} |")
    lines.append(f"| floor | {floor['0 to 256']:.3f} | {floor[LAST]:.3f} | |")
    check_block("adaptation", "\n".join(lines))


def test_the_recipe_of_tiny_reaches_what_it_was_made_for(adaptation):
    run, floor = adaptation["runs"]["yarn"], adaptation["floor"]
    assert keys_of(run).value >= 0.95
    assert run["nats"][LAST] <= 1.05 * floor[LAST]
    assert run["gate"]["increase"] <= 0.02
    assert run["steps"] <= 1000
    stories = adaptation["runs"]["babyllama"]
    assert stories["adapted"][LAST] <= 1.03 * stories["base"]["0 to 256"]


@pytest.fixture(scope="module")
def training_free() -> dict:
    return json.loads((RESULTS / "tiny-training-free.json").read_text())


def test_the_training_free_tables_are_the_result_file(training_free):
    results = training_free["results"]
    tables = [f"**{factor} x**\n\n{method_table(training_free, factor)}" for factor in results]
    absent = ", ".join(f"`{name}`" for name in NEED_MORE if name not in training_free["given"])
    given = ", ".join(f"`{name}` with {values}" for name, values in training_free["given"].items())
    notes = f"Given parameters: {given}. Not measured, because they need lists that a search finds: {absent}."
    check_block("training-free", "\n\n".join([*tables, notes]), MEASURED)
    chosen = ["none", "linear", "ntk", "ntk-by-parts", "llama3", "yarn"]
    check_block("training-free", method_table(training_free, "4", chosen))


def test_what_the_protocol_says_the_tables_teach_is_in_them(training_free):
    results, floors = training_free["results"], training_free["floors"]

    def nats(factor: int, method: str, stretch: int = -1) -> float:
        return list(results[str(factor)][method]["nats"].values())[stretch]

    def keys(factor: int, method: str) -> list[int]:
        return [cell["correct"] for cell in results[str(factor)][method]["passkey"].values()]

    def floor(factor: int, name: str = "floor") -> float:
        return list(floors[str(factor)][name].values())[-1]

    for factor in (2, 4, 8):
        assert nats(factor, "linear", 0) > 3
        assert not any(keys(factor, "linear"))
        for stretch in range(1, len(keys(factor, "yarn"))):
            assert nats(factor, "ntk-by-parts", stretch) > nats(factor, "yarn", stretch)
        for blind in ("none", "giraffe-power", "p-rope"):
            assert nats(factor, blind) > 1.5 * floor(factor)
    for method in ("yarn", "llama3"):
        assert nats(2, method) < floor(2) + 0.01
        assert nats(2, method) < floor(2, "256-token floor") - 0.01
        assert nats(2, method, 0) < nats(2, "none", 0) + 0.001
    assert nats(4, "llama3") < floor(4, "256-token floor") - 0.01
    for level in ("yarn", "cope"):
        assert abs(nats(4, level) - floor(4, "256-token floor")) < 0.01
    for dynamic, static in (("dynamic", "ntk"), ("dynamic-linear", "linear"), ("dynamic-yarn", "yarn")):
        for rows in results.values():
            one, other = rows[dynamic], rows[static]
            assert (one["nats"], one["passkey"]) == (other["nats"], other["passkey"])
    static = [name for name in results["8"] if name not in LENGTH_DEPENDENT]
    assert min(static, key=lambda name: nats(8, name)) == "yarn"
    assert min(nats(8, name) for name in static if name != "yarn") > nats(8, "yarn") + 0.1
    assert abs(nats(8, "yarn") - floor(8, "256-token floor")) < 0.01
    assert nats(8, "yarn") > floor(8) + 0.1
    for factor in (4, 8):
        assert nats(factor, "ntk", 0) < nats(factor, "none", 0) + 0.01
        assert nats(factor, "ntk") > floor(factor, "256-token floor") + 0.2


def method_table(record: dict, factor: str, names: list[str] | None = None) -> str:
    """Loss by stretch and keys by length, one method per row, the floors below."""
    methods, floors = record["results"][factor], record["floors"][factor]
    spans = list(floors["floor"])
    lengths = list(methods["none"]["passkey"])
    heads = [*(f"nats {span}" for span in spans), *(f"keys at {length}" for length in lengths)]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for name in names or [name for name in METHODS if name in methods or name not in NEED_MORE]:
        if name not in methods:
            lines.append(f"| `{name}` | not yet measured |{' |' * (len(heads) - 1)}")
            continue
        nats = [f"{methods[name]['nats'][span]:.2f}" for span in spans]
        keys = [f"{cell['correct']}/{cell['n']}" for cell in methods[name]["passkey"].values()]
        lines.append(f"| `{name}` | {' | '.join(nats + keys)} |")
    for name, losses in floors.items():
        nats = (f"{value:.2f}" for value in losses.values())
        lines.append(f"| {name} | {' | '.join(nats)} |{' |' * len(lengths)}")
    return "\n".join(lines)


def test_the_costs_are_those_of_the_benchmarks():
    extend = json.loads((RESULTS / "extend_cost.json").read_text())
    patch = json.loads((RESULTS / "patch_overhead.json").read_text())
    runs, ratio = extend["runs"], extend["ratio_of_seconds"]["extend / imports"]
    rows = [
        f"| `extend --link-weights`, {extend['checkpoint']['apparent_gb']:.0f} GB in "
        f"{extend['checkpoint']['files']} files | {spread(runs['extend']['seconds'], '.1f')} s, "
        f"{runs['extend']['peak_mb']['median']:.0f} MB | "
        f"{spread(ratio, '.2f')} x importing torch and transformers |"
    ]
    start = json.loads((RESULTS / "start_cost.json").read_text())
    for name, what, baseline in (
        ("methods", "`ropepatch methods`", "import torch"),
        ("plan tiny --to 2q", "a wrong length, name or option", "import torch"),
        ("plan tiny --to 2k", "`ropepatch plan`", "import torch, transformers.modeling_utils"),
    ):
        rows.append(
            f"| {what} | {spread(start['cpu_seconds'][name], '.2f')} s of CPU time | "
            f"{spread(start['ratio'][f'{name} / {baseline}'], '.2f')} x `{baseline}` |"
        )
    rows += [
        f"| forward of {f['tokens']} tokens, {f['mode']} | "
        f"| {spread(f['ratios']['patched / native'], '.3f')} x the same scaling in stock transformers |"
        for f in patch["forward"]
    ]
    rows.append(f"| `patch()` | {spread(patch['patch_milliseconds']['patch'], '.1f')} ms | |")
    reading = json.loads((RESULTS / "perplexity_speed.json").read_text())
    for name, what in (
        ("curve", f"perplexity at {len(reading['curve']['lengths'])} lengths to 16 x the context"),
        ("sliding", f"perplexity, {reading['sliding']['protocol'].replace('=', ' ')}"),
    ):
        seconds, ratio = reading[name]["seconds"]["ours"], reading[name]["published / ours"]
        rows.append(
            f"| {what} | {spread(seconds, '.2f')} s | "
            f"{spread(ratio, '.2f')} x faster than one pass per {'length' if name == 'curve' else 'window'} |"
        )
    memory = reading["memory"]["one-pass"]
    rows.append(
        f"| memory of perplexity at 32k tokens, 32k vocabulary | {memory['ours']['net_mib']:.0f} MiB | "
        f"{memory['ours / published']:.3f} x that with all logits |"
    )
    asking = json.loads((RESULTS / "retrieval_speed.json").read_text())
    for one in asking["timed"]:
        rows.append(
            f"| retrieval on {one['model']}, {one['answers']} answers at {len(one['lengths'])} lengths to "
            f"{one['lengths'][-1]} tokens | {spread(one['seconds'][ONCE], '.1f')} s | "
            f"{spread(one[f'{EACH} / {ONCE}'], '.1f')} x faster than one prompt for each answer |"
        )
    for one in asking["counted"]:
        rows.append(
            f"| retrieval to {one['lengths'][-1]} tokens, {one['haystacks']} haystacks, "
            f"{one['keys']} keys of each of {len(one['kinds'])} kinds | "
            f"{one['tokens'][ONCE]['all'] / 1e6:.2f} M tokens read | "
            f"{one[f'tokens: {EACH} / {ONCE}']['all']:.0f} x fewer than by one prompt for each answer |"
        )
    training = json.loads((RESULTS / "train_cost.json").read_text())
    speed, memory = training["speed"], training["memory"]
    rows.append(
        f"| a training step of {training['tokens']} tokens, 32k vocabulary | "
        f"{spread(speed['tokens_per_second']['ours'], '.0f')} tokens/s, "
        f"{memory['ours']['net_mib']:.0f} MiB | {spread(speed['ours / stock'], '.2f')} x the speed and "
        f"{memory['ours / stock']:.2f} x the memory of one with all logits |"
    )
    machine = extend["environment"]
    header = f"| {machine['cores']} cores, {machine['cpu']} | median (quartiles) | ratio (quartiles) |"
    check_block("costs", "\n".join([header, "|---|---|---|", *rows]))


def test_the_table_of_attacks_is_the_result_file():
    result = json.loads((RESULTS / "robustness.json").read_text())
    head, *lines = robustness.rows(result)
    check_block("robustness", markdown(head, lines))


def spread(figure: dict[str, float], form: str) -> str:
    return f"{figure['median']:{form}} ({figure['q1']:{form}} to {figure['q3']:{form}})"
