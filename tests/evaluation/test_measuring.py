"""Suites are measured once, resumed where they stopped, and say what stands behind every figure."""

import json
import math
import shutil
from contextlib import nullcontext
from itertools import count

import pytest
import torch
from checkpoint_folders import edit_json
from made_results import of

import ropepatch
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.measuring import Machine, Method, Suite, measure
from ropepatch.evaluation.results import FLOOR, read_result
from ropepatch.evaluation.tasks import Goal, PerplexityTask, RetrievalTask
from ropepatch.model.checkpoint import TINY
from ropepatch.scaling import METHODS

TALES = PerplexityTask(windows=3)
YARN = (Method(name="yarn"),)
KEYS = RetrievalTask(lengths=("0.5x", "2x"), haystacks=3)
SUITE = Suite(
    models=("tiny",),
    methods=(Method(name="yarn"), Method(name="ntk")),
    to=("2x",),
    tasks=(TALES, KEYS),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the suite gives, and the folder it was written to."""
    out = tmp_path_factory.mktemp("suite")
    return list(measure(SUITE, out=out)), out


def rows(results):
    return [(result.label, result.rows) for result in results]


def test_the_figures_are_those_of_the_patched_model(results, tiny):
    model, tokenizer = tiny
    tales = [tale.ids for tale in held_out_tales(tokenizer, length=512, count=3)]
    with ropepatch.patch(model, ropepatch.plan("tiny", to=512, method="yarn")):
        curve = ropepatch.perplexity(model, None, tales)
        found = ropepatch.passkey(model, tokenizer, lengths=[128, 512], haystacks=3)
    by_length = of(results[0], "perplexity", "yarn").of("loss", "length")
    assert [row.at["length"] for row in by_length] == [128, 256, 512]
    for row in by_length:
        assert row.mean == curve.at(row.at["length"])
    asked = of(results[0], "retrieval", "yarn")
    for length in found.lengths:
        assert asked.row("found", length=length).mean == found.found(length)
        assert asked.row("log_prob", length=length).mean == found.log_prob(length)


def test_the_floor_of_the_tales_is_exact(results, tiny):
    tales = held_out_tales(tiny[1], length=512, count=3)
    floor = of(results[0], "perplexity", FLOOR).row("loss", length=512).value
    assert floor == pytest.approx(
        -sum(t.log_probs()[1:].sum().item() for t in tales) / (3 * 511)
    )


def test_every_result_has_its_provenance_in_a_file(results):
    measured, out = results
    result = of(measured, "perplexity", "yarn")
    assert (result.model["name"], result.scaling["factor"]) == ("tiny", 2.0)
    assert len(result.scaling["inv_freq"]) == len(result.model["inv_freq"])
    assert len(result.model["weights"]) == len(result.parameters["digest"]) == 64
    assert result.env["torch"] == torch.__version__
    files = {
        f"tiny-512-{result.task}-{result.label}.json": result for result in measured
    }
    assert {file.name for file in out.iterdir()} == files.keys()
    for name, result in files.items():
        assert (
            (out / name).read_text()
            == read_result(out / name).to_json()
            == result.to_json()
        )


def unmeasurable(name):
    raise AssertionError(f"{name} is measured again")


def of_tiny(*tasks, to="2x", methods=(), **options):
    """What these tasks give of tiny, unscaled and scaled by these methods."""
    return list(
        measure(
            Suite(models=("tiny",), methods=methods, to=(to,), tasks=tasks), **options
        )
    )


def test_existing_results_are_not_measured_again_and_load_no_model(
    results, monkeypatch
):
    monkeypatch.setattr("ropepatch.evaluation.measuring.load_checkpoint", unmeasurable)
    measured, out = results
    again = list(measure(SUITE, out=out, progress=unmeasurable))
    assert again == measured


def interrupted(suite, out, *, after=0):
    """Measure until that many steps of progress are done, in the middle of a task."""
    steps = count()

    def advance(done, total):
        if next(steps) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(measure(suite, out=out, progress=lambda name: nullcontext(advance)))


def test_two_at_once_in_one_folder_end_as_one(results, tmp_path):
    """In the middle of the first measurement another is killed and a third runs to its end."""
    suite = Suite(models=("tiny",), to=("2x",), tasks=(TALES,))
    steps, others = count(), []

    def kept():
        return list(tmp_path.glob(".*.partial/*.jsonl"))

    def advance(done, total):
        if next(steps) == 0:
            assert len(kept()) == 1
            interrupted(suite, tmp_path, after=1)
            assert len(kept()) == 2
            others.extend(measure(suite, out=tmp_path))
            assert not kept()

    first = list(
        measure(suite, out=tmp_path, progress=lambda name: nullcontext(advance))
    )
    assert rows(first) == rows(others) == rows(results[0])[:2]
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"] * 2


def test_an_unsupported_remapping_raises_before_the_measurement(monkeypatch):
    def refuse(model, plan):
        raise RopepatchError("this attention cannot be replaced")

    monkeypatch.setattr("ropepatch.evaluation.measuring.put", refuse)
    with pytest.raises(RopepatchError, match="this attention cannot be replaced"):
        of_tiny(SHORT, methods=(Method(name="rerope"),), progress=unmeasurable)


def test_the_gain_is_the_loss_in_windows_minus_one_pass(
    tiny,
):
    model, tokenizer = tiny
    task = PerplexityTask(windows=2, gain=True)
    gain = of(of_tiny(task, methods=YARN), "perplexity", "yarn").of(
        "gain", "begin", "end"
    )
    tales = [tale.ids for tale in held_out_tales(tokenizer, length=512, count=2)]
    with ropepatch.patch(model, ropepatch.plan("tiny", to=512, method="yarn")):
        full = ropepatch.perplexity(model, None, tales)
        limited = ropepatch.perplexity(model, None, tales, window=256, stride=128)
    assert (gain[0].at["begin"], gain[-1].at["end"]) == (256, 512)
    brought = sum(row.value * row.n for row in gain)
    expected = (
        torch.stack(limited.nll)[:, 255:].sum() - torch.stack(full.nll)[:, 255:].sum()
    )
    assert brought == pytest.approx(expected.item(), rel=1e-4)


# What was measured before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("task", "retrieval"),
        ("label", "ntk"),
        ("target", 256),
        (
            "scaling",
            {
                "method": "yarn",
                "factor": 4.0,
                "parameters": {},
                "attention_factor": 1.0,
            },
        ),
        ("parameters", {"windows": 2}),
        ("model", {"name": "tiny", "trained": 256, "weights": "0" * 64}),
    ],
)
def test_a_result_with_other_settings_is_not_reused(results, tmp_path, key, value):
    file = results[1] / "tiny-512-perplexity-yarn.json"
    (tmp_path / file.name).write_text(
        json.dumps(json.loads(file.read_text()) | {key: value})
    )
    with pytest.raises(RopepatchError, match=rf"other settings: it differs in .*{key}"):
        list(measure(SUITE, out=tmp_path, progress=unmeasurable))


def test_partial_results_of_one_model_are_not_resumed_with_another(tmp_path):
    """Both are called model; the second one's configuration gives it other frequencies."""
    text = tmp_path / "text.txt"
    text.write_text("a rope has no end until it is cut. " * 300)
    rope = json.loads((TINY / "config.json").read_text())["rope_parameters"]
    suites = []
    for name, theta in (("a", rope["rope_theta"]), ("b", 500.0)):
        folder = shutil.copytree(TINY, tmp_path / name / "model")
        edit_json(
            folder / "config.json",
            rope_parameters=rope | {"rope_theta": theta},
            rope_theta=theta,
        )
        task = PerplexityTask(text=str(text), windows=3)
        suites.append(Suite(models=(str(folder),), to=("1x",), tasks=(task,)))
    interrupted(suites[0], tmp_path / "out")
    assert rows(measure(suites[1], out=tmp_path / "out")) == rows(measure(suites[1]))
    assert not list((tmp_path / "out").glob("*.partial"))
    assert not [
        file
        for file in (tmp_path / "out").iterdir()
        if str(tmp_path) in file.read_text()
    ]


def test_further_results_have_the_precision_of_earlier_ones(tmp_path):
    of_tiny(SHORT, out=tmp_path, machine=Machine(dtype=torch.bfloat16))
    both = of_tiny(SHORT, methods=YARN, out=tmp_path)
    assert [r.env["dtype"] for r in both if r.label != FLOOR] == ["torch.bfloat16"] * 2
    file = tmp_path / "tiny-512-perplexity-yarn.json"
    edit_json(file, env=read_result(file).env | {"dtype": "torch.float32"})
    with pytest.raises(
        RopepatchError,
        match="other settings: it differs in dtype",
    ):
        of_tiny(SHORT, methods=YARN, out=tmp_path)


# Which jobs there are


SHORT = PerplexityTask(windows=1, lengths=(64,))


def test_targets_have_one_plan_and_tasks_their_own_files(
    tmp_path,
):
    more = SHORT.model_copy(update={"windows": 2})
    suite = Suite(
        models=("tiny",), methods=YARN, to=("2x", "4x", 512), tasks=(SHORT, more)
    )
    scaled = [one for one in measure(suite, out=tmp_path) if one.label == "yarn"]
    assert [
        (r.target, r.scaling["factor"], r.parameters["pieces"]) for r in scaled
    ] == [
        (to, factor, pieces)
        for to, factor in ((512, 2.0), (1024, 4.0))
        for pieces in (1, 2)
    ]
    second = read_result(tmp_path / "tiny-1k-perplexity-2-baseline.json")
    assert second.parameters["pieces"] == 2


# What the tasks hand on


@pytest.mark.parametrize(
    ("settings", "trained", "to", "lengths"),
    [
        ({}, 256, 512, [128, 256, 512]),
        ({}, 256, 64, [64]),
        ({"lengths": ("0.5x", 128)}, 64, 256, [32, 128]),
        (
            {"stride": 128},
            256,
            512,
            [256, 512],
        ),  # windows no longer than the stride are left out
    ],
)
def test_the_lengths_are_multiples_of_the_trained_context(
    tiny, settings, trained, to, lengths
):
    task = PerplexityTask(documents=1, **settings)
    assert (
        task.prepare(Goal("tiny", tiny[1], trained, to)).parameters["lengths"]
        == lengths
    )


@pytest.mark.parametrize(
    ("trained", "edges"),
    [(256, [0, 32, 45, 64, 91, 128, 181, 256, 362, 512]), (4, [0, 2, 3, 4, 6, 8])],
)
def test_stretches_of_positions_are_half_octaves(tiny, trained, edges):
    ready = PerplexityTask(windows=2).prepare(
        Goal("tiny", tiny[1], trained, 2 * trained)
    )
    assert [0, *(row.at["end"] for row in ready.floor if "end" in row.at)] == edges
    assert all(math.isfinite(row.value) for row in ready.floor)


def test_two_models_with_one_name_for_their_files_are_refused():
    suite = SUITE.model_copy(update={"models": ("tiny", "tiny"), "tasks": (TALES,)})
    with pytest.raises(RopepatchError, match="two results would be called"):
        measure(suite)


def test_a_method_called_as_the_floor_is_refused(monkeypatch):
    monkeypatch.setitem(METHODS, FLOOR, METHODS["linear"])
    suite = SUITE.model_copy(update={"methods": (Method(name=FLOOR),)})
    with pytest.raises(RopepatchError, match="two results would be called"):
        measure(suite)
