"""The choice of a method by measuring: who takes part, on what, and what comes of it."""

import json
import shutil
from dataclasses import replace

import pytest
from fake_fits import DIVISORS, fake_fits
from made_results import reading
from tokenizer_makes import whole_words

import ropepatch
from ropepatch.cli import app
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.tasks import PerplexityTask, RetrievalTask
from ropepatch.model.source import find_source
from ropepatch.pipeline.choice import choose, fit_beside, ranking_suite
from ropepatch.pipeline.results import Results
from ropepatch.pipeline.running import bar
from ropepatch.scaling.file import FIT


def of(label, nats):
    """A loss over 1024 tokens, and of 1 nat in the first 256."""
    return reading(label, [1.0, nats, nats])


BASE = of("baseline", 9.0)


@pytest.fixture
def fits(monkeypatch):
    return fake_fits(monkeypatch)


@pytest.fixture
def two(monkeypatch):
    """Two candidates, for speed."""
    monkeypatch.setattr("ropepatch.pipeline.evaluation.candidates", lambda: ("linear", "yarn"))


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
    choose("tiny", to=512, **texts, windows=7, haystacks=2, keys=3, out=out, device="meta")
    ((suite, options, _),) = seen
    reading, asking = suite.tasks
    assert reading == PerplexityTask(**texts, windows=7)
    assert asking == RetrievalTask(haystacks=2, keys=3)
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


def test_keys_that_the_tokenizer_cannot_write_are_left_out_with_one_warning(fits, measures, tmp_path):
    folder = shutil.copytree(find_source("tiny", None, weights=True).folder, tmp_path / "wordless")
    whole_words(digits="").save_pretrained(folder)
    (tmp_path / "text.txt").write_text("a bear went to find a ball. " * 2000)
    seen, results = measures
    results += [BASE, of("yarn", 2.0)]
    lines = []
    choice = choose(folder, to=1024, methods=["yarn"], text=tmp_path / "text.txt", say=lines.append)
    (warning,) = (line for line in lines if line.startswith("warning: no retrieval: "))
    assert "cannot write" in warning
    assert choice.left_out == {"retrieval": warning.removeprefix("warning: no retrieval: ")}
    assert [task.name for task in seen[0][0].tasks] == ["perplexity"]
    assert (choice.method, choice.ranking.rows[0].found) == ("yarn", None)


# What is chosen


@pytest.mark.parametrize(
    ("nats", "recommended", "method", "parameters"),
    [
        ((9.0, 2.0, 1.0), FIT, "custom", {"divisors": DIVISORS, "attention_factor": 1.1, "queries": None}),
        ((9.0, 1.0, 2.0), "yarn", "yarn", {}),
        ((1.0, 1.0, 2.0), None, None, {}),
    ],
    ids=["a fit", "a published method", "nothing"],
)
def test_the_best_is_chosen_or_nothing_where_nothing_helps(
    fits, measures, nats, recommended, method, parameters
):
    measures[1].extend(map(of, ("baseline", "yarn", FIT, "floor"), (*nats, 0.1)))
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
    assert done.stderr.startswith("method auto is searched for before there is a plan; nothing of it is kept")
    assert "Take fit: it gains +8.000" in done.stderr


def test_extend_with_auto_ends_with_exit_code_1_where_nothing_helps(fits, measures, run_here, tmp_path):
    measures[1].extend([of("baseline", 1.0), of("yarn", 1.5)])
    done = run_here("extend", "tiny", "--to", "1k", "--method", "auto", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Do not extend" in done.stderr
    assert "error:" not in done.stderr
    with pytest.raises(RopepatchError, match="Do not extend"):
        ropepatch.extend("tiny", to=1024, method="auto", dry_run=True)


def test_auto_takes_no_settings_and_no_other_processes(monkeypatch, fits, measures):
    measures[1].extend([BASE, of("yarn", 2.0)])
    with pytest.raises(RopepatchError, match="`settings` beside `method` auto"):
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


def test_compare_without_haystacks_ranks_by_loss_alone_and_says_nothing_of_retrieval(compared, two):
    words = ("--methods", "yarn,all", "--haystacks", "0")
    ((suite, _),), printed = compared([BASE, of("linear", 2.0), of("yarn", 1.0)], *words)
    assert [method.label for method in suite.methods] == ["yarn", "linear"]
    assert [task.name for task in suite.tasks] == ["perplexity"]
    table, _, advice = printed.out.partition("Take yarn: ")
    assert [line.split()[0] for line in table.splitlines()[1:4]] == ["yarn", "linear", "baseline"]
    for word in ("etriev", "answer", "found", "haystack"):
        assert word not in table + advice + printed.err


def test_compare_gives_no_command_where_nothing_helps(compared):
    _, printed = compared([of("baseline", 1.0), of("yarn", 1.5)])
    assert "Do not extend" in printed.out
    assert "ropepatch extend" not in printed.out


def test_compare_of_a_fit_measures_what_it_found_and_says_how_to_have_it(compared, fits):
    words = ("--methods", "fit,yarn", "--text", "my books", "--windows", "5")
    ((suite, plans),), printed = compared([BASE, of("yarn", 2.0), of(FIT, 1.0)], *words)
    assert [method.label for method in suite.methods] == ["yarn", FIT]
    assert plans[1].scaling.divisors == DIVISORS
    assert fits[0]["spare"] == 5
    again = "ropepatch extend tiny --to 1k --method fit --text 'my books' --field text --split test"
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
    suite, _ = ranking_suite("tiny", [], to=1024, haystacks=0)
    method, _ = fit_beside(suite, tmp_path, revision=None, device="cpu", progress=bar)
    words = ("--methods", f"yarn,{method.name}")
    ((measured, _),), printed = compared([BASE, of("yarn", 2.0), of(FIT, 1.0)], *words)
    assert [method.label for method in measured.methods] == ["yarn", FIT]
    assert f"\n  ropepatch extend tiny --to 1k --method {method.name}\n" in printed.out
