"""The ranking of scalings, on results whose order is known."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from made_results import result_of

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.grid import wilson
from ropepatch.evaluation.ranking import rank
from ropepatch.evaluation.results import Result
from ropepatch.evaluation.tasks import PerplexityTask
from ropepatch.evaluation.tasks.perplexity import PerplexityMeasurement

TRAINED, TARGET, DOCUMENTS = 256, 1024, 12
NOISE = torch.randn(DOCUMENTS, generator=torch.Generator().manual_seed(0)).double()


def reading(label, nats, *, inside=0.5, spread=0.5, own=0.0, digest="d", method=None) -> Result:
    """A loss that differs from document to document, alike for all labels but for ``own`` noise."""
    generator = torch.Generator().manual_seed(sum(map(ord, label)))
    noise = spread * NOISE + own * torch.randn(DOCUMENTS, generator=generator).double()
    losses = (nats + noise - noise.mean()).tolist()
    tokens = TARGET - 1
    within = (inside + spread * NOISE - spread * NOISE.mean()).tolist()
    tables = {
        "by_document": [{"nats": loss * tokens, "tokens": tokens} for loss in losses],
        "by_document_inside": [{"nats": loss * (TRAINED - 1), "tokens": TRAINED - 1} for loss in within],
        "by_position": [
            {"begin": 0, "end": 128, "nats": inside + 0.1, "tokens": 127},
            {"begin": 128, "end": 256, "nats": inside - 127 / 1280, "tokens": 128},
            {"begin": 256, "end": 1024, "nats": 9.0, "tokens": 768},
        ],
    }
    return result_of("perplexity", label, tables, {"digest": digest}, method=method)


def keys(label, correct, of=20, inside=None) -> Result:
    """Passkeys, of which the first are found: a scaling that finds less finds none that another does not."""
    found = {128: of if inside is None else inside, TARGET: correct}
    rows = [
        {"length": length, "correct": count, "n": of, "interval": wilson(count, of)}
        | {"found": [1] * count + [0] * (of - count), "wanted": 1}
        for length, count in found.items()
    ]
    return result_of("passkey", label, {"by_length": rows}, {})


def ranked(*results):
    return rank(results, base="base", ignored=["floor"])


def test_scalings_are_ranked_by_their_loss_and_told_apart_document_by_document():
    """The documents differ far more than the scalings do."""
    ranking = ranked(reading("base", 3.0), reading("b", 1.05), reading("a", 1.0), reading("floor", 0.1))
    first, second, base = ranking.rows
    assert [row.label for row in ranking.rows] == ["a", "b", "base"]
    assert [row.nats for row in ranking.rows] == pytest.approx([1.0, 1.05, 3.0])
    assert (first.behind, second.behind, base.behind) == pytest.approx((0.0, 0.05, 2.0))
    assert first.interval[1] > second.interval[0]
    assert second.behind_interval == pytest.approx((0.05, 0.05))
    assert not second.tied
    assert ranking.recommended == "a"
    assert "2.000 nats per token less than the model as it is over 1024 tokens" in ranking.advice[0]
    assert ranking.advice[1] == "The next, b, loses 0.050 nats more (95 % interval 0.050 to 0.050)."


@pytest.mark.parametrize(
    ("found", "inside", "why"),
    [((17, 19), 0.5, "finds the most"), ((19, 19), 0.6, "loses the least within 256 tokens")],
)
def test_of_tied_scalings_the_one_with_more_keys_or_else_the_least_price_is_recommended(found, inside, why):
    results = [
        reading("base", 9.0),
        reading("a", 1.0, own=0.5, inside=inside),
        reading("b", 1.05, own=0.5, inside=inside - 0.05),
    ]
    ranking = ranked(*results, keys("base", 0), keys("a", found[0]), keys("b", found[1]))
    assert [row.tied for row in ranking.rows] == [True, True, False]
    assert [row.found for row in ranking.rows] == [found[0] / 20, found[1] / 20, 0]
    assert ranking.recommended == "b"
    assert ranking.advice[1] == f"This text does not tell it from a; of these, it {why}."


def test_of_several_tasks_with_passkeys_the_first_ranks():
    results = [reading("base", 9.0), reading("a", 1.0), reading("b", 1.05)]
    first = [keys("base", 0), keys("a", 17), keys("b", 19)]
    others = [keys("base", 20), keys("a", 20), keys("b", 0)]
    assert ranked(*results, *first, *others) == ranked(*results, *first)


def test_keys_that_are_lost_are_said():
    results = [reading("base", 9.0), reading("a", 1.0)]
    assert "train it" in ranked(*results, keys("base", 0), keys("a", 17)).advice[-1]
    assert not any("train it" in line for line in ranked(*results, keys("base", 0), keys("a", 18)).advice)


def test_a_model_that_finds_no_keys_within_its_own_context_is_not_blamed_for_the_rest():
    results = [reading("base", 9.0), reading("a", 1.0)]
    advice = ranked(*results, keys("base", 0, inside=9), keys("a", 0, inside=20)).advice
    assert advice[-1] == (
        "What is found tells nothing: as it is, the model does not find such things within 256 tokens."
    )
    assert "train it" in ranked(*results, keys("base", 0, inside=10), keys("a", 0)).advice[-1]


def test_a_tied_scaling_must_itself_beat_the_model_as_it_is():
    noisy = [reading("base", 1.2, spread=0.1), reading("a", 1.0, spread=0.1)]
    worse = reading("b", 1.05, own=1.0, inside=0.4, spread=0.1)
    ranking = ranked(*noisy, worse, keys("base", 20), keys("a", 18), keys("b", 20))
    assert ranking.rows[1].tied
    assert ranking.recommended == "a"


def test_one_piece_of_text_gives_no_verdict():
    def single(label, nats):
        result = reading(label, nats)
        return replace(result, tables=result.tables | {"by_document": result.tables["by_document"][:1]})

    ranking = ranked(single("base", 9.0), single("a", 1.0))
    assert ranking.recommended is None
    assert "give more" in ranking.advice[0]


@pytest.mark.parametrize("nats", [1.0, 1.5])
def test_where_no_scaling_beats_the_model_as_it_is_the_advice_is_not_to_extend(nats):
    ranking = ranked(reading("base", 1.0), reading("a", nats), reading("b", 2.0))
    assert ranking.recommended is None
    assert ranking.advice[0].startswith("Do not extend")
    assert f"(a by {1.0 - nats:+.3f} nats" in ranking.advice[0]


def test_a_gain_within_the_doubt_is_no_reason_to_extend():
    assert ranked(reading("base", 1.0, own=0.5), reading("a", 0.95, own=0.5)).recommended is None


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([reading("base", 1.0), reading("floor", 0.5)], "nothing to rank"),
        ([reading("a", 1.0), reading("b", 1.0)], "nothing to rank"),
        ([reading("base", 1.0), reading("a", 1.0, digest="other")], "different texts"),
    ],
)
def test_what_cannot_be_compared_is_refused(results, message):
    with pytest.raises(RopepatchError, match=message):
        ranked(*results)


# With scalings that were trained


def trained(result):
    return replace(result, model=result.model | {"weights": "after", "adapted_from": "before"})


def test_a_model_that_was_trained_already_is_told_to_train_longer():
    results = [reading("base", 9.0), reading("a", 2.0), trained(reading("a + mine", 1.0))]
    advice = ranked(*results, keys("base", 0), keys("a", 3), keys("a + mine", 17)).advice
    assert advice[0].startswith("Take a + mine: 8.000 nats")
    assert advice[-1] == (
        "It finds 85% of what is asked for at 1024 tokens: train longer, or choose a nearer target."
    )


def test_where_training_does_not_help_either_the_advice_says_so():
    results = [reading("base", 1.0), reading("a", 1.5), trained(reading("a + mine", 1.2))]
    advice = ranked(*results).advice
    assert advice[0].startswith(
        "Do not extend: over 1024 tokens none of these scalings, trained or not, is seen"
    )
    untrained = [result for result in results if not result.adapted]
    assert "none of these scalings is seen" in ranked(*untrained).advice[0]


# The price within the trained context


def without_inside(result):
    tables = {name: rows for name, rows in result.tables.items() if name != "by_document_inside"}
    return replace(result, tables=tables)


def test_the_price_is_taken_document_by_document_and_has_their_doubt():
    costs = torch.linspace(-0.02, 0.04, DOCUMENTS).double()
    result = reading("a", 1.0, spread=2.0)
    rows = [
        {"nats": row["nats"] + cost * row["tokens"], "tokens": row["tokens"]}
        for row, cost in zip(result.tables["by_document_inside"], costs.tolist(), strict=True)
    ]
    result = replace(result, tables=result.tables | {"by_document_inside": rows})
    ranking = ranked(reading("base", 3.0, spread=2.0), result)
    row, base = ranking.rows
    error = 1.96 * costs.std(unbiased=False).item() / DOCUMENTS**0.5
    assert row.price == pytest.approx(0.01)
    assert row.price_interval == pytest.approx((0.01 - error, 0.01 + error), abs=0.002)
    assert (base.price, base.price_interval) == (0.0, (0.0, 0.0))
    low, high = row.price_interval
    cost = "Its short-context cost: +0.010 nats within the first 256 tokens"
    assert ranking.advice[1] == f"{cost} (95 % interval {low:+.3f} to {high:+.3f})."


def test_results_without_the_sums_within_the_trained_context_have_a_price_without_an_interval():
    old = [without_inside(reading("base", 3.0)), without_inside(reading("a", 1.0, inside=0.55))]
    for results in (old, [old[0], reading("a", 1.0, inside=0.55)]):
        ranking = ranked(*results)
        assert ranking.rows[0].price == pytest.approx(0.05)
        assert ranking.rows[0].price_interval == (-math.inf, math.inf)
        assert ranking.advice[1] == "Its short-context cost: +0.050 nats within the first 256 tokens."


def test_what_is_measured_holds_the_sums_of_each_text_within_the_trained_context():
    losses = [torch.rand(1023, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    pieces = [torch.zeros(1024, dtype=torch.long)] * 3
    task = PerplexityTask(text="books")
    read = PerplexityMeasurement(task, pieces, lengths=[512, 1024], trained=256, parameters={}, floor=None)
    rows = read.tables(LossCurve(tuple(losses)))["by_document_inside"]
    assert [row["tokens"] for row in rows] == [255, 255, 255]
    assert [row["nats"] for row in rows] == pytest.approx([loss[:255].sum().item() for loss in losses])


# The Pareto front


def front(ranking):
    return {row.label for row in ranking.rows if row.front}


@pytest.mark.parametrize(
    "asked",
    [
        [keys("base", 0), keys("b", 20)],
        [keys("a", 3), keys("b", 20)],
    ],
    ids=["one was not asked", "the model was not asked"],
)
def test_keys_that_tell_nothing_bring_nobody_on_the_front(asked):
    results = [reading("base", 3.0), reading("a", 1.0), reading("b", 1.1, inside=0.6)]
    assert front(ranked(*results, *asked)) == {"a"}


def drawn(seed):
    """Results whose figures fall on a coarse grid, so that some are equal, and whose losses are noisy."""
    generator = torch.Generator().manual_seed(seed)

    def grid(low, high):
        return torch.randint(low, high, (), generator=generator).item()

    results = [reading("base", 2.0), keys("base", 0, inside=grid(5, 16))]
    for label in "abcde":
        noise, inside = grid(0, 3) / 10, 0.5 + grid(0, 4) / 100
        results.append(reading(label, 1 + grid(0, 4) / 20, own=noise, inside=inside))
        results.append(keys(label, grid(15, 19)))
    return results


@pytest.mark.parametrize("seed", range(8))
def test_the_front_and_the_choice_are_what_the_definitions_say(seed):
    results = drawn(seed)
    ranking = ranked(*results)
    retrieves = results[1].tables["by_length"][0]["correct"] >= 10
    figures = {
        row.label: torch.tensor([row.nats, row.inside, -row.found * retrieves], dtype=torch.float64)
        for row in ranking.rows
    }
    beaten = {
        mine
        for mine, other in itertools.product(figures, repeat=2)
        if (figures[other] <= figures[mine]).all() and (figures[other] < figures[mine]).any()
    }
    assert front(ranking) == figures.keys() - beaten
    left = [row for row in ranking.rows if row.label != "base" and row.behind_interval[0] <= 0]
    for measure in (lambda row: -row.found * retrieves, lambda row: row.inside, lambda row: row.nats):
        best = min(map(measure, left))
        left = [row for row in left if measure(row) == best]
    assert ranking.recommended == left[0].label


def test_a_scaling_that_finds_more_keys_than_the_chosen_one_is_named():
    results = [reading("base", 9.0), reading("a", 1.0), reading("b", 1.5), reading("c", 1.25)]
    asked = [keys("base", 0), keys("a", 18), keys("b", 20), keys("c", 19)]
    assert ranked(*results, *asked).advice[2] == (
        "The most is found by b, 100% against 90%, which so few questions do not tell apart, for +0.500 nats "
        "over the target."
    )
    blind = [keys("base", 0, inside=0), *asked[1:]]
    for others in (asked[:2], blind):
        assert not any("The most is" in line for line in ranked(*results, *others).advice)


# Attention maps


def by_method(**nats):
    return [reading("base", 9.0), *(reading(name, loss, method=name) for name, loss in nats.items())]


@pytest.mark.parametrize(
    ("others", "rest"),
    [
        (
            {"yarn": 2.0, "ntk": 3.0},
            "; the best that other engines run, too, is yarn, +1.000 nats over the target.",
        ),
        ({"yarn": 9.5}, "."),
        ({}, "."),
    ],
    ids=["others help", "others do not help", "no others"],
)
def test_where_a_map_wins_its_engine_and_the_best_for_other_engines_are_named(others, rest):
    ranking = ranked(*by_method(rerope=1.0, dca=1.5, **others))
    assert ranking.recommended == "rerope"
    only = "Only transformers runs rerope, by code that comes with the checkpoint"
    assert ranking.advice[-1] == only + rest
    assert not any("transformers" in line for line in ranked(*by_method(yarn=1.0, rerope=2.0)).advice)


def test_the_control_is_ranked_and_never_recommended():
    ranking = ranked(*by_method(**{"lambda": 0.5, "yarn": 1.0, "dca": 2.0}))
    assert [row.label for row in ranking.rows] == ["lambda", "yarn", "dca", "base"]
    assert ranking.recommended == "yarn"
    assert ranking.advice[-1] == "lambda is a control, which forgets what is far: nothing to take."
    assert ranked(*by_method(**{"lambda": 0.5})).recommended is None


# What is found comes first


def asked(kind, found, *, of=20, inside=20, parameters=None):
    """By label what is found of a kind at the target; each finds the first of the questions."""
    return [
        result_of(
            "retrieval",
            label,
            {
                "by_kind": [
                    {"kind": kind, "length": length, "share": count / of, "n": of}
                    | {"interval": wilson(count, of), "found": [1] * count + [0] * (of - count), "wanted": 1}
                    for length, count in ((256, inside), (TARGET, count))
                ]
            },
            parameters or {},
        )
        for label, count in found.items()
    ]


TWO = [reading("base", 9.0), reading("near", 1.0), reading("far", 1.5)]


CHAINS = {"base": 0, "near": 8, "far": 16}


def keys_of(of=20, inside=None, **found):
    return [keys(label, count, of, inside) for label, count in found.items()]


@pytest.mark.parametrize(
    ("asking", "order"),
    [
        (keys_of(base=0, near=0, far=20), ["far", "near", "base"]),
        (keys_of(base=0, near=14, far=20), ["far", "near", "base"]),
        (keys_of(base=0, near=15, far=20), ["near", "far", "base"]),
        (keys_of(base=0, near=20, far=20), ["near", "far", "base"]),
        (keys_of(base=0, near=20, far=0), ["near", "far", "base"]),
        (keys_of(base=0, near=0, far=5, of=5), ["near", "far", "base"]),
        (keys_of(base=0, near=0, far=20, inside=0), ["near", "far", "base"]),
        (keys_of(base=0, far=20), ["near", "far", "base"]),
        (keys_of(near=0, far=20), ["near", "far", "base"]),
        (asked("vt", {"base": 0, "near": 0, "far": 20}), ["far", "near", "base"]),
        (asked("vt", {"base": 0, "near": 0, "far": 20}, inside=9), ["near", "far", "base"]),
        (keys_of(base=0, near=20, far=20) + asked("vt", CHAINS), ["far", "near", "base"]),
        (keys_of(base=0, near=20, far=14) + asked("vt", CHAINS), ["near", "far", "base"]),
    ],
    ids=[
        "all against none", "enough", "too few", "equal", "the nearer finds more", "five keys",
        "the model finds none within its context", "one was not asked", "the model was not asked",
        "chains", "chains that the model cannot follow", "several kinds", "several kinds that disagree",
    ],
)  # fmt: skip
def test_a_scaling_that_is_seen_to_find_more_comes_first_and_else_the_one_with_less_loss(asking, order):
    ranking = ranked(*TWO, *asking)
    assert [row.label for row in ranking.rows] == order
    assert ranking.recommended == order[0]
    assert ranked(*TWO[:2], TWO[2], *reversed(asking)).recommended == order[0]


def test_loss_first_would_be_caught(monkeypatch):
    """The old rule, by which what is found never told two scalings apart."""
    monkeypatch.setattr("ropepatch.evaluation.answers.Answers.finds_more_than", lambda *both: False)
    assert ranked(*TWO, *keys_of(base=0, near=0, far=20)).recommended == "near"


def test_the_advice_says_what_both_find_and_what_the_one_with_less_loss_does_not():
    ranking = ranked(*TWO, *keys_of(base=0, near=10, far=20))
    assert ranking.advice[:2] == (
        "Take far: 7.500 nats per token less than the model as it is over 1024 tokens; it finds 100% "
        "(95 % interval 84% to 100%) of what is asked for at 1024 tokens, the model as it is 0% "
        "(95 % interval 0% to 16%).",
        "near loses the least over 1024 tokens, -0.500 nats, and finds less: 50%. Of the questions that only "
        "one of the two answers, far answers 10 of 10.",
    )
    assert (ranking.rows[1].behind, ranking.rows[1].tied) == (pytest.approx(-0.5), False)


@pytest.mark.parametrize(
    ("results", "recommended"),
    [
        ([reading("base", 1.0), reading("a", 1.0), *keys_of(base=0, a=20)], "a"),
        ([reading("base", 1.0), reading("a", 1.1), *keys_of(base=0, a=20)], None),
        ([reading("base", 1.0), reading("a", 0.9), *keys_of(base=20, a=0)], None),
        ([reading("base", 1.0), reading("a", 1.0), *keys_of(base=20, a=20)], None),
        ([*TWO[:2], reading("far", 9.5), *keys_of(base=0, near=0, far=20)], "near"),
        ([*TWO[:2], reading("far", math.nan), *keys_of(base=0, near=0, far=20)], "near"),
        ([reading("base", 9.0), reading("far", math.nan), *keys_of(base=0, far=20)], None),
        ([reading("base", math.nan), reading("a", 1.0), *keys_of(base=0, a=20)], None),
    ],
    ids=[
        "finds more, equal loss", "finds more, worse loss", "finds less, better loss", "equal in both",
        "the finder reads worse than the model", "a loss that is no number", "that alone",
        "the model has no number",
    ],
)  # fmt: skip
def test_what_gains_in_one_measure_must_not_lose_in_the_other(results, recommended):
    ranking = ranked(*results)
    assert ranking.recommended == recommended
    assert ranking.advice[0].startswith("Take" if recommended else "Do not extend")
    assert ranked(*reversed(results)).recommended == recommended
    json.dumps(ranking.record(), allow_nan=False)


def test_where_finding_and_reading_disagree_the_advice_not_to_extend_says_in_what():
    advice = ranked(reading("base", 1.0), reading("a", 1.1), *keys_of(base=0, a=20)).advice
    assert advice == (
        "Do not extend: over 1024 tokens no scaling is seen to beat the model as it is without being worse "
        "in what it finds or in its loss. a finds 100%, the model as it is 0%; a loses +0.100 nats against "
        "the model as it is.",
    )


def test_the_rest_is_ranked_like_the_best_by_what_is_found_then_by_loss():
    losses = {"base": 9.0, "a": 3.0, "b": 2.0, "c": 1.5, "d": 1.0}
    results = [reading(label, nats) for label, nats in losses.items()]
    ranking = ranked(*results, *keys_of(base=0, a=40, b=39, c=20, d=19, of=40))
    assert [row.label for row in ranking.rows] == ["b", "a", "d", "c", "base"]
    assert ranking.recommended == "b"
