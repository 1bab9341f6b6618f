"""An extension is measured before and after: the baseline, patched and adapted, side by side."""

import gc
import shutil
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file
from tiny_checkpoint import tiny_llama_folder

import ropepatch
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import BASELINE, FLOOR, comparisons
from ropepatch.evaluation.measuring import measure, measure_extension
from ropepatch.evaluation.suites import Method, Suite
from ropepatch.evaluation.tasks import LmEvalTask, PerplexityTask, RetrievalTask
from ropepatch.model import source
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.loading import load_model
from ropepatch.model.weights import fingerprint, read_headers
from ropepatch.pipeline.evaluation import named_suite

PLAN = ropepatch.plan("tiny", to=512)
TALES = PerplexityTask(windows=2, gain=True)
KEYS = RetrievalTask(lengths=("0.5x", "2x"), haystacks=1)
SHORT = PerplexityTask(windows=1, lengths=(64,))
# Of a suite only the tasks count.
SUITE = Suite(models=("some/model",), methods=(Method(name="ntk"),), to=("8x",), tasks=(TALES, KEYS))
ONLY_SHORT = SUITE.model_copy(update={"tasks": (SHORT,)})


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """The checkpoint of the plan: the same weights, other frequencies."""
    return ropepatch.extend(PLAN, tmp_path_factory.mktemp("extended") / "checkpoint").folder


@pytest.fixture(scope="module")
def trained(extended, tmp_path_factory):
    """The same with one tensor changed, as if it was trained."""
    folder = tmp_path_factory.mktemp("trained") / "checkpoint"
    shutil.copytree(extended, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("q_proj.weight"))
    tensors[name] = tensors[name] * 1.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def results(extended, tmp_path_factory):
    """What there is of the extended checkpoint, and the folder it was written to."""
    out = tmp_path_factory.mktemp("results")
    return list(measure_extension(SUITE, PLAN, extended, label="again", out=out)), out


@pytest.fixture(scope="module")
def after(results, trained, tmp_path_factory):
    """What there is of the trained checkpoint, where the others were measured before."""
    out = tmp_path_factory.mktemp("after")
    for file in results[1].iterdir():
        if "again" not in file.name:
            shutil.copy(file, out)
    return list(measure_extension(SUITE, PLAN, trained, label="yarn + mine", out=out, progress=only_mine))


def only_mine(name):
    assert "yarn + mine" in name, f"{name} is measured again"
    return nullcontext(lambda done, total: None)


def unmeasurable(name):
    raise AssertionError(f"{name} is measured")


def of(results, task, label):
    (result,) = (result for result in results if (result.task, result.label) == (task, label))
    return result


def test_every_task_is_measured_as_it_is_patched_and_adapted(results):
    assert [(result.task, result.label) for result in results[0]] == [
        ("perplexity", FLOOR),
        ("perplexity", BASELINE),
        ("perplexity", "yarn"),
        ("retrieval", BASELINE),
        ("retrieval", "yarn"),
        ("perplexity", "again"),
        ("retrieval", "again"),
    ]


@pytest.mark.parametrize("task", ["perplexity", "retrieval"])
def test_a_checkpoint_that_was_not_trained_measures_what_the_patched_model_does_to_the_bit(results, task):
    again, patched = (of(results[0], task, label) for label in ("again", "yarn"))
    assert again.rows == patched.rows != of(results[0], task, BASELINE).rows


def test_before_and_after_meet_in_one_comparison_for_each_task(after):
    reading, asking = comparisons(after)
    for group in (reading, asking):
        assert (group.model, group.trained, group.target) == ("tiny", 256, 512)
        assert list(group.results) == [BASELINE, "yarn", "yarn + mine"]
        assert len({len(result.rows) for result in group.results.values()}) == 1
    assert reading.floor.label == FLOOR
    assert reading.lengths() == [128, 256, 512]
    assert asking.lengths() == [128, 512]


def test_the_adapted_model_is_what_stock_transformers_loads(after, trained, tiny):
    tales = [tale.ids for tale in held_out_tales(tiny[1], length=512, count=2)]
    curve = ropepatch.perplexity(load_model(Checkpoint(trained)), None, tales)
    found = of(after, "perplexity", "yarn + mine").of("loss", "length")
    assert [row.value for row in found] == [curve.at(length).mean for length in (128, 256, 512)]
    assert found[-1].value != of(after, "perplexity", "yarn").row("loss", length=512).value


def test_an_adapted_result_says_whose_weights_it_has_and_what_they_were_made_from(after, results, trained):
    before, mine = (of(after, "retrieval", label).model for label in ("yarn", "yarn + mine"))
    assert mine["weights"] == fingerprint(read_headers(trained)) != before["weights"]
    assert mine["adapted_from"] == before["weights"]
    assert {key: mine[key] for key in before if key != "weights"} == {
        key: before[key] for key in before if key != "weights"
    }
    assert "adapted_from" not in before
    assert [result.label for result in after if result.adapted] == ["yarn + mine"] * 2
    assert not any(result.adapted for result in results[0])  # the weights of the extended one are the base's


def test_a_plan_scales_with_its_own_parameters(tmp_path):
    made = ropepatch.plan("tiny", to=512, method="yarn", beta_fast=8.0)
    found = of(list(measure_extension(ONLY_SHORT, made)), "perplexity", "yarn")
    assert found.scaling["parameters"]["beta_fast"] == 8.0
    with pytest.raises(RopepatchError, match="does not have the frequencies of yarn to 512 tokens"):
        measure_extension(ONLY_SHORT, made, ropepatch.extend(PLAN, tmp_path / "other"))


# Resumed


def test_what_a_suite_measured_of_the_same_scaling_is_taken(tmp_path):
    suite = Suite(models=("tiny",), methods=(Method(name="yarn"),), to=(512,), tasks=(SHORT,))
    list(measure(suite, out=tmp_path))
    assert len(list(measure_extension(suite, PLAN, out=tmp_path, progress=unmeasurable))) == 3


def test_a_result_of_other_trained_weights_is_refused_at_once(results, trained):
    with pytest.raises(RopepatchError, match=r"again.json was measured with other settings: .*model"):
        measure_extension(SUITE, PLAN, trained, label="again", out=results[1])


def test_a_result_that_was_read_back_stands_beside_the_others_whatever_its_model_was_called(
    tmp_path, monkeypatch
):
    folder = tiny_llama_folder(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a small story about a long rope. " * 60)
    monkeypatch.chdir(tmp_path)
    found = []
    for model, text, adapted in (
        ("model", "text.txt", None),
        (str(folder), str(tmp_path / "text.txt"), tmp_path / "adapted"),
    ):
        made = ropepatch.plan(model, to=128)
        if adapted is not None:
            ropepatch.extend(made, adapted)
        suite = Suite(to=("1x",), tasks=(PerplexityTask(text=text, windows=2),))
        found = list(measure_extension(suite, made, adapted, out=tmp_path / "out"))
    (group,) = comparisons(found)
    assert list(group.results) == [BASELINE, "yarn", "adapted"]
    assert group.parameters["text"] == str(tmp_path / "text.txt")


# What is refused, before anything is measured


@pytest.mark.parametrize("label", ["yarn", FLOOR])
def test_a_label_that_is_taken_is_refused(label, extended):
    with pytest.raises(RopepatchError, match="two results would be called tiny-512-perplexity"):
        measure_extension(SUITE, PLAN, extended, label=label)


def test_a_folder_that_is_no_checkpoint_of_the_plan_is_refused(tmp_path):
    with pytest.raises(RopepatchError, match="does not have the frequencies of yarn to 512 tokens"):
        measure_extension(SUITE, PLAN, source.TINY)
    with pytest.raises(RopepatchError, match="no folder"):
        measure_extension(SUITE, PLAN, tmp_path / "absent")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(RopepatchError, match="holds a PEFT adapter, not a model"):
        measure_extension(SUITE, PLAN, tmp_path)


def test_a_mistake_in_a_task_is_found_before_anything_is_measured(tmp_path):
    made = ropepatch.plan(str(tiny_llama_folder(tmp_path / "model")), to=128)
    with pytest.raises(RopepatchError, match="--text is missing"):
        measure_extension(SUITE, made, progress=unmeasurable)


# How


def test_each_model_is_loaded_once_and_gone_before_the_other_comes(extended, monkeypatch):
    loaded = []

    def load(checkpoint, *_):
        gc.collect()
        assert all(model() is None for _, model in loaded)
        model = load_model(checkpoint)
        loaded.append((checkpoint.folder, weakref.ref(model)))
        return model

    monkeypatch.setattr("ropepatch.evaluation.measuring.load_checkpoint", load)
    tasks = (SHORT, SHORT.model_copy(update={"windows": 2}))
    assert len(list(measure_extension(SUITE.model_copy(update={"tasks": tasks}), PLAN, extended))) == 8
    assert [folder for folder, _ in loaded] == [source.TINY, extended]


def test_the_models_are_put_on_the_device(extended, monkeypatch):
    seen = []

    def look(model, *args, **options):
        seen.append(model.device.type)
        raise KeyboardInterrupt

    monkeypatch.setattr("ropepatch.evaluation.tasks.perplexity", look)
    monkeypatch.setattr("ropepatch.evaluation.measuring.forecast", lambda model, measurements: "")
    with pytest.raises(KeyboardInterrupt):
        list(measure_extension(ONLY_SHORT, PLAN, extended, device="meta"))
    assert seen == ["meta"]


def test_the_revision_is_that_of_the_plan():
    with pytest.raises(RopepatchError, match="tiny comes with ropepatch and has no revisions"):
        measure_extension(ONLY_SHORT, replace(PLAN, revision="commit"))


def test_a_method_that_follows_the_length_stands_beside_its_checkpoint(tmp_path):
    """Stock transformers recomputes `dynamic` as it reads."""
    made = ropepatch.plan("tiny", to=512, method="dynamic")
    folder = ropepatch.extend(made, tmp_path / "checkpoint").folder
    suite = SUITE.model_copy(update={"tasks": (PerplexityTask(windows=1, lengths=(512,)),)})
    found = list(measure_extension(suite, made, folder))
    (group,) = comparisons(found)
    losses = {name: row.value for name, row in group.at("loss", length=512).items()}
    assert losses["adapted"] == pytest.approx(losses["dynamic"], abs=1e-3)
    assert abs(losses[BASELINE] - losses["dynamic"]) > 0.1


def test_tasks_of_lm_eval_run_on_all_three(extended):
    task = LmEvalTask(tasks=("ropepatch_passkey",), metadata={"haystacks": 2})
    found = list(measure_extension(SUITE.model_copy(update={"tasks": (task,)}), PLAN, extended))
    (group,) = comparisons(found)
    scores = {name: {row.measure: row.value for row in result.rows} for name, result in group.results.items()}
    assert scores[BASELINE]["acc"] == 0
    assert scores["yarn"] == scores["adapted"]
    assert scores["adapted"]["acc"] == 1


def test_a_field_or_a_split_of_no_text_is_refused():
    for field, split in (("body", "test"), ("text", "train")):
        with pytest.raises(RopepatchError, match="`field` and `split` are of `text`, which is missing"):
            named_suite("demo", text=None, field=field, split=split)
