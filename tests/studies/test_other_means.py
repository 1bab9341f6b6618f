"""The other means of eval/: what each chooses on some windows, and what the rows then say of others."""

import importlib
import json
import math
import re
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import means
import pytest
import torch
import torch.nn.functional as F
from loss_models import VOCABULARY, build
from map_oracle import ORACLE
from methods import NEED_MORE

import ropepatch
from ropepatch.data.texts import digest
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.evaluation.intervals import Mean
from ropepatch.model.survey import survey
from ropepatch.scaling import METHODS, YaRN
from ropepatch.scaling.rope import Rope

pytestmark = pytest.mark.sweep

EVAL = Path(__file__).resolve().parents[2] / "eval" / "studies"
TRAINED, FACTOR = 16, 4
TARGET = FACTOR * TRAINED
NEED_A_FACTOR = [name for name in METHODS if name not in NEED_MORE]


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EVAL / "training_free")
        yield importlib.import_module("other_means")


def some_windows(count, length, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (count, length), generator=draw).tolist()


@pytest.fixture(scope="module")
def make_case():
    """A random model and random windows, at a factor."""
    model = build(head_dim=16, max_position_embeddings=TRAINED)
    rope = survey(model.config.to_dict(), model).rope

    def made(factor=FACTOR, floor=None):
        length = factor * TRAINED
        choosing = means.Reading(model, TRAINED, some_windows(2, length, 12))
        testing = means.Reading(model, TRAINED, some_windows(3, length, 2))
        return means.Case("random", factor, model, rope, choosing, testing, floor)

    return made


@pytest.fixture(scope="module")
def case(make_case):
    return make_case()


@pytest.fixture(scope="module")
def chosen(case):
    """The row of the best published method."""
    return means.published(case, {})


@torch.inference_mode()
def in_one_pass(model, pieces):
    """Nats of every token after the first of each window, from all logits at once."""
    ids = torch.as_tensor(pieces)
    logits = model(ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


def half_a_window_at_a_time(model, pieces, trained=TRAINED):
    ids, half = torch.as_tensor(pieces), trained // 2
    losses = [in_one_pass(model, ids[:, :trained])]
    for begin in range(half, ids.shape[1] - half, half):
        losses.append(in_one_pass(model, ids[:, begin : begin + trained])[:, half - 1 :])
    return torch.cat(losses, dim=1)


@contextmanager
def turned(case, scaling):
    """The model with a scaling's frequencies at the target, put straight into its rotary module."""
    rotary, frequencies = case.model.model.rotary_emb, scaling.frequencies(case.rope, TARGET)
    before = rotary.inv_freq, rotary.attention_scaling
    try:
        rotary.inv_freq, rotary.attention_scaling = frequencies.inv_freq, frequencies.attention_factor
        yield
    finally:
        rotary.inv_freq, rotary.attention_scaling = before


def nats(case, scaling, reading):
    with turned(case, scaling):
        return in_one_pass(case.model, reading.pieces).mean().item()


def of_registry(case, reading):
    """What every method that needs nothing but the factor costs."""
    makings = {name: ropepatch.make_scaling(name, factor=float(FACTOR)) for name in NEED_A_FACTOR}
    return {name: nats(case, scaling, reading) for name, scaling in makings.items()}


def excess(case, scaling):
    base = half_a_window_at_a_time(case.model, case.testing.pieces).mean().item()
    return nats(case, scaling, case.testing) - base


# Excess


def test_excess_is_one_pass_less_the_own_window_half_a_window_at_a_time(case):
    linear = ropepatch.make_scaling("linear", factor=4.0)
    row = case.row({"a": 1}, case.scaled(linear))
    with turned(case, linear):
        one = in_one_pass(case.model, case.testing.pieces)
    apart = one - half_a_window_at_a_time(case.model, case.testing.pieces)
    assert row["excess"] == pytest.approx(apart.mean().item(), abs=1e-5)
    assert row["short"] == pytest.approx(apart[:, : TRAINED - 1].mean().item(), abs=1e-5)
    assert abs(row["excess"]) > 1e-3
    assert abs(row["short"]) > 0.01
    low, high = Mean.of(row["clusters"]).interval()
    assert low < row["excess"] < high
    assert Mean.of(row["clusters"]).value == row["excess"]
    assert row["settings"] == {"a": 1}


# The best published method


def test_published_is_the_best_of_the_registry_on_the_windows_to_choose_on(case, chosen):
    costs = of_registry(case, case.choosing)
    best = min(costs, key=costs.get)
    assert means.methods() == NEED_A_FACTOR
    assert chosen["settings"] == {"method": best, "tried": len(NEED_A_FACTOR)}
    costs_of_the_others = of_registry(case, case.testing)
    assert min(costs_of_the_others, key=costs_of_the_others.get) != best  # chosen there, it would be another
    assert best != "yarn"  # which other tests name
    assert chosen["excess"] == pytest.approx(excess(case, ropepatch.make_scaling(best, factor=4.0)), abs=1e-5)


# A temperature


def test_a_method_that_follows_the_length_stands_as_it_is_at_the_target(case, monkeypatch):
    monkeypatch.setattr(means, "ATTENTION_FACTORS", [])
    row = means.temperature(case, {"published": {"settings": {"method": "dynamic"}}})
    dynamic = excess(case, ropepatch.make_scaling("dynamic", factor=4.0))
    assert row["excess"] == pytest.approx(dynamic, abs=1e-5)
    assert abs(row["excess"] - case.row({}, nullcontext)["excess"]) > 1e-3


def test_temperature_is_the_best_attention_factor_on_the_windows_to_choose_on(case):
    row = means.temperature(case, {"published": {"settings": {"method": "yarn"}}})
    own = ropepatch.make_scaling("yarn", factor=4.0).frequencies(case.rope, TARGET).attention_factor
    made = {a: YaRN(factor=4.0, attention_factor=a) for a in (own, *(0.9 + 0.05 * k for k in range(13)))}
    costs = {a: nats(case, scaling, case.choosing) for a, scaling in made.items()}
    best = min(costs, key=costs.get)
    assert row["settings"]["attention_factor"] == pytest.approx(best)
    assert costs[best] < costs[own]
    assert row["excess"] == pytest.approx(excess(case, made[best]), abs=1e-5)


# A pair of divisors


@pytest.mark.parametrize("method", ["linear", "yarn"])
def test_a_pair_is_the_method_over_the_target_and_keeps_its_one_attention_factor_for_short_texts(
    case, method
):
    row = means.pair(case, {"published": {"settings": {"method": method}}})
    assert row["excess"] == pytest.approx(excess(case, ropepatch.make_scaling(method, factor=4.0)), abs=1e-5)
    a = 1 + 0.1 * math.log(4) if method == "yarn" else 1.0
    assert row["settings"] == {"method": method, "attention_factor": pytest.approx(a)}
    pieces = [piece[:TRAINED] for piece in case.testing.pieces]
    with turned(case, YaRN(factor=1.0, attention_factor=a)):
        one = in_one_pass(case.model, pieces)
    assert row["short"] == pytest.approx((one - in_one_pass(case.model, pieces)).mean().item(), abs=1e-5)
    assert (abs(row["short"]) > 1e-4) == (method == "yarn")


# Attention maps


def farthest(name, settings, target):
    """The greatest effective distance of the last tokens to any before them."""
    distance = ORACLE[name](**settings)
    return max(distance(last, key) for last in (target - 1, target - 2) for key in range(target - 2))


@pytest.mark.parametrize(("factor", "trained"), [(2, 512), (8, 256)])
@pytest.mark.parametrize("name", ["rerope", "leaky-rerope", "self-extend"])
def test_every_setting_of_a_map_keeps_the_target_within_the_trained_window_and_the_least_just_so(
    name, factor, trained
):
    target = factor * trained
    reading = SimpleNamespace(trained=trained, length=target)
    options = list(means.map_settings(name, SimpleNamespace(testing=reading)))
    assert len({tuple(settings.values()) for settings in options}) == (3 if name == "rerope" else 6)
    for settings in options:
        assert 0 < settings["window"] < trained
        assert farthest(name, settings, target) <= trained
    if name != "rerope":
        number, step = ("divisor", 0.1) if name == "leaky-rerope" else ("group", 1)
        for window in (trained // 2, trained * 3 // 4):
            least = min(settings[number] for settings in options if settings["window"] == window)
            assert farthest(name, {"window": window, number: least - step}, target) >= trained


def test_a_map_is_the_best_of_its_settings_on_the_windows_to_choose_on(case):
    row = means.attention_map("self-extend", case, {})
    costs = {}
    for settings in means.map_settings("self-extend", case):
        with ropepatch.patch(case.model, "self-extend", to=TARGET, **settings):
            costs[tuple(settings.values())] = in_one_pass(case.model, case.choosing.pieces).mean().item()
    window, group = min(costs, key=costs.get)
    assert row["settings"] == {"window": window, "group": group, "tried": 6}
    with ropepatch.patch(case.model, "self-extend", to=TARGET, window=window, group=group):
        one = in_one_pass(case.model, case.testing.pieces)
    own = half_a_window_at_a_time(case.model, case.testing.pieces)
    assert row["excess"] == pytest.approx((one - own).mean().item(), abs=1e-5)


# A search


GRID = [
    YaRN(factor=4.0, beta_fast=fast, beta_slow=slow, attention_factor=a, truncate=False)
    for fast in (4, 8, 16, 32)
    for slow in (0.5, 1, 2)
    for a in (1.0, 1.05, 1.1, 1.15, 1.2)
]
WANTED = YaRN(factor=6.0, beta_fast=21.0, beta_slow=1.4, attention_factor=1.13, truncate=False)
ROPE = Rope(rotary_dim=128, rope_theta=10000.0, original_max_position_embeddings=256)


def away(scaling, wanted=WANTED):
    """How far the logarithms of a scaling's divisors and attention factor are from those wanted, squared."""
    found, best = (one.frequencies(ROPE, 1024) for one in (scaling, wanted))
    apart = (found.inv_freq.double() / best.inv_freq.double()).log().square().sum().item()
    return apart + 100 * math.log(found.attention_factor / best.attention_factor) ** 2


@pytest.fixture(scope="module")
def searched():
    """What a search finds where the cost is known everywhere, and what every point that it tried cost."""
    costs = []
    real = means.Case("known", 4, None, ROPE, None, None, None)
    known = SimpleNamespace(
        factor=4,
        rope=ROPE,
        custom=real.custom,
        scaled=lambda scaling: scaling,
        cost=lambda scaling: costs.append(away(scaling)) or costs[-1],
        row=lambda settings, scaling: {"settings": settings, "read": scaling},
    )
    return means.search(known, {}), costs


def test_a_search_begins_with_a_grid_and_is_as_good_as_every_point_that_it_tried(searched):
    row, costs = searched
    assert costs[: len(GRID)] == pytest.approx([away(scaling) for scaling in GRID], rel=1e-4)
    assert row["settings"]["tried"] == len(costs) > len(GRID) + 20
    assert away(row["read"]) == pytest.approx(min(costs), abs=1e-4)
    assert away(row["read"]) < 0.1 * min(costs[:80])  # the steps did something
    names = ("beta_fast", "beta_slow", "attention_factor")
    parameters = {name: row["settings"][name] for name in names}
    stated = YaRN(factor=row["settings"]["scale"], **parameters, truncate=False)
    assert away(row["read"], stated) < 1e-8


def test_a_search_chooses_on_the_windows_to_choose_on(case, monkeypatch):
    monkeypatch.setattr(means, "RANDOM_POINTS", 0)
    monkeypatch.setattr(means, "PATTERN_STEPS", ())
    costs = [nats(case, scaling, case.choosing) for scaling in GRID]
    row = means.search(case, {})
    best = GRID[costs.index(min(costs))]
    settings = row["settings"]
    assert settings["tried"] == len(GRID)
    assert [settings[name] for name in ("beta_fast", "beta_slow", "attention_factor")] == pytest.approx(
        [best.beta_fast, best.beta_slow, best.attention_factor]
    )
    assert row["excess"] == pytest.approx(excess(case, best), abs=1e-5)


# Training


def test_adaptation_is_the_run_that_ended_lowest_less_the_base(make_case, tmp_path, monkeypatch):
    def run(nats, steps):
        return {"nats": {"0 to 2048": nats, "0 to 256": 5 - nats}, "steps": steps, "tokens": 10 * steps}

    file = tmp_path / "adaptation.json"
    file.write_text(json.dumps({"runs": {"a": run(3.0, 5), "b": run(2.0, 7), "c": {"steps": 0}}}))
    monkeypatch.setattr(means, "ADAPTATION", file)
    case = make_case(factor=128)
    named = means.Case("tiny", 8, case.model, case.rope, case.choosing, case.testing, None)
    row = means.adaptation(named, {})
    base = case.testing.base
    assert row["settings"] == {"run": "b", "steps": 7, "tokens": 70}
    assert row["excess"] == pytest.approx(2.0 - base.at(2048).mean)
    assert row["short"] == pytest.approx(3.0 - base.at(256).mean)
    assert means.adaptation(case, {}) is None


# Rows


def stub(excess):
    """A mean with a known result."""
    return lambda case, rows: {"settings": {}, "excess": excess, "clusters": [], "short": 0.0}


@pytest.fixture
def three_means(script, monkeypatch):
    made = {"published": stub(2.0), "half": stub(1.0), "none": lambda case, rows: None}
    monkeypatch.setattr(script, "MEANS", made)


def test_every_mean_is_measured_in_turn_and_told_the_rows_before_it(script, case, monkeypatch):
    seen = []

    def telling(case, rows):
        seen.append([*rows])
        return stub(1.0)(case, rows)

    monkeypatch.setattr(script, "MEANS", dict.fromkeys(["one", "two", "three"], telling))
    monkeypatch.setattr(script, "case_of", lambda name, factor: case)
    others = [("random", 5), ("another", 4)]
    rows = [{"model": model, "factor": factor, "mean": "one"} for model, factor in others]
    written = []
    script.measure("random", 4, rows, lambda: written.append(len(rows)))
    assert seen == [[], ["one"], ["one", "two"]]
    assert [row["mean"] for row in rows] == ["one", "one", "one", "two", "three"]
    assert written == [3, 4, 5]


def test_rows_say_what_was_read_and_a_share_is_of_the_excess_of_the_published_method(
    script, case, monkeypatch, three_means
):
    monkeypatch.setattr(script, "case_of", lambda name, factor: case)
    rows = []
    script.measure("random", 4, rows, lambda: None)
    assert [row["share_of_published"] for row in rows] == [1.0, 0.5]
    assert [row["floor"] for row in rows] == [None, None]
    row = rows[1]
    assert (row["model"], row["factor"], row["mean"]) == ("random", 4, "half")
    assert (row["windows"], row["windows_to_choose"]) == (3, 2)
    assert row["digest"] == digest(case.testing.pieces) != digest(case.choosing.pieces)
    own = half_a_window_at_a_time(case.model, case.testing.pieces).mean().item()
    assert row["base"] == pytest.approx(own, abs=1e-5)


def test_a_share_is_of_what_is_above_the_least_possible_loss(script, make_case, monkeypatch, three_means):
    case = make_case(floor=1.5)
    monkeypatch.setattr(script, "case_of", lambda name, factor: case)
    rows = []
    script.measure("random", 4, rows, lambda: None)
    own = half_a_window_at_a_time(case.model, case.testing.pieces).mean().item()
    assert rows[1]["share_of_published"] == pytest.approx((own + 1.0 - 1.5) / (own + 2.0 - 1.5), abs=1e-5)
    assert rows[0]["share_of_published"] == 1.0


# The script


def test_the_script_adds_only_the_rows_that_are_missing(
    script, tmp_path, monkeypatch, tiny, case, three_means
):
    monkeypatch.setattr(ropepatch, "load", lambda name: tiny)
    file, cases = tmp_path / "found.json", []
    line = ["other_means.py", "--json", str(file), "--only", "random 4;other 8", "--threads"]
    monkeypatch.setattr(sys, "argv", [*line, str(torch.get_num_threads())])
    monkeypatch.setattr(script, "case_of", lambda name, factor: cases.append(name) or case)

    def run():
        script.main()
        return json.loads(file.read_text())["rows"]

    rows = run()
    named = [(row["model"], row["factor"], row["mean"]) for row in rows]
    assert named == [(*one, mean) for one in (("random", 4), ("other", 8)) for mean in ("published", "half")]

    record = {"rows": [row for row in rows if row["mean"] != "half"]}
    record["rows"][0]["excess"] = 4.0  # as if measured otherwise: it must stay, and count
    file.write_text(json.dumps(record))
    rows = run()
    assert rows[:2] == record["rows"]
    assert [(row["model"], row["mean"]) for row in rows[2:]] == [("random", "half"), ("other", "half")]
    assert [row["share_of_published"] for row in rows[2:]] == [0.25, 0.5]

    monkeypatch.setattr(script, "MEANS", {"published": stub(2.0)})
    before = file.read_bytes()
    cases.clear()
    run()
    assert (file.read_bytes(), cases) == (before, [])  # a finished file reads no model


# Texts


def test_settings_for_tiny_are_chosen_on_other_tales_than_those_tested(script, tiny, monkeypatch):
    model, tokenizer = tiny
    monkeypatch.setattr(ropepatch, "load", lambda name: tiny)
    monkeypatch.setattr(script, "TO_TEST", 3)
    monkeypatch.setattr(script, "TO_CHOOSE", 4 * 512)
    case = script.case_of("tiny", 2)
    tales = held_out_tales(tokenizer, length=512, count=3)
    assert (case.rope.original_max_position_embeddings, case.testing.trained) == (256, 256)
    assert [list(ids) for ids in case.testing.pieces] == [tale.ids.tolist() for tale in tales]
    assert len(case.choosing.pieces) == 4
    assert {len(ids) for ids in case.choosing.pieces} == {512}
    every = [digest([ids]) for reading in (case.choosing, case.testing) for ids in reading.pieces]
    assert len(set(every)) == 7
    least = torch.cat([-tale.log_probs()[1:] for tale in tales]).mean().item()
    assert case.floor == pytest.approx(least)
    own = half_a_window_at_a_time(model, [ids.tolist() for ids in case.testing.pieces], 256)
    assert 0.2 < case.floor < own.mean().item()


def test_settings_for_stories_are_chosen_on_other_documents_than_those_tested(
    script, tiny, monkeypatch, tmp_path
):
    stories = tmp_path / "stories.txt"
    stories.write_text("<|endoftext|>".join(f"{index:03} " * 40 for index in range(100)))
    loaded = []
    monkeypatch.setattr(ropepatch, "load", lambda name: loaded.append(name) or tiny)
    monkeypatch.setattr(script, "STORIES", stories)
    case = script.case_of("some", 2)
    assert loaded == [script.SHARED / "checkpoints" / "some"]
    assert case.floor is None

    def read(reading):
        """The numbers of the documents that the windows are from, each word of a document its number."""
        return {int(word) for ids in reading.pieces for word in re.findall(r"\b\d{3}\b", tiny[1].decode(ids))}

    assert read(case.choosing) <= set(range(70))
    assert read(case.testing) <= set(range(85, 100))
    assert min(len(read(reading)) for reading in (case.choosing, case.testing)) > 10
    assert {len(ids) for reading in (case.choosing, case.testing) for ids in reading.pieces} == {512}
