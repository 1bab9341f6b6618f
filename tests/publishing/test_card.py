"""A card describes the method and the results, with no number that was not measured."""

import math
import re
import shutil
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import methods
import pytest
import yaml
from checkpoint_folders import files_of
from huggingface_hub import ModelCard, parse_eval_result_entries
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_results import asking, fine_tuned, reading, row_of, scoring
from transformers import LlamaConfig

import ropepatch
from ropepatch.attention import REMAPPINGS
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.results import as_read
from ropepatch.extension.record import Record
from ropepatch.model.weights import fingerprint, read_headers
from ropepatch.publishing.card import writing
from ropepatch.publishing.card.model import Extended
from ropepatch.publishing.card.writing import (
    MARKER,
    address,
    board_scores,
    card_text,
    citation,
    read_folder,
    write_card,
)
from ropepatch.report.tables import EFFECTIVE, results_text
from ropepatch.scaling import METHODS

CHECK = {
    "base": 0.61237,
    "now": 0.61849,
    "increase": 0.009994,
    "most": 0.02,
    "passed": True,
}
TRAINING = {
    "recipe": {"save": "merged"},
    "run": "0123456789abcdef",
    "steps": 600,
    "tokens": 1_234_567,
    "device": "CPU, 2 threads",
    "short_context": CHECK,
}
REVISION = "6f5d4e3c2b1a09876f5d4e3c2b1a09876f5d4e3c"
ON_HUB = {"model": "meta-llama/Llama-2-7b-hf", "revision": REVISION}
VERIFIED = {
    "frequencies": "equal",
    "logits": "equal",
    "compared": True,
    "difference": 0.0,
}
COMMAND = "ropepatch extend tiny --to 1k --recipe mine --eval demo"
TRAINED = [
    reading("floor", [0.41234, 0.39345, 0.38456]),
    reading("baseline", [0.61111, 2.02222, 12.03333]),
    reading("yarn", [0.65551, 0.60662, 0.55773], method="yarn"),
    fine_tuned(reading("yarn + mine", [0.62884, 0.50995, 0.45006], method="yarn")),
    asking("baseline", [4, 0, 0]),
    asking("yarn", [4, 3, 1], method="yarn"),
    fine_tuned(asking("yarn + mine", [4, 4, 3], method="yarn")),
]
BASE, TRAINED_WEIGHTS = (TRAINED[k].model["weights"] for k in (1, 3))


def record(method="yarn", base_model="tiny", **more):
    parameters = methods.example(method, 16).parameters()
    plan = ropepatch.plan(base_model, to=1024, method=method, **parameters)
    return Record.of(plan).amended(verified=VERIFIED, **more)


def made(stated=None, results=(), weights=BASE, name="x", files=()):
    return Extended(
        name, stated or record(), results, weights=weights, files=frozenset(files)
    )


SCORED = scoring(
    "yarn", {("long_task", "acc"): 0.40456, ("short_task", "em"): 0.5}, method="yarn"
)
LINEAR = LlamaConfig(
    rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    max_position_embeddings=256,
    name_or_path="llama",
)
MADE = {
    "trained": made(
        record(training=TRAINING, command=COMMAND),
        TRAINED,
        TRAINED_WEIGHTS,
        "me/tiny-1k",
        ["tokenizer_config.json", "training", "evaluation.html"],
    ),
    "training-free": made(record("ntk", base={})),
    "scored": made(results=[SCORED]),
    "licensed": made(
        record(base={"license": "llama2", "language": ["en", "de"]}, **ON_HUB),
        TRAINED[:3],
    ),
    "scaled before": made(
        record(
            "linear",
            LINEAR,
            earlier=Record.of(ropepatch.plan("tiny", to=512, method="linear")),
        )
    ),
    "folded": made(record(training=TRAINING, folded_attention_factor=1.1386294361)),
    "an adapter": made(
        record(training=TRAINING).amended(verified=None),
        name="me/adapter-1k",
        files=["adapter_config.json"],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A real checkpoint with results."""
    out = tmp_path_factory.mktemp("made") / "tiny-1k"
    ropepatch.extend(ropepatch.plan("tiny", to=1024, method="yarn"), out, reading=False)
    (out / "evaluation").mkdir()
    weights = {"weights": fingerprint(read_headers(out))}
    for k, result in enumerate([*TRAINED[:3], *TRAINED[4:6]]):
        own = replace(result, model=result.model | weights)
        own.write(out / "evaluation" / f"{k}.json")
    return out


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "tiny-1k")


def blocks(card, language):
    return re.findall(rf"^```{language}\n(.*?)\n```$", card, re.MULTILINE | re.DOTALL)


def front(*arguments, **options):
    return ModelCard(card_text(made(*arguments, **options))).data


def tables(card):
    """Every table as rows of cells, by the heading or caption above it."""
    found, heading = {}, ""
    for line in card.splitlines():
        heading = line.strip("#* ") if line.startswith(("#", "**")) else heading
        if line.startswith("| ") and "---" not in line:
            found.setdefault(heading, []).append(re.split(r" ?(?<!\\)\| ?", line)[1:-1])
    return found


def unescaped(text):
    return re.sub(r"\\(.)", r"\1", text)


# Every number comes from the record or the results

NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)*(?:[eE][-+]?\d+)?(?:%|[km]\b)?")
UNQUOTED = {
    "inv_freq",
    "inv_freq_before",
    "evaluation",
    "config_before",
    "clusters",
    "recipe",
}


def leaves(content):
    """Every number and text in JSON-like data that a card may quote."""
    if isinstance(content, list | tuple):
        return [part for item in content for part in leaves(item)]
    if not isinstance(content, dict):
        return [] if content is None or isinstance(content, bool) else [content]
    if {"kind", "depth"} & content.get("at", {}).keys():
        return []
    found = [*content]
    for key, value in content.items():
        if key not in UNQUOTED:
            found += leaves(value)
        is_loss = content.get("measure") == "loss" and key in ("value", "low", "high")
        if is_loss and value is not None:
            found.append(math.exp(value))  # the perplexity
    return found


@cache
def agrees(shown, value):
    """Whether a number as printed is the value, rounded."""
    digits = shown.rstrip("%km").replace(",", "")
    scale = {"%": 100, "k": 1 / 1024, "m": 1 / 1024**2}.get(shown[-1], 1)
    if digits.count(".") > 1:
        return False
    mantissa, _, exponent = digits.lower().partition("e")
    places = len(mantissa.partition(".")[2])
    rounded = f"{scale * abs(value):.{places}{'e' if exponent else 'f'}}"
    return float(rounded) == float(digits)


@pytest.mark.parametrize("name", [*MADE, *METHODS])
def test_every_number_is_in_the_record_or_the_results(name):
    model = MADE[name] if name in MADE else made(record(name))
    results = [asdict(result) for result in model.results]
    known = leaves(as_read([model.record.to_dict(), model.name, results]))
    texts = {
        number
        for part in known
        if isinstance(part, str)
        for number in NUMBER.findall(part)
    }
    values = {part for part in known if isinstance(part, int | float)}
    card = card_text(model).partition("## Citation")[0]
    said = re.sub(rf"[Ii]ntervals: 95 %|95 % interval|{EFFECTIVE}", "", card)
    for number in NUMBER.findall(unescaped(said)):
        assert number in texts or any(agrees(number, value) for value in values), number


# Results


def test_tables_mark_this_checkpoint_and_the_outcome_comes_first():
    card = card_text(MADE["trained"])
    shown = tables(card)
    names = ["baseline", "yarn", "**yarn + mine** (this checkpoint)"]
    losses, found = shown["Loss (nats/token)"], shown["Retrieval accuracy"]
    assert [row[0] for row in losses[-4:]] == [*names, "floor"]
    assert [row[0] for row in found[-3:]] == names
    assert losses[-2][-1] == "0.450 (0.405 to 0.495)"
    assert shown["Perplexity"][-2][-1] == "1.568 (1.499 to 1.641)"
    assert [row[2].partition(" (")[0] for row in found[-3:]] == ["0%", "75%", "100%"]
    outcome = card.partition("## How to load it")[0]
    loss = r"Loss \(nats/token\) at 1,024 tokens: this checkpoint 0\.450 .*, the base model 12\.033 .*"
    assert re.search(rf"{loss} Retrieval accuracy at 1,024 .* 75% ", unescaped(outcome))
    within = card.partition("### Within the original context length\n\n")[2]
    check = (
        r"0\.612 .* before, 0\.618 after \(\+1\.00%\), within the limit of 2\.00%\.\n"
    )
    assert re.search(check, within)
    failed = CHECK | {"now": 0.7, "increase": 0.143, "passed": False}
    trained = record(training=TRAINING | {"short_context": failed})
    assert "**above** the limit" in card_text(made(trained))


@pytest.mark.parametrize(("documents", "haystacks"), [(2, 4), (4, 2), (10, 10)])
def test_warnings_of_the_terminal_stand_before_the_headline(documents, haystacks):
    results = [
        reading("yarn", [[0.6] * documents] * 3, method="yarn"),
        asking("yarn", [1, 1, 1], n=haystacks, method="yarn"),
    ]
    printed = re.findall(r"^Warning: (.*)\.$", results_text(results), re.MULTILINE)
    assert len(printed) == (documents < 5) + (haystacks < 5)
    head = card_text(made(results=results)).partition("Loss (nats/token) at")[0]
    assert re.findall(r"^> \*\*Warning:\*\* (.*)\.$", head, re.MULTILINE) == printed


NAMELESS = [
    replace(one, model={k: v for k, v in one.model.items() if k != "weights"})
    for one in TRAINED[:3]
]
OTHERS = [TRAINED[1], reading("linear", [0.9, 0.8, 2.75], method="linear"), TRAINED[3]]


@pytest.mark.parametrize(
    ("changes", "results", "weights"),
    [
        ({}, OTHERS, BASE),
        ({}, OTHERS, TRAINED_WEIGHTS),
        ({"factor": 8.0}, TRAINED[:3], BASE),
        ({"target": 2048}, TRAINED[:3], BASE),
        ({"parameters": {"beta_fast": 16.0}}, TRAINED[:3], BASE),
        ({"training": TRAINING}, TRAINED[:3], BASE),
        ({}, TRAINED[:3], "sha256:other"),
        ({}, TRAINED[:3], None),
        ({}, NAMELESS, None),
    ],
)
def test_results_of_another_scaling_or_weights_are_not_claimed(
    changes, results, weights
):
    assert made(results=TRAINED[:3]).evidence
    assert made(record(**changes), results, weights).evidence == []


def test_two_measurements_of_one_task_stand_apart():
    plays = {"text": "plays", "digest": "b00c"}
    again = [replace(r, parameters=r.parameters | plays) for r in TRAINED[:3]]
    model = made(results=[*TRAINED[:3], *again])
    card = card_text(model, {"perplexity": "first", "perplexity-2": "second"})
    assert card.count("### Perplexity\n") == 2
    for name, caption in (("perplexity", "first"), ("perplexity-2", "second")):
        assert f"![{caption}](evaluation/{name}.png)" in card
    found = ModelCard(card).data.eval_results
    assert {(r.dataset_name, r.metric_value) for r in found} == {
        ("books", 0.5577),
        ("plays", 0.5577),
    }


def test_a_card_without_results_says_that_nothing_was_measured():
    card = card_text(MADE["training-free"])
    assert "Nothing was measured on this checkpoint." in card
    assert "nats" not in card
    assert "model-index" not in card


# The front matter


def stated(results):
    """What the Hub is told of results: the data set, the metric, its value and its place."""
    told = [
        (r.dataset_name, r.metric_name, r.metric_value, r.metric_args) for r in results
    ]
    assert all(r.metric_name.startswith(r.metric_type) for r in results)
    return told


def test_the_hub_is_told_what_this_checkpoint_reads_and_finds():
    data = ModelCard(card_text(MADE["trained"])).data
    assert data.tags == ["ropepatch", "long-context", "rope-scaling", "yarn"]
    assert data.model_name == "tiny-1k"
    asked = {"length": 1024, "n": 12}
    assert stated(data.eval_results) == [
        ("books", "loss at 1,024 tokens", 0.4501, {"length": 1024, "n": 1000}),
        ("generated text", "accuracy at 1,024 tokens", 0.75, asked),
        ("generated text", "log_prob at 1,024 tokens", -0.825, asked),
    ]


def test_the_hub_gets_scores_and_measures_up_to_the_target():
    row = SCORED.rows[0]
    empty = replace(row, at={"task": "b", "version": "1"}, value=None)
    scored = [replace(SCORED, rows=[row, empty])]
    place = {"task": "long_task", "version": "1", "n": 20}
    expected = [("long_task", "accuracy", 0.4046, place)]
    assert stated(front(results=scored).eval_results) == expected
    rows = [row_of("brier", {"length": n}, [0.25, 0.5]) for n in (256, 1024, 4096)]
    (found,) = front(results=[replace(TRAINED[2], rows=rows)]).eval_results
    assert found.metric_name == "brier at 1,024 tokens"


def test_boards_of_the_hub_get_scores_measured_whole():
    metrics = {("mmlu_pro", "exact_match (custom-extract)"): 0.40456}
    few = scoring("yarn", metrics | {("long_task", "acc"): 0.5}, method="yarn")
    whole = replace(few, parameters=few.parameters | {"limit": None})
    ((name, text),) = board_scores(made(results=[whole])).items()
    (entry,) = parse_eval_result_entries(yaml.safe_load(text))
    assert name == entry.task_id == "mmlu_pro"
    assert (entry.dataset_id, entry.value) == ("TIGER-Lab/MMLU-Pro", 40.46)
    assert not board_scores(made(results=[few]))
    assert not board_scores(MADE["trained"])


OTHER = {"license": "other", "license_name": "mine", "license_link": "https://a.org/l"}


@pytest.mark.parametrize(
    "base", [{"license": "llama2", "language": ["en", "de"]}, OTHER, {}]
)
def test_licence_and_language_are_those_of_the_base(base):
    told = front(record(base=base)).to_dict().items()
    assert {k: v for k, v in told if k.startswith(("license", "language"))} == base


@pytest.mark.parametrize(
    ("changes", "files", "expected"),
    [
        (ON_HUB, [], (ON_HUB["model"], None, "transformers")),
        (
            ON_HUB | {"training": TRAINING},
            [],
            (ON_HUB["model"], "finetune", "transformers"),
        ),
        (ON_HUB, ["adapter_config.json"], (ON_HUB["model"], "adapter", "peft")),
        ({"model": "a/b", "training": TRAINING}, [], (None, None, "transformers")),
        ({"model": "/data/x"}, [], (None, None, "transformers")),
    ],
)
def test_a_base_on_the_hub_is_named_with_its_relation(changes, files, expected):
    told = front(record(**changes), files=files)
    keys = ("base_model", "base_model_relation", "library_name")
    assert tuple(map(told.get, keys)) == expected


# How to load it


@pytest.mark.parametrize("method", ["yarn", "linear", "dynamic", "longrope-switch"])
def test_every_engine_is_listed_and_vllm_gets_its_command(method):
    model = made(record(method), name="tiny-1k")
    card = unescaped(card_text(model))
    rows = tables(card)["Engine support"][1:]
    engines = {one.engine: one for one in model.record.engines}
    assert rows == [
        [one.engine, one.reads, one.how or "", one.note] for one in engines.values()
    ]
    part = card.partition("### vLLM\n\n")[2].partition("\n##")[0]
    engine = engines["vLLM"]
    if engine.reads == "no":
        assert part.startswith("vLLM does not support this RoPE scaling")
    else:
        command = " ".join(["vllm serve tiny-1k", *engine.switches])
        assert part.startswith(f"```bash\n{command}\n```")
    assert engine.note in part
    reads = engines["llama.cpp"].reads
    assert ("`convert_hf_to_gguf.py`" in card) == (reads != "no")


def test_the_lines_of_transformers_run_as_printed(folder, monkeypatch):
    card = card_text(read_folder(folder, "me/tiny-1k", "longer/1k"))
    (lines, *_) = blocks(card, "python")
    assert lines.count('from_pretrained("me/tiny-1k", revision="longer/1k")') == 2
    assert "vllm serve me/tiny-1k --revision longer/1k" in card
    (lines, *_) = blocks(card_text(read_folder(folder)), "python")
    names = {}
    monkeypatch.chdir(folder.parent)
    exec(lines, names)
    assert names["model"].config.max_position_embeddings == 1024
    assert names["tokenizer"]("a key")["input_ids"]


def test_an_adapter_is_loaded_with_its_rope():
    model = MADE["an adapter"]
    card = card_text(model)
    (lines,) = blocks(card, "python")
    compile(lines, "card", "exec")
    assert 'ropepatch.load_adapter(snapshot_download("me/adapter-1k"))' in lines
    assert "vllm" not in card.lower()
    assert "loads without ropepatch" not in card
    branch = card_text(replace(model, branch="b"))
    assert 'snapshot_download("me/adapter-1k", revision="b")' in branch
    local = replace(model, name="adapter", record=model.record.amended(model="llama"))
    assert 'load_adapter("adapter", base="path/to/llama")' in card_text(local)


# How it was made, and whom to cite


def test_command_and_plan_are_printed_without_long_lists():
    card = card_text(MADE["trained"])
    assert COMMAND in blocks(card, "bash")
    (plan,) = blocks(card, "yaml")
    kept, told = MADE["trained"].record.to_dict(), yaml.safe_load(plan)
    changes, rope = told.pop("config_changes"), kept["config_changes"]
    assert changes["rope_parameters"] == rope["rope_parameters"]
    given = {k: v for k, v in kept["parameters"].items() if v is not None}
    assert told.pop("parameters") == given
    assert told.keys() > {"method", "factor", "target", "rope_theta"}
    assert told.items() <= kept.items()
    folded = card_text(MADE["folded"])
    assert folded.count("before folding") == 3  # of losses and training
    (plan,) = blocks(card_text(made(record("custom"))), "yaml")
    parameters = yaml.safe_load(plan)["parameters"]
    assert parameters["divisors"] == "a list, see ropepatch.json"


def test_papers_of_methods_and_ropepatch_are_cited():
    papers = {method.paper for method in (METHODS | REMAPPINGS).values()}
    for paper in papers - {"–", REMAPPINGS["lampe"].paper}:
        entry = citation(paper)
        assert (entry.count("@"), entry.count("@misc{ropepatch,")) == (2, 1)
        assert entry.count("{") == entry.count("}")
        assert address(paper) in entry
        if paper.startswith("arXiv"):
            assert f"year          = {{20{paper[6:8]}}}," in entry
            assert f"eprint        = {{{paper[6:]}}}," in entry
    assert citation(METHODS["yarn"].paper) in card_text(MADE["licensed"])


@pytest.mark.parametrize("paper", ["javascript:alert(1)", "evil.example/a"])
def test_the_paper_of_an_unregistered_method_is_not_printed(paper):
    card = card_text(made(record().amended(method="of a stranger", paper=paper)))
    assert card.count("@misc{") == 1
    assert paper not in card
    known = card_text(made(record(paper=paper)))
    assert "[arXiv:2309.00071](https://arxiv.org/abs/2309.00071)" in known
    assert paper not in known


# Names of the user's own


@given(st.text(max_size=60))
@example(
    "```\n---\nlicense: mit\n---\n# <script>alert(1)</script> | a | b |\n\n![x](http://x)"
)
@example("-->\n<!--")
@example("'quoted\n```\n# broken'")
@example("]( http://evil.example )")
@example("x\u202ey\u2028z https://evil.example www.evil.example")
@settings(max_examples=5, deadline=None)
def test_no_name_breaks_the_card(name):
    results = [
        replace(
            one,
            label=name if one.scaling else one.label,
            parameters=one.parameters | {"text": name},
        )
        for one in TRAINED[:3]
    ]
    named = MADE["scored"].record.amended(warnings=[name], command=name, model=name)
    card = card_text(made(named, results), {"perplexity": name})
    data = ModelCard(card).data
    assert data.tags[0] == "ropepatch"
    assert "license" not in data.to_dict()
    assert {len(row) for row in tables(card)["Perplexity"]} == {4}
    assert card.count(MARKER) == 1
    assert card.replace("\n", "").isprintable()
    fence = re.compile(r"^(`{3,})\w*\n.*?^\1$", re.MULTILINE | re.DOTALL)
    outside = fence.sub("", card.partition(MARKER)[2])
    assert not re.search(r"(?<!\\)<(?!br>)", outside)
    assert not re.search(r"(?<!\\)://evil|www\.evil", re.sub(r"`[^`]*`", "", outside))
    assert [line for line in outside.splitlines() if line.startswith("# ")] == ["# x"]


# The file


def test_a_card_is_written_again_to_the_byte(copied, monkeypatch):
    *figures, card = write_card(copied, "me/tiny-1k")
    assert [file.stem for file in figures] == ["perplexity", "retrieval"]
    for file in figures:
        assert file.read_bytes().startswith(b"\x89PNG")
        caption = rf"!\[[^\]]{{20,}}\]\(evaluation/{file.name}\)"
        assert re.search(caption, card.read_text())
    first = files_of(copied)
    write_card(copied, "me/tiny-1k")
    assert files_of(copied) == first

    def full(file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patching:
        patching.setattr(writing, "whole_file", full)
        with pytest.raises(RopepatchError, match=r"README\.md: No space left"):
            write_card(copied, "me/other")
    assert files_of(copied) == first


def test_a_card_of_other_weights_claims_nothing(copied, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert write_card(copied) == [copied / "README.md"]  # without figures
    card = (copied / "README.md").read_text()
    assert "![" not in card
    assert "### Retrieval" in card
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    monkeypatch.chdir(copied)
    write_card(Path())
    card = Path("README.md").read_text()
    assert "# tiny-1k" in card
    assert "### Retrieval" not in card
    assert "model-index" not in card


def test_a_card_of_the_user_is_never_touched(copied, tmp_path):
    (copied / "README.md").write_bytes(b"---\nlicense: mit\n---\n# Mine\xff\n")
    before = files_of(copied)
    assert write_card(copied) == []
    assert files_of(copied) == before
    (copied / "README.md").unlink()
    (copied / "evaluation" / "0.json").write_text("{")
    for place in (tmp_path, copied):  # no record, a damaged result
        with pytest.raises(RopepatchError):
            write_card(place)
    assert not (copied / "README.md").exists()
