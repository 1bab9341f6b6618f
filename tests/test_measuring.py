"""Suites are measured once, resumed where they stopped, and say what stands behind every figure."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tiny_checkpoint import tiny_llama_folder

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import FLOOR
from ropepatch.evaluation.results import read_result
from ropepatch.measuring import AS_IT_IS, measure
from ropepatch.suites import LmEvalTask, Method, PasskeyTask, PerplexityTask, Suite
from ropepatch.tiny.held_out import held_out_tales

TALES = PerplexityTask(windows=3)
KEYS = PasskeyTask(lengths=("0.5x", "2x"), depths=(0.0, 1.0), trials=2)
SUITE = Suite(
    models=("tiny",), methods=(Method(name="yarn"), Method(name="ntk")), to=("2x",), tasks=(TALES, KEYS)
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the suite gives, and the folder it was written to."""
    out = tmp_path_factory.mktemp("suite")
    return list(measure(SUITE, out=out)), out


def of(results, task, label):
    (found,) = (result for result in results if (result.task, result.label) == (task, label))
    return found


def test_every_task_is_measured_as_it_is_and_scaled(results):
    labels = [(result.task, result.label) for result in results[0]]
    assert labels == [
        ("perplexity", FLOOR),
        ("perplexity", AS_IT_IS),
        ("perplexity", "yarn"),
        ("perplexity", "ntk"),
        ("passkey", AS_IT_IS),
        ("passkey", "yarn"),
        ("passkey", "ntk"),
    ]


def test_the_figures_are_those_of_the_patched_model(results, tiny):
    model, tokenizer = tiny
    tales = [tale.ids for tale in held_out_tales(tokenizer, length=512, count=3)]
    with ropepatch.patch(model, ropepatch.plan("tiny", to=512, method="yarn")):
        curve = ropepatch.perplexity(model, None, tales)
        grid = ropepatch.passkey(model, tokenizer, lengths=[128, 512], depths=[0.0, 1.0], trials=2)
    rows = of(results[0], "perplexity", "yarn").tables["by_length"]
    assert [row["length"] for row in rows] == [128, 256, 512]
    for row in rows:
        assert row["nats"] == curve.at(row["length"]).mean
        assert (row["tokens"], row["documents"]) == (3 * (row["length"] - 1), 3)
        assert row["interval"][0] < row["nats"] < row["interval"][1]
    cells = of(results[0], "passkey", "yarn").tables["cells"]
    assert {(row["length"], row["depth"]): row["correct"] for row in cells} == {
        place: cell.correct for place, cell in grid.cells.items()
    }


def test_the_positions_add_up_to_the_whole(results):
    tables = of(results[0], "perplexity", "ntk").tables
    rows, whole = tables["by_position"], tables["by_length"][-1]
    assert [row["begin"] for row in rows[1:]] == [row["end"] for row in rows[:-1]]
    assert (rows[0]["begin"], rows[-1]["end"]) == (0, 512)
    assert 256 in [row["end"] for row in rows]
    assert sum(row["nats"] * row["tokens"] for row in rows) / whole["tokens"] == pytest.approx(whole["nats"])
    documents = tables["by_document"]
    assert sum(row["nats"] for row in documents) / whole["tokens"] == pytest.approx(whole["nats"])


def test_the_floor_of_the_tales_is_exact(results, tiny):
    tales = held_out_tales(tiny[1], length=512, count=3)
    floor = of(results[0], "perplexity", FLOOR).tables["by_length"][-1]["nats"]
    assert floor == pytest.approx(-sum(t.log_probs()[1:].sum().item() for t in tales) / (3 * 511))
    for label in ("yarn", "ntk"):
        assert floor < of(results[0], "perplexity", label).tables["by_length"][-1]["nats"]


def test_every_result_carries_its_provenance(results):
    result = of(results[0], "perplexity", "yarn")
    assert result.model["name"] == "tiny"
    assert result.model["trained"] == 256
    assert len(result.model["weights"]) == 64
    assert result.scaling["method"] == "yarn"
    assert result.scaling["factor"] == 2.0
    assert result.scaling["parameters"]["beta_fast"] == 32.0
    assert len(result.scaling["inv_freq"]) == len(result.model["inv_freq"])
    assert result.parameters["protocol"] == "one-pass"
    assert (result.parameters["pieces"], result.parameters["tokens"]) == (3, 3 * 512)
    assert len(result.parameters["digest"]) == 64
    assert set(result.env) >= {"ropepatch", "torch", "transformers", "device", "dtype"}
    assert result.seconds > 0
    keys = of(results[0], "passkey", "yarn")
    assert keys.parameters["seed"] == 0
    assert keys.parameters["template"]["digits"] == 5
    assert of(results[0], "passkey", AS_IT_IS).scaling is None


def test_every_result_is_a_file_that_reads_back(results):
    measured, out = results
    files = sorted(out.iterdir())
    assert [file.name for file in files] == sorted(
        f"tiny-512-{task}-{label}.json"
        for task in ("perplexity", "passkey")
        for label in ("as-it-is", "yarn", "ntk", "floor")
        if (task, label) != ("passkey", "floor")
    )
    read = {(result.task, result.label): result for result in map(read_result, files)}
    for result in measured:
        assert json.loads(read[result.task, result.label].to_json()) == json.loads(result.to_json())


def unmeasurable(name):
    raise AssertionError(f"{name} is measured again")


def test_what_is_there_already_is_not_measured_again(results):
    measured, out = results
    again = list(measure(SUITE, out=out, progress=unmeasurable))
    assert [json.loads(r.to_json())["tables"] for r in again] == [
        json.loads(r.to_json())["tables"] for r in measured
    ]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"tasks": (replace(TALES, windows=2), KEYS)}, "parameters"),
        ({"tasks": (TALES, replace(KEYS, seed=1))}, "parameters"),
    ],
)
def test_a_result_of_other_settings_is_not_taken_for_this_one(results, change, key):
    with pytest.raises(RopepatchError, match=rf"was measured with other settings \({key}\)"):
        list(measure(replace(SUITE, **change), out=results[1], progress=unmeasurable))


def test_a_result_of_other_weights_is_not_taken_for_this_one(results, tmp_path):
    file = results[1] / "tiny-512-perplexity-as-it-is.json"
    content = json.loads(file.read_text())
    content["model"]["weights"] = "0" * 64
    (tmp_path / file.name).write_text(json.dumps(content))
    with pytest.raises(RopepatchError, match=r"other settings \(model\)"):
        list(measure(SUITE, out=tmp_path, progress=unmeasurable))


@pytest.mark.parametrize("after", range(8))
def test_a_suite_that_is_killed_ends_with_the_same_results(results, tmp_path, after):
    """Stopped in the middle of a task, after so many steps of progress in all."""
    steps = 0

    @contextmanager
    def until(name):
        def advance(done, total):
            nonlocal steps
            steps += 1
            if steps > after:
                raise KeyboardInterrupt

        yield advance

    with pytest.raises(KeyboardInterrupt):
        list(measure(SUITE, out=tmp_path, progress=until))
    resumed = list(measure(SUITE, out=tmp_path))
    assert [(r.label, r.tables) for r in map(jsonable, resumed)] == [
        (r.label, r.tables) for r in map(jsonable, results[0])
    ]
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in results[1].iterdir()}


def jsonable(result):
    return replace(result, **{key: json.loads(json.dumps(getattr(result, key))) for key in ("tables",)})


def test_a_suite_that_is_killed_outright_ends_with_the_same_results(results, tmp_path):
    code = (
        "import os, sys\nfrom contextlib import contextmanager\nfrom pathlib import Path\n"
        "from ropepatch.measuring import measure\nfrom ropepatch.suites import read_suite\n"
        "@contextmanager\ndef until(name):\n"
        "    yield lambda done, total: os._exit(9) if 'ntk' in name else None\n"
        "list(measure(read_suite(sys.argv[1]), out=Path(sys.argv[2]), progress=until))"
    )
    suite = tmp_path / "suite.yaml"
    suite.write_text(
        "models: [tiny]\nmethods: [yarn, ntk]\nto: [2x]\ntasks:\n"
        "  - {task: perplexity, windows: 3}\n"
        "  - {task: passkey, lengths: [0.5x, 2x], depths: [0.0, 1.0], trials: 2}\n"
    )
    out = tmp_path / "out"
    assert subprocess.run([sys.executable, "-c", code, suite, out], check=False).returncode == 9
    assert {file.name for file in out.glob("*.json")} == {
        "tiny-512-perplexity-floor.json",
        "tiny-512-perplexity-as-it-is.json",
        "tiny-512-perplexity-yarn.json",
    }
    resumed = list(measure(SUITE, out=out))
    assert [r.tables for r in map(jsonable, resumed)] == [r.tables for r in map(jsonable, results[0])]


def test_a_mistake_in_the_last_method_is_found_before_anything_is_measured():
    suite = replace(SUITE, methods=(*SUITE.methods, Method(name="longrope")))
    with pytest.raises(RopepatchError, match="longrope needs"):
        measure(suite, progress=unmeasurable)


def test_models_of_one_name_are_not_mixed_up(tmp_path):
    for folder in ("a", "b"):
        tiny_llama_folder(tmp_path / folder / "model")
    models = (str(tmp_path / "a" / "model"), str(tmp_path / "b" / "model"))
    text = tmp_path / "text.txt"
    text.write_text("a small story about a long rope. " * 60)
    task = PerplexityTask(text=str(text), windows=2)
    with pytest.raises(RopepatchError, match="two results would be called"):
        measure(Suite(models=models, to=("1x",), tasks=(task,)))


def test_a_suite_without_a_model_says_so():
    with pytest.raises(RopepatchError, match="names no models"):
        measure(replace(SUITE, models=()))


@pytest.mark.parametrize(
    ("options", "protocol", "scored"),
    [
        ({"protocol": "sliding", "stride": 32}, "sliding", 511),
        ({"protocol": "disjoint", "bos": "window"}, "disjoint", None),
        ({"protocol": "truncated"}, "truncated", None),
    ],
)
def test_the_protocols_of_the_papers_have_a_row_for_every_window(tiny, options, protocol, scored):
    task = PerplexityTask(documents=2, windows=None, lengths=("0.5x", "2x"), **options)
    (result,) = measure(Suite(models=("tiny",), to=("2x",), tasks=(task,)))
    rows = result.tables["by_length"]
    assert result.parameters["protocol"] == protocol
    assert [row["length"] for row in rows] == [128, 512]
    if scored:
        assert {row["tokens"] for row in rows} == {2 * scored}
    assert rows[0]["nats"] != rows[1]["nats"]


def test_what_tokens_beyond_the_trained_context_bring_is_the_loss_without_them_less_that_with_them(tiny):
    from ropepatch.evaluation.protocols import Sliding

    model, tokenizer = tiny
    task = PerplexityTask(windows=4, gain=True)
    suite = Suite(models=("tiny",), methods=(Method(name="yarn"),), to=("2x",), tasks=(task,))
    gain = of(list(measure(suite)), "perplexity", "yarn").tables["gain"]
    tales = [tale.ids for tale in held_out_tales(tokenizer, length=512, count=4)]
    with ropepatch.patch(model, ropepatch.plan("tiny", to=512, method="yarn")):
        full = ropepatch.perplexity(model, None, tales)
        limited = ropepatch.perplexity(model, None, tales, protocol=Sliding(256, 128))
    assert (gain[0]["begin"], gain[-1]["end"]) == (256, 512)
    brought = sum(row["nats"] * row["tokens"] for row in gain)
    expected = torch.stack(limited.nll)[:, 255:].sum() - torch.stack(full.nll)[:, 255:].sum()
    assert brought == pytest.approx(expected.item(), rel=1e-4)
    assert "perplexity" not in gain[0]


def test_tasks_of_lm_eval_run_on_the_patched_model():
    task = LmEvalTask(tasks=("ropepatch_passkey",), metadata={"depths": [0.5], "trials": 2})
    suite = Suite(models=("tiny",), methods=(Method(name="yarn"),), to=("2x",), tasks=(task,))
    results = list(measure(suite))
    scores = {r.label: {row["metric"]: row["value"] for row in r.tables["scores"]} for r in results}
    assert scores[AS_IT_IS]["acc"] == 0
    assert scores["yarn"]["acc"] == 1


def test_several_processes_write_the_results_of_one(results, tmp_path):
    """As `torchrun -m ropepatch eval` starts them; only the first prints."""
    suite = tmp_path / "suite.yaml"
    suite.write_text("methods: [yarn]\nto: [2x]\ntasks: [{task: perplexity, windows: 3}]\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ropepatch"]
    words = ["eval", "tiny", "--suite", str(suite), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*launcher, *words],
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("512 tokens") == 2  # the headline and one line
    for label in (AS_IT_IS, "yarn"):
        file = tmp_path / "out" / f"tiny-512-perplexity-{label.replace(' ', '-')}.json"
        assert read_result(file).tables == jsonable(of(results[0], "perplexity", label)).tables
