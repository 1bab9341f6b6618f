"""The choice of a method by measuring: its candidates, its data and its outcome."""

import json
from dataclasses import replace

import pytest
import torch
from fake_fits import DIVISORS, fake_fits
from made_results import reading
from methods import STATIC

import ropepatch
from ropepatch.attention import REMAPPINGS
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.suites import Method
from ropepatch.evaluation.tasks import PerplexityTask, RetrievalTask
from ropepatch.fitting.examples import read_splits
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.pipeline.choice import CompareOptions, fit_apart, ranking_suite
from ropepatch.pipeline.evaluation import candidates, participants
from ropepatch.processes import Processes
from ropepatch.progress import bar
from ropepatch.scaling import METHODS
from ropepatch.scaling.file import FIT
from ropepatch.scaling.powers import PositionInterpolation
from ropepatch.scaling.ramps import YaRN

# Candidates


def test_registered_static_methods_without_required_parameters_are_candidates(
    monkeypatch,
):
    before = {*candidates()}
    usual = {"linear", "ntk", "ntk-by-parts", "yarn", "llama3", "p-rope", "resonance", "cope"}
    assert usual <= before < {*STATIC}
    assert not {"none", "abf", "custom", "longrope", "longrope-switch", "dynamic"} & before

    class Mine(PositionInterpolation):
        name = "mine"
        share: float = 0.5

    class Needy(PositionInterpolation):
        name = "needy"
        share: float

    class Moving(PositionInterpolation):
        name = "moving"
        length_dependent = True

    for method in (Mine, Needy, Moving):
        monkeypatch.setitem(METHODS, method.name, method)
    assert {*candidates()} - before == {"mine"}


def test_dynamic_at_the_target_length_equals_one_of_the_candidates():
    held = ropepatch.plan("tiny", to=1024, method="dynamic").frequencies()
    twins = (ropepatch.plan("tiny", to=1024, method=name).frequencies() for name in candidates())
    assert any(
        held.inv_freq.equal(twin.inv_freq) and held.attention_factor == twin.attention_factor
        for twin in twins
    )


def test_unsupported_methods_are_left_out_of_groups_and_rejected_by_name(
    monkeypatch,
):
    methods, left_out = participants(Checkpoint.find("tiny"), ["yarn", "remappings"], to=1024)
    assert [plan.method.name for _, plan in methods] == [
        "yarn",
        *(name for name in REMAPPINGS if name != "string"),
    ]
    assert [*left_out] == ["string"]
    with pytest.raises(RopepatchError, match="up to 504 tokens"):
        participants(Checkpoint.find("tiny"), ["remappings", "string"], to=1024)
    monkeypatch.setattr("ropepatch.pipeline.evaluation.candidates", lambda: ("linear", "yarn"))

    def refuse(self, rope, length=None):
        raise RopepatchError("not on this rope")

    monkeypatch.setattr(YaRN, "frequencies", refuse)
    methods, left_out = participants(Checkpoint.find("tiny"), ["all"], to=1024)
    assert [method for method, _ in methods] == [Method(name="linear")]
    assert left_out == {"yarn": "not on this rope"}
    with pytest.raises(RopepatchError, match="not on this rope"):
        participants(Checkpoint.find("tiny"), ["linear", "yarn"], to=1024)


# Data; the ranking uses nothing that the fit was trained on


def test_a_ranking_measures_loss_and_also_retrieval_if_the_needles_fit():
    suite, reason = ranking_suite(Checkpoint.find("tiny"), [Method(name="yarn")], to=512, haystacks=3, keys=2)
    assert [*suite.tasks] == [PerplexityTask(windows=24), RetrievalTask(haystacks=3, keys=2)]
    assert reason is None
    for options, has_reason in (({"haystacks": 0}, False), ({"keys": 18}, True)):
        suite, reason = ranking_suite(Checkpoint.find("tiny"), [], to=512, **options)
        assert [task.name for task in suite.tasks] == ["perplexity"]
        assert ("has no room for" in str(reason)) == has_reason


def windows_of(pieces):
    return {tuple(piece.tolist()) for piece in pieces}


@pytest.mark.parametrize("windows", [1, 7])
def test_a_fit_does_not_use_the_text_sequences_of_the_ranking(tiny, tmp_path, monkeypatch, windows):
    fits = fake_fits(monkeypatch)
    _, tokenizer = tiny
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(number) for number in range(6000)))
    suite, _ = ranking_suite(
        Checkpoint.find("tiny"), [], to=512, text=str(text), windows=windows, haystacks=0
    )
    ranked = []

    def look(model, tokenizer, pieces, **options):
        ranked.extend(pieces)
        return LossCurve(tuple(torch.zeros(511) for _ in pieces))

    monkeypatch.setattr("ropepatch.evaluation.tasks.perplexity", look)
    suite.tasks[0].prepare("tiny", tokenizer, trained=256, to=512).run(*tiny, None, lambda done, total: None)
    of: dict = {"field": "text", "split": "test", "say": print, "progress": bar, "allow_code": False}
    fit_apart(suite, tmp_path, CompareOptions(model="tiny", to=512, device="cpu", **of))
    assert fits[0]["say"] is print
    read = {key: fits[0][key] for key in ("field", "split", "spare")}
    fitted = read_splits(tokenizer, fits[0]["text"], length=fits[0]["to"], **read)
    assert windows_of(ranked).isdisjoint(windows_of(fitted.windows))
    assert len(ranked) == windows
    careless = read_splits(tokenizer, str(text), length=512, **read | {"spare": 0})
    assert windows_of(ranked) <= windows_of(careless.windows)


def test_a_fit_does_not_use_the_generated_texts_of_the_ranking(tiny):
    _, tokenizer = tiny
    fitted = read_splits(tokenizer, None, field="text", split="test", length=64, spare=24)
    ranked = [tale.ids for tale in held_out_tales(tokenizer, length=64, count=24)]
    assert len(windows_of(fitted.windows)) > 200
    assert windows_of(ranked).isdisjoint(windows_of(fitted.windows))


# The choice for given results


def of(label, nats):
    """A result with this loss up to 1,024 tokens, and 1 nat in the first 256."""
    return reading(label, [1.0, nats, nats])


HELPS = [of("baseline", 9.0), of("yarn", 2.0)]
FITS = [*HELPS, of(FIT, 1.0)]
NOTHING = [of("baseline", 1.0), of("yarn", 1.5)]


@pytest.fixture
def fits(monkeypatch):
    return fake_fits(monkeypatch)


@pytest.fixture
def measured(monkeypatch, fits):
    """Two candidates; every measurement returns the results in this list."""
    results = []
    monkeypatch.setattr("ropepatch.pipeline.evaluation.candidates", lambda: ("linear", "yarn"))
    monkeypatch.setattr("ropepatch.evaluation.measuring.measure", lambda suite, **options: iter(results))
    return results


@pytest.mark.parametrize(
    ("nats", "recommended", "method", "parameters"),
    [
        ((9.0, 2.0, 1.0), FIT, "custom", {"divisors": DIVISORS, "attention_factor": 1.1, "queries": None}),
        ((9.0, 1.0, 2.0), "yarn", "yarn", {}),
        ((1.0, 1.0, 2.0), None, None, {}),
    ],
    ids=["a fit", "a published method", "nothing"],
)
def test_choose_returns_the_best_method_or_none_if_none_helps(
    measured, tmp_path, nats, recommended, method, parameters
):
    measured += map(of, ("baseline", "yarn", FIT, "floor"), (*nats, 0.1))
    choice = ropepatch.choose("tiny", to=1024, out=tmp_path)
    assert (choice.ranking.recommended, choice.method, choice.parameters) == (recommended, method, parameters)
    assert len(str(choice).splitlines()) > len(choice.ranking.rows)
    file = tmp_path / FIT / "fit.json"
    assert ropepatch.plan("tiny", to=1024, method=str(file)).scaling.divisors == DIVISORS


def test_a_failed_fit_is_left_out_with_the_reason_unless_requested_by_name(monkeypatch, measured):
    measured += HELPS
    with monkeypatch.context() as two:
        two.setattr("ropepatch.pipeline.options.join", lambda: Processes(0, 2))
        with pytest.raises(RopepatchError, match="in one process"):
            ropepatch.extend("tiny", to=1024, method="auto", dry_run=True)

    def fit(model, **options):
        raise RopepatchError("too little text")

    monkeypatch.setattr("ropepatch.fitting.fitting.fit", fit)
    lines = []
    choice = ropepatch.choose("tiny", to=1024, say=lines.append)
    assert (choice.left_out, choice.method, choice.fitted) == ({FIT: "too little text"}, "yarn", None)
    assert "warning: without fit: too little text" in lines
    with pytest.raises(RopepatchError, match="too little text"):
        ropepatch.choose("tiny", to=1024, methods=["fit", "yarn"])


def test_retrieval_that_does_not_fit_is_left_out_with_one_warning(measured):
    measured += HELPS
    lines = []
    choice = ropepatch.choose("tiny", to=1024, methods=["yarn"], keys=200, say=lines.append)
    (warning,) = (line for line in lines if line.startswith("warning: no retrieval: "))
    assert choice.left_out == {"retrieval": warning.removeprefix("warning: no retrieval: ")}
    assert (choice.method, choice.ranking.rows[0].answers) == ("yarn", {})


def test_extend_with_auto_uses_the_best_method_and_explains_it_on_stderr(measured, run_here, tmp_path):
    measured += FITS
    words = ("extend", "tiny", "--to", "1k", "--method", "auto")
    done = run_here(*words, "--dry-run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["method"], plan["parameters"]["divisors"]) == ("custom", list(DIVISORS))
    assert "Use fit. At 1,024 tokens over the baseline: loss gain +8.000" in done.stderr
    with pytest.raises(RopepatchError, match="cannot be combined with `method` auto"):
        ropepatch.extend("tiny", to=1024, method="auto", beta=3, dry_run=True)
    measured[:] = NOTHING
    done = run_here(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Do not extend" in done.stderr
    assert "error:" not in done.stderr
    with pytest.raises(RopepatchError, match="Do not extend"):
        ropepatch.extend("tiny", to=1024, method="auto", dry_run=True)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-auto-1k.fit"]  # the measurements


@pytest.mark.parametrize("allowed", [True, False])
def test_auto_chooses_a_remapping_only_if_its_code_is_allowed(measured, monkeypatch, allowed):
    seen = []

    def measure(suite, source, **options):
        seen.extend(method.name for method in suite.methods)
        scaling = {"method": "rerope", "factor": 4.0, "parameters": {}, "attention_factor": 1.0}
        remapped = [replace(of("rerope", 1.0), scaling=scaling)] * ("rerope" in seen)
        return iter([*HELPS, *remapped])

    monkeypatch.setattr("ropepatch.evaluation.measuring.measure", measure)
    recorded = {}
    remembered = lambda terms, *places: recorded.update(terms) or {}  # noqa: E731
    monkeypatch.setattr("ropepatch.pipeline.learned._remembered", remembered)
    chosen = ropepatch.extend("tiny", to=1024, method="auto", allow_code=allowed, dry_run=True)
    assert recorded.get("allow_code") == (True if allowed else None)  # other terms reuse no results
    assert chosen.plan.method.name == ("rerope" if allowed else "yarn")


# The output of compare


def test_compare_prints_an_extend_command_only_if_a_method_helps(measured, run_here, tmp_path):
    measured += FITS
    words = ("compare", "tiny", "--to", "1k", "--methods", "fit,yarn")
    done = run_here(*words, "--text", "my books", "--windows", "5", cwd=tmp_path)
    again = "ropepatch extend tiny --to 1k --method fit --text 'my books' --field text --split test"
    assert f"\n  {again}\n" in done.stdout
    done = run_here(*words, "--out", str(tmp_path / "out"))
    file = tmp_path / "out" / FIT / "fit.json"
    assert f"\n  ropepatch extend tiny --to 1k --method {file}\n" in done.stdout
    done = run_here(*words[:4], "--methods", f"yarn,{file}")
    assert f"\n  ropepatch extend tiny --to 1k --method {file}\n" in done.stdout
    measured[:] = NOTHING
    done = run_here(*words)
    assert "Do not extend" in done.stdout
    assert "ropepatch extend" not in done.stdout


def test_compare_without_haystacks_ranks_by_loss_and_omits_retrieval(measured, run_here):
    measured += [of("baseline", 9.0), of("linear", 2.0), of("yarn", 1.0)]
    words = ("--methods", "yarn,all", "--haystacks", "0")
    done = run_here("compare", "tiny", "--to", "1k", *words)
    table, _, advice = done.stdout.partition("Use yarn. ")
    assert [line.split()[0] for line in table.splitlines()[2:5]] == ["yarn", "linear", "baseline"]
    for word in ("etriev", "answer", "found", "haystack"):
        assert word not in table + advice + done.stderr


def test_compare_rejects_an_unknown_method_before_fitting(measured, fits):
    with pytest.raises(RopepatchError, match="unknown method 'yarnn'"):
        ropepatch.compare("tiny", to=1024, methods="fit,yarnn")
    assert fits == []
