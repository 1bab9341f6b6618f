"""Tasks of lm-eval on a model in memory, with small tasks of our own."""

import json
import logging
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.harness import run_tasks

TASKS = Path(__file__).resolve().parents[2] / "eval" / "tasks"
FILLER = " turns and turns" * 200
SAID = " Bread cools on the sill. Smoke climbs from"
RIGHT, WRONG = (
    {"text": SAID, "target": " every"},
    {"text": SAID, "target": " 7"},
)  # what tiny says next, or not


UNREAD = r"(?m)cannot read the data of wheel: no route$"


def write_task(folder, name, rows, *, output_type="loglikelihood", metrics=("acc: mean",), **settings):
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
        lines.append(f"  - {{metric: {title}, aggregation: {aggregation}, higher_is_better: true}}")
    lines += [f"{key}: {value}" for key, value in settings.items()]
    (folder / f"{name}.yaml").write_text("\n".join([*lines, "metadata: {version: 2.0}", ""]))


def run(tiny, folder, *tasks, **options):
    return run_tasks(*tiny, tasks, include_path=folder, **options)


def tokens(tiny, text):
    return tiny[1].encode(text)


def text_of(tiny, length):
    """A text of so many tokens, beginning-of-sequence token included."""
    ids = tokens(tiny, FILLER)[:length]
    text = tiny[1].decode(ids[1:])
    assert tokens(tiny, text) == ids
    return text


# What comes back


def test_a_row_says_task_version_metric_value_error_and_count_of_the_first_documents(tiny, tmp_path):
    write_task(tmp_path, "wheel", [RIGHT, WRONG, RIGHT, WRONG, WRONG])
    (row,) = run(tiny, tmp_path, "wheel", limit=4)
    # two of four: the mean's standard error is sqrt(p (1 - p) / (n - 1))
    expected = {"task": "wheel", "version": "2.0", "metric": "acc", "value": 0.5, "n": 4}
    assert row == expected | {"stderr": pytest.approx((0.25 / 3) ** 0.5)}


def test_a_group_has_a_row_of_its_own_beside_those_of_its_tasks(tiny, tmp_path):
    for name, row in (("one", RIGHT), ("two", WRONG)):
        write_task(tmp_path, name, [row])
    (tmp_path / "both.yaml").write_text(
        "group: both\ntask: [one, two]\naggregate_metric_list: [{metric: acc, aggregation: mean}]\n"
    )
    values = {row["task"]: row["value"] for row in run(tiny, tmp_path, "both")}
    assert values == {"one": 1.0, "two": 0.0, "both": 0.5}


def test_what_is_no_finite_number_is_none(tiny, tmp_path):
    code = "def infinite(items):\n    return float('inf')\n"
    metrics = ("acc: mean", "perplexity: !function wheel_data.infinite")
    write_task(tmp_path, "wheel", [RIGHT], metrics=metrics, code=code)
    found = {row["metric"]: row for row in run(tiny, tmp_path, "wheel")}
    assert found["perplexity"]["value"] is None
    assert found["perplexity"]["stderr"] is None
    assert found["acc"]["stderr"] is None  # of one document there is none
    json.dumps(found, allow_nan=False)


def test_lengths_that_nobody_asked_for_have_no_row(tiny, tmp_path):
    """RULER's tasks give -1 for them."""
    code = (
        "def scores(doc, results):\n    return {'4096': -1.0, '128': 0.0 if doc['target'] == ' 7' else 1.0}\n"
    )
    rows = [RIGHT, WRONG]
    metrics = ("'4096': mean", "'128': mean")
    settings = {"process_results": "!function wheel_data.scores", "code": code}
    write_task(tmp_path, "wheel", rows, metrics=metrics, **settings)
    (row,) = run(tiny, tmp_path, "wheel")
    assert (row["metric"], row["value"], row["n"]) == ("128", 0.5, 2)


# Nothing is cut


def test_the_refusal_names_the_task_and_counts_its_prompts(tiny, tmp_path):
    write_task(tmp_path, "short", [RIGHT])
    rows = [{"text": text_of(tiny, length), "target": " turns"} for length in (20, 60, 80)]
    write_task(tmp_path, "long", rows)
    with pytest.raises(
        RopepatchError, match=r"long: 2 of 4 prompts exceed the 50 tokens .* longest takes 80"
    ):
        run(tiny, tmp_path, "short", "long", max_length=50)
    assert run(tiny, tmp_path, "long", max_length=80)[0]["n"] == 3  # the answer is predicted, not read
    with pytest.raises(RopepatchError, match="long: 1 of 3 prompts exceed the 79 tokens"):
        run(tiny, tmp_path, "long", max_length=79)


def test_without_max_length_the_config_decides(tiny, tmp_path):
    write_task(tmp_path, "wheel", [{"text": text_of(tiny, 257), "target": " turns"}])
    with pytest.raises(RopepatchError, match="exceed the 256 tokens"):
        run(tiny, tmp_path, "wheel")
    assert run(tiny, tmp_path, "wheel", max_length=300)[0]["n"] == 1


GENERATES = {
    "output_type": "generate_until",
    "metrics": ("exact_match: mean",),
    "generation_kwargs": '{do_sample: false, max_gen_toks: 8, until: ["\\n"]}',
}


def test_a_prompt_with_room_for_its_answer_is_generated_and_one_token_less_is_refused(tiny, tmp_path):
    text = text_of(tiny, 92)
    model, tokenizer = tiny
    ids = torch.tensor([tokens(tiny, text)])
    said = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
    target = tokenizer.decode(said[0, 92:], skip_special_tokens=True)
    write_task(tmp_path, "says", [{"text": text, "target": target}], **GENERATES)
    assert run(tiny, tmp_path, "says", max_length=100)[0]["value"] == 1.0
    with pytest.raises(
        RopepatchError, match=r"says: a prompt takes 92 tokens and its answer up to 8.* the 99 "
    ):
        run(tiny, tmp_path, "says", max_length=99)
    with pytest.raises(RopepatchError, match="says"):  # the answer alone fills the window
        run(tiny, tmp_path, "says", max_length=8)


def test_a_whole_document_is_never_refused_and_its_added_token_not_scored(tiny, tmp_path):
    model, tokenizer = tiny
    text = text_of(tiny, 61)
    metrics = ("byte_perplexity: weighted_perplexity",)
    write_task(
        tmp_path,
        "reads",
        [{"text": "", "target": text}],
        output_type="loglikelihood_rolling",
        metrics=metrics,
    )
    (row,) = run(tiny, tmp_path, "reads", max_length=60)
    ids = tokens(tiny, text)
    assert ids[0] == tokenizer.bos_token_id
    with torch.no_grad():
        chances = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    total = chances.gather(1, torch.tensor(ids)[1:, None]).sum().item()
    assert row["value"] == pytest.approx(np.exp(-total / len(text.encode())), rel=1e-5)


# What stays as it was


def test_model_and_tokenizer_are_as_before_also_frequencies_of_another_dtype_than_the_weights(tmp_path):
    model, tokenizer = ropepatch.load("tiny", device="cpu")
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.bfloat16()
    model.model.rotary_emb.inv_freq = frequencies.clone()
    write_task(tmp_path, "wheel", [RIGHT])
    write_task(tmp_path, "says", [{"text": "The mill", "target": "x"}], **GENERATES)
    model.train()
    model.model.layers[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    generation = model.generation_config.to_dict()
    assert run((model, tokenizer), tmp_path, "wheel", "says")[0]["value"] == 1.0
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert (model.dtype, model.model.rotary_emb.inv_freq.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert model.generation_config.to_dict() == generation
    assert tokenizer.pad_token is None


@pytest.mark.parametrize("fails", [False, True])
def test_seeds_environment_and_logging_are_as_before(tiny, tmp_path, monkeypatch, fails):
    write_task(tmp_path, "wheel", [RIGHT])
    logger = logging.getLogger("lm_eval")

    def state():
        draws = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        return *draws, dict(os.environ), logger.level, sys.stdout

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(987)  # other than lm-eval's
    monkeypatch.delenv("DISABLE_MULTIPROC", raising=False)
    monkeypatch.setattr(logger, "level", logging.INFO)
    before = state()
    if fails:
        with pytest.raises(RopepatchError):
            run(tiny, tmp_path, "wheel", max_length=1)
    else:
        run(tiny, tmp_path, "wheel")
    assert state() == before


def test_nothing_is_printed_to_standard_output(tiny, tmp_path, capsys):
    write_task(tmp_path, "wheel", [RIGHT], code="print('hello')")
    run(tiny, tmp_path, "wheel")
    assert capsys.readouterr().out == ""


def test_tasks_get_the_tokenizer_in_a_folder_without_a_pointer_to_code(tiny, tmp_path):
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
    expected = f"False 77 {tokens(tiny, 'The mill')}"
    settings = {"code": f"EXPECTED = {expected!r}{code}", "process_results": "!function wheel_data.scores"}
    write_task(tmp_path, "wheel", None, **settings)
    tokenizer = tiny[1]
    tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": ["someone/else--code.Tokenizer", None]}
    try:
        (row,) = run(tiny, tmp_path, "wheel", metadata={"word": "The mill"}, max_length=77)
        assert "auto_map" in tokenizer.init_kwargs
    finally:
        del tokenizer.init_kwargs["auto_map"]
    assert row["value"] == 1.0


# What cannot be run


def test_lm_eval_missing_says_what_to_install_and_tasks_that_are_no_list_of_names_are_refused(
    tiny, monkeypatch
):
    for tasks in ("ropepatch_passkey", []):
        with pytest.raises(RopepatchError, match="tasks must be a list of names"):
            run_tasks(*tiny, tasks, include_path=TASKS)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(RopepatchError, match="lm-eval is needed") as error:
        run(tiny, TASKS, "ropepatch_passkey")
    assert error.value.hint == 'pip install "ropepatch[eval]"'


@pytest.mark.slow
def test_unknown_tasks_are_refused_with_the_nearest_of_ours_and_of_the_harness(tiny):
    unknown = ["ropepatch_passkeys", "niah_singel_1"]
    with pytest.raises(
        RopepatchError, match="lm-eval has no task ropepatch_passkeys, niah_singel_1"
    ) as error:
        run(tiny, TASKS, "ropepatch_passkey", *unknown)
    assert error.value.hint == "did you mean ropepatch_passkey, niah_single_1?"


@pytest.mark.parametrize(
    ("code", "offline", "message", "hint"),
    [
        ("raise ConnectionError('no route\\nmore')", True, UNREAD, "only data sets in the cache"),
        ("raise ConnectionError('no route\\nmore')", False, UNREAD, "check the network"),
        ("import a_package_of_none", False, "a package of wheel is missing", "pip install a_package_of_none"),
    ],
)
def test_what_a_task_cannot_read_or_import_is_an_error_of_one_line(
    tiny, tmp_path, monkeypatch, code, offline, message, hint
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    write_task(tmp_path, "wheel", [RIGHT], code=code)
    with pytest.raises(RopepatchError, match=message) as error:
        run(tiny, tmp_path, "wheel")
    assert hint in error.value.hint
