"""Tables hold the numbers of the results, and the terminal shows them whole."""

from made_results import asking, reading

from ropepatch.evaluation.ranking import rank
from ropepatch.report import print_ranking, ranking_tables, results_tables


def table(caption, *results):
    """The table of this caption: its heads, and its rows by their first cell."""
    (found,) = (one for one in results_tables(results) if one.caption == caption)
    return found.heads[1:], {r[0].text: r[1:] for r in found.rows}


def lines(cells):
    return [cell.line for cell in cells]


def test_every_measure_by_length_has_a_table_with_its_intervals():
    results = [
        reading("baseline", [0.6, 2.0, 12.0]),
        reading("yarn", [0.65, 0.6, 0.55], method="yarn"),
    ]
    heads, rows = table("Loss (nats/token)", *results)
    assert heads == ["256 tokens", "512 tokens", "1,024 tokens"]
    assert rows["baseline"][-1].line == "12.000 (10.800 to 13.200)"
    assert [cell.best for cell in rows["yarn"]] == [False, True, True]
    _, perplexities = table("Perplexity", *results)
    assert perplexities["baseline"][-1].line == "1.6e5 (4.9e4 to 5.4e5)"
    _, answers = table(
        "Answer log-prob (nats/token)", asking("yarn", [4, 4, 3], method="yarn")
    )
    assert answers["yarn"][-1].text == "-0.83"


def test_an_effective_length_has_the_lower_end_of_its_accuracy():
    heads, rows = table("Retrieval accuracy", asking("yarn", [20, 0, 20], n=20))
    *shares, reached = rows["yarn"]
    low = dict(zip(heads, shares, strict=False))["256 tokens"].detail.partition(" ")[0]
    assert (reached.text, reached.detail) == ("256", f"accuracy at least {low}")


def test_stretches_of_positions_are_joined_to_the_trained_context_and_its_doublings():
    lengths, nats = [64, 128, 256, 384, 512, 700], [6.0, 4.0, 2.0, 1.0, 3.0, 5.0]
    result = reading("yarn", nats, lengths=lengths, gain=[0.1, 0.2, 0.3, 0.5, 0.7])
    heads, rows = table("Loss (nats/token), by position", result)
    assert heads == ["0 to 256", "256 to 512", "512 to 700"]
    assert lines(rows["yarn"]) == [
        "4.000 (3.600 to 4.400)",
        "2.000 (1.800 to 2.200)",
        "5.000 (4.500 to 5.500)",
    ]
    heads, rows = table(
        "Gain from the longer context (nats/token), by position", result
    )
    assert heads == ["256 to 512", "512 to 700"]
    assert lines(rows["yarn"]) == ["0.400 (0.360 to 0.440)", "0.700 (0.630 to 0.770)"]


def test_kinds_of_questions_have_a_table_of_their_own_where_there_are_several():
    of = {"number": [4, 2, 0], "sentence": [4, 4, 3]}
    results = [
        asking("baseline", of),
        asking("yarn", {kind: [4] * 3 for kind in of}, method="yarn"),
    ]
    _, found = table("Retrieval accuracy, number", *results)
    assert [cell.text for cell in found["baseline"]] == ["100%", "50%", "0%", "256"]
    _, found = table("Retrieval accuracy, sentence", *results)
    assert [cell.text for cell in found["baseline"]] == ["100%", "100%", "75%", "512"]
    assert [cell.best for cell in found["yarn"]] == [False, False, True, False]
    _, log_probs = table("Answer log-prob (nats/token), number", *results)
    assert [log_probs[name][2].text for name in ("baseline", "yarn")] == [
        "-3.00",
        "-0.10",
    ]
    assert not any(
        one.caption == "Retrieval accuracy" for one in results_tables(results)
    )


def test_a_kind_that_the_baseline_only_guesses_is_shown_with_the_reason_and_without_an_effective_length():
    of = {"number": [9, 2, 0], "chain": [3, 9, 9]}
    chain = [
        one
        for one in results_tables([asking("baseline", of, n=10, keys=4)])
        if "chain" in one.caption
    ]
    why = "within 256 tokens the unscaled model answers 9 of 30 (95 % interval 12% to 56%), no better than"
    assert [
        one.caption.partition(", chain (")[2].partition(" guessing")[0] for one in chain
    ] == [f"not counted: {why}"] * 2
    assert [len(one.heads) for one in chain] == [4, 4]


# A ranking

DIFFERENT = [
    reading("baseline", [1.0, 9.0, 9.0]),
    reading("yarn", [1.25, 2.0, 2.0], method="yarn"),
]
LOSSES = [
    *DIFFERENT,
    reading("linear", [1.5, 2.5, 2.5], method="linear"),
    reading("floor", [0.5, 0.25, 0.125]),
]
ANSWERS = [
    asking("baseline", [20, 0, 0], n=20),
    asking("yarn", [20, 20, 10], n=20, method="yarn"),
    asking("linear", [20, 10, 5], n=20, method="linear"),
]


def ranked(*results):
    return [
        (found.heads, {row[found.labels - 1].text: row for row in found.rows})
        for found in ranking_tables(rank(results, base="baseline"), results)
    ]


def test_a_ranking_shows_loss_cost_and_answers_with_their_paired_differences():
    (_, rows), (_, answers) = ranked(*LOSSES, *ANSWERS)
    assert list(rows) == ["yarn", "linear", "baseline", "floor"]
    assert lines(rows["yarn"][1:]) == [
        "2.000",
        "+7.000 (+6.300 to +7.700)",
        "1.250",
        "+0.250 (+0.225 to +0.275)",
    ]
    assert lines(rows["floor"][1:]) == ["0.125"] + [""] * 3
    assert [[cell.text for cell in row] for row in answers.values()] == [
        ["passkey", "yarn", "30/60", "-1.55", "+1.45", "better"],
        ["passkey", "linear", "15/60", "-2.27", "+0.72", "better"],
        ["passkey", "baseline", "0/60", "-3.00", "", ""],
    ]
    assert len(ranked(*LOSSES)) == 1


def test_ranking_and_advice_fit_the_screen(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    print_ranking(rank(LOSSES, base="baseline"), LOSSES)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
