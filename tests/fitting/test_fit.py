"""`ropepatch.fit` and `ropepatch fit`: from a checkpoint to frequencies that stock transformers reads."""

import itertools
import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rank_processes import on_processes
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import ropepatch
from ropepatch.cli import app
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.files import read_json
from ropepatch.fitting import Objective, course, examples, fitting, published
from ropepatch.fitting.problem import Problem

TO = 320


def read_little(monkeypatch):
    """Little to read, so that a fit takes a second."""
    monkeypatch.setattr(examples, "TALES", 6)
    monkeypatch.setattr(examples, "HELD_OUT", 2)
    monkeypatch.setattr(course, "MIXTURES", 2)
    monkeypatch.setattr(course, "BATCH_TOKENS", TO)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    read_little(monkeypatch)


@pytest.fixture(scope="module")
def fitted():
    with pytest.MonkeyPatch.context() as monkeypatch:
        read_little(monkeypatch)
        return ropepatch.fit("tiny", to=TO, steps=6)


@pytest.fixture
def loss(tiny):
    """The loss of some windows of the fit under a scaling."""
    material = examples.read_material(tiny[1], None, field="text", split="", length=TO, spare=0)

    def loss(scaling, part):
        with ropepatch.patch(tiny[0], scaling):
            return ropepatch.perplexity(tiny[0], None, list(getattr(material, part))).at(TO).mean

    return loss


def test_a_fitted_checkpoint_gives_the_fitted_logits_in_stock_transformers(fitted, tmp_path, tiny):
    model, tokenizer = tiny
    ids = held_out_tales(tokenizer, length=TO, count=1)[0].ids[None]
    with torch.no_grad(), ropepatch.patch(model, fitted.plan):
        expected = model(ids).logits
    folder = ropepatch.extend(fitted.plan, tmp_path / "out").folder
    stock = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(stock(ids).logits, expected)


def test_the_record_says_how_much_better_the_held_out_windows_are_read(fitted, loss):
    held = fitted.record["held_out"]
    assert (held["windows"], held["documents"]) == (2, 2)
    assert held["after"] == pytest.approx(loss(fitted.plan, "unseen"), abs=1e-5)
    start = ropepatch.make_scaling(fitted.record["start"], factor=TO / 256)
    assert held["before"] == pytest.approx(loss(start, "unseen"), abs=1e-5)
    assert held["gain"] == pytest.approx(held["before"] - held["after"], abs=1e-6)
    first, second = str(fitted).splitlines()[:2]
    assert first == "tiny: 256 -> 320 tokens"
    assert second.startswith(
        f"{held['gain']:.3f} nats/token better than the best published method ({fitted.record['start']}), "
        "windows of 2 documents: no interval; "
    )
    more = replace(fitted, record=fitted.record | {"held_out": held | {"gain_interval": [0.1, 0.25]}})
    assert "95 % 0.100 to 0.250; " in str(more)


def test_no_published_method_reads_the_windows_that_decide_better(fitted, loss):
    decided = fitted.record["decided_by"]
    assert decided["after"] == pytest.approx(loss(fitted.plan, "held_out"), abs=1e-5)
    methods = published(fitted.plan.rope, TO / 256)
    losses = {name: loss(ropepatch.make_scaling(name, factor=TO / 256), "held_out") for name in methods}
    assert fitted.record["start"] == min(losses, key=losses.get)
    assert decided["before"] == pytest.approx(min(losses.values()), abs=1e-5)
    assert decided["after"] <= decided["before"]


@pytest.mark.slow
def test_the_same_seed_finds_the_same_and_another_does_not(fitted):
    assert ropepatch.fit("tiny", to=TO, steps=6).scaling == fitted.scaling
    assert ropepatch.fit("tiny", to=TO, steps=6, init="yarn", seed=1).scaling != fitted.scaling


def test_a_budget_of_time_ends_starts_and_descent_with_the_best_until_then(monkeypatch):
    told = []

    @contextmanager
    def heard(name):
        yield lambda done, total: told.append((name, done, total))

    ticks = itertools.count()  # a second between two looks at the clock
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    for module in (fitting, course):
        monkeypatch.setattr(module, "time", clock)
    found = ropepatch.fit("tiny", to=TO, steps=1000, minutes=0.5, progress=heard)
    starts = [(done, total) for name, done, total in told if name == "starts"]
    steps = [(done, total) for name, done, total in told if name == "fit"]
    assert starts == sorted(starts)
    assert 0 < starts[0][0] < starts[-1][0] < starts[-1][1]  # a part of what it would have read
    assert 0 < steps[-1][0] < course.RACERS * 30 < steps[-1][1]
    record = found.record
    assert (record["minutes"], record["stopped"]) == (0.5, True)
    assert record["decided_by"]["after"] <= record["decided_by"]["before"]
    last = {row["start"]: row["step"] for row in record["history"]}
    assert sum(last.values()) == steps[-1][0]  # where they stopped they were judged
    assert "stopped after 0.5 min" in str(found)


class StoppedError(Exception):
    pass


@contextmanager
def stopping(name):
    def advance(done, total):
        if name == "fit" and done == 5:
            raise StoppedError

    yield advance


@pytest.mark.slow
def test_an_interrupted_fit_goes_on_to_the_same_end_and_its_folder_is_refused_to_another(fitted, tmp_path):
    work = tmp_path / "work"
    with pytest.raises(StoppedError):
        ropepatch.fit("tiny", to=TO, steps=6, work=work, progress=stopping)
    assert 0 < read_json(work / "fit.json")["course"]["taken"] < 5
    with pytest.raises(RopepatchError, match="is of another fit"):
        ropepatch.fit("tiny", to=TO, steps=7, work=work)
    again = ropepatch.fit("tiny", to=TO, steps=6, work=work)
    assert again.scaling == fitted.scaling
    assert again.record["forward_tokens"] == fitted.record["forward_tokens"]


@pytest.mark.slow
def test_a_search_is_given_the_forward_tokens_of_the_descent(monkeypatch):
    searches = []

    def spending(name, problem, starts, *, budget, seed, windows):
        searches.append((name, budget - problem.spent))
        return iter(())

    monkeypatch.setattr("ropepatch.fitting.fitting.run_search", spending)
    record = ropepatch.fit("tiny", to=TO, steps=6, search="longrope2").record
    assert searches == [("longrope2", (6 + (course.RACERS - 1) * 1) * TO * 3)]
    assert record["search"] == "longrope2"


@pytest.mark.slow
def test_a_search_is_never_worse_on_the_held_out_windows_than_the_start():
    found = ropepatch.fit("tiny", to=TO, steps=3, search="coordinates")
    assert found.record["decided_by"]["after"] <= found.record["decided_by"]["before"]


@pytest.mark.slow
def test_key_tokens_and_needles_change_what_is_minimised(monkeypatch):
    seen = []
    weighed = Problem.by_window

    def by_window(problem, vector):
        seen.append(problem)
        return weighed(problem, vector)

    monkeypatch.setattr(Problem, "by_window", by_window)
    ropepatch.fit("tiny", to=TO, steps=1, init="yarn", objective=Objective(keys=3.0, needles=1.0, short=2.0))
    weights = seen[0].examples.weights
    assert len({round(ratio, 3) for ratio in (weights / weights.min()).flatten().tolist()}) >= 3
    assert seen[0].needles is not None
    assert seen[0].cost(1) == 2 * TO


@pytest.mark.slow
def test_kept_pairs_are_kept_and_monotone_divisors_do_not_fall():
    found = ropepatch.fit("tiny", to=TO, steps=2, init="yarn", shape="monotone", keep=2).scaling
    assert found.divisors[:2] == (1.0, 1.0)
    assert list(found.divisors) == sorted(found.divisors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": 256}, "already covers 256 tokens"),
        ({"to": TO, "search": "luck"}, "luck"),
        ({"to": TO, "init": "nonsense"}, "unknown method 'nonsense'"),
        ({"to": TO, "init": "dynamic"}, "follows the length"),
        ({"to": TO, "minutes": 0}, "minutes must be a number above 0"),
        ({"to": TO, "minutes": 1, "search": "evolution"}, "of a descent, got 1 for evolution"),
        ({"to": TO, "keep": 16}, "keep must be below the 16 rotary pairs of tiny, got 16"),
    ],
)
def test_a_fit_of_nonsense_is_refused(arguments, message):
    with pytest.raises(RopepatchError, match=message):
        ropepatch.fit("tiny", **arguments)


def test_a_checkpoint_without_tales_of_its_own_needs_a_text(shared):
    with pytest.raises(RopepatchError, match="--text is missing"):
        ropepatch.fit(shared / "checkpoints" / "babyllama-361", to=512)


# the command


def command(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_the_command_writes_a_small_file_that_stands_for_a_method(tmp_path):
    file = tmp_path / "fitted.json"
    done = command("fit", "tiny", "--to", TO, "--steps", 2, "--init", "yarn", "--out", file)
    assert done.exit_code == 0, done.output
    assert f"--method {file}" in done.output
    planned = command("plan", "tiny", "--method", file, "--json")
    assert json.loads(planned.stdout)["parameters"]["divisors"] == read_json(file)["parameters"]["divisors"]
    assert read_json(file)["fit"]["steps"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["fitted.json"]


@pytest.mark.slow
def test_the_command_writes_a_checkpoint_with_the_record_of_the_fit(tmp_path):
    out = tmp_path / "out"
    done = command("fit", "tiny", "--to", TO, "--steps", 2, "--init", "yarn", "--out", out, "--json")
    assert done.exit_code == 0, done.output
    record = read_json(out / "ropepatch.json")
    assert record["fit"]["held_out"] == json.loads(done.stdout)["held_out"]
    assert record["method"] == "custom"
    assert record["verified"]["logits"] == "equal"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_command_refuses_an_output_that_exists_before_it_works(tmp_path, monkeypatch):
    monkeypatch.setattr("ropepatch.fitting.fit", lambda *args, **kwargs: pytest.fail("it worked"))
    (tmp_path / "here.json").write_text("{}")
    done = command("fit", "tiny", "--to", TO, "--out", tmp_path / "here.json")
    assert isinstance(done.exception, RopepatchError)
    assert "already exists" in str(done.exception)


def test_the_command_asks_for_the_room_of_a_checkpoint_before_it_works(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    def work(*args, **kwargs):
        raise RopepatchError("it worked")

    monkeypatch.setattr("ropepatch.fitting.fit", work)
    for words, message in (
        (["--out", tmp_path / "new" / "out"], "the copy needs"),
        (["--out", tmp_path / "out.json"], "it worked"),
        (["--out", tmp_path / "out", "--link-weights"], "it worked"),
    ):
        done = command("fit", "tiny", "--to", TO, *words)
        assert message in str(done.exception)


def test_processes_that_do_not_know_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RopepatchError, match="these processes do not know each other"):
        ropepatch.fit("tiny", to=TO)


def fit_on_one_of_several(rank, out):
    with pytest.MonkeyPatch.context() as monkeypatch:
        read_little(monkeypatch)
        scored = []
        score = Problem.score
        monkeypatch.setattr(Problem, "score", lambda *told: scored.append(1) or score(*told))
        found = ropepatch.fit("tiny", to=TO, steps=6, work=out / "work", minutes=60)
    torch.save((found.record, len(scored)), out / f"{rank}.pt")


@pytest.mark.slow
def test_processes_share_a_fit_and_find_what_one_does_to_the_bit(fitted, tmp_path):
    on_processes(2, fit_on_one_of_several, tmp_path)
    (first, some), (second, others) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert abs(some - others) <= 2
    assert others > 10
    differing = ("seconds", "env", "minutes", "stopped")
    alone, first, second = (
        {key: value for key, value in record.items() if key not in differing}
        for record in (fitted.record, first, second)
    )
    assert first == second == alone


def test_token_ids_that_the_model_does_not_have_are_refused(tmp_path):
    file = tmp_path / "ids.jsonl"
    file.write_text(json.dumps({"input_ids": [*range(5, 900)] * 10 + [5000] * 10}))
    with pytest.raises(RopepatchError, match="holds token id 5000, the model has 1024"):
        ropepatch.fit("tiny", to=TO, text=file)
