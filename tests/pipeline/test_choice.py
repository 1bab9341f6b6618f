"""The choice of a method by measuring: who takes part, on what, and what comes of it."""

import json
from dataclasses import replace

import made_results
import pytest
from fake_fits import DIVISORS, fake_fits

import ropepatch
from ropepatch.cli import app
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.ranking import RULE, rank
from ropepatch.evaluation.tasks import PerplexityTask
from ropepatch.fitting.choosing import fit_beside, ranking_suite
from ropepatch.pipeline.choice import choose
from ropepatch.pipeline.results import Results
from ropepatch.report.terminal import print_ranking
from ropepatch.scaling.file import FIT


def of(label, nats, *, inside=1.0):
    """A loss over 1024 tokens, and `inside` in the first 256, in documents that differ alike for all."""
    result = made_results.reading(label, [inside, nats, nats])
    whole = [{"nats": (nats + k) * 100, "tokens": 100} for k in range(10)]
    short = [{"nats": (inside + k) * 50, "tokens": 50} for k in range(10)]
    tables = {**result.tables, "by_document": whole, "by_document_inside": short}
    return replace(result, tables=tables)


BASE = of("as it is", 9.0)


@pytest.fixture
def fits(monkeypatch):
    return fake_fits(monkeypatch)


@pytest.fixture
def two(monkeypatch):
    """Two candidates, for speed."""
    monkeypatch.setattr("ropepatch.fitting.choosing.candidates", lambda: ("linear", "yarn"))


@pytest.fixture
def measures(monkeypatch, two):
    """What was measured, each time; gives the results that are put into it."""
    seen = []
    results = []

    def measure(suite, **options):
        plans = {
            method.label: ropepatch.plan("tiny", to=suite.to[0], method=method.name)
            for method in suite.methods
        }
        seen.append((suite, options, plans))
        return iter(results)

    monkeypatch.setattr("ropepatch.evaluation.measuring.measure", measure)
    return seen, results


# What is measured


def test_options_reach_the_measurement_and_the_fit(fits, measures, tmp_path):
    seen, results = measures
    results += [BASE, of("yarn", 2.0)]
    texts = {"text": "books", "field": "body", "split": "dev"}
    out = tmp_path / "out"
    choose("tiny", to=512, **texts, windows=7, trials=2, out=out, device="meta")
    ((suite, options, _),) = seen
    reading, asking = suite.tasks
    assert reading == PerplexityTask(**texts, windows=7)
    assert (asking.lengths, asking.trials) == ((128, 256, 512), 2)
    assert (suite.models, suite.to, options["out"], options["device"]) == (("tiny",), (512,), out, "meta")
    (asked,) = fits
    wanted = {"model": "tiny", "to": 512, **texts, "spare": 7, "device": "meta", "work": out / FIT / "work"}
    assert {key: asked[key] for key in wanted} == wanted
    assert json.loads((out / FIT / "fit.json").read_text())["method"] == "custom"


def test_a_fit_that_cannot_be_made_is_left_out_with_the_reason_or_refused_if_it_is_named(
    monkeypatch, measures
):
    def fit(model, **options):
        raise RopepatchError("too little text")

    monkeypatch.setattr("ropepatch.fitting.fitting.fit", fit)
    measures[1].extend([BASE, of("yarn", 2.0)])
    lines = []
    choice = choose("tiny", to=1024, say=lines.append)
    assert (choice.left_out, choice.method, choice.fitted) == ({FIT: "too little text"}, "yarn", None)
    assert "warning: without fit: too little text" in lines
    with pytest.raises(RopepatchError, match="too little text"):
        choose("tiny", to=1024, methods=["fit", "yarn"])


def test_several_processes_do_not_fit(monkeypatch, fits, measures):
    monkeypatch.setenv("WORLD_SIZE", "2")
    measures[1].extend([BASE, of("yarn", 2.0)])
    assert choose("tiny", to=1024, device="cpu").left_out == {FIT: "a fit runs in one process"}
    assert fits == []


def test_passkeys_that_the_tokenizer_cannot_write_are_left_out_with_the_reason(monkeypatch, fits, measures):
    monkeypatch.setattr(
        "ropepatch.fitting.choosing.askable", lambda *words: ([], RopepatchError("no digits"))
    )
    seen, results = measures
    results += [BASE, of("yarn", 2.0)]
    lines = []
    assert choose("tiny", to=1024, say=lines.append).left_out == {"passkeys": "no digits"}
    assert "warning: no passkeys are asked for: no digits" in lines
    assert [task.name for task in seen[0][0].tasks] == ["perplexity"]


# What is chosen


@pytest.mark.parametrize(
    ("nats", "recommended", "method", "parameters"),
    [
        ((9.0, 2.0, 1.0), FIT, "custom", {"divisors": DIVISORS, "attention_factor": 1.1}),
        ((9.0, 1.0, 2.0), "yarn", "yarn", {}),
        ((1.0, 1.0, 2.0), None, None, {}),
    ],
    ids=["a fit", "a published method", "nothing"],
)
def test_the_best_is_chosen_or_nothing_where_nothing_helps(
    fits, measures, nats, recommended, method, parameters
):
    measures[1].extend(map(of, ("as it is", "yarn", FIT, "floor"), (*nats, 0.1)))
    choice = choose("tiny", to=1024)
    assert (choice.ranking.recommended, choice.method, choice.parameters) == (recommended, method, parameters)
    assert choice.fitted.scaling.divisors == DIVISORS


# What is told on the way


def test_extend_with_auto_shows_why_on_stderr(fits, measures, run_here, tmp_path):
    measures[1].extend([BASE, of("yarn", 2.0), of(FIT, 1.0)])
    done = run_here("extend", "tiny", "--to", "1k", "--method", "auto", "--dry-run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["method"], plan["parameters"]["attention_factor"]) == ("custom", 1.1)
    assert plan["parameters"]["divisors"] == list(DIVISORS)
    assert done.stderr.startswith(
        "--method auto is searched for before there is a plan; nothing of it is kept"
    )
    assert RULE in done.stderr
    assert "Take fit: 8.000 nats per token less" in done.stderr


def test_extend_with_auto_ends_with_exit_code_1_where_nothing_helps(fits, measures, run_here, tmp_path):
    measures[1].extend([of("as it is", 1.0), of("yarn", 1.5)])
    done = run_here("extend", "tiny", "--to", "1k", "--method", "auto", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Do not extend" in done.stderr
    assert "error" not in done.stderr
    with pytest.raises(RopepatchError, match="Do not extend"):
        ropepatch.extend("tiny", to=1024, method="auto", dry_run=True)


def test_auto_takes_no_settings_and_no_other_processes(monkeypatch, fits, measures):
    measures[1].extend([BASE, of("yarn", 2.0)])
    with pytest.raises(RopepatchError, match="--set beside --method auto"):
        ropepatch.extend("tiny", to=1024, method="auto", beta=3, dry_run=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RopepatchError, match="in one process"):
        ropepatch.extend("tiny", to=1024, method="auto", dry_run=True)


@pytest.mark.parametrize("allowed", [True, False])
def test_auto_chooses_a_map_only_where_its_code_is_allowed_and_puts_that_on_record(
    fits, measures, monkeypatch, tmp_path, allowed
):
    seen, results = measures
    results += [BASE, of("yarn", 2.0), *[replace(of("rerope", 1.0), scaling={"method": "rerope"})] * allowed]
    asked = {}
    monkeypatch.setattr(
        "ropepatch.pipeline.learned._remembered", lambda terms, *places: asked.update(terms) or {}
    )
    chosen = ropepatch.extend("tiny", to=1024, method="auto", allow_code=allowed, dry_run=True)
    assert chosen.plan.method.name == ("rerope" if allowed else "yarn")
    assert ("rerope" in seen[0][2]) == allowed
    assert asked.get("allow_code") == (True if allowed else None)
    result = choose("tiny", to=1024, allow_code=allowed)
    assert (result.method, result.parameters) == (chosen.plan.method.name, {})
    assert ropepatch.plan("tiny", to=1024, method=result.method) == chosen.plan


TABLE = [BASE, of("yarn", 2.0, inside=1.25), of("linear", 2.5, inside=1.5), of("floor", 0.125)]


def table(capsys, results):
    """The words of each line of a ranking."""
    print_ranking(rank(results, base="as it is", ignored=["floor"]), results)
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_the_table_marks_the_front_and_shows_the_short_loss_with_its_interval_and_the_rule(capsys):
    lines = table(capsys, TABLE)
    yarn, linear, base, floor = lines[1:5]
    assert yarn == ["yarn", "6.500", *yarn[2:5], "1.250", "+0.250", "(+0.250", "to", "+0.250)", "*"]
    assert linear[:2] == ["linear", "7.000"]
    assert linear[5:] == ["0.500", "(0.500", "to", "0.500)", "1.500", "+0.500", "(+0.500", "to", "+0.500)"]
    assert (base[3], base[-1]) == ("13.500", "*")
    assert floor == ["floor", "0.125"]
    assert ["Rule:", *RULE.split()] in lines
    assert not any("tied" in " ".join(line) for line in lines[1:5])


def test_table_advice_and_rule_fit_the_screen(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    print_ranking(rank(TABLE, base="as it is", ignored=["floor"]), TABLE)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert " ".join(printed.split()).endswith(f"Rule: {RULE}")


def test_an_interval_that_is_not_known_is_left_out_of_the_table(capsys):
    def old(result):
        return replace(result, tables={k: v for k, v in result.tables.items() if k != "by_document_inside"})

    yarn = table(capsys, list(map(old, TABLE)))[1]
    assert yarn[5:] == ["1.250", "+0.250", "*"]


def test_what_the_text_does_not_tell_apart_is_called_tied(capsys):
    noisy = of("linear", 2.5)
    nats = [row | {"nats": row["nats"] + 90 * (-1) ** k} for k, row in enumerate(noisy.tables["by_document"])]
    noisy = replace(noisy, tables=noisy.tables | {"by_document": nats})
    lines = table(capsys, [BASE, of("yarn", 2.25), noisy])
    assert [line[0] for line in lines[1:4] if "tied" in " ".join(line)] == ["linear"]


@pytest.fixture
def compared(monkeypatch, capsys):
    """What compare measures, and what it prints of results."""

    def compare(results, *words):
        calls = []

        def measured(suite, **options):
            calls.append((suite, [ropepatch.plan("tiny", to=1024, method=m.name) for m in suite.methods]))
            return Results(tuple(results))

        monkeypatch.setattr("ropepatch.pipeline.choice.measured", measured)
        app(["compare", "tiny", "--to", "1k", *words], standalone_mode=False)
        return calls, capsys.readouterr()

    return compare


def test_compare_of_all_measures_the_candidates_once_each(compared, two):
    ((suite, _),), _ = compared([BASE, of("yarn", 1.0)], "--methods", "yarn,all", "--trials", "0")
    assert [method.label for method in suite.methods] == ["yarn", "linear"]
    assert [task.name for task in suite.tasks] == ["perplexity"]


def test_compare_gives_no_command_where_nothing_helps(compared):
    _, printed = compared([of("as it is", 1.0), of("yarn", 1.5)])
    assert "Do not extend" in printed.out
    assert "ropepatch extend" not in printed.out


def test_compare_of_a_fit_measures_what_it_found_and_says_how_to_have_it(compared, fits):
    words = ("--methods", "fit,yarn", "--text", "my books", "--windows", "5")
    ((suite, plans),), printed = compared([BASE, of("yarn", 2.0), of(FIT, 1.0)], *words)
    assert [method.label for method in suite.methods] == ["yarn", FIT]
    assert plans[1].scaling.divisors == DIVISORS
    assert fits[0]["spare"] == 5
    again = "ropepatch extend tiny --to 1k --method auto --text 'my books' --field text --split test"
    assert f"\n  {again}\n" in printed.out


def test_compare_with_a_folder_for_results_keeps_the_fit(compared, fits, tmp_path):
    words = ("--methods", "fit,yarn", "--out", str(tmp_path))
    _, printed = compared([BASE, of("yarn", 2.0), of(FIT, 1.0)], *words)
    file = tmp_path / FIT / "fit.json"
    assert f"\n  ropepatch extend tiny --to 1k --method {file}\n" in printed.out
    assert ropepatch.plan("tiny", to=1024, method=str(file)).scaling.divisors == DIVISORS


def test_compare_refuses_an_unknown_method_before_it_fits(compared, fits):
    with pytest.raises(RopepatchError, match="unknown method 'yarnn'"):
        compared([], "--methods", "fit,yarnn")
    assert fits == []


def test_compare_takes_a_scaling_file_for_a_method(compared, fits, tmp_path):
    suite, _ = ranking_suite("tiny", [], to=1024, trials=0)
    method, _ = fit_beside(suite, tmp_path)
    words = ("--methods", f"yarn,{method.name}")
    ((measured, _),), printed = compared([BASE, of("yarn", 2.0), of(FIT, 1.0)], *words)
    assert [method.label for method in measured.methods] == ["yarn", FIT]
    assert f"\n  ropepatch extend tiny --to 1k --method {method.name}\n" in printed.out
