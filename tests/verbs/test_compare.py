"""The choice of a method by measuring: its candidates, its data and its outcome."""

import pytest
from made_results import reading
from methods import STATIC

import ropepatch
from ropepatch.attention import REMAPPINGS
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.measuring import candidates, participants
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.scaling import METHODS
from ropepatch.scaling.powers import PositionInterpolation
from ropepatch.scaling.ramps import YaRN

# Candidates


def test_registered_static_methods_without_required_parameters_are_candidates(
    monkeypatch,
):
    before = {*candidates()}
    usual = {
        "linear",
        "ntk",
        "ntk-by-parts",
        "yarn",
        "llama3",
        "p-rope",
        "resonance",
        "cope",
    }
    assert usual <= before < {*STATIC}
    assert (
        not {"none", "abf", "custom", "longrope", "longrope-switch", "dynamic"} & before
    )

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
    twins = (
        ropepatch.plan("tiny", to=1024, method=name).frequencies()
        for name in candidates()
    )
    assert any(
        held.inv_freq.equal(twin.inv_freq)
        and held.attention_factor == twin.attention_factor
        for twin in twins
    )


def test_unsupported_methods_are_left_out_of_groups(
    monkeypatch,
):
    lines = []

    def named(*methods):
        source = Checkpoint.find("tiny")
        found = participants(source, methods, to=1024, say=lines.append)
        return [method.name for method in found]

    fitting = [name for name in REMAPPINGS if name != "string"]
    assert named("yarn", "remappings") == ["yarn", *fitting]
    assert [line.partition(": ")[2][:14] for line in lines] == ["without string"]
    with pytest.raises(RopepatchError, match="up to 504 tokens"):
        named("remappings", "string")
    monkeypatch.setattr(
        "ropepatch.evaluation.measuring.candidates", lambda: ("linear", "yarn")
    )

    def refuse(self, rope, length=None):
        raise RopepatchError("not on this rope")

    monkeypatch.setattr(YaRN, "frequencies", refuse)
    assert named("all") == ["linear"]
    assert lines[-1] == "warning: without yarn: not on this rope"
    with pytest.raises(RopepatchError, match="not on this rope"):
        named("linear", "yarn")


# The choice for given results


def of(label, nats):
    """A result with this loss up to 1,024 tokens, and 1 nat in the first 256."""
    return reading(label, [1.0, nats, nats])


HELPS = [of("baseline", 9.0), of("yarn", 2.0)]
NOTHING = [of("baseline", 1.0), of("yarn", 1.5)]


@pytest.fixture
def measured(monkeypatch):
    """Two candidates; every measurement returns the results in this list."""
    results = []
    monkeypatch.setattr(
        "ropepatch.evaluation.measuring.candidates", lambda: ("linear", "yarn")
    )
    monkeypatch.setattr(
        "ropepatch.evaluation.measuring.measure",
        lambda suite, source, **options: iter(results),
    )
    return results


@pytest.mark.parametrize(
    ("nats", "method"),
    [((9.0, 1.0), "yarn"), ((1.0, 1.0), None)],
    ids=["a published method", "nothing"],
)
def test_compare_returns_the_best_method_or_none_if_none_helps(measured, nats, method):
    measured += map(of, ("baseline", "yarn", "floor"), (*nats, 0.1))
    choice = ropepatch.compare("tiny", to=1024, methods="yarn", say=lambda line: None)
    assert (choice.ranking.recommended, choice.method) == (method, method)
    assert len(str(choice).splitlines()) > len(choice.ranking.rows)


def test_retrieval_that_does_not_fit_is_left_out(measured):
    measured += HELPS
    lines = []
    choice = ropepatch.compare(
        "tiny", to=1024, methods=["yarn"], keys=200, say=lines.append
    )
    (warning,) = (line for line in lines if line.startswith("warning: no retrieval: "))
    assert "200 keys of the kind number" in warning
    assert (choice.method, choice.ranking.rows[0].answers) == ("yarn", {})


def test_compare_draws_its_prompts_by_the_given_seed(monkeypatch):
    suites = []

    def measure(suite, source, **options):
        suites.append(suite)
        return iter(HELPS)

    monkeypatch.setattr("ropepatch.evaluation.measuring.measure", measure)
    quiet = {"say": lambda line: None}
    ropepatch.compare("tiny", to=1024, methods="yarn", seed=7, **quiet)
    assert suites[0].tasks[-1].seed == 7


# The output of compare


def test_compare_prints_an_extend_command_only_if_a_method_helps(measured, run_here):
    measured += HELPS
    words = ("compare", "tiny", "--to", "1k", "--methods", "yarn")
    done = run_here(*words, "--haystacks", "0")
    command = "\n  ropepatch extend tiny --to 1k --method yarn"
    assert f"{command}\n" in done.stdout
    assert "etriev" not in done.stdout + done.stderr
    done = run_here(*words, "--original", "128")
    assert f"{command} --original 128\n" in done.stdout
    measured[:] = NOTHING
    done = run_here(*words)
    assert "Do not extend" in done.stdout
    assert "ropepatch extend" not in done.stdout
