"""Answers on the cache of a haystack are those to whole prompts, or every prompt is read whole."""

import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from loss_models import VOCABULARY, build
from oldest import OLDEST, needs
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model

import ropepatch
from ropepatch.data.haystack import Haystack, Haystacks, Question
from ropepatch.errors import RopepatchError
from ropepatch.evaluation import retrieval
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.retrieval import (
    Answer,
    Reader,
    Retrieval,
    answerable,
    ask,
    chat_parts,
    effective_length,
    passkey,
    why_not_counted,
)
from ropepatch.evaluation.tasks import Goal, RetrievalTask, retrieval_rows

LENGTHS = (40, 90, 150)
TRAINED = {"max_position_embeddings": 64}
SLIDING = {"sliding_window": 16}
MODELS = {
    "grouped queries": lambda: build("llama", **TRAINED),
    "partial rotary": lambda: build("gpt_neox"),
    "all layers slide": lambda: build("mistral", **SLIDING),
    "some layers slide": lambda: build("gemma3_text", **SLIDING),
}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}


@pytest.fixture(scope="module")
def models():
    return {name: make() for name, make in MODELS.items()}


@pytest.fixture
def model():
    return MODELS["grouped queries"]()


def haystacks(model, count=2):
    """Random tokens; what the model says to whole prompts of one length is the answer at all of them."""
    draw = torch.Generator().manual_seed(0)
    top = min(VOCABULARY, model.config.get_text_config().vocab_size)
    room, made = 9, []
    for _ in range(count):
        ids = torch.randint(3, top, (LENGTHS[-1] - room,), generator=draw)
        questions = []
        for number in range(6):
            asked = torch.randint(3, top, (3 + number % 4,), generator=draw)
            whole = row = torch.cat([ids[: LENGTHS[number % 3] - room], asked])
            for _ in range(3 - number % 2):
                with torch.no_grad():
                    said = model(whole[None], use_cache=False).logits[0, -1:].argmax(-1)
                whole = torch.cat([whole, said])
            questions.append(Question("made", asked, whole[len(row) :], 5 + number))
        made.append(
            Haystack(
                ids, {n: n - room for n in LENGTHS}, dict.fromkeys(LENGTHS, questions)
            )
        )
    return made


def apart(one, other):
    """By how much log-probabilities differ; infinite where a verdict does."""
    assert [a[:4] for a in one.answers] == [a[:4] for a in other.answers]
    pairs = list(zip(one.answers, other.answers, strict=True))
    return max(
        abs(a.log_prob - b.log_prob) if a.found == b.found else math.inf
        for a, b in pairs
    )


@contextmanager
def calls(model):
    """(rows, tokens) of every forward pass within the block."""
    shapes = []
    hook = model.register_forward_pre_hook(
        lambda _, __, options: shapes.append(tuple(options["input_ids"].shape)),
        with_kwargs=True,
    )
    yield shapes
    hook.remove()


def ask_whole(model, made):
    with patch.object(Reader, "_cached", return_value=None):
        return ask(model, made)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, None) for name in MODELS),
        ("partial rotary", "self-extend"),
        ("some layers slide", "self-extend"),
        ("grouped queries", "dynamic"),
    ],
)
def test_answers_on_the_cache_are_those_to_whole_prompts(
    models, name, method, caplog, monkeypatch
):
    model, count = models[name], 1 if method else 2
    with ropepatch.patch(model, method, to=1024) if method else nullcontext():
        made = haystacks(model, count)
        with calls(model) as once:
            cached = ask(model, made)
        with calls(model) as each:
            whole = ask_whole(model, made)
        monkeypatch.setattr(retrieval, "MOST_ROWS", 1)
        small = ask(model, made)
    assert apart(cached, whole) < 1e-4
    assert apart(small, whole) < 1e-4
    assert {answer.found for answer in whole.answers} == {True, False}
    # A part and a batch each; two prompts are compared
    assert (len(each), len(once)) == (18 * count, count * 6 + 2)
    assert not [one for one in caplog.records if one.name.startswith("ropepatch")]


@torch.no_grad()
@pytest.mark.parametrize("answers", [ask, ask_whole])
def test_an_answer_has_its_mean_log_prob(answers):
    model = MODELS["grouped queries"]()
    (made,) = haystacks(model, 1)
    whole = made.asked[90][1]
    half = replace(whole, answer=whole.answer.clone())
    half.answer[-1] = (half.answer[-1] + 1) % VOCABULARY
    short = replace(made, asked={40: [], 90: [whole, half], 150: []})
    asked = answers(model, [short])
    for question, answer in zip((whole, half), asked.answers, strict=True):
        row = torch.cat([made.ids[: made.stops[90]], question.ids, question.answer])
        ends = range(len(row) - len(question.answer), len(row))
        log_probs = [
            model(row[None, :end]).logits[0, -1].log_softmax(-1)[row[end]].item()
            for end in ends
        ]
        assert answer[:3] == (0, 90, "made")
        assert answer.depth == pytest.approx(question.end / made.stops[90], abs=1e-6)
        mean = sum(log_probs) / len(log_probs)
        assert answer.log_prob == pytest.approx(mean, abs=1e-5)
    assert [answer.found for answer in asked.answers] == [True, False]


def test_a_haystack_read_in_chunks_loses_no_token(monkeypatch, caplog):
    model = MODELS["grouped queries"]()
    made = haystacks(model, 1)
    whole = ask_whole(model, made)
    monkeypatch.setattr(retrieval, "CHUNK", 20)
    with calls(model) as shapes:
        assert apart(ask(model, made), whole) < 1e-4
    assert [tokens for rows, tokens in shapes if rows == 1][:2] == [20, 11]
    assert not caplog.records


def test_a_model_with_another_cache_gets_whole_prompts(model, caplog):
    made = haystacks(model)
    whole = ask_whole(model, made)

    def from_zero(_, __, options):
        if options["use_cache"]:  # positions of a question begin at 0
            options["position_ids"] = torch.arange(options["input_ids"].shape[1])[None]

    model.register_forward_pre_hook(from_zero, with_kwargs=True)
    assert apart(ask(model, made), whole) == 0
    (record,) = caplog.records
    assert "every prompt is processed whole, which is slower" in record.getMessage()


@pytest.mark.parametrize(
    ("dtype", "by", "refused"),
    [
        (torch.float32, 2e-4, False),
        (torch.float32, 5e-3, True),
        (torch.bfloat16, 0.015, False),
        (torch.bfloat16, 0.08, True),
    ],
)
def test_logits_may_differ_by_the_rounding_of_their_dtype(
    model, dtype, by, refused, caplog
):
    def scale(_, __, options, output):
        output.logits = output.logits * (1 + by * bool(options["use_cache"]))

    model.to(dtype).register_forward_hook(scale, with_kwargs=True)
    ask(model, haystacks(model, 1))
    assert ("every prompt is processed whole" in caplog.text) == refused


# Models that are read whole, and models that are not


OWN_CACHE = pytest.mark.xfail(
    OLDEST, reason="a class of its own there, which is not seen", strict=True
)
FOLLOWS = "its frequencies depend on the input length"


@pytest.mark.parametrize(
    ("family", "rope", "reason"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 4.0}, FOLLOWS),
        ("llama", LONGROPE | FACTORS, FOLLOWS),
        ("llama", LONGROPE | FACTORS | {"short_factor": FACTORS["long_factor"]}, None),
        ("llama", {"rope_type": "yarn", "factor": 4.0}, None),
        pytest.param("qwen3_next", None, "LinearAttentionLayer", marks=OWN_CACHE),
        ("blt", None, "there is no cache for its config"),
        ("mllama", None, None),  # attention to images that are not there
        ("gemma4_text", None, None),  # layers that share keys
        ("deepseek_v3", None, None),  # compressed keys
    ],
)
def test_only_other_caches_and_moving_frequencies_need_whole_prompts(
    family, rope, reason, caplog
):
    needs(family)
    if rope is None:
        model = tiny_model(family)
    else:
        model = build(family, **TRAINED, rope_parameters={"rope_theta": 1e4} | rope)
    made = haystacks(model, 1)
    assert apart(ask(model, made), ask_whole(model, made)) < 1e-4
    assert (reason is None) == (not caplog.records)
    assert (reason or "") in caplog.text


def test_a_wrapped_model_is_read_once(model, caplog):
    made = haystacks(model)
    expected = ask(model, made)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with calls(wrapped) as shapes:
        assert ask(wrapped, made) == expected
    assert len(shapes) == 14
    assert not caplog.records


def test_nan_logits_and_a_tokenizer_of_another_model_are_refused(model):
    (made,) = haystacks(model, 1)
    strange = replace(made.asked[40][0], answer=torch.tensor([VOCABULARY]))
    with pytest.raises(
        RopepatchError, match="the tokenizer returns token 48, the model has 0 to 47"
    ):
        ask(model, [replace(made, asked={40: [strange]})])
    with torch.no_grad():
        model.lm_head.weight[5] = math.nan
    with pytest.raises(RopepatchError, match="returned NaN logits"):
        ask(model, [made])


# Resuming


def test_a_killed_run_resumes_with_the_missing_haystacks(model, tmp_path):
    made, folder = haystacks(model, 4), tmp_path / "new" / "kept"
    expected = ask(model, made)

    def killed(done, total):
        if done > 2 * len(made[0].ids):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(model, made, keep=folder, progress=killed)
    (file,) = folder.iterdir()
    assert len(file.read_text().strip().splitlines()) == 3
    file.write_text(file.read_text()[:-20])  # it died while it wrote
    told = []
    for reads in (2, 0):
        with calls(model) as shapes:
            resumed = ask(
                model, made, keep=folder, progress=lambda *now: told.append(now)
            )
        assert sum(shape == (1, 31) for shape in shapes) == reads
        assert resumed == expected
    assert told == [(number * 141, 4 * 141) for number in (1, 2, 3, 4)] * 2


# What is made of answers


SOME = Retrieval(
    (
        *(Answer(h, 64, "number", 0.3, True, -0.5) for h in range(3)),
        *(Answer(h, 64, "fact", 1.0, h > 0, -0.5 if h else -2.0) for h in range(3)),
        *(Answer(h, 128, "number", 0.2, False, -2.0) for h in range(3)),
        *(Answer(h, 128, "fact", 0.7, False, -2.0) for h in range(3)),
    )
)


def test_a_mean_is_over_haystacks_of_a_place():
    assert SOME.found(64).clusters == ((1, 2), (2, 2), (2, 2))
    assert SOME.found(64, "fact").clusters == ((0, 1), (1, 1), (1, 1))
    assert SOME.found(64, depths=(0.3, 1)).clusters == SOME.found(64, "fact").clusters
    assert SOME.log_prob(64).clusters == ((-2.5, 2), (-1, 2), (-1, 2))
    assert (SOME.found(64).share, SOME.log_prob(64).share) == (True, False)
    message = r"no questions at 128 tokens, kind chain(?s:.*)kinds: number, fact"
    with pytest.raises(RopepatchError, match=message):
        SOME.found(128, "chain")


@pytest.mark.parametrize(
    ("found", "reached"),
    [
        ((1, 0.9, 0.5), 512),
        ((1, 0.5, 1), 256),
        ((0.5, 1, 1), None),
        ((1, 1, 0.856), 1024),
        ((), None),
    ],
)
def test_the_effective_length_demands_all_shorter_ones(found, reached):
    by_length = dict(zip((1024, 512, 256), found[::-1], strict=False))
    assert effective_length(by_length) == reached


# Chat templates


def test_a_chat_template_is_split_where_the_message_stands(tiny):
    tokenizer = ropepatch.load("tiny", device="cpu")[1]
    with pytest.raises(RopepatchError, match="no chat template"):
        chat_parts(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<s>U: {{ m.content }}\n{% endfor %}A:"
    )
    assert chat_parts(tokenizer) == ("<s>U: ", "\nA:")
    plain, chat = (
        passkey(tiny[0], tokenizer, lengths=[160], haystacks=1, chat=chat)
        for chat in (False, True)
    )
    assert plain != chat
    tokenizer.chat_template = "{{ messages[0].content }}{{ messages[0].content }}"
    with pytest.raises(RopepatchError, match="repeats the user's message 2 times"):
        chat_parts(tokenizer)


# The task


def prepared(tiny, model="x", to=512, limit=None, **settings):
    """The parameters of the prompts of a task."""
    task = RetrievalTask(**{"haystacks": 2} | settings)
    task = task if limit is None else task.limited(limit)
    return task.prepare(Goal(model, tiny[1], 256, to)).parameters


def test_a_task_uses_the_lengths_with_room_for_the_keys(tiny):
    made = prepared(tiny, keys=2)
    assert made["lengths"] == [256, 512]
    assert (made["keys"], made["kinds"]) == (2, ["number", "sentence", "chain"])
    assert made["left_out"].keys() == {"fact"}
    assert "Not measured: fact (a haystack of 256 " in RetrievalTask.method(made)
    with pytest.raises(RopepatchError, match="64 tokens has no room"):
        prepared(tiny, keys=2, lengths=["0.25x"])


def test_a_task_asks_tiny_for_one_key_within_a_limit(tiny):
    made = prepared(tiny, "tiny")
    assert (made["keys"], made["kinds"]) == (1, ["passkey"])
    assert prepared(tiny, "tiny", haystacks=5, limit=2)["haystacks"] == 2
    assert prepared(tiny, "tiny", haystacks=5, limit=64)["haystacks"] == 5


def test_a_text_of_token_ids_holds_no_needles(tiny, tmp_path):
    (tmp_path / "ids.jsonl").write_text('{"text": [5, 6, 7]}\n')
    with pytest.raises(RopepatchError, match="holds token ids"):
        prepared(tiny, text=str(tmp_path / "ids.jsonl"))


def test_a_kind_counts_by_all_original_lengths_together():
    """9 of 20 are above a guess among 4 at one length, 15 of 40 at both are not."""
    lucky, unlucky = (
        Mean.of([[float(n < right), 1.0] for n in range(20)], share=True)
        for right in (10, 5)
    )
    assert why_not_counted({64: lucky}, kind="number", keys=4, trained=128) is None
    reason = why_not_counted(
        {64: lucky, 128: unlucky, 256: lucky}, kind="number", keys=4, trained=128
    )
    assert reason is not None
    assert reason.startswith(
        "within 128 tokens the unscaled model answers 15 of 40 (95 % interval "
    )


def test_rows_are_by_length_by_kind_and_by_depth():
    rows = retrieval_rows(SOME)
    found = [row for row in rows if row.measure == "found"]
    assert [(row.at["kind"], row.at.get("depth")) for row in found] == [
        ("number", None),
        ("number", 0.3),
        ("fact", None),
        ("fact", 0.9),
        ("number", None),
        ("number", 0.1),
        ("fact", None),
        ("fact", 0.7),
    ]
    assert found[2].mean == SOME.found(64, "fact")


def test_tokens_of_quotes_are_also_counted_by_half():
    far, near = (
        Answer(0, 64, "quote", 0.5, 8, -1.0, 32),
        Answer(0, 64, "quote", 0.6, 9, -3.0, 16),
    )
    rows = retrieval_rows(Retrieval((far, near)))
    by_half = {
        (row.measure, row.at["depth"]): row.mean for row in rows if "depth" in row.at
    }
    assert {place: mean.clusters for place, mean in by_half.items()} == {
        ("found", 0.25): ((8, 32),),
        ("log_prob", 0.25): ((-1, 1),),
        ("found", 0.75): ((9, 16),),
        ("log_prob", 0.75): ((-3, 1),),
    }


@torch.no_grad()
def test_quotes_are_scored_as_by_a_loop_over_whole_prompts(tiny, shared):
    """Token by token: each after all true tokens before it, from its own pass over the whole prompt."""
    model, tokenizer = tiny
    novel = (shared / "texts" / "novels" / "Chesterton_Thursday_1908.txt").read_text()
    plan = Haystacks(lengths=[300], count=1, keys=2, kinds=("quote",), texts=[novel])
    (haystack,) = plan.make(tokenizer)
    with ropepatch.patch(model, "yarn", to=512):
        for answer in ask(model, [haystack]).answers:
            stop = haystack.stops[answer.length]
            (quote,) = [
                one
                for one in haystack.asked[answer.length]
                if round(one.end / stop, 6) == answer.depth
            ]
            ids = [*haystack.ids[:stop].tolist(), *quote.ids.tolist()]
            log_probs, right = [], 0
            for token in haystack.ids[quote.end - 32 : quote.end].tolist():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
                log_probs.append(logits.log_softmax(-1)[token].item())
                right += int(logits.argmax()) == token
                ids.append(token)
            assert (answer.found, answer.parts) == (right, 32)
            assert answer.log_prob == pytest.approx(sum(log_probs) / 32, abs=1e-4)


def test_answerable_kinds_are_answered_within_the_original_length(tiny, monkeypatch):
    monkeypatch.setattr(retrieval, "EXAM_MOST", 8)
    model, tokenizer = tiny
    assert answerable(model, tokenizer, 256, seed=0) == ["passkey"]
    stranger = type(model)(model.config).eval()
    for weight in stranger.parameters():
        torch.nn.init.normal_(weight)
    assert answerable(stranger, tokenizer, 256, seed=0) == []
