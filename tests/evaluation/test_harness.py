"""Tasks of lm-eval on a model in memory, with small tasks of our own."""

import copy
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.harness import _rows, run_tasks
from ropepatch.evaluation.intervals import Mean

TASKS = Path(__file__).resolve().parents[2] / "eval" / "tasks"
SAID = " Bread cools on the sill. Smoke climbs from"
RIGHT, WRONG = (
    {"text": SAID, "target": " every"},
    {"text": SAID, "target": " 7"},
)  # as tiny says, or not
GENERATES = {
    "output_type": "generate_until",
    "metrics": ("exact_match: mean",),
    "generation_kwargs": '{do_sample: false, max_gen_toks: 8, until: ["\\n"]}',
}


def write_task(
    folder,
    name,
    rows,
    *,
    output_type="loglikelihood",
    metrics=("acc: mean",),
    **settings,
):
    """A task of rows {text, target}; more code goes to the end of its helper ``NAME_data``."""
    code = settings.pop("code", "")
    listed = f"def rows(**metadata):\n    return {{'test': datasets.Dataset.from_list({rows!r})}}\n"
    (folder / f"{name}_data.py").write_text(f"import datasets\n{listed}\n{code}\n")
    lines = [
        f"task: {name}",
        f"custom_dataset: !function {name}_data.rows",
        "test_split: test",
        f"output_type: {output_type}",
        "num_fewshot: 0",
        "doc_to_text: text",
        "doc_to_target: target",
        "metric_list:",
    ]
    for metric in metrics:
        title, aggregation = metric.split(": ")
        lines.append(
            f"  - {{metric: {title}, aggregation: {aggregation}, higher_is_better: true}}"
        )
    lines += [f"{key}: {value}" for key, value in settings.items()]
    (folder / f"{name}.yaml").write_text(
        "\n".join([*lines, "metadata: {version: 2.0}", ""])
    )


def run(tiny, folder, *tasks, **options):
    return run_tasks(*tiny, tasks, include_path=folder, **options)


def text_of(tiny, length):
    """A text of so many tokens, beginning-of-sequence token included."""
    ids = tiny[1].encode(" turns and turns" * 200)[:length]
    text = tiny[1].decode(ids[1:])
    assert tiny[1].encode(text) == ids
    return text


# What comes back


def test_rows_have_task_version_metric_value_error_and_count(tiny, tmp_path):
    code = "def infinite(items):\n    return float('inf')\n"
    code += "def scores(doc, results):\n    right = doc['target'] != ' 7'\n"
    code += "    return {'acc': float(right), '4096': -1.0, 'perplexity': 1.0}\n"
    metrics = ("acc: mean", "'4096': mean")  # -1 is RULER's, unasked
    metrics += ("perplexity: !function one_data.infinite",)
    settings = {
        "process_results": "!function one_data.scores",
        "code": code,
        "metrics": metrics,
    }
    write_task(tmp_path, "one", [RIGHT, WRONG, RIGHT, WRONG, WRONG], **settings)
    write_task(tmp_path, "two", [WRONG])
    (tmp_path / "both.yaml").write_text(
        "group: both\ntask: [one, two]\naggregate_metric_list: [{metric: acc, aggregation: mean}]\n"
    )
    rows = {
        (row.at["task"], row.measure): row
        for row in run(tiny, tmp_path, "both", limit=4)
    }
    of_one = {("one", "acc"), ("one", "perplexity")}
    assert rows.keys() == of_one | {("two", "acc"), ("both", "acc")}
    row = rows["one", "acc"]
    assert (row.at, row.value, row.n) == ({"task": "one", "version": "2.0"}, 0.5, 4)
    share = Mean.of([(1, 1), (0, 1), (1, 1), (0, 1)], share=True).interval()
    assert (row.low, row.high) == share
    assert rows["one", "perplexity"].value is None
    assert rows["both", "acc"].value == pytest.approx(0.4)


def test_graded_scores_of_ruler_have_intervals_within_0_and_1():
    samples = [{"filter": "none", "4096": score} for score in (0.2, 1.0, 1.0)]
    results = {"versions": {}, "samples": {"ruler_vt": samples}}
    [row] = _rows(
        "ruler_vt", results | {"results": {"ruler_vt": {"4096,none": 2.2 / 3}}}
    )
    assert 0 <= row.low < row.value < row.high <= 1


# Nothing is cut


def test_a_prompt_that_would_be_truncated_is_refused(tiny, tmp_path):
    write_task(tmp_path, "short", [RIGHT])
    texts = [text_of(tiny, length) for length in (20, 60, 257)]
    write_task(tmp_path, "long", [{"text": text, "target": " turns"} for text in texts])
    for options, limit in (({"max_length": 50}, 50), ({}, 256)):
        with pytest.raises(
            RopepatchError, match=f"short, long takes 257 .* more than the {limit} of"
        ):
            run(tiny, tmp_path, "short", "long", **options)
    assert (
        run(tiny, tmp_path, "long", max_length=257)[0].n == 3
    )  # the answer is predicted, not read


def test_a_prompt_needs_room_for_its_answer(tiny, tmp_path):
    text = text_of(tiny, 92)
    model, tokenizer = tiny
    ids = torch.tensor([tokenizer.encode(text)])
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
    )
    target = tokenizer.decode(said[0, 92:], skip_special_tokens=True)
    write_task(tmp_path, "says", [{"text": text, "target": target}], **GENERATES)
    assert run(tiny, tmp_path, "says", max_length=100)[0].value == 1.0
    for length in (99, 8):  # the answer alone fills 8
        with pytest.raises(RopepatchError, match="says"):
            run(tiny, tmp_path, "says", max_length=length)


def test_a_whole_document_is_scored_without_its_added_token(tiny, tmp_path):
    model, tokenizer = tiny
    text = text_of(tiny, 61)
    options = {
        "output_type": "loglikelihood_rolling",
        "metrics": ("byte_perplexity: weighted_perplexity",),
    }
    write_task(tmp_path, "reads", [{"text": "", "target": text}], **options)
    (row,) = run(tiny, tmp_path, "reads", max_length=60)
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    with torch.no_grad():
        chances = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    total = chances.gather(1, torch.tensor(ids)[1:, None]).sum().item()
    assert row.value == pytest.approx(np.exp(-total / len(text.encode())), rel=1e-5)


def test_chat_puts_a_prompt_into_the_template(tiny, tmp_path):
    model, tokenizer = tiny[0], copy.deepcopy(tiny[1])
    tokenizer.chat_template = "{{ messages[0].content }}" + " turns" * 100
    write_task(tmp_path, "asked", [RIGHT])
    assert run((model, tokenizer), tmp_path, "asked", max_length=50)[0].value == 1.0
    with pytest.raises(RopepatchError, match="more than the 50 of the model"):
        run((model, tokenizer), tmp_path, "asked", max_length=50, chat=True)


# What stays as it was


@pytest.mark.parametrize("fails", [False, True])
def test_model_tokenizer_and_output_are_as_before(tmp_path, capsys, fails):
    model, tokenizer = ropepatch.load("tiny", device="cpu")
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.bfloat16()
    # Of another dtype than the weights
    model.model.rotary_emb.inv_freq = frequencies.clone()
    write_task(tmp_path, "wheel", [RIGHT], code="print('hello')")
    write_task(tmp_path, "says", [{"text": "The mill", "target": "x"}], **GENERATES)
    model.train().model.layers[1].eval()

    def state():
        modes = {name: module.training for name, module in model.named_modules()}
        generation = model.generation_config.to_dict()
        level = logging.getLogger("lm_eval").level
        return modes, model.dtype, generation, tokenizer.pad_token, level

    before = state()
    if fails:
        with pytest.raises(RopepatchError):
            run((model, tokenizer), tmp_path, "wheel", max_length=1)
    else:
        assert run((model, tokenizer), tmp_path, "wheel", "says")[0].value == 1.0
    assert state() == before
    assert model.model.rotary_emb.inv_freq.tolist() == frequencies.tolist()
    assert capsys.readouterr().out == ""


def test_tasks_load_the_tokenizer_without_a_pointer_to_code(tiny, tmp_path):
    """RULER's tasks load it with trust_remote_code."""
    code = """
import json, pathlib
from transformers import AutoTokenizer
def rows(tokenizer, max_length, word, **metadata):
    config = json.loads((pathlib.Path(tokenizer) / "tokenizer_config.json").read_text())
    ids = AutoTokenizer.from_pretrained(tokenizer).encode(word)
    row = {"text": word, "target": " x", "seen": f"{'auto_map' in config} {max_length} {ids}"}
    return {"test": datasets.Dataset.from_list([row])}
def scores(doc, results):
    return {"acc": float(doc["seen"] == EXPECTED)}
"""
    expected = f"False 77 {tiny[1].encode('The mill')}"
    settings = {
        "code": f"EXPECTED = {expected!r}{code}",
        "process_results": "!function wheel_data.scores",
    }
    write_task(tmp_path, "wheel", None, **settings)
    tokenizer = tiny[1]
    tokenizer.init_kwargs["auto_map"] = {
        "AutoTokenizer": ["someone/else--code.Tokenizer", None]
    }
    try:
        (row,) = run(
            tiny, tmp_path, "wheel", metadata={"word": "The mill"}, max_length=77
        )
        assert "auto_map" in tokenizer.init_kwargs
    finally:
        del tokenizer.init_kwargs["auto_map"]
    assert row.value == 1.0


# What cannot be run


@pytest.mark.slow
def test_unknown_tasks_are_refused_with_the_nearest_name(tiny):
    unknown = ["ropepatch_passkeys", "niah_singel_1"]
    with pytest.raises(
        RopepatchError, match="ropepatch_passkeys, niah_singel_1"
    ) as error:
        run(tiny, TASKS, "ropepatch_passkey", *unknown)
    assert error.value.hint == "did you mean ropepatch_passkey?"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ConnectionError('no route\\nmore')", r"(?m)wheel: no route$"),
        ("import a_package_of_none", "wheel: No module named 'a_package_of_none'"),
        (None, r"a task of lm-eval needs lm_eval(?s:.*)ropepatch\[eval\]"),
    ],
)
def test_missing_data_or_packages_are_an_error_of_one_line(
    tiny, tmp_path, monkeypatch, code, message
):
    if code is None:
        monkeypatch.setitem(sys.modules, "lm_eval", None)
    write_task(tmp_path, "wheel", [RIGHT], code=code or "")
    with pytest.raises(RopepatchError, match=message):
        run(tiny, tmp_path, "wheel")
