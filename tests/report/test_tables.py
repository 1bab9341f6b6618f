"""Tables hold the numbers of the results, best methods are marked, and a terminal shows them whole."""

from made_results import asking, reading, scoring

from ropepatch.evaluation.ranking import rank
from ropepatch.evaluation.results import comparisons
from ropepatch.report.tables import (
    Cell,
    Table,
    ranking_tables,
    results_text,
    table_text,
    tables_of,
)


def tables(*results):
    """By caption: the heads of the values, and the rows by their first cell."""
    return {
        one.caption: (
            one.heads[one.labels :],
            {row[0].text: row[one.labels :] for row in one.rows},
        )
        for group in comparisons(results)
        for one in tables_of(group)
    }


def lines(cells):
    return [cell.line() for cell in cells]


LOSSES = [
    reading("baseline", [0.6, 2.0, 12.0], gain=[-0.5, -6.0]),
    reading("yarn", [0.65, 0.6, 0.55], method="yarn", gain=[0.2, 0.3]),
    reading("floor", [0.4, 0.39, 0.38]),
]


def test_every_measure_by_length_has_a_table_with_its_intervals():
    found = tables(*LOSSES, asking("yarn", [4, 4, 3], method="yarn"))
    heads, rows = found["Loss (nats/token)"]
    assert heads == ["256 tokens", "512 tokens", "1,024 tokens"]
    assert rows["baseline"][-1].line() == "12.000 (10.800 to 13.200)"
    assert [cell.best for cell in rows["yarn"]] == [False, True, True]
    assert not any(cell.best for cell in rows["floor"])
    _, perplexities = found["Perplexity"]
    assert perplexities["baseline"][-1].line() == "1.628e+05 (4.902e+04 to 5.404e+05)"
    _, answers = found["Answer log-prob (nats/token)"]
    assert answers["yarn"][-1].text == "-0.83"


def test_an_effective_length_has_the_lower_end_of_its_accuracy():
    heads, rows = tables(asking("yarn", [20, 0, 20], n=20))["Retrieval accuracy"]
    *shares, reached = rows["yarn"]
    low = dict(zip(heads, shares, strict=False))["256 tokens"].detail.partition(" ")[0]
    assert (reached.text, reached.detail) == ("256", f"accuracy at least {low}")


def test_losses_and_gains_have_a_row_for_every_range():
    found = tables(*LOSSES)
    heads, rows = found["Loss (nats/token), by position"]
    assert heads == ["baseline", "yarn", "floor"]
    assert list(rows) == ["0 to 256", "256 to 512", "512 to 1,024"]
    assert rows["512 to 1,024"][1].line() == "0.550 (0.495 to 0.605)"
    assert [cell.best for cell in rows["0 to 256"]] == [True, False, False]
    heads, rows = found["Gain from the longer context (nats/token), by position"]
    assert heads == ["baseline", "yarn"]
    assert [cell.text for cell in rows["256 to 512"]] == ["-0.500", "0.200"]


def test_scores_of_lm_eval_have_a_row_for_every_metric():
    measured = {"baseline": {("a", "acc"): 0.1, ("b", "acc"): 0.5}}
    measured["yarn"] = {("a", "acc"): 0.4}
    found = tables(*(scoring(name, scores) for name, scores in measured.items()))
    heads, rows = found["Scores"]
    assert heads == ["baseline", "yarn"]
    assert lines(rows["a"]) == ["0.1 (0.06 to 0.14)", "0.4 (0.36 to 0.44)"]
    assert lines(rows["b"]) == ["0.5 (0.46 to 0.54)", "–"]


def test_several_kinds_of_questions_have_tables_of_their_own():
    of = {"number": [4, 2, 0], "sentence": [4, 4, 3]}
    perfect = {kind: [4] * 3 for kind in of}
    found = tables(asking("baseline", of), asking("yarn", perfect, method="yarn"))
    assert "Retrieval accuracy" not in found
    texts = {
        kind: [
            cell.text for cell in found[f"Retrieval accuracy, {kind}"][1]["baseline"]
        ]
        for kind in of
    }
    assert texts["number"] == ["100%", "50%", "0%", "256"]
    assert texts["sentence"] == ["100%", "100%", "75%", "512"]
    _, log_probs = found["Answer log-prob (nats/token), number"]
    assert log_probs["baseline"][2].text == "-3.00"


def test_a_kind_that_the_baseline_guesses_has_the_reason():
    of = {"number": [9, 2, 0], "chain": [3, 9, 9]}
    found = tables(asking("baseline", of, n=10, keys=4))
    chain = {name: heads for name, (heads, _) in found.items() if "chain" in name}
    why = "within 256 tokens the unscaled model answers 9 of 30 (95 % interval 12% to 56%), no better than"
    assert len(chain) == 2
    for name, heads in chain.items():
        assert f", chain (not counted: {why}" in name
        assert len(heads) == 3  # without an effective length


def test_a_kind_that_a_training_asked_is_marked_as_taught():
    student = asking("student", {"number": [9, 9, 9], "quote": [9, 9, 9]}, n=10, keys=4)
    student.model["taught"] = ["number"]
    others = asking("baseline", {"number": [9, 9, 0], "quote": [9, 9, 0]}, n=10, keys=4)
    captions = tables(others, student)
    marked = [name for name in captions if "this kind was taught to student" in name]
    assert marked == [name for name in captions if ", number" in name] != []


def test_a_wide_table_is_wrapped():
    text = results_text(LOSSES, 72)
    table = text[text.index("Loss (nats/token)") :].split("\n\n")[0]
    assert max(map(len, table.splitlines())) <= 72
    assert "12.000 (10.800 to 13.200)" in results_text(LOSSES)


# A ranking


def test_a_ranking_shows_losses_and_answers_with_their_differences():
    results = [
        reading("baseline", [1.0, 9.0, 9.0]),
        reading("yarn", [1.25, 2.0, 2.0], method="yarn"),
        reading("linear", [1.5, 2.5, 2.5], method="linear"),
        reading("floor", [0.5, 0.25, 0.125]),
        asking("baseline", [20, 0, 0], n=20),
        asking("yarn", [20, 20, 10], n=20, method="yarn"),
        asking("linear", [20, 10, 5], n=20, method="linear"),
    ]
    losses, answers = ranking_tables(rank(results), results)
    rows = {row[0].text: lines(row[1:]) for row in losses.rows}
    assert list(rows) == ["yarn", "linear", "baseline", "floor"]
    gain, cost = "+7.000 (+6.300 to +7.700)", "+0.250 (+0.225 to +0.275)"
    assert rows["yarn"] == ["2.000", gain, "1.250", cost]
    assert rows["floor"] == ["0.125"]
    assert [[cell.text for cell in row] for row in answers.rows] == [
        ["passkey", "yarn", "30/60", "-1.55", "+1.45", "better"],
        ["passkey", "linear", "15/60", "-2.27", "+0.72", "better"],
        ["passkey", "baseline", "0/60", "-3.00", "", ""],
    ]


def test_on_a_narrow_screen_intervals_stand_below_their_values():
    cells = [Cell("a"), Cell("1.5", "1 to 2"), Cell("2.5", "2 to 3")]
    table = Table("caption", ["", "short", "long"], [cells])
    assert table_text(table, 40).splitlines()[2:] == ["a  1.5 (1 to 2)  2.5 (2 to 3)"]
    lines = table_text(table, 24).splitlines()
    assert lines[2:] == ["a       1.5       2.5", "   (1 to 2)  (2 to 3)"]
