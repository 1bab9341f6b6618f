"""The tables of SmolLM2's pages, on pages whose truth is known."""

import pytest
import smollm2_tables
from smollm2_study import KINDS

NATS = {"baseline": -5.0, "good": -1.0, "alike": -1.0}


@pytest.fixture
def rows():
    """Eight pages, of which each is as much easier or harder for every method; of `alike` there are five."""
    return [
        {
            "target": 16384,
            "method": method,
            "page": page,
            "losses": [512.0 * (3 - nats / 10 * (block >= 16) + page / 100) for block in range(31)],
            **{
                f"{kind} {length}": {"found": "01" * 8, "log_prob": [nats + page / 10 + noise] * 16}
                for kind in KINDS
                for length in smollm2_tables.lengths_of(16384)
            },
        }
        for method, nats in NATS.items()
        for page in range(5 if method == "alike" else 8)
        for noise in [0.01 * ((page * 7 + len(method)) % 5 - 2)]
    ]


def test_a_method_is_compared_with_the_baseline_on_the_pages_that_both_have_read(rows):
    methods = smollm2_tables.by_method(rows, 16384)
    for name in ("good", "alike"):
        gain = smollm2_tables.over(
            methods[name], methods["baseline"], lambda row: smollm2_tables.log_prob(row, 16384)
        )
        low, high = gain.interval()
        assert low < 4 < high  # unpaired, `alike` would be 0.15 lower: its pages are the harder ones
        assert high - low < 0.1
        loss = smollm2_tables.over(
            methods[name], methods["baseline"], lambda row: smollm2_tables.loss(row, 8192, 15872)
        )
        assert loss.value == pytest.approx(-0.4)


def test_only_differences_that_are_there_get_a_star(rows):
    lines = smollm2_tables.pairs_table(rows).splitlines()[2:]
    starred = {line.split(" | ")[0].strip("| "): line.endswith("* |") for line in lines}
    assert sorted(starred.values()) == [False, True, True]
    assert not starred.get("good above alike", starred.get("alike above good"))
    (good,) = (line for line in smollm2_tables.answers_table(rows).splitlines() if "`good`" in line)
    assert "128/256" in good
