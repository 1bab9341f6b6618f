"""The tables of learned frequencies: known rows give known shares."""

import fit_study
import fit_tables as TABLES
import pytest


def row(label, nats, short, seed=None, **more):
    cell = {"model": "m", "text": "t", "factor": 4, "label": label, "seed": seed}
    return cell | {"nats": nats, "short": short, "own": [1.0, 2.0, 3.0], "forward_tokens": 100} | more


ROWS = [
    row("none", [9.0, 9.0, 9.0], [0.5, 0.5, 0.5]),
    row("yarn", [1.4, 2.6, 3.5], [0.6, 0.6, 0.6]),
    row("ntk", [1.5, 2.7, 3.6], [0.4, 0.4, 0.4]),
    row("descent", [1.1, 2.2, 3.0], [0.5, 0.7, 0.6], seed=0),
    row("descent", [1.3, 2.2, 3.4], [0.7, 0.7, 0.7], seed=1),
]


def test_learned_is_compared_with_the_best_published_method_as_a_share_and_window_by_window():
    (found,) = TABLES.summaries(ROWS)
    assert found.published == "yarn"
    assert found.published_excess == pytest.approx(0.5)
    assert found.by_seed == pytest.approx((0.1, 0.3))
    assert found.excess == pytest.approx(0.2)
    assert found.share.value == pytest.approx(0.4)
    assert found.behind.value == pytest.approx(-0.3)
    reach = 4.302653 * 0.1 / 3**0.5  # Student's t over windows that differ by -0.2, -0.4 and -0.3
    assert found.behind.interval() == pytest.approx((-0.3 - reach, -0.3 + reach), abs=1e-6)
    assert found.short.value == pytest.approx(0.05)


def test_windows_of_one_document_are_one_cluster():
    of_two = [one | {"documents": [5, 7, 5]} if one["label"] == "none" else one for one in ROWS]
    (found,) = TABLES.summaries(of_two)
    behind, share = ([x for pair in mean.clusters for x in pair] for mean in (found.behind, found.share))
    assert behind == pytest.approx([-0.5, 2, -0.4, 1])
    assert share == pytest.approx([0.4, 0.9, 0.2, 0.6])


def test_a_share_is_of_what_is_above_the_least_possible_loss_and_of_an_excess_below_nothing_none():
    (below,) = TABLES.summaries([dict(one, own=[3.0, 3.0, 4.0]) for one in ROWS])
    assert below.share is None
    assert below.excess == pytest.approx(-3.4 / 3)
    (above,) = TABLES.summaries([dict(one, floor=[0.9, 1.9, 2.9]) for one in ROWS])
    assert above.excess == pytest.approx(0.2)
    assert above.share.value == pytest.approx(0.3 / 0.6)


def test_the_best_vector_fitted_on_the_test_windows_bounds_the_share():
    later, best = (
        row(TABLES.BOUND, nats, [0.5, 0.5, 0.5], seed=seed)
        for seed, nats in ((0, [1.2, 2.2, 3.2]), (1, [1.1, 2.1, 3.1]))
    )
    (found,) = TABLES.summaries([*ROWS, later, best])
    assert fit_study.BOUND == TABLES.BOUND
    assert found.bound == pytest.approx(0.1 / 0.5)
    assert "| 40% [" in TABLES.table([found])
    assert "] | 20% |" in TABLES.table([found])
