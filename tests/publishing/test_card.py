"""A card says what was done and what was measured, and no number that nobody measured."""

import json
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
from huggingface_hub import ModelCard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from made_results import adapted, asking, reading, row_of, scoring
from transformers import LlamaConfig

import ropepatch
from ropepatch.attention import MAPS
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.results import as_read
from ropepatch.extension.record import Record
from ropepatch.model.weights import fingerprint, read_headers
from ropepatch.publishing.card import Extended, card_text, write_card
from ropepatch.publishing.card.model import shown_command
from ropepatch.publishing.card.parts import address, bibtex, entries
from ropepatch.publishing.card.writing import MARKER
from ropepatch.report import print_results
from ropepatch.report.tables import EFFECTIVE
from ropepatch.scaling import METHODS

GATE = {"base": 0.61237, "now": 0.61849, "increase": 0.009994, "most": 0.02, "passed": True}
BASE = reading("baseline", [0.6, 2.0, 12.0]).model["weights"]  # those of every result but the adapted
TRAINED_WEIGHTS = adapted(reading("yarn", [0.6, 2.0, 12.0])).model["weights"]
ADAPTATION = {"recipe": {"save": "merged"}, "run": "0123456789abcdef", "steps": 600, "tokens": 1_234_567}
ADAPTATION |= {"seconds": 1234.5, "device": "CPU, 2 threads", "gate": GATE}
REVISION = "6f5d4e3c2b1a09876f5d4e3c2b1a09876f5d4e3c"
ON_HUB = {"model": "meta-llama/Llama-2-7b-hf", "revision": REVISION}
VERIFIED = {"frequencies": "equal", "logits": "equal", "compared": True, "difference": 0.0}
PARAMETERS = {"custom": {"divisors": [1.5] * 16}, "abf": {"rope_theta": 80_000.0}}
PARAMETERS |= {"longrope": {"long_factor": [2.5] * 16}}
PARAMETERS |= {"longrope-switch": {"long_factor": [2.5] * 16, "short_factor": [1.5] * 16}}


def record(method="yarn", base_model="tiny", **more):
    plan = ropepatch.plan(base_model, to=1024, method=method, **PARAMETERS.get(method, {}))
    return Record.of(plan).amended(verified=VERIFIED, **more)


TRAINED = [
    reading("floor", [0.41234, 0.39345, 0.38456]),
    reading("baseline", [0.61111, 2.02222, 12.03333]),
    reading("yarn", [0.65551, 0.60662, 0.55773], method="yarn"),
    adapted(reading("yarn + mine", [0.62884, 0.50995, 0.45006], method="yarn")),
    asking("baseline", [4, 0, 0]),
    asking("yarn", [4, 3, 1], method="yarn"),
    adapted(asking("yarn + mine", [4, 4, 3], method="yarn")),
]
SCORED = [
    scoring("baseline", {("long_task", "acc"): 0.10123, ("short_task", "exact_match"): 0.5}),
    scoring("yarn", {("long_task", "acc"): 0.40456}, method="yarn"),
]
NAMED = {
    "name": "me/tiny-1k",
    "files": frozenset({"tokenizer.json", "adaptation", "evaluation.html"}),
}
COMMAND = "ropepatch extend tiny --to 1k --recipe mine --eval demo"
MADE = {
    "trained": Extended(
        record=record(adaptation=ADAPTATION, command=COMMAND),
        results=TRAINED,
        weights=TRAINED_WEIGHTS,
        **NAMED,
    ),
    "training-free": Extended("tiny-1k", record("ntk", base={})),
    "scored": Extended("tiny-1k", record(), SCORED, weights=BASE),
    "licensed": Extended(
        "me/tiny-1k",
        record(base={"license": "llama2", "language": ["en", "de"]}).amended(**ON_HUB),
        TRAINED[:3],
        weights=BASE,
    ),
    "scaled before": Extended(
        "tiny-1k",
        record(
            "linear",
            LlamaConfig(
                rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
                max_position_embeddings=256,
                name_or_path="llama",
            ),
            earlier=Record.of(ropepatch.plan("tiny", to=512, method="linear")),
        ),
    ),
    "an adapter": Extended(
        "me/adapter-1k",
        record(adaptation=ADAPTATION).amended(verified=None),
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
        replace(result, model={**result.model, **weights}).write(out / "evaluation" / f"{k}.json")
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
UNQUOTED = {"inv_freq", "inv_freq_before", "evaluation", "config_before", "clusters", "recipe"}


def numbers_of(text):
    return NUMBER.findall(re.sub(r"\\(.)", r"\1", text))


def leaves(content):
    """Every number and text in JSON-like data that a card may quote."""
    if isinstance(content, dict) and {"kind", "depth"} & content.get("at", {}).keys():
        return []
    if isinstance(content, dict):
        losses = [content.get(key) for key in ("value", "low", "high")] * (content.get("measure") == "loss")
        perplexities = [math.exp(nats) for nats in losses if nats is not None]
        kept = [part for key, value in content.items() if key not in UNQUOTED for part in leaves(value)]
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
    return float(f"{scale * abs(value):.{places}{'e' if exponent else 'f'}}") == float(digits)


def unfounded(card, made):
    """The numbers of a card that are neither in the record nor in the results."""
    told = [made.record.to_dict(), made.name, [asdict(result) for result in made.results]]
    known = leaves(as_read(told))
    texts = {number for part in known if isinstance(part, str) for number in numbers_of(part)}
    values = {part for part in known if isinstance(part, int | float)}
    said = re.sub(r"^```bibtex.*?^```$", "", card, flags=re.MULTILINE | re.DOTALL)
    said = re.sub(rf"[Ii]ntervals: 95 %|95 % interval|{EFFECTIVE}", "", said)
    return [
        number
        for number in numbers_of(said)
        if number not in texts and not any(agrees(number, value) for value in values)
    ]


@pytest.mark.parametrize("made", [*MADE.values(), *(Extended("tiny-1k", record(name)) for name in METHODS)])
def test_every_number_is_in_the_record_or_the_results(made):
    assert unfounded(card_text(made), made) == []


@pytest.mark.slow
def test_a_number_that_was_made_up_would_be_found():
    made = MADE["trained"]
    card = card_text(made)
    places = [match for match in NUMBER.finditer(card) if match.start() < card.index("```bibtex")]
    seen = 0
    for match in places:
        last = match.end() - 1 - (match[0][-1] in "%km")
        changed = card[:last] + str((int(card[last]) + 3) % 10) + card[last + 1 :]
        seen += bool(unfounded(changed, made))
    assert seen > 0.85 * len(places), f"{seen} of {len(places)}"
    assert unfounded(card + "It is 3.7 times as good.", made) == ["3.7"]


# What was measured


def test_the_tables_are_those_of_the_results_with_this_checkpoint_marked():
    card = card_text(MADE["trained"])
    assert card_text(replace(MADE["trained"], results=TRAINED[::-1])) == card
    shown = tables(card)
    heads = ["", "baseline", "yarn", "**yarn + mine** (this checkpoint)"]
    losses, found = shown["Nats per token"], shown["Answers found"]
    assert (losses[0], found[0]) == ([*heads, "floor"], heads)
    assert losses[-1][2:] == ["0.558 (0.458 to 0.658)", "0.450 (0.350 to 0.550)", "0.385"]
    assert shown["Perplexity"][-1][3] == "1.568 (1.419 to 1.733)"
    assert [row[0] for row in found[1:]] == ["256 tokens", "512 tokens", "1,024 tokens", EFFECTIVE]
    assert [cell.partition(" (")[0] for cell in found[2]] == ["512 tokens", "0%", "75%", "100%"]


def test_the_outcome_at_the_target_comes_first_and_the_old_context_is_told():
    card = card_text(MADE["trained"])
    outcome = card.partition("## How to load it")[0]
    for said in (
        r"at 1,024 tokens of books: this checkpoint 0\.450 \(.*\), the base model 12\.033",
        r"Answers found at 1,024 tokens: this checkpoint 75% \(.*\), the base model 0% \(",
    ):
        assert re.search(said, outcome)
    loss, found, watched, *_ = card.partition("### Within the old context\n\n")[2].splitlines()
    assert loss.endswith("256 tokens of books: 0.611 (0.511 to 0.711) before, 0.629 (0.529 to 0.729) after.")
    assert re.search(r"Answers found at 256 tokens: 100% \(.*\) before, 100% \(.*\) after\.$", found)
    assert watched.endswith("0.612 nats per token before, 0.618 after (+1.00%), within the 2.00% allowed.")
    trained = ADAPTATION | {"gate": GATE | {"now": 0.7, "increase": 0.143, "passed": False}}
    assert "(+14.30%), **beyond** the 2.00% allowed" in card_text(Extended("x", record(adaptation=trained)))


@pytest.mark.parametrize(("documents", "haystacks"), [(2, 4), (4, 2), (10, 10)])
def test_every_warning_of_the_terminal_is_on_the_card_before_its_headline(documents, haystacks, capsys):
    results = [
        reading("yarn", [[0.6] * documents] * 3, method="yarn"),
        asking("yarn", [1, 1, 1], n=haystacks, method="yarn"),
    ]
    print_results(results)
    printed = re.findall(r"^Warning: (.*)\.$", capsys.readouterr().out, re.MULTILINE)
    assert len(printed) == (documents < 5) + (haystacks < 5)
    card = card_text(Extended("x", record(), results, weights=BASE))
    head = card.partition("Nats per token at")[0]
    assert re.findall(r"^> \*\*Warning:\*\* (.*)\.$", head, re.MULTILINE) == printed
    assert card.count("Warning") == len(printed)


def test_a_measure_that_nobody_registered_has_its_metric_on_the_hub():
    rows = [row_of("brier", {"length": n}, [0.25, 0.5, 0.75]) for n in (256, 1024)]
    (metric,) = ModelCard(
        card_text(Extended("x", record(), [replace(TRAINED[2], rows=rows)], weights=BASE))
    ).data.eval_results
    stated = (metric.metric_type, metric.metric_name, metric.metric_value, metric.metric_args["n"])
    assert stated == ("brier", "brier at 1,024 tokens", 0.5, 300)


def test_without_results_it_says_that_nothing_was_measured():
    card = card_text(MADE["training-free"])
    assert "## What was measured\n\nNothing was measured on this checkpoint.\n\n## How it was made" in card
    assert "nats" not in card
    assert "model-index" not in card


def test_results_of_another_scaling_or_of_other_weights_are_not_claimed():
    others = [
        reading("baseline", [0.6, 2.0, 12.0]),
        reading("linear", [0.9, 0.8, 2.75], method="linear"),
        adapted(reading("yarn + mine", [0.6, 0.5, 0.45], method="yarn")),
    ]

    def claimed(stated, results, weights=BASE):
        return Extended("x", stated, results, weights=weights).evidence

    assert claimed(record(), TRAINED[:3])
    assert claimed(record(), others) == claimed(record(), others, TRAINED_WEIGHTS) == []
    assert claimed(record(adaptation=ADAPTATION), TRAINED[:3]) == []
    assert claimed(record(factor=8.0), TRAINED[:3]) == []
    assert claimed(record(target=2048), TRAINED[:3]) == []
    parameters = record().parameters | {"beta_fast": 16.0}
    assert claimed(record(parameters=parameters), TRAINED[:3]) == []
    assert claimed(record(), TRAINED[:3], "sha256:other") == claimed(record(), TRAINED[:3], None) == []
    nameless = [replace(r, model={k: v for k, v in r.model.items() if k != "weights"}) for r in TRAINED[:3]]
    assert claimed(record(), nameless, None) == []


def test_weights_that_were_replaced_after_the_measurement_are_given_no_results(copied):
    write_card(copied)
    assert "### Retrieval" in (copied / "README.md").read_text()
    file = copied / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    write_card(copied)
    card = (copied / "README.md").read_text()
    assert "### Retrieval" not in card
    assert "model-index" not in card


def test_two_measurements_of_one_task_stand_apart():
    twice = [*TRAINED[:3], *(replace(r, parameters={**r.parameters, "text": "plays"}) for r in TRAINED[:3])]
    made = Extended(
        "x", record(), twice, weights=BASE, captions={"perplexity": "first", "perplexity-2": "second"}
    )
    card = card_text(made)
    assert card.count("### Perplexity\n") == 2
    assert "![first](evaluation/perplexity.png)" in card
    assert "![second](evaluation/perplexity-2.png)" in card
    assert "evaluation/perplexity-2.png" not in card_text(replace(made, captions={"perplexity": "first"}))
    found = ModelCard(card).data.eval_results
    assert {(r.dataset_name, r.metric_value) for r in found} == {("books", 0.5577), ("plays", 0.5577)}


def test_a_target_that_was_not_measured_gives_way_to_the_longest_length_below():
    rows = [
        replace(row, at={"length": 4096}) if row.at == {"length": 1024} else row for row in TRAINED[2].rows
    ]
    card = card_text(Extended("x", record(), [replace(TRAINED[2], rows=rows)], weights=BASE))
    assert "Nats per token at 512 tokens of books: this checkpoint 0.607" in card
    (metric,) = ModelCard(card).data.eval_results
    assert (metric.metric_name, metric.metric_value) == ("loss at 512 tokens", 0.6066)


# The front matter


def test_the_hub_is_told_what_this_checkpoint_reads_and_finds():
    data = ModelCard(card_text(MADE["trained"])).data
    assert data.tags == ["ropepatch", "long-context", "rope-scaling", "yarn"]
    assert data.model_name == "tiny-1k"
    assert [(r.dataset_name, r.metric_type, r.metric_value) for r in data.eval_results] == [
        ("books", "loss", 0.4501),
        ("generated text", "accuracy", 0.75),
        ("generated text", "log_prob", -0.825),
    ]
    assert [(r.metric_args["length"], r.metric_args["n"]) for r in data.eval_results] == [
        (1024, 1000),
        (1024, 12),
        (1024, 12),
    ]
    assert {r.task_type for r in data.eval_results} == {"text-generation"}
    (result,) = ModelCard(card_text(MADE["scored"])).data.eval_results
    stated = (result.dataset_name, result.metric_type, result.metric_name, result.metric_value)
    assert stated == ("long_task", "accuracy", "accuracy", 0.4046)
    assert result.metric_args == {"task": "long_task", "version": "1", "n": 20}


def test_a_score_that_is_none_is_left_out():
    scores = scoring("yarn", {("long_task", "acc"): 0.4, ("short_task", "acc"): 0.0}, method="yarn")
    rows = [scores.rows[0], replace(scores.rows[1], value=None, low=None, high=None)]
    card = card_text(Extended("x", record(), [replace(scores, rows=rows)], weights=BASE))
    assert len(ModelCard(card).data.eval_results) == 1
    assert tables(card)["Scores"][-1] == ["short\\_task", "1", "acc", "–"]


@pytest.mark.parametrize(
    "base",
    [
        {"license": "llama2", "language": ["en", "de"]},
        {"license": "other", "license_name": "mine", "license_link": "https://example.org/l"},
        {},
    ],
)
def test_licence_and_language_are_those_of_the_base_or_none(base):
    front = ModelCard(card_text(Extended("x", record(base=base)))).data.to_dict()
    assert {key: value for key, value in front.items() if key.startswith(("license", "language"))} == base


def front_of(**more):
    files = frozenset(more.pop("files", ()))
    data = ModelCard(card_text(Extended("x", record(**more), files=files))).data.to_dict()
    return data.get("base_model"), data.get("base_model_relation"), data["library_name"]


def test_a_base_model_is_named_where_it_is_on_the_hub():
    hub, name = ON_HUB, ON_HUB["model"]
    assert front_of(**hub) == (name, None, "transformers")
    assert front_of(**hub, adaptation=ADAPTATION) == (name, "finetune", "transformers")
    assert front_of(**hub, adaptation=ADAPTATION, files=["adapter_config.json"]) == (name, "adapter", "peft")
    for local in ("tiny", "models/llama", "/data/llama"):
        assert front_of(model=local, adaptation=ADAPTATION) == (None, None, "transformers")


# How to load it


@pytest.mark.parametrize("method", ["yarn", "linear", "dynamic", "longrope-switch", "custom"])
def test_vllm_is_told_as_the_engine_notes_say(method):
    made = Extended("tiny-1k", record(method))
    part = card_text(made).partition("### vLLM\n\n")[2].partition("\n##")[0]
    engine = made.engine("vLLM")
    if engine is None:
        assert part == ""
    elif engine.reads == "no":
        assert part.startswith("vLLM does not read this rope")
    else:
        limit = " --max-model-len 1024" if "--max-model-len 1024" in engine.note else ""
        assert part.startswith(f"```bash\nvllm serve tiny-1k{limit}\n```")
        assert engine.note in re.sub(r"\\(.)", r"\1", part)


def test_the_lines_of_transformers_run_as_printed(copied, monkeypatch):
    write_card(copied)
    (lines, *_) = blocks((copied / "README.md").read_text(), "python")
    names = {}
    monkeypatch.chdir(copied.parent)
    exec(lines, names)
    assert names["model"].config.max_position_embeddings == 1024
    assert names["tokenizer"]("a key")["input_ids"]


def test_an_adapter_is_loaded_with_the_rope_it_was_trained_under():
    made = MADE["an adapter"]
    (lines,) = blocks(card_text(made), "python")
    compile(lines, "card", "exec")
    assert 'ropepatch.load_adapter(snapshot_download("me/adapter-1k"))' in lines
    assert "vllm" not in card_text(made).lower()
    assert "loads without ropepatch" not in card_text(made)
    (lines,) = blocks(card_text(replace(made, branch="longer")), "python")
    assert 'load_adapter(snapshot_download("me/adapter-1k", revision="longer"))' in lines
    local = replace(made, name="adapter", record=made.record.amended(model="/data/llama"))
    assert 'load_adapter("adapter", base="path/to/llama")' in card_text(local)


def test_every_engine_is_listed_with_its_note_and_the_lines_follow_from_the_name():
    made = MADE["trained"]
    card = card_text(made)
    rows = [
        [re.sub(r"\\(.)", r"\1", cell) for cell in row] for row in tables(card)["Who reads this rope"][1:]
    ]
    assert rows == [[e.engine, e.reads, e.note] for e in made.record.engines]
    assert "vllm serve tiny-1k --max-model-len 1024" in card_text(Extended("tiny-1k", record("linear")))


# How it was made


def test_the_command_is_printed_and_the_plan_as_yaml():
    card = card_text(MADE["trained"])
    assert COMMAND in blocks(card, "bash")
    (plan,) = blocks(card, "yaml")
    stated = MADE["trained"].record
    told = yaml.safe_load(plan)
    assert told["config_changes"]["rope_parameters"] == stated.config_changes["rope_parameters"]
    assert told["parameters"] == {k: v for k, v in stated.parameters.items() if v is not None}
    same = "method factor target rope_theta attention_factor original_max_position_embeddings"
    assert {key: told[key] for key in same.split()} == {key: getattr(stated, key) for key in same.split()}


def test_a_long_list_of_the_plan_is_left_to_the_record():
    stated = record("custom")
    stated = stated.amended(parameters=stated.parameters | {"queries": [[[[1.0, 0.5]] * 8] * 2] * 2})
    (plan,) = blocks(card_text(Extended("x", stated)), "yaml")
    parameters = yaml.safe_load(plan)["parameters"]
    assert parameters["divisors"] == parameters["queries"] == "a list, see ropepatch.json"


def test_a_folded_factor_is_told_and_losses_and_training_are_said_to_be_from_before():
    stated = record(adaptation=ADAPTATION)
    folded = card_text(Extended("x", stated.amended(folded_attention_factor=1.1386294361)))
    assert "The attention factor, 1.1386, was folded into the query weights" in folded
    assert "on 1,234,567 tokens, before folding." in folded
    assert "- Training, before folding: 600 steps" in folded
    assert "watched during the training, before folding: 0.612 nats" in folded
    assert "before folding" not in card_text(Extended("x", stated))


# Whom to cite


UNCITED = MAPS["lampe"].paper  # whose authors nobody here has read


def test_the_papers_of_the_methods_can_be_cited_and_year_and_eprint_follow_from_the_number():
    cited = {method.paper for method in (METHODS | MAPS).values()} - {"–", UNCITED}
    assert {address(paper) for paper in cited} == entries().keys()
    for paper in cited:
        made = bibtex(paper)
        assert made.count("{") == made.count("}")
        if paper.startswith("arXiv"):
            assert f"year          = {{20{paper[6:8]}}}," in made
            assert f"eprint        = {{{paper[6:]}}}," in made
    assert bibtex(METHODS["yarn"].paper) in card_text(Extended("x", record("yarn")))


@pytest.mark.parametrize(
    "paper", ["–", "", "a talk", "javascript:alert(1)", "arXiv:9999.00001", "evil.example/a", "http://a.b"]
)
def test_a_paper_of_a_method_that_is_not_registered_is_neither_cited_nor_a_link(paper):
    card = card_text(Extended("x", record().amended(method="of a stranger", paper=paper)))
    assert bibtex(paper) is None
    assert card.count("@misc{") == 1
    assert "@misc{ropepatch," in card
    assert f"](https://{paper}" not in card
    assert f"]({paper}" not in card
    assert f"(`{paper}`)" in card or not paper
    known = card_text(Extended("x", record(paper=paper or "evil")))
    assert "[arXiv:2309.00071](https://arxiv.org/abs/2309.00071)" in known
    assert not paper or paper == "–" or paper not in known


def test_the_base_model_and_ropepatch_are_cited():
    (entries,) = blocks(card_text(MADE["licensed"]), "bibtex")
    assert "author        = {{meta-llama}}," in entries
    assert f"note          = {{revision {REVISION}}}," in entries
    assert f"note          = {{version {ropepatch.__version__}}}," in entries


# Names of the user's own


def test_a_command_keeps_its_words_and_loses_its_folders():
    typed = (
        "/home/alice/venv/bin/ropepatch extend '/home/alice/my models/llama 2' --to 32k "
        "--text=/home/alice/books --out ~/out/x --set 'divisors=[1.0, 2.0]' --recipe ./mine.yaml "
        "--push me/llama"
    )
    assert shown_command(typed) == (
        "ropepatch extend 'llama 2' --to 32k --text=books --out x --set 'divisors=[1.0, 2.0]' "
        "--recipe mine.yaml --push me/llama"
    )
    assert shown_command("ropepatch extend '/home/alice/x") == r"ropepatch extend x"


PARTS = st.lists(
    st.text("abcxyz =-_.'\"$é", min_size=1, max_size=8).filter(str.strip), min_size=1, max_size=3
)


@given(PARTS, st.sampled_from(["/home/zorro/", "~zorro/", "./zorro/", "../zorro/q/", "C:\\zorro\\"]))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_folder_of_the_user_is_on_the_card(parts, root):
    import shlex

    path = root + "/".join(parts)
    command = shlex.join(["ropepatch", "extend", path, "--text", path, f"--out={path}", "--to", "1k"])
    results = [replace(r, parameters={**r.parameters, "text": path}) for r in TRAINED[:3]]
    stated = MADE["scored"].record.amended(model=path, command=command)
    made = Extended("x", stated, results, weights=BASE)
    assert made.evidence
    assert "zorro" not in card_text(made)
    assert "zorro" not in card_text(replace(made, record=stated.amended(command=None)))


@given(st.text(max_size=60))
@example("```\n---\nlicense: mit\n---\n# <script>alert(1)</script> | a | b |\n\n![x](http://x)")
@example("-->\n<!--")
@example("'quoted\n```\n# broken'")
@example("]( http://evil.example )")
@settings(max_examples=20, deadline=None)
def test_no_name_breaks_the_card(name):
    results = [
        replace(r, label=name if r.scaling else r.label, parameters={**r.parameters, "text": name})
        for r in TRAINED[:3]
    ]
    stated = MADE["scored"].record.amended(warnings=[name], command=name, model=name)
    made = Extended("me/x", stated, results, weights=BASE, captions={"perplexity": name})
    card = card_text(made)
    data = ModelCard(card).data
    assert data.tags[0] == "ropepatch"
    assert "license" not in data.to_dict()
    rows = tables(card)["Perplexity"]
    assert {len(row) for row in rows} == {4}
    assert card.count(MARKER) == 1
    outside = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", card.partition(MARKER)[2], flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"(?<!\\)<(?!br>)", outside)
    assert [line for line in outside.splitlines() if line.startswith("# ")] == ["# x"]


# The file


def test_a_card_and_its_figures_are_written_the_same_to_the_byte_again(copied, monkeypatch):
    files = write_card(copied, "me/tiny-1k")
    names = [str(file.relative_to(copied)) for file in files]
    assert names == ["README.md", "evaluation/perplexity.png", "evaluation/retrieval.png"]
    card = (copied / "README.md").read_text()
    for file in files[1:]:
        assert file.read_bytes().startswith(b"\x89PNG")
        assert re.search(rf"!\[[^\]]{{20,}}\]\(evaluation/{file.name}\)", card)
    assert 'from_pretrained("me/tiny-1k")' in card
    assert ModelCard.load(copied / "README.md").data.library_name == "transformers"
    assert not [*copied.rglob("*.partial")]
    first = {file: file.read_bytes() for file in files}
    assert {file: file.read_bytes() for file in write_card(copied, "me/tiny-1k")} == first
    monkeypatch.chdir(copied)
    write_card(Path())
    assert "# tiny-1k" in Path("README.md").read_text()


def test_a_card_of_the_user_is_never_touched(copied):
    own = b"---\nlicense: mit\n---\n# Mine\xff\n"
    (copied / "README.md").write_bytes(own)
    before = sorted(copied.rglob("*"))
    assert write_card(copied) == []
    assert (copied / "README.md").read_bytes() == own
    assert sorted(copied.rglob("*")) == before


def test_a_card_that_fails_leaves_everything_as_it_was(copied, monkeypatch):
    write_card(copied)
    (copied / "evaluation" / "retrieval.png").unlink()
    before = {file: file.read_bytes() for file in copied.rglob("*") if file.is_file()}
    writing = import_module("ropepatch.publishing.card.writing")

    def full(figure, file):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "_save", full)
    with pytest.raises(RopepatchError, match=r"cannot write .*README\.md: No space left"):
        write_card(copied, "me/other")
    assert {file: file.read_bytes() for file in copied.rglob("*") if file.is_file()} == before


def test_without_matplotlib_there_is_a_card_without_figures(copied, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert write_card(copied) == [copied / "README.md"]
    card = (copied / "README.md").read_text()
    assert "![" not in card
    assert "### Retrieval" in card


def test_a_folder_that_ropepatch_did_not_make_or_with_a_damaged_result_gets_no_card(copied, tmp_path):
    with pytest.raises(RopepatchError, match=r"no ropepatch\.json in .*: ropepatch did not make it"):
        write_card(tmp_path)
    (copied / "evaluation" / "0.json").write_text("{")
    with pytest.raises(RopepatchError, match=r"0\.json is not a result"):
        write_card(copied)
    assert not (copied / "README.md").exists()


ODD = st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=3)
ODD = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner)
)
FULL = record(
    adaptation=ADAPTATION,
    command=COMMAND,
    folded_attention_factor=1.1,
    earlier=record("linear"),
    base={"license": "mit", "language": "en"},
).to_dict()


def places_of(content, path=()):
    if path:
        yield path
    inner = content.items() if isinstance(content, dict) else ()
    inner = enumerate(content[:2]) if isinstance(content, list) else inner
    for key, value in inner:
        yield from places_of(value, (*path, key))


@given(st.sampled_from([*places_of(FULL)]), ODD)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_record_makes_the_card_crash(path, value):
    damaged = json.loads(json.dumps(FULL))
    place = damaged
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    try:
        made = Extended("me/x", Record.parse(damaged), files=frozenset({"tokenizer.json"}))
    except RopepatchError:
        return
    ModelCard(card_text(made))


# A branch


def test_every_line_that_loads_names_the_branch(copied):
    write_card(copied, "me/tiny-1k", "longer/1k")
    card = (copied / "README.md").read_text()
    (lines, *_) = blocks(card, "python")
    assert lines.count('from_pretrained("me/tiny-1k", revision="longer/1k")') == 2
    assert "vllm serve me/tiny-1k --revision longer/1k" in card
    write_card(copied, "me/tiny-1k")
    assert "longer/1k" not in (copied / "README.md").read_text()
