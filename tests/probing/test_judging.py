"""The verdict on an engine: right in every precision, or the mistake that it makes."""

import copy
import functools
import random

import pytest
import torch
from engines import Engine

import ropepatch
from ropepatch.extension import writing
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.probing.judging import (
    OTHER_MODEL,
    UNDECIDED,
    _beats,
    divergence,
    judge,
)
from ropepatch.probing.making import make_reading
from ropepatch.probing.reading import (
    DOUBLED,
    FACTORLESS,
    MISREAD,
    RIGHT,
    TWICE,
    UNSCALED,
)

METHODS = ("yarn", "llama3", "linear", "ntk", "longrope")
PRECISIONS = ("bfloat16", "float16", "q8")
DRAWS = 20
COMPUTED = {}  # the top tokens of each engine, computed once


def fingerprinted(plan, out):
    folder = writing.check(plan, out).write().path
    return folder, make_reading(Checkpoint(folder))


@pytest.fixture(scope="module")
def checkpoint(request, tmp_path_factory):
    """A real checkpoint extended by a method and a factor, and its fingerprint; each computed once."""

    @functools.cache
    def made(name="babyllama-361", method="yarn", factor=4):
        source = name
        if name != "tiny":
            source = request.getfixturevalue("shared") / "checkpoints" / name
        parameters = {}
        if method == "longrope":
            size = ropepatch.plan(source, to="2x").source.config.rope.num_pairs
            steps = torch.linspace(0, 1, size, dtype=torch.float64)
            parameters["long_factor"] = tuple((factor ** steps.pow(0.5)).tolist())
        plan = ropepatch.plan(source, to=f"{factor}x", method=method, **parameters)
        return fingerprinted(plan, tmp_path_factory.mktemp("checkpoint") / "out")

    return made


def tops_of(engine, reading):
    return engine.tops(reading.ids[:-1], reading.positions)


def answers(folder, reading, *, count=20, **engine):
    key = tuple(engine.items())
    if (folder, key) not in COMPUTED:
        COMPUTED[folder, key] = tops_of(Engine(folder, **engine), reading)
    return [dict(list(top.items())[:count]) for top in COMPUTED[folder, key]]


@pytest.mark.parametrize(
    ("verdict", "count", "engine"),
    [
        (OTHER_MODEL, 20, {"noise": 0.2}),
        *(
            (mistake, 10, {"mistake": mistake, "precision": "q8"})
            for mistake in (UNSCALED, TWICE, FACTORLESS, DOUBLED, MISREAD)
        ),
    ],
)
def test_the_verdict_identifies_what_an_engine_computes(
    checkpoint, verdict, count, engine
):
    folder, reading = checkpoint()
    judgement = judge(reading, answers(folder, reading, count=count, **engine))
    assert judgement.verdict == verdict, judgement


def test_truncated_prompts_are_reported_and_missing_answers_are_undecided(checkpoint):
    folder, reading = checkpoint()
    right = answers(folder, reading)
    truncated = up_to(256, right, reading)
    line = str(judge(reading, truncated, limit=256))
    assert line.startswith("WRONG: the server truncates prompts (to at most 256 tokens")
    few = [*right[:3], *[None] * (len(right) - 3)]
    for tops in (truncated, few, [None] * len(right)):
        assert judge(reading, tops).verdict == UNDECIDED


def up_to(limit, tops, reading):
    return [
        top if at <= limit else None
        for top, at in zip(tops, reading.positions, strict=True)
    ]


def test_an_engine_that_refuses_prompts_is_judged_to_its_limit(checkpoint):
    folder, reading = checkpoint()
    middle = (reading.window + reading.target) // 2
    judgement = judge(
        reading, up_to(middle, answers(folder, reading), reading), middle, refuses=True
    )
    assert (judgement.verdict, judgement.limit) == (RIGHT, middle)
    assert str(judgement).startswith(
        f"OK up to {middle:,} tokens; the server refuses the next prompt (KL "
    )
    wrong = up_to(middle, answers(folder, reading, mistake=UNSCALED), reading)
    judgement = judge(reading, wrong, middle, refuses=True)
    assert (judgement.verdict, judgement.limit) == (UNSCALED, middle)
    assert f"the server refuses more than {middle:,} tokens" in str(judgement)


UNNAMED = [
    *({"factor": 3.0}, {"factor": 5.0}, {"beta_fast": 8.0}, {"attention_factor": 1.0}),
    {"rope_theta": 12000.0},
]


def with_parameters(engine, **parameters):
    config = copy.deepcopy(engine.model.config)
    config.rope_parameters = config.rope_parameters | parameters
    engine.rotary = type(engine.rotary)(config)
    return engine


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("method", "parameters"),
    [*(("yarn", one) for one in UNNAMED), ("linear", {"rope_theta": 11000.0})],
    ids=str,
)
def test_an_engine_with_other_rope_parameters_is_never_right(
    checkpoint, method, precision, parameters
):
    folder, reading = checkpoint("tiny", method)
    engine = with_parameters(Engine(folder, precision=precision), **parameters)
    judgement = judge(reading, tops_of(engine, reading))
    assert not judgement.is_right, judgement


@pytest.mark.parametrize("precision", ["float32", *PRECISIONS])
def test_a_right_engine_is_right_in_every_precision(checkpoint, precision):
    folder, reading = checkpoint("tiny")
    judgement = judge(reading, answers(folder, reading, precision=precision))
    assert judgement.is_right, judgement


@pytest.mark.parametrize(("method", "verdict"), [("yarn", UNDECIDED), ("none", RIGHT)])
def test_a_model_that_ignores_rope_is_undecided_unless_unscaled(
    method, verdict, without_queries, tmp_path
):
    plan = ropepatch.plan(without_queries, to="4x", method=method)
    folder, reading = fingerprinted(plan, tmp_path / "out")
    assert judge(reading, answers(folder, reading)).verdict == verdict


# Noise of the weights within and beyond the original length
NOISY = [
    (RIGHT, 0.0, 0.05, UNDECIDED),
    (UNSCALED, 0.0, 0.05, UNSCALED),  # ten times nearer than any other hypothesis
    (UNSCALED, 0.0, 0.1, UNDECIDED),
    (DOUBLED, 0.05, 0.05, DOUBLED),  # as noisy beyond as within
    (DOUBLED, 0.0, 0.05, UNDECIDED),
]


@pytest.mark.parametrize(("mistake", "near", "far", "verdict"), NOISY)
def test_noise_beyond_is_allowed_as_within_or_far_from_errors(
    checkpoint, mistake, near, far, verdict
):
    folder, reading = checkpoint("tiny")
    within, beyond = (
        answers(folder, reading, mistake=mistake, noise=noise) for noise in (near, far)
    )
    given = [
        two if is_beyond else one
        for one, two, is_beyond in zip(within, beyond, reading.beyond, strict=True)
    ]
    judgement = judge(reading, given)
    assert judgement.verdict == verdict, judgement


def test_a_rival_nearer_at_most_positions_is_not_beaten():
    best, rival = (0.02,) * 48, (*(0.0,) * 44, *(1.0,) * 4)
    assert not _beats(best, rival)
    assert _beats((0.0,) * 48, rival[::-1][:12] + (0.02,) * 36)


@pytest.mark.parametrize("count", [1, 5, 20, 60])
def test_the_divergence_is_a_lower_bound_exact_for_all_tokens(count):
    generator = torch.Generator().manual_seed(0)
    for spread in (0.0, 0.01, 0.1, 1.0, 4.0) * 40:
        one, noise = torch.randn(2, 60, generator=generator, dtype=torch.float64)
        p, q = torch.stack((3 * one, 3 * one + spread * noise)).log_softmax(-1)
        tops = []
        for log_probs, most in ((p, max(20, count)), (q, count)):
            values, tokens = log_probs.topk(most)
            tops.append(dict(zip(tokens.tolist(), values.tolist(), strict=True)))
        exact = (p.exp() * (p - q)).sum().item()
        assert divergence(*tops) <= exact + 1e-6
        if count == 60:
            assert divergence(*tops) == pytest.approx(exact, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "case", [RIGHT, UNSCALED, TWICE, FACTORLESS, "other weights", *PRECISIONS]
)
def test_all_twenty_random_engines_get_the_expected_verdict(checkpoint, method, case):
    wrong = []
    for number in range(DRAWS):
        draw = random.Random(repr((method, case, number)))
        name, factor = (
            draw.choice(("babyllama-361", "stories-260k")),
            draw.choice((3, 4, 6)),
        )
        precision, count = draw.choice(PRECISIONS), draw.choice((20, 20, 10, 5))
        folder, reading = checkpoint(name, method, factor)
        if case == "other weights":
            expected, engine = OTHER_MODEL, {"noise": 0.25}
        elif (
            case not in reading.tops
        ):  # right; or the mistake does not change this method noticeably
            expected, engine = RIGHT, {}
            precision = case if case in PRECISIONS else precision
        else:
            expected, engine = case, {"mistake": case}
        judgement = judge(
            reading,
            answers(folder, reading, precision=precision, count=count, **engine),
        )
        if judgement.verdict != expected:
            wrong.append((number, name, factor, precision, count, str(judgement)))
    assert not wrong
