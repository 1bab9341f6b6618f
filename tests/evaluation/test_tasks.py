"""The tasks of eval/tasks, against what they say they measure."""

import copy
import importlib.util
import json
import math
import re
from pathlib import Path

import pytest
import torch
from run_recipes import run_python
from tiny_models import tiny_model
from tokenizer_makes import CHECKPOINT, TOKENIZERS
from tokenizers import decoders

import ropepatch
from ropepatch.data.haystack import Haystacks
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.harness import run_tasks
from ropepatch.pipeline.evaluation import named_suite

TASKS = Path(__file__).resolve().parents[2] / "eval" / "tasks"


@pytest.fixture(scope="module")
def helpers():
    spec = importlib.util.spec_from_file_location("ropepatch_tasks", TASKS / "ropepatch_tasks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tales(tiny, tmp_path_factory):
    """A file of three documents of about 290 tokens."""
    _, tokenizer = tiny
    documents = held_out_tales(tokenizer, length=290, count=3)
    file = tmp_path_factory.mktemp("texts") / "tales.txt"
    file.write_text("<|endoftext|>".join(tokenizer.decode(tale.ids[1:]).strip() for tale in documents))
    return file


def scores(tiny, task, *, max_length, **metadata):
    model, tokenizer = tiny
    rows = run_tasks(model, tokenizer, [task], include_path=TASKS, metadata=metadata, max_length=max_length)
    return {row["metric"]: row for row in rows}


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
    return tokenizer, HFLM(pretrained=tiny_model("llama"), tokenizer=tokenizer, max_length=1000)


# Passkeys


def test_every_length_has_as_many_keys_found_as_ropepatch_passkey(tiny):
    given = {"haystacks": 4, "seed": 7}
    found = scores(tiny, "ropepatch_passkey", max_length=512, max_seq_lengths=[128, 380, 400], **given)
    expected = {
        f"acc_{length}": ropepatch.passkey(*tiny, lengths=[length], **given).found(length)
        for length in (128, 380, 400)
    }
    assert {name: (row["value"], row["n"]) for name, row in found.items() if name != "acc"} == {
        name: (pytest.approx(mean.value), mean.weight) for name, mean in expected.items()
    }
    correct = sum(mean.value * mean.weight for mean in expected.values())
    assert 4 < correct < 12  # some and not all, or equality would say little
    assert (found["acc"]["value"], found["acc"]["n"]) == (pytest.approx(correct / 12), 12)


@pytest.mark.parametrize("name", ["bundled", "llama3", "metaspace", "llama2"])
def test_the_harness_reads_exactly_the_tokens_of_the_prompt(name, helpers):
    tokenizer, harness = reader(name)
    plan = Haystacks(lengths=[700, 701, 733], count=3, keys=1, kinds=("passkey",))
    for haystack in plan.make(tokenizer):
        ((length, (question,)),) = haystack.asked.items()
        read = haystack.ids[: haystack.stops[length]].tolist() + question.ids.tolist()
        answer = question.answer.tolist()
        assert len(read) + len(answer) == length
        assert harness._encode_pair(*helpers._decoded(tokenizer, read, answer)) == (read, answer)


def test_a_tokenizer_whose_text_is_read_as_other_tokens_is_refused(helpers, tmp_path):
    tokenizer = copy.deepcopy(TOKENIZERS["llama3"]())
    writes_others = [decoders.Replace(".", "!"), decoders.ByteLevel()]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(writes_others)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(RopepatchError, match="has other tokens when its text is encoded"):
        helpers.passkeys(max_seq_lengths=[256], tokenizer=str(tmp_path))


# Long documents


def test_long_perplexity_is_that_of_its_windows_by_hand(tiny, tales, tmp_path):
    model, tokenizer = tiny
    file = tmp_path / "tales.txt"
    file.write_text(tales.read_text().replace(". ", ".\nDéjà vu ! ", 1), encoding="utf-8")
    documents = file.read_text(encoding="utf-8").split("<|endoftext|>")
    total, tokens = 0.0, 0
    for document in documents:
        ids = tokenizer.encode(document, add_special_tokens=False)
        tokens += len(ids)
        row = [tokenizer.bos_token_id, *ids]
        for begin in range(0, len(ids), 100):
            predicted = ids[begin : begin + 100]
            end = begin + len(predicted)
            read = row[end - 100 : end + 1]  # the last window is moved back until it is full
            total += log_probs(model, read)[-len(predicted) :].sum().item()
        assert len(ids) % 100
    found = scores(tiny, "ropepatch_long_perplexity", max_length=100, text=str(file))
    units = {
        "token": tokens,
        "word": sum(len(document.split()) for document in documents),
        "byte": sum(len(document.encode()) for document in documents),
    }
    assert {name: row["value"] for name, row in found.items()} == {
        f"{unit}_perplexity": pytest.approx(math.exp(-total / count), rel=1e-5)
        for unit, count in units.items()
    }
    assert {row["n"] for row in found.values()} == {3}


def test_the_column_of_a_text_reaches_the_tasks_of_lm_eval(tiny, tmp_path):
    file = tmp_path / "books.jsonl"
    rows = [{"text": "Rain.", "body": f"The mill wheel turns {number} times. " * 9} for number in range(2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = named_suite("harness", model="tiny", text=str(file), field="body", split="test")
    (task,) = [task for task in suite.tasks if "ropepatch_long_perplexity" in task.tasks]
    task = task.model_copy(update={"tasks": ("ropepatch_long_perplexity",)})
    measurement = task.prepare("tiny", tiny[1], trained=256, to=256)
    found = {row.measure: row.value for row in measurement.run(*tiny, None, lambda done, total: None)}
    bodies = [row["body"] for row in rows]
    losses = [-log_probs(tiny[0], [tiny[1].bos_token_id, *tiny[1].encode(body)[1:]]) for body in bodies]
    mean = sum(loss.sum() for loss in losses) / sum(map(len, losses))
    assert found["token_perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)


# Key tokens


def test_key_tokens_are_those_that_gain_by_the_definition(tiny, helpers):
    model, tokenizer = tiny
    tale = held_out_tales(tokenizer, length=110, count=6)[-1]
    short, ids = 40, tale.ids.tolist()
    expected = set()
    for at in range(1 + short, len(ids)):
        before = short + (at - 1 - short) % 10  # grows by one per token, up to the next multiple of short / 4
        far = log_probs(model, ids[: at + 1])[-1]
        near = log_probs(model, [ids[0], *ids[at - before : at + 1]])[-1]
        if far - near > 2 and far > -2:
            expected.add(at)
    text = tokenizer.decode(ids[1:])
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    runs = helpers._key_tokens(model, tokenizer, text, short)
    assert expected
    assert expected == {
        at + 1
        for at, (begin, end) in enumerate(offsets)
        if any(first <= begin and end <= last for first, last in runs)
    }


def test_the_spans_of_a_document_are_limited_and_evenly_spread(helpers, tales, monkeypatch):
    places = [(at, at + 9) for at in range(100, 170, 10)]
    monkeypatch.setattr(helpers, "_key_tokens", lambda *arguments: places)
    given = {"text": str(tales), "max_seq_lengths": [256], "short": 48, "evaluator": "tiny"}
    given["tokenizer"] = str(CHECKPOINT)
    every = helpers.key_spans(**given)["test"]["context"]
    assert len(every) == 3 * 7
    few = helpers.key_spans(spans=3, **given)["test"]["context"]
    assert few == [every[document * 7 + index] for document in range(3) for index in (0, 2, 4)]


@pytest.mark.parametrize("name", ["bundled", "gpt2", "llama2"])
def test_a_span_has_the_white_space_before_it_and_the_tokens_that_the_harness_counts(name, helpers):
    tokenizer, harness = reader(name)
    text = "The mill wheel turns\nand turns."
    words = [match.span() for match in re.finditer(r"\w+", text)][1:]
    rows = helpers._spans_of(tokenizer, text, words)
    bos = tokenizer.bos_token or ""
    assert [row["span"] for row in rows] == [" mill", " wheel", " turns", "\nand", " turns"]
    for row in rows:
        assert f"{bos}{text}".startswith(row["context"] + row["span"])
        assert row["tokens"] == len(harness._encode_pair(row["context"], row["span"])[1])


# What a task cannot do without


READ = {"tokenizer": str(CHECKPOINT)}
KEYS = {"text": "x", "max_seq_lengths": [128]}
DULL = {"text": "The mill wheel turns and turns. " * 60, "max_seq_lengths": [200], "short": 100}


@pytest.mark.parametrize(
    ("builder", "metadata", "message"),
    [
        ("passkeys", {}, "ropepatch_passkey needs max_seq_lengths"),
        ("passkeys", {"max_seq_lengths": [128]}, "needs the model's tokenizer"),
        ("passkeys", {"max_seq_lengths": [128, 257], "pretrained": str(CHECKPOINT)}, "needs 257 tokens"),
        ("long_documents", READ | {"add_bos_token": False}, "needs a text"),
        ("long_documents", READ | {"text": "A mill."}, "count the special tokens"),
        ("key_spans", {"text": "x"}, "ropepatch_key_tokens needs max_seq_lengths"),
        ("key_spans", KEYS | {"short": 64}, "needs an evaluator"),
        ("key_spans", KEYS | {"evaluator": "tiny"}, "short must be from 4 to 127"),
        ("key_spans", KEYS | {"max_length": 100}, "needs 128 tokens"),
        ("key_spans", READ | DULL | {"evaluator": "tiny"}, "marks no key token in 1 documents"),
    ],
)
def test_missing_metadata_of_a_task_is_named(helpers, builder, metadata, message, tmp_path):
    if " " in metadata.get("text", ""):
        (file := tmp_path / "text.txt").write_text(metadata["text"])
        metadata = metadata | {"text": str(file)}
    with pytest.raises(RopepatchError, match=message):
        getattr(helpers, builder)(**metadata)


# Plain lm-eval


@pytest.mark.slow
def test_plain_lm_eval_gives_the_scores_of_run_tasks(tiny, tales, tmp_path):
    tasks = ["ropepatch_passkey", "ropepatch_long_perplexity", "ropepatch_key_tokens"]
    metadata = {
        "max_seq_lengths": [128, 256],
        "haystacks": 4,
        "text": str(tales),
        "evaluator": "tiny",
        "short": 48,
    }
    command = ["-m", "lm_eval", "--model", "hf", "--device", "cpu"]
    command += ["--model_args", f"pretrained={CHECKPOINT},add_bos_token=False"]
    command += ["--include_path", str(TASKS), "--tasks", ",".join(tasks), "--metadata", json.dumps(metadata)]
    command += ["--output_path", str(tmp_path)]
    run_python(*command, HF_HUB_OFFLINE="1")
    (file,) = tmp_path.rglob("results*.json")
    plain = json.loads(file.read_text())["results"]
    rows = run_tasks(*tiny, tasks, include_path=TASKS, metadata=metadata, max_length=256)
    assert len(rows) == 3 + 3 + 2
    for row in rows:
        assert plain[row["task"]][f"{row['metric']},none"] == pytest.approx(row["value"], rel=1e-5)
