"""The tasks of eval/tasks, against what they say they measure."""

import copy
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from run_recipes import run_python
from tiny_models import tiny_model
from tokenizer_makes import CHECKPOINT, TOKENIZERS

import ropepatch
from ropepatch.data.haystack import Haystacks
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.harness import run_tasks
from ropepatch.evaluation.tasks import Goal, LmEvalTask
from ropepatch.verbs.evaluate import named_suite

TASKS = Path(__file__).resolve().parents[2] / "eval" / "tasks"


@pytest.fixture(scope="module")
def helpers():
    spec = importlib.util.spec_from_file_location(
        "ropepatch_tasks", TASKS / "ropepatch_tasks.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tales(tiny, tmp_path_factory):
    """A file of three documents of about 290 tokens."""
    _, tokenizer = tiny
    documents = held_out_tales(tokenizer, length=290, count=3)
    file = tmp_path_factory.mktemp("texts") / "tales.txt"
    file.write_text(
        "<|endoftext|>".join(
            tokenizer.decode(tale.ids[1:]).strip() for tale in documents
        )
    )
    return file


def scores(tiny, task, *, max_length, **metadata):
    model, tokenizer = tiny
    rows = run_tasks(
        model,
        tokenizer,
        [task],
        include_path=TASKS,
        metadata=metadata,
        max_length=max_length,
    )
    return {row.measure: row for row in rows}


def log_probs(model, ids):
    """Of every token but the first, one forward pass with full logits."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None]).flatten()


def reader(name):
    """A tokenizer, and the harness with it."""
    from lm_eval.models.huggingface import HFLM

    tokenizer = copy.deepcopy(TOKENIZERS[name]())
    tokenizer.add_special_tokens({"eos_token": "<s>"})
    return tokenizer, HFLM(
        pretrained=tiny_model("llama"), tokenizer=tokenizer, max_length=1000
    )


# Passkeys


def test_every_length_has_as_many_keys_found_as_ropepatch_passkey(tiny):
    given = {"haystacks": 4, "seed": 7}
    found = scores(
        tiny,
        "ropepatch_passkey",
        max_length=512,
        max_seq_lengths=[128, 380, 400],
        **given,
    )
    correct = 0
    for length in (128, 380, 400):
        mean = ropepatch.passkey(*tiny, lengths=[length], **given).found(length)
        row = found[f"acc_{length}"]
        assert (row.value, row.n) == (pytest.approx(mean.value), mean.weight)
        correct += mean.value * mean.weight
    assert 4 < correct < 12  # some and not all, or equality would say little
    assert (found["acc"].value, found["acc"].n) == (pytest.approx(correct / 12), 12)


@pytest.mark.parametrize("name", ["bundled", "llama3", "metaspace", "llama2"])
def test_the_harness_reads_exactly_the_tokens_of_the_prompt(name, helpers):
    tokenizer, harness = reader(name)
    plan = Haystacks(lengths=[700, 701, 733], count=3, keys=1, kinds=("passkey",))
    for haystack in plan.make(tokenizer):
        ((length, (question,)),) = haystack.asked.items()
        read = haystack.ids[: haystack.stops[length]].tolist() + question.ids.tolist()
        answer = question.answer.tolist()
        assert len(read) + len(answer) == length
        assert harness._encode_pair(*helpers._decoded(tokenizer, read, answer)) == (
            read,
            answer,
        )


# Long documents


def test_long_perplexity_is_that_of_its_windows_by_hand(tiny, tales, tmp_path):
    model, tokenizer = tiny
    file = tmp_path / "tales.jsonl"
    text = tales.read_text().replace(". ", ".\nDéjà vu ! ", 1)
    documents = text.split("<|endoftext|>")
    rows = [{"text": "Rain.", "body": document} for document in documents]
    file.write_text("\n".join(map(json.dumps, rows)))
    total, tokens = 0.0, 0
    for document in documents:
        ids = tokenizer.encode(document, add_special_tokens=False)
        tokens += len(ids)
        row = [tokenizer.bos_token_id, *ids]
        for begin in range(0, len(ids), 100):
            predicted = ids[begin : begin + 100]
            end = begin + len(predicted)
            read = row[
                end - 100 : end + 1
            ]  # the last window is moved back until it is full
            total += log_probs(model, read)[-len(predicted) :].sum().item()
        assert len(ids) % 100
    source = {"text": str(file), "field": "body", "split": "test"}
    suite = named_suite("harness", None, source)
    (task,) = [one for one in suite.tasks if "ropepatch_long_perplexity" in one.tasks]
    task = task.model_copy(update={"tasks": ("ropepatch_long_perplexity",)})
    measured = task.prepare(Goal("tiny", tokenizer, 100, 100)).measure(model)
    found = {row.measure: row for row in measured}
    units = {
        "token": tokens,
        "word": sum(len(document.split()) for document in documents),
        "byte": sum(len(document.encode()) for document in documents),
    }
    assert {name: row.value for name, row in found.items()} == {
        f"{unit}_perplexity": pytest.approx(math.exp(-total / count), rel=1e-5)
        for unit, count in units.items()
    }
    assert {row.n for row in found.values()} == {3}


# RULER


@pytest.mark.slow
def test_ruler_has_documents_of_its_own_at_each_length(tiny):
    model, tokenizer = tiny[0], copy.deepcopy(tiny[1])
    tokenizer.add_tokens([f"<{number}>" for number in range(8000)])
    tokenizer.chat_template = "{% for one in messages %}{{ one.content }} {% endfor %}"
    task = LmEvalTask(tasks=("niah_single_1",), limit=3, form="chat")
    goal = Goal("tiny", tokenizer, 1024, 4096)
    documents = task.prepare(goal)
    assert documents.parameters["lengths"] == [2048, 4096]
    own = task.model_copy(update={"metadata": {"max_seq_lengths": [3000]}})
    assert own.prepare(goal).parameters["lengths"] == [3000]
    rows = documents.measure(model)
    assert [(row.measure, row.n, row.value) for row in rows] == [
        ("2048", 3, 0.0),
        ("4096", 3, 0.0),
    ]
    assert all(row.low == 0.0 < row.high for row in rows)


@pytest.mark.parametrize("metadata", [{}, {"max_seq_lengths": [2048, 4096]}])
def test_lengths_that_lm_eval_cannot_make_are_refused(tiny, metadata):
    task = LmEvalTask(tasks=("ropepatch_passkey", "ruler_vt"), metadata=metadata)
    with pytest.raises(RopepatchError, match="2048 tokens with a vocabulary of"):
        task.prepare(Goal("tiny", tiny[1], 2048, 4096))


# Retrieval


@pytest.mark.slow
def test_generated_answers_have_the_accuracy_of_passkeys(tiny):
    lengths, haystacks = [128, 240], 10
    settings = {
        "max_seq_lengths": lengths,
        "haystacks": haystacks,
        "keys": 1,
        "kinds": ["passkey"],
    }
    settings["tokenizer"] = str(CHECKPOINT)
    found = scores(tiny, "ropepatch_retrieval", max_length=256, **settings)
    expected = ropepatch.passkey(*tiny, lengths=lengths, haystacks=haystacks)
    assert {
        f"acc_passkey_{length}": expected.found(length).value for length in lengths
    } == {metric: row.value for metric, row in found.items() if metric != "acc"}


# What a task cannot do without


READ = {"tokenizer": str(CHECKPOINT)}


@pytest.mark.parametrize(
    ("builder", "metadata", "message"),
    [
        ("passkeys", {"max_seq_lengths": [128]}, "needs the model's tokenizer"),
        (
            "passkeys",
            {"max_seq_lengths": [128, 257], "pretrained": str(CHECKPOINT)},
            "needs 257 tokens",
        ),
        ("long_documents", READ | {"text": "A mill."}, "count the special tokens"),
        ("questions", {}, "ropepatch_retrieval needs max_seq_lengths"),
    ],
)
def test_missing_metadata_of_a_task_is_named(
    helpers, builder, metadata, message, tmp_path
):
    if " " in metadata.get("text", ""):
        (file := tmp_path / "text.txt").write_text(metadata["text"])
        metadata = metadata | {"text": str(file)}
    with pytest.raises(RopepatchError, match=message):
        getattr(helpers, builder)(**metadata)


# Plain lm-eval


@pytest.mark.slow
def test_plain_lm_eval_gives_the_scores_of_run_tasks(tiny, tales, tmp_path):
    tasks = ["ropepatch_passkey", "ropepatch_long_perplexity"]
    metadata = {
        "max_seq_lengths": [128, 256],
        "haystacks": 4,
        "text": str(tales),
    }
    command = ["-m", "lm_eval", "--model", "hf", "--device", "cpu"]
    command += ["--model_args", f"pretrained={CHECKPOINT},add_bos_token=False"]
    command += [
        "--include_path",
        str(TASKS),
        "--tasks",
        ",".join(tasks),
        "--metadata",
        json.dumps(metadata),
    ]
    command += ["--output_path", str(tmp_path)]
    run_python(*command, HF_HUB_OFFLINE="1")
    (file,) = tmp_path.rglob("results*.json")
    plain = json.loads(file.read_text())["results"]
    rows = run_tasks(
        *tiny, tasks, include_path=TASKS, metadata=metadata, max_length=256
    )
    assert len(rows) == 3 + 3
    for row in rows:
        assert plain[row.at["task"]][f"{row.measure},none"] == pytest.approx(
            row.value, rel=1e-5
        )
