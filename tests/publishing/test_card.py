"""A card describes the method and the results, with no number that was not measured."""

import math
import re
import shutil
import sys
from dataclasses import asdict, replace
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import yaml
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
from ropepatch.publishing.card.model import Extended
from ropepatch.publishing.card.writing import (
    MARKER,
    address,
    bibtex,
    board_scores,
    card_text,
    entries,
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
BASE = reading("baseline", [0.6, 2.0, 12.0]).model[
    "weights"
]  # those of every result but the fine_tuned
TRAINED_WEIGHTS = fine_tuned(reading("yarn", [0.6, 2.0, 12.0])).model["weights"]
TRAINING = {
    "recipe": {"save": "merged"},
    "run": "0123456789abcdef",
    "steps": 600,
    "tokens": 1_234_567,
}
TRAINING |= {"device": "CPU, 2 threads", "short_context": CHECK}
REVISION = "6f5d4e3c2b1a09876f5d4e3c2b1a09876f5d4e3c"
ON_HUB = {"model": "meta-llama/Llama-2-7b-hf", "revision": REVISION}
VERIFIED = {
    "frequencies": "equal",
    "logits": "equal",
    "compared": True,
    "difference": 0.0,
}
PARAMETERS = {"custom": {"divisors": [1.5] * 16}, "abf": {"rope_theta": 80_000.0}}
PARAMETERS |= {"longrope": {"long_factor": [2.5] * 16}}
PARAMETERS |= {
    "longrope-switch": {"long_factor": [2.5] * 16, "short_factor": [1.5] * 16}
}
COMMAND = "ropepatch extend tiny --to 1k --recipe mine --eval demo"


def record(method="yarn", base_model="tiny", **more):
    plan = ropepatch.plan(
        base_model, to=1024, method=method, **PARAMETERS.get(method, {})
    )
    return Record.of(plan).amended(verified=VERIFIED, **more)


def made(stated=None, results=(), weights=BASE, name="x", **more):
    return Extended(name, stated or record(), results, weights=weights, **more)


TRAINED = [
    reading("floor", [0.41234, 0.39345, 0.38456]),
    reading("baseline", [0.61111, 2.02222, 12.03333]),
    reading("yarn", [0.65551, 0.60662, 0.55773], method="yarn"),
    fine_tuned(reading("yarn + mine", [0.62884, 0.50995, 0.45006], method="yarn")),
    asking("baseline", [4, 0, 0]),
    asking("yarn", [4, 3, 1], method="yarn"),
    fine_tuned(asking("yarn + mine", [4, 4, 3], method="yarn")),
]
SCORED = [
    scoring(
        "baseline", {("long_task", "acc"): 0.10123, ("short_task", "exact_match"): 0.5}
    ),
    scoring("yarn", {("long_task", "acc"): 0.40456}, method="yarn"),
]
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
        files=frozenset({"tokenizer_config.json", "training", "evaluation.html"}),
    ),
    "training-free": made(record("ntk", base={})),
    "scored": made(results=SCORED),
    "licensed": made(
        record(base={"license": "llama2", "language": ["en", "de"]}).amended(**ON_HUB),
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
        files=frozenset({"adapter_config.json"}),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A real checkpoint with results."""
    out = tmp_path_factory.mktemp("made") / "tiny-1k"
    ropepatch.extend(ropepatch.plan("tiny", to=1024, method="yarn"), out)
    (out / "evaluation").mkdir()
    weights = {"weights": fingerprint(read_headers(out))}
    for k, result in enumerate([*TRAINED[:3], *TRAINED[4:6]]):
        replace(result, model={**result.model, **weights}).write(
            out / "evaluation" / f"{k}.json"
        )
    return out


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "tiny-1k")


def blocks(card, language):
    return re.findall(rf"^```{language}\n(.*?)\n```$", card, re.MULTILINE | re.DOTALL)


def tables(card):
    """Every table as rows of cells, by the heading or caption above it."""
    found, heading = {}, ""
    for line in card.splitlines():
        heading = line.strip("#* ") if line.startswith(("#", "**")) else heading
        if line.startswith("| "):
            found.setdefault(heading, []).append(re.split(r" ?(?<!\\)\| ?", line)[1:-1])
    return {name: [rows[0], *rows[2:]] for name, rows in found.items()}


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


def numbers_of(text):
    return NUMBER.findall(re.sub(r"\\(.)", r"\1", text))


def leaves(content):
    """Every number and text in JSON-like data that a card may quote."""
    if isinstance(content, dict) and {"kind", "depth"} & content.get("at", {}).keys():
        return []
    if isinstance(content, dict):
        losses = [content.get(key) for key in ("value", "low", "high")] * (
            content.get("measure") == "loss"
        )
        perplexities = [math.exp(nats) for nats in losses if nats is not None]
        kept = [
            part
            for key, value in content.items()
            if key not in UNQUOTED
            for part in leaves(value)
        ]
        return [*perplexities, *content, *kept]
    if isinstance(content, list | tuple):
        return [part for item in content for part in leaves(item)]
    return [] if content is None or isinstance(content, bool) else [content]


@cache
def agrees(shown, value):
    """Whether a number as printed is the value, rounded."""
    digits = shown.rstrip("%km").replace(",", "")
    scale = {"%": 100, "k": 1 / 1024, "m": 1 / 1024**2}.get(shown[-1], 1)
    if digits.count(".") > 1:
        return False
    mantissa, _, exponent = digits.lower().partition("e")
    places = len(mantissa.partition(".")[2])
    return float(f"{scale * abs(value):.{places}{'e' if exponent else 'f'}}") == float(
        digits
    )


@pytest.mark.parametrize(
    "model", [*MADE.values(), *(made(record(name)) for name in METHODS)]
)
def test_every_number_is_in_the_record_or_the_results(model):
    known = leaves(
        as_read(
            [
                model.record.to_dict(),
                model.name,
                [asdict(result) for result in model.results],
            ]
        )
    )
    texts = {
        number for part in known if isinstance(part, str) for number in numbers_of(part)
    }
    values = {part for part in known if isinstance(part, int | float)}
    said = re.sub(
        r"^```bibtex.*?^```$", "", card_text(model), flags=re.MULTILINE | re.DOTALL
    )
    said = re.sub(rf"[Ii]ntervals: 95 %|95 % interval|{EFFECTIVE}", "", said)
    for number in numbers_of(said):
        assert number in texts or any(agrees(number, value) for value in values), number


# Results


def test_the_tables_are_those_of_the_results_with_this_checkpoint_marked_and_the_outcome_first():
    card = card_text(MADE["trained"])
    assert card_text(replace(MADE["trained"], results=TRAINED[::-1])) == card
    shown = tables(card)
    names = ["baseline", "yarn", "**yarn + mine** (this checkpoint)"]
    losses, found = shown["Loss (nats/token)"], shown["Retrieval accuracy"]
    assert [row[0] for row in losses[-4:]] == [*names, "floor"]
    assert [row[0] for row in found[-3:]] == names
    assert [row[-1] for row in losses[-3:]] == [
        "0.558 (0.502 to 0.614)",
        "0.450 (0.405 to 0.495)",
        "0.385 (0.346 to 0.423)",
    ]
    assert shown["Perplexity"][-2][-1] == "1.568 (1.499 to 1.641)"
    assert [row[2].partition(" (")[0] for row in found[-3:]] == ["0%", "75%", "100%"]
    outcome = card.partition("## How to load it")[0].splitlines()
    within = card.partition("### Within the original context length\n\n")[
        2
    ].splitlines()
    for lines, begin, numbers in (  # in the order of the sentence
        (
            outcome,
            "Loss (nats/token) at 1,024",
            ["1,024", "0.450", "12.033", "1,024", "75%"],
        ),
        (
            within,
            "Short-context check on held-out text",
            ["0.612", "0.618", "1.00%", "2.00%"],
        ),
    ):
        (line,) = (line for line in lines if line.startswith(begin))
        told = [
            number for number in numbers_of(line.replace("+", "")) if number in numbers
        ]
        assert told == numbers
    trained = TRAINING | {
        "short_context": CHECK | {"now": 0.7, "increase": 0.143, "passed": False}
    }
    assert "**above**" in card_text(made(record(training=trained)))
    assert "**above**" not in card


@pytest.mark.parametrize(("documents", "haystacks"), [(2, 4), (4, 2), (10, 10)])
def test_every_warning_of_the_terminal_is_on_the_card_before_its_headline(
    documents, haystacks
):
    results = [
        reading("yarn", [[0.6] * documents] * 3, method="yarn"),
        asking("yarn", [1, 1, 1], n=haystacks, method="yarn"),
    ]
    printed = re.findall(r"^Warning: (.*)\.$", results_text(results), re.MULTILINE)
    assert len(printed) == (documents < 5) + (haystacks < 5)
    card = card_text(made(results=results))
    head = card.partition("Loss (nats/token) at")[0]
    assert re.findall(r"^> \*\*Warning:\*\* (.*)\.$", head, re.MULTILINE) == printed
    assert card.count("Warning") == len(printed)


def test_results_of_another_scaling_or_of_other_weights_are_not_claimed():
    others = [
        reading("baseline", [0.6, 2.0, 12.0]),
        reading("linear", [0.9, 0.8, 2.75], method="linear"),
        fine_tuned(reading("yarn + mine", [0.6, 0.5, 0.45], method="yarn")),
    ]
    beta = record().parameters | {"beta_fast": 16.0}
    nameless = [
        replace(r, model={k: v for k, v in r.model.items() if k != "weights"})
        for r in TRAINED[:3]
    ]
    assert made(results=TRAINED[:3]).evidence
    for stated, results, weights in (
        (record(), others, BASE),
        (record(), others, TRAINED_WEIGHTS),
        *(
            (record(**more), TRAINED[:3], BASE)
            for more in ({"factor": 8.0}, {"target": 2048})
        ),
        *(
            (record(**more), TRAINED[:3], BASE)
            for more in ({"parameters": beta}, {"training": TRAINING})
        ),
        *((record(), TRAINED[:3], weights) for weights in ("sha256:other", None)),
        (record(), nameless, None),
    ):
        assert made(stated, results, weights).evidence == []


def test_two_measurements_of_one_task_stand_apart_and_what_was_not_measured_gives_way_to_what_was():
    twice = [
        *TRAINED[:3],
        *(
            replace(r, parameters={**r.parameters, "text": "plays", "digest": "b00c"})
            for r in TRAINED[:3]
        ),
    ]
    captions = {"perplexity": "first", "perplexity-2": "second"}
    card = card_text(made(results=twice, captions=captions))
    assert card.count("### Perplexity\n") == 2
    for name, caption in captions.items():
        assert f"![{caption}](evaluation/{name}.png)" in card
    found = ModelCard(card).data.eval_results
    assert {(r.dataset_name, r.metric_value) for r in found} == {
        ("books", 0.5577),
        ("plays", 0.5577),
    }
    far = [
        replace(row, at={"length": 4096}) if row.at == {"length": 1024} else row
        for row in TRAINED[2].rows
    ]
    (metric,) = ModelCard(
        card_text(made(results=[replace(TRAINED[2], rows=far)]))
    ).data.eval_results
    assert (metric.metric_name, metric.metric_value) == ("loss at 512 tokens", 0.6066)
    card = card_text(MADE["training-free"])
    assert "Nothing was measured on this checkpoint." in card
    assert "nats" not in card
    assert "model-index" not in card


# The front matter


def test_the_hub_is_told_what_this_checkpoint_reads_and_finds():
    data = ModelCard(card_text(MADE["trained"])).data
    assert data.tags == ["ropepatch", "long-context", "rope-scaling", "yarn"]
    assert data.model_name == "tiny-1k"
    stated = [
        (
            r.dataset_name,
            r.metric_type,
            r.metric_value,
            r.metric_args["length"],
            r.metric_args["n"],
        )
        for r in data.eval_results
    ]
    assert stated == [
        ("books", "loss", 0.4501, 1024, 1000),
        ("generated text", "accuracy", 0.75, 1024, 12),
        ("generated text", "log_prob", -0.825, 1024, 12),
    ]
    (result,) = ModelCard(card_text(MADE["scored"])).data.eval_results
    stated = (
        result.dataset_name,
        result.metric_type,
        result.metric_name,
        result.metric_value,
    )
    assert stated == ("long_task", "accuracy", "accuracy", 0.4046)
    assert result.metric_args == {"task": "long_task", "version": "1", "n": 20}
    rows = [
        SCORED[1].rows[0],
        replace(SCORED[1].rows[0], at={"task": "b", "version": "1"}, value=None),
    ]
    rows += [
        row_of("brier", {"length": n}, [0.25, 0.5, 0.75]) for n in (256, 1024)
    ]  # which nobody registered
    found = ModelCard(
        card_text(made(results=[replace(TRAINED[2], rows=rows[2:])]))
    ).data.eval_results
    assert [(r.metric_type, r.metric_name, r.metric_value) for r in found] == [
        ("brier", "brier at 1,024 tokens", 0.5)
    ]
    without = ModelCard(
        card_text(made(results=[replace(SCORED[1], rows=rows[:2])]))
    ).data.eval_results
    assert len(without) == 1


def test_the_boards_of_the_hub_get_the_scores_of_their_benchmarks_that_were_measured_whole():
    metrics = {("mmlu_pro", "exact_match (custom-extract)"): 0.40456}
    few = scoring("yarn", metrics | {("long_task", "acc"): 0.5}, method="yarn")
    whole = replace(few, parameters=few.parameters | {"limit": None})
    ((name, text),) = board_scores(made(results=[whole])).items()
    (entry,) = parse_eval_result_entries(yaml.safe_load(text))
    assert name == "mmlu_pro"
    assert (entry.dataset_id, entry.task_id) == ("TIGER-Lab/MMLU-Pro", "mmlu_pro")
    assert entry.value == 40.46
    assert not board_scores(made(results=[few]))
    assert not board_scores(MADE["trained"])


def test_licence_and_language_are_those_of_the_base_which_is_named_where_it_is_on_the_hub():
    def front(files=(), **more):
        return ModelCard(
            card_text(made(record(**more), files=frozenset(files)))
        ).data.to_dict()

    other = {
        "license": "other",
        "license_name": "mine",
        "license_link": "https://example.org/l",
    }
    for base in ({"license": "llama2", "language": ["en", "de"]}, other, {}):
        stated = front(base=base).items()
        assert {
            key: value
            for key, value in stated
            if key.startswith(("license", "language"))
        } == base
    trained, adapter = {"training": TRAINING}, ["adapter_config.json"]
    for files, more, expected in (
        ((), ON_HUB, (ON_HUB["model"], None, "transformers")),
        ((), ON_HUB | trained, (ON_HUB["model"], "finetune", "transformers")),
        (adapter, ON_HUB | trained, (ON_HUB["model"], "adapter", "peft")),
        *(
            ((), {"model": name} | trained, (None, None, "transformers"))
            for name in ("tiny", "a/b", "/data/x")
        ),
    ):
        stated = front(files, **more)
        keys = ("base_model", "base_model_relation", "library_name")
        assert tuple(map(stated.get, keys)) == expected


# How to load it


@pytest.mark.parametrize(
    "method", ["yarn", "linear", "dynamic", "longrope-switch", "custom"]
)
def test_every_engine_is_listed_with_its_note_and_vllm_is_told_what_it_wants(method):
    model = made(record(method), name="tiny-1k")
    card = card_text(model)
    rows = tables(card)["Engine support"][1:]
    assert [[re.sub(r"\\(.)", r"\1", cell) for cell in row] for row in rows] == [
        [engine.engine, engine.reads, engine.how or "", engine.note]
        for engine in model.record.engines
    ]
    part, engine = (
        card.partition("### vLLM\n\n")[2].partition("\n##")[0],
        model.engine("vLLM"),
    )
    if engine.reads == "no":
        assert part.startswith("vLLM does not support this RoPE scaling")
    else:
        limit = " --max-model-len 1024" if "--max-model-len 1024" in engine.note else ""
        assert part.startswith(f"```bash\nvllm serve tiny-1k{limit}\n```")
        assert engine.note in re.sub(r"\\(.)", r"\1", part)
    llama_cpp = card.partition("### llama.cpp\n\n")[2].partition("\n##")[0]
    assert ("convert_hf_to_gguf.py" in llama_cpp) == (
        model.engine("llama.cpp").reads != "no"
    )


def test_the_lines_of_transformers_run_as_printed_and_name_the_branch(
    copied, monkeypatch
):
    write_card(copied, "me/tiny-1k", "longer/1k")
    card = (copied / "README.md").read_text()
    (lines, *_) = blocks(card, "python")
    assert lines.count('from_pretrained("me/tiny-1k", revision="longer/1k")') == 2
    assert "vllm serve me/tiny-1k --revision longer/1k" in card
    write_card(copied)
    (lines, *_) = blocks((copied / "README.md").read_text(), "python")
    assert "longer/1k" not in (copied / "README.md").read_text()
    names = {}
    monkeypatch.chdir(copied.parent)
    exec(lines, names)
    assert names["model"].config.max_position_embeddings == 1024
    assert names["tokenizer"]("a key")["input_ids"]


def test_an_adapter_is_loaded_with_the_rope_it_was_trained_under():
    model = MADE["an adapter"]
    (lines,) = blocks(card_text(model), "python")
    compile(lines, "card", "exec")
    assert 'ropepatch.load_adapter(snapshot_download("me/adapter-1k"))' in lines
    assert "vllm" not in card_text(model).lower()
    assert "loads without ropepatch" not in card_text(model)
    assert 'snapshot_download("me/adapter-1k", revision="b")' in card_text(
        replace(model, branch="b")
    )
    local = replace(model, name="adapter", record=model.record.amended(model="llama"))
    assert 'load_adapter("adapter", base="path/to/llama")' in card_text(local)


# How it was made, and whom to cite


def test_the_command_is_printed_and_the_plan_as_yaml_without_long_lists():
    card = card_text(MADE["trained"])
    assert COMMAND in blocks(card, "bash")
    (plan,) = blocks(card, "yaml")
    stated, told = MADE["trained"].record, yaml.safe_load(plan)
    assert (
        told["config_changes"]["rope_parameters"]
        == stated.config_changes["rope_parameters"]
    )
    assert told["parameters"] == {
        k: v for k, v in stated.parameters.items() if v is not None
    }
    for key in (
        "method",
        "factor",
        "target",
        "rope_theta",
        "attention_factor",
        "original_max_position_embeddings",
    ):
        assert told[key] == getattr(stated, key)
    assert (
        card_text(MADE["folded"]).count("before folding") == 3
    )  # of losses and training
    assert "before folding" not in card
    (plan,) = blocks(card_text(made(record("custom"))), "yaml")
    assert (
        yaml.safe_load(plan)["parameters"]["divisors"] == "a list, see ropepatch.json"
    )


def test_the_papers_of_the_methods_the_base_model_and_ropepatch_are_cited():
    cited = {method.paper for method in (METHODS | REMAPPINGS).values()} - {
        "–",
        REMAPPINGS["lampe"].paper,
    }
    assert {address(paper) for paper in cited} == entries().keys()
    for paper in cited:
        entry = bibtex(paper)
        assert entry.count("{") == entry.count("}")
        if paper.startswith("arXiv"):
            assert f"year          = {{20{paper[6:8]}}}," in entry
            assert f"eprint        = {{{paper[6:]}}}," in entry
    (all_of_them,) = blocks(card_text(MADE["licensed"]), "bibtex")
    for entry in (
        "author        = {{meta-llama}},",
        f"{{revision {REVISION}}}",
        bibtex(METHODS["yarn"].paper),
    ):
        assert entry in all_of_them
    assert f"note          = {{version {ropepatch.__version__}}}," in all_of_them


@pytest.mark.parametrize(
    "paper",
    [
        "–",
        "",
        "a talk",
        "javascript:alert(1)",
        "arXiv:9999.00001",
        "evil.example/a",
        "http://a.b",
    ],
)
def test_a_paper_of_a_method_that_is_not_registered_is_neither_cited_nor_a_link(paper):
    card = card_text(made(record().amended(method="of a stranger", paper=paper)))
    assert bibtex(paper) is None
    assert card.count("@misc{") == 1
    assert f"](https://{paper}" not in card
    assert f"]({paper}" not in card
    known = card_text(made(record(paper=paper or "evil")))
    assert "[arXiv:2309.00071](https://arxiv.org/abs/2309.00071)" in known
    assert not paper or paper == "–" or paper not in known


# Names of the user's own


@given(st.text(max_size=60))
@example(
    "```\n---\nlicense: mit\n---\n# <script>alert(1)</script> | a | b |\n\n![x](http://x)"
)
@example("-->\n<!--")
@example("'quoted\n```\n# broken'")
@example("]( http://evil.example )")
@example("x\u202ey\u2028z https://evil.example www.evil.example")
@settings(max_examples=20, deadline=None)
def test_no_name_breaks_the_card(name):
    results = [
        replace(
            r,
            label=name if r.scaling else r.label,
            parameters={**r.parameters, "text": name},
        )
        for r in TRAINED[:3]
    ]
    stated = MADE["scored"].record.amended(warnings=[name], command=name, model=name)
    card = card_text(made(stated, results, captions={"perplexity": name}))
    data = ModelCard(card).data
    assert data.tags[0] == "ropepatch"
    assert "license" not in data.to_dict()
    assert {len(row) for row in tables(card)["Perplexity"]} == {4}
    assert card.count(MARKER) == 1
    outside = re.sub(
        r"^(`{3,})\w*\n.*?^\1$",
        "",
        card.partition(MARKER)[2],
        flags=re.MULTILINE | re.DOTALL,
    )
    assert not re.search(r"(?<!\\)<(?!br>)", outside)
    assert card.replace("\n", "").isprintable()
    assert not re.search(r"(?<!\\)://evil|www\.evil", re.sub(r"`[^`]*`", "", outside))
    assert [line for line in outside.splitlines() if line.startswith("# ")] == ["# x"]


# The file


def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_card_and_its_figures_are_written_the_same_to_the_byte_again(
    copied, monkeypatch
):
    files = write_card(copied, "me/tiny-1k")
    names = [str(file.relative_to(copied)) for file in files]
    assert names == [
        "evaluation/perplexity.png",
        "evaluation/retrieval.png",
        "README.md",
    ]
    card = (copied / "README.md").read_text()
    for file in files[:-1]:
        assert file.read_bytes().startswith(b"\x89PNG")
        assert re.search(rf"!\[[^\]]{{20,}}\]\(evaluation/{file.name}\)", card)
    assert ModelCard.load(copied / "README.md").data.library_name == "transformers"
    first = contents(copied)
    write_card(copied, "me/tiny-1k")
    assert contents(copied) == first
    file = copied / "model.safetensors"  # of other weights nothing was measured
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    monkeypatch.chdir(copied)
    write_card(Path())
    card = Path("README.md").read_text()
    assert "# tiny-1k" in card
    assert "### Retrieval" not in card
    assert "model-index" not in card


def test_a_card_of_the_user_is_never_touched_and_none_is_written_for_what_is_not_ours(
    copied, tmp_path
):
    (copied / "README.md").write_bytes(b"---\nlicense: mit\n---\n# Mine\xff\n")
    before = contents(copied)
    assert write_card(copied) == []
    assert contents(copied) == before
    (copied / "README.md").unlink()
    (copied / "evaluation" / "0.json").write_text("{")
    for place in (tmp_path, copied):  # no record, a damaged result
        with pytest.raises(RopepatchError):
            write_card(place)
    assert not (copied / "README.md").exists()


def test_a_card_that_fails_leaves_everything_as_it_was(copied, monkeypatch):
    write_card(copied)
    (copied / "evaluation" / "retrieval.png").unlink()
    before = contents(copied)
    writing = import_module("ropepatch.publishing.card.writing")

    def full(file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patching:
        patching.setattr(writing, "whole_file", full)
        with pytest.raises(
            RopepatchError, match=r"cannot write .*README\.md: No space left"
        ):
            write_card(copied, "me/other")
    assert contents(copied) == before
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert write_card(copied) == [copied / "README.md"]  # without figures
    card = (copied / "README.md").read_text()
    assert "![" not in card
    assert "### Retrieval" in card
