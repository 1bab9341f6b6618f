"""The study of a real model runs from one command, goes on where it stopped, and its page has its tables."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import smollm2_cost
import smollm2_study
import smollm2_tables
from readme import check_block

from ropepatch.evaluation.results import Result

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "results" / "smollm2.json"
TINY = RESULTS.with_name("tiny-retrieval.json")
PAGE = ROOT / "eval" / "studies" / "smollm2" / "smollm2.md"


@pytest.fixture(scope="module")
def record():
    return json.loads(RESULTS.read_text())


@pytest.fixture(scope="module")
def tiny_record():
    return json.loads(TINY.read_text())


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ("retrieval", smollm2_tables.retrieval_tables),
        ("harness", smollm2_tables.harness_table),
        ("loss", smollm2_tables.loss_table),
        ("apart", smollm2_tables.apart_table),
        ("choice", smollm2_tables.choice_text),
        ("machine", smollm2_tables.machine_text),
        ("precision", smollm2_tables.precision_text),
        ("tiny-retrieval", smollm2_tables.retrieval_tables),
        ("tiny-loss", smollm2_tables.loss_table),
        ("tiny-apart", smollm2_tables.apart_table),
    ],
)
def test_the_page_has_the_tables_of_the_results(record, tiny_record, block, text):
    check_block(block, text(tiny_record if block.startswith("tiny-") else record), PAGE)


def test_what_the_page_says_of_the_tables_of_tiny_is_in_them(tiny_record):
    chains = {
        (length, kind): [name for name, _, _ in smollm2_tables.apart(tiny_record, [kind], length)]
        for length in smollm2_tables.lengths(tiny_record)
        for kind in (*smollm2_study.FIRST, *smollm2_study.OTHERS)
    }
    four = chains.pop((1024, "niah_single"))
    assert four == ["as it is", "ntk", "llama3", "dca"]
    assert max(map(len, chains.values())) < 3
    nats = {
        name: smollm2_tables.read(smollm2_tables.losses(tiny_record, name))
        for name in smollm2_tables.methods(tiny_record)
    }
    assert sorted(four, key=lambda name: -nats[name].mean) == four
    assert all(nats[one].interval[0] > nats[next_one].interval[1] for one, next_one in pairwise(four))
    assert abs(nats["dca"].mean - nats["self-extend"].mean) < 0.001
    for kind in (smollm2_study.KEYS, *smollm2_study.OTHERS):
        for method in nats:
            found, n = smollm2_tables.counted(smollm2_tables.of(tiny_record, method, kind))
            assert found <= 0.1 * n


def test_the_page_prints_the_command_for_a_larger_model_and_what_it_costs():
    check_block("cost", smollm2_cost.cost_text(), PAGE)


def test_the_front_page_has_the_short_table(record):
    check_block("smollm2", smollm2_tables.short_table(record))


def test_what_the_page_says_of_its_tables_is_in_them(record):
    def found(method, kinds, length):
        return sum(
            smollm2_tables.counted(smollm2_tables.of(record, method, kind, length))[0] for kind in kinds
        )

    def nats(method):
        return smollm2_tables.read(smollm2_tables.losses(record, method)).mean

    chains = [
        smollm2_tables.apart(record, [kind], length)
        for length in smollm2_tables.lengths(record)
        for kind in smollm2_study.FIRST
    ]
    assert max(map(len, chains)) == 2
    kinds = (*smollm2_study.FIRST, *smollm2_study.OTHERS)
    by_linear = {
        kind: sum(found("linear", [kind], n) for n in smollm2_tables.lengths(record)) for kind in kinds
    }
    assert {kind: n for kind, n in by_linear.items() if n} == {"fwe": 1}
    assert abs(nats("linear") - nats("as it is")) < 0.1  # a tenth of a nat
    near = ("ntk", "yarn", "llama3")
    assert all(found(method, smollm2_study.FIRST, 16384) for method in near)
    assert not found("as it is", smollm2_study.FIRST, 16384)
    assert max(map(nats, near)) - min(map(nats, near)) < 0.05


def row(method, kind, found, *, wanted=1, length=100, **more):
    return {"method": method, "kind": kind, "length": length, "round": 0, "seconds": 1.0} | (
        {"found": found, "wanted": wanted} | more
    )


def test_a_score_of_lm_eval_is_kept_as_answers_found():
    score = {"task": "niah_single_1", "metric": "4096", "value": 0.75, "n": 4, "stderr": 0.2, "version": "1"}
    result = Result(
        task="lm-eval",
        label="yarn",
        model={},
        scaling=None,
        target=16384,
        parameters={},
        env={},
        seconds=60.0,
        tables={"scores": [score, score | {"task": "niah_multikey_2", "value": 0.0}]},
    )
    rows = list(smollm2_study.rows_of(result, "harness-0"))
    assert [(row["kind"], row["length"], row["correct"], row["n"]) for row in rows] == [
        ("niah_single_1", 4096, 3, 4),
        ("niah_multikey_2", 4096, 0, 4),
    ]
    record = {"rows": [*rows, row("linear", "niah_single", [1])]}
    assert smollm2_tables.harness_table(record).splitlines()[2:] == [
        "| yarn | 3/4 (30% to 95%) | 0/4 (0% to 49%) | 60 s |"
    ]
    assert smollm2_tables.lengths(record) == [100]


def test_told_apart_are_the_most_methods_no_two_of_whose_intervals_touch():
    found = {"as it is": 0, "a": 2, "b": 10, "c": 12, "d": 20}
    rows = [row(name, "niah_single", [1] * n + [0] * (20 - n)) for name, n in found.items()]
    chain = smollm2_tables.apart({"rows": rows}, ["niah_single"], 100)
    assert chain == [("as it is", 0, 20), ("b", 10, 20), ("d", 20, 20)]
    assert smollm2_tables.apart({"rows": rows[:2]}, ["niah_single"], 100) == [("as it is", 0, 20)]


def test_losses_agree_where_each_mean_lies_within_the_interval_of_every_other():
    def read(method, *nats):
        return [
            {
                "method": method,
                "kind": "loss",
                "length": 100,
                "round": at,
                "digest": str(at),
                "spans": [[0, 50, nat * 49, 49], [50, 100, nat * 99, 50]],
            }
            for at, nat in enumerate(nats)
        ]

    rows = [*read("wide", 1.0, 3.0), *read("near", 1.5, 2.7), *read("narrow", 1.99, 2.01)]
    assert smollm2_tables.losses_agree({"rows": rows}, ["wide", "near"], 50)
    assert smollm2_tables.losses_agree({"rows": rows}, ["wide", "near", "narrow"], 50) is False
    assert (
        smollm2_tables.losses_agree({"rows": read("one", 1.0) + read("other", 1.0)}, ["one", "other"], 50)
        is None
    )


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The command of the page, on tiny."""
    folder = tmp_path_factory.mktemp("study")
    words = smollm2_cost.COMMAND.split()[3:]
    swapped = {
        "--out": folder / "out",
        "--json": folder / "record.json",
        "--rounds": 2,
        "--trials": 1,
        "--documents": 2,
    }
    options = {word: swapped.get(word, value) for word, value in zip(words[::2], words[1::2], strict=True)}
    assert options.keys() - swapped.keys() == {"--text"}
    asked = ["tiny", "--methods", "linear,yarn,fit", "--fit-init", "yarn", "--fit-minutes", "0.01", "--check"]
    asked += [str(word) for name, value in options.items() if name != "--text" for word in (name, value)]
    return smollm2_study.reader().parse_args([*asked, "--device", "cpu"])


@pytest.mark.slow
def test_the_command_of_the_page_makes_the_tables_of_tiny_and_goes_on_where_it_was_stopped(
    study, monkeypatch
):
    measured, names = smollm2_study.measure, []

    def stopped(suite, *, out, **where):
        names.append(out.name)
        if out.name == "near-0" and names.count("near-0") == 1:
            raise KeyboardInterrupt
        return measured(suite, out=out, **where)

    monkeypatch.setattr(smollm2_study, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        smollm2_study.run(study)
    early = json.loads(study.json.read_text())
    assert {row["kind"] for row in early["rows"]} == {"loss", "short", "niah_single", "niah_multikey"}
    smollm2_study.run(study)
    again = [f"{part}-{n}" for n in (0, 1) for part in ("loss", "far", "near", "float32", "others")]
    again.remove("others-0")  # too short for tiny
    assert names == ["loss-0", "far-0", "near-0", *again]
    record = json.loads(study.json.read_text())
    assert [row for row in record["rows"] if row in early["rows"]] == early["rows"]
    assert smollm2_tables.methods(record) == ["as it is", "fit", "linear", "yarn"]
    for name in smollm2_tables.methods(record):
        assert smollm2_tables.counted(smollm2_tables.of(record, name, "niah_single", 512))[1] == 2
        assert smollm2_tables.counted(smollm2_tables.of(record, name, "niah_multikey", 512))[1] == 8
        assert len(smollm2_tables.of(record, name, "loss")) == 4
    own, linear, yarn = (
        smollm2_tables.read(smollm2_tables.of(record, name, "loss"), 256, 512).mean
        for name in ("as it is", "linear", "yarn")
    )
    assert yarn < own < linear
    assert smollm2_tables.choice(record).recommended in ("yarn", "fit")
    tables = smollm2_tables.retrieval_tables(record) + smollm2_tables.loss_table(record)
    assert all(f"\n| {name} |" in tables for name in ("as it is", "fit", "linear", "yarn"))
    assert "Documents read: 4." in smollm2_tables.machine_text(record)
    assert "losses of 16 windows" in smollm2_tables.precision_text(record)
    assert "told apart" in smollm2_tables.apart_table(record)
    assert smollm2_study.rows_read(study, 256, 512)[512] == sum(
        len(row.get("found", [0]))
        for row in record["rows"]
        if row["method"] == "yarn" and row["length"] == 512
    )
