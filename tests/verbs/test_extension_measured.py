"""Results of an extension: baseline, patched and fine-tuned model in one comparison."""

import gc
import shutil
import weakref
from contextlib import nullcontext

import pytest
from made_results import of
from safetensors.torch import load_file, save_file

import ropepatch
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.measuring import Method, Suite, measure_extension
from ropepatch.evaluation.results import BASELINE, FLOOR
from ropepatch.evaluation.tasks import PerplexityTask, RetrievalTask
from ropepatch.model.checkpoint import TINY, Checkpoint
from ropepatch.model.weights import fingerprint, read_headers

PLAN = ropepatch.plan("tiny", to=512)
TALES = PerplexityTask(windows=2, gain=True)
KEYS = RetrievalTask(lengths=("0.5x", "2x"), haystacks=1)
SHORT = PerplexityTask(windows=1, lengths=(64,))
# Only the tasks of the suite are used.
SUITE = Suite(
    models=("some/model",),
    methods=(Method(name="ntk"),),
    to=("8x",),
    tasks=(TALES, KEYS),
)


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """The checkpoint of the plan: same weights, other frequencies."""
    return ropepatch.extend(
        PLAN, tmp_path_factory.mktemp("extended") / "checkpoint"
    ).folder


@pytest.fixture(scope="module")
def trained(extended, tmp_path_factory):
    """The same checkpoint with one tensor changed, as if trained."""
    folder = tmp_path_factory.mktemp("trained") / "checkpoint"
    shutil.copytree(extended, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("q_proj.weight"))
    tensors[name] = tensors[name] * 1.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def results(extended, tmp_path_factory):
    """The results of the extended checkpoint, and their folder."""
    out = tmp_path_factory.mktemp("results")
    return list(measure_extension(SUITE, PLAN, extended, out=out)), out


@pytest.fixture(scope="module")
def after(results, trained, tmp_path_factory):
    """The results of the trained checkpoint if the others were measured before."""

    def only_mine(name):
        assert "yarn + training" in name, f"{name} is measured again"
        return nullcontext(lambda done, total: None)

    out = tmp_path_factory.mktemp("after")
    for file in results[1].iterdir():
        if "training" not in file.name:
            shutil.copy(file, out)
    return list(measure_extension(SUITE, PLAN, trained, out=out, progress=only_mine))


def test_an_untrained_checkpoint_scores_exactly_like_the_patched_model(results):
    measured = {(result.task, result.label) for result in results[0]}
    tasks, labels = ("perplexity", "retrieval"), (BASELINE, "yarn", "yarn + training")
    assert measured == {(task, label) for task in tasks for label in labels} | {
        ("perplexity", FLOOR)
    }
    for task in tasks:
        again, patched = (
            of(results[0], task, label) for label in ("yarn + training", "yarn")
        )
        assert again.rows == patched.rows != of(results[0], task, BASELINE).rows
    assert not any(
        result.fine_tuned for result in results[0]
    )  # the weights are the base's


def test_the_fine_tuned_result_equals_the_loaded_checkpoint(after, trained, tiny):
    tales = [tale.ids for tale in held_out_tales(tiny[1], length=512, count=2)]
    curve = ropepatch.perplexity(Checkpoint(trained).load(), None, tales)
    found = of(after, "perplexity", "yarn + training").of("loss", "length")
    assert [row.value for row in found] == [
        curve.at(length).value for length in (128, 256, 512)
    ]
    assert (
        found[-1].value != of(after, "perplexity", "yarn").row("loss", length=512).value
    )
    before, mine = (
        of(after, "retrieval", label).model for label in ("yarn", "yarn + training")
    )
    own = {
        "weights": fingerprint(read_headers(trained)),
        "fine_tuned_from": before["weights"],
    }
    assert mine == before | own
    assert own["weights"] != before["weights"]
    assert [result.label for result in after if result.fine_tuned] == [
        "yarn + training"
    ] * 2


def test_a_checkpoint_with_other_frequencies_than_the_plan_is_refused(extended):
    other = ropepatch.plan("tiny", to=512, beta_fast=8.0)
    with pytest.raises(RopepatchError, match="frequencies of yarn to 512 tokens"):
        measure_extension(SUITE, other, extended)


def test_each_model_is_loaded_once_and_freed_before_the_next(extended, monkeypatch):
    loaded = []

    def load(checkpoint, *_):
        gc.collect()
        assert all(model() is None for _, model in loaded)
        model = checkpoint.load()
        loaded.append((checkpoint.folder, weakref.ref(model)))
        return model

    monkeypatch.setattr("ropepatch.evaluation.measuring.load_checkpoint", load)
    tasks = (SHORT, SHORT.model_copy(update={"windows": 2}))
    assert (
        len(
            list(
                measure_extension(
                    SUITE.model_copy(update={"tasks": tasks}), PLAN, extended
                )
            )
        )
        == 8
    )
    assert [folder for folder, _ in loaded] == [TINY, extended]
