"""The methods that take part where scalings are measured against each other, and what is measured."""

import pytest
import torch
from fake_fits import fake_fits
from methods import STATIC

import ropepatch
from ropepatch.attention import MAPS
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.suites import Method
from ropepatch.evaluation.tasks import PerplexityTask, RetrievalTask
from ropepatch.fitting.examples import read_splits
from ropepatch.pipeline.choice import fit_beside, ranking_suite
from ropepatch.pipeline.evaluation import candidates, participants
from ropepatch.pipeline.running import bar
from ropepatch.scaling import METHODS
from ropepatch.scaling.powers import PositionInterpolation
from ropepatch.scaling.ramps import YaRN


def test_every_static_method_that_needs_no_parameters_takes_part():
    part = {*candidates()}
    assert (
        {"linear", "ntk", "ntk-by-parts", "yarn", "llama3", "p-rope", "resonance", "cope"} <= part < {*STATIC}
    )
    assert not {"none", "abf", "custom", "longrope", "longrope-switch", "dynamic"} & part


def test_a_new_method_takes_part_by_being_in_the_registry(monkeypatch):
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
    assert {"mine", "needy", "moving"} & {*candidates()} == {"mine"}


def test_a_method_that_follows_the_length_is_measured_as_a_static_one_that_takes_part():
    held = ropepatch.plan("tiny", to=1024, method="dynamic").frequencies()
    twins = (ropepatch.plan("tiny", to=1024, method=name).frequencies() for name in candidates())
    assert any(
        held.inv_freq.equal(twin.inv_freq) and held.attention_factor == twin.attention_factor
        for twin in twins
    )


def test_of_all_what_a_model_does_not_allow_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr("ropepatch.pipeline.evaluation.candidates", lambda: ("linear", "yarn"))

    def refuse(self, rope, length=None):
        raise RopepatchError("not on this rope")

    monkeypatch.setattr(YaRN, "frequencies", refuse)
    methods, left_out = participants("tiny", ["all"], to=1024)
    assert [method for method, _ in methods] == [Method(name="linear")]
    assert left_out == {"yarn": "not on this rope"}
    with pytest.raises(RopepatchError, match="not on this rope"):
        participants("tiny", ["linear", "yarn"], to=1024)


def test_of_the_maps_those_that_do_not_reach_the_target_are_left_out_with_the_reason():
    methods, left_out = participants("tiny", ["yarn", "maps"], to=1024)
    assert [plan.method.name for _, plan in methods] == ["yarn", *(name for name in MAPS if name != "string")]
    assert list(left_out) == ["string"]
    assert "up to 504 tokens, not 1,024" in left_out["string"]
    with pytest.raises(RopepatchError, match="up to 504 tokens"):
        participants("tiny", ["maps", "string"], to=1024)


def test_a_ranking_reads_the_target_and_asks_for_keys_as_they_are_named():
    suite, reason = ranking_suite("tiny", [Method(name="yarn")], to=512, haystacks=3, keys=2)
    assert [*suite.tasks] == [PerplexityTask(windows=24), RetrievalTask(haystacks=3, keys=2)]
    assert reason is None
    suite, reason = ranking_suite("tiny", [], to=512, haystacks=0)
    assert ([task.name for task in suite.tasks], reason) == (["perplexity"], None)


def test_keys_without_room_at_any_length_are_left_out_with_the_reason():
    suite, reason = ranking_suite("tiny", [], to=512, keys=18)
    assert [task.name for task in suite.tasks] == ["perplexity"]
    assert "has no room for" in str(reason)


# Nothing is ranked on what the fit has seen


def windows_of(pieces):
    return {tuple(piece.tolist()) for piece in pieces}


@pytest.mark.parametrize("windows", [1, 7])
def test_the_windows_that_rank_are_none_of_those_that_the_fit_reads(tiny, tmp_path, monkeypatch, windows):
    fits = fake_fits(monkeypatch)
    _, tokenizer = tiny
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(number) for number in range(6000)))
    suite, _ = ranking_suite("tiny", [], to=512, text=str(text), windows=windows, haystacks=0)
    ranked = []

    def look(model, tokenizer, pieces, **options):
        ranked.extend(pieces)
        return LossCurve(tuple(torch.zeros(511) for _ in pieces))

    monkeypatch.setattr("ropepatch.evaluation.tasks.perplexity", look)
    suite.tasks[0].prepare("tiny", tokenizer, trained=256, to=512).run(*tiny, None, None)
    fit_beside(suite, tmp_path, revision=None, device="cpu", progress=bar)
    read = {key: fits[0][key] for key in ("field", "split", "spare")}
    fitted = read_splits(tokenizer, fits[0]["text"], length=fits[0]["to"], **read)
    assert windows_of(ranked).isdisjoint(windows_of(fitted.windows))
    assert len(ranked) == windows
    careless = read_splits(tokenizer, str(text), length=512, **read | {"spare": 0})
    assert windows_of(ranked) <= windows_of(careless.windows)


def test_the_tales_that_rank_are_none_of_those_that_the_fit_reads(tiny):
    _, tokenizer = tiny
    fitted = read_splits(tokenizer, None, field="text", split="test", length=64, spare=24)
    ranked = [tale.ids for tale in held_out_tales(tokenizer, length=64, count=24)]
    assert len(windows_of(fitted.windows)) > 200
    assert windows_of(ranked).isdisjoint(windows_of(fitted.windows))
