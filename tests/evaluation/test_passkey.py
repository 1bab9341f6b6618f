import functools
import math
from collections import Counter
from itertools import groupby, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loss_models import IgnoresPositions, WithoutPositions
from passkey_cases import (
    CHECKPOINT,
    TEMPLATE,
    TOKENIZERS,
    Known,
    Speaking,
    copied,
    llama3,
    read,
    reading,
    within,
)
from tiny_models import tiny_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ropepatch.data.prompts import PasskeyTemplate, passkey_prompt
from ropepatch.data.templates import NAMED
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.passkey import Passkey, PasskeyGrid, draw_needles, passkey
from ropepatch.settings import seed_of

GRID = {"lengths": (80, 113, 160), "depths": (0.0, 0.3, 1.0)}
CELLS = list(product(*GRID.values()))


def counts(grid: PasskeyGrid) -> dict[tuple[int, float], int]:
    return {cell: read.correct for cell, read in grid.cells.items()}


def test_a_model_that_always_answers_gets_every_key(tokenizer):
    grid = passkey(Known(copied), tokenizer, trials=7, **GRID)
    assert grid.cells == dict.fromkeys(CELLS, Passkey(7, 7))


@pytest.mark.parametrize("wrong", [*range(-9, 0), -40])
def test_a_key_counts_only_if_every_token_of_the_answer_is_said_and_nothing_else_counts(tokenizer, wrong):
    def says(ids: list[int]) -> list[int]:
        said = copied(ids)
        said[wrong] += 1
        return said

    correct = 0 if -7 <= wrong < -1 else 3  # a space and five digits: said after the last but 6 tokens and on
    assert set(counts(passkey(Known(says), tokenizer, trials=3, **GRID)).values()) == {correct}


@pytest.mark.parametrize("late", [-1, 1])
def test_a_model_that_says_the_answer_a_token_early_or_late_gets_no_key(tokenizer, late):
    def says(ids: list[int]) -> list[int]:
        return torch.tensor(copied(ids)).roll(late).tolist()

    assert set(counts(passkey(Known(says), tokenizer, trials=3, **GRID)).values()) == {0}


@pytest.mark.parametrize("window", [75, 90, 128])
def test_a_model_with_a_window_gets_the_keys_of_exactly_the_cells_within(tokenizer, window):
    begins = {
        (length, depth): passkey_prompt(tokenizer, length=length, depth=depth, key="48213").needle[0]
        for length, depth in CELLS
    }
    expected = {cell: 2 * (cell[0] - begin <= window) for cell, begin in begins.items()}
    assert set(expected.values()) == {0, 2}
    assert counts(passkey(Known(within(window)), tokenizer, trials=2, **GRID)) == expected


def test_retrieved_keys_are_counted_one_by_one(tokenizer):
    def says(ids: list[int]) -> list[int]:
        return [0] * len(ids) if ids[-1] % 2 else copied(ids)

    with reading(model := Known(says)) as rows:
        grid = passkey(model, tokenizer, trials=10, **GRID)
    even = [row[-1] % 2 == 0 for row in rows]
    assert counts(grid) == {cell: sum(even[10 * i : 10 * i + 10]) for i, cell in enumerate(CELLS)}
    assert len(set(counts(grid).values())) > 2


# Teacher forcing is greedy decoding


def generated(model: PreTrainedModel, rows: list[Tensor], answer: int) -> list[bool]:
    """Whether greedy decoding from each row without its answer gives just the answer."""
    prompts, answers = torch.stack(rows).split([len(rows[0]) - answer, answer], dim=1)
    said = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=answer,
        pad_token_id=0,
    )
    said = F.pad(said[:, prompts.shape[1] :], (0, answer))[:, :answer]  # all may have ended early
    return (said == answers).all(dim=1).tolist()


@pytest.fixture(scope="module")
def checkpoint() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT).eval()


def greedy_verdicts(model: PreTrainedModel, rows: list[Tensor], answer: int) -> list[bool]:
    by_length = [list(group) for _, group in groupby(rows, key=len)]
    return [verdict for group in by_length for verdict in generated(model, group, answer)]


def test_verdicts_on_the_bundled_checkpoint_are_those_of_greedy_decoding(checkpoint, tokenizer):
    lengths, depths = (128, 256, 320, 1024), (0.0, 0.3, 0.6, 1.0)
    with reading(checkpoint) as rows:
        grid = passkey(checkpoint, tokenizer, lengths=lengths, depths=depths, trials=1, share_prefixes=False)
    verdicts = [bool(read.correct) for read in grid.cells.values()]
    assert verdicts == greedy_verdicts(checkpoint, rows, answer=6)
    assert any(verdicts[:4])
    assert not all(verdicts[-4:])


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2", "gemma4_text"])
def test_verdicts_on_a_random_model_that_says_a_digit_are_those_of_greedy_decoding(family):
    model, tokenizer = tiny_model(family), TOKENIZERS["whole_words"]()
    digits = set(tokenizer.convert_tokens_to_ids([*"0123456789"]))
    others = torch.tensor([token for token in range(model.config.vocab_size) if token not in digits])
    model.get_output_embeddings().register_forward_hook(lambda _, __, out: out.index_fill(-1, others, -1e9))
    with reading(model) as rows:
        grid = passkey(
            model,
            tokenizer,
            lengths=range(70, 78),
            depths=[place / 12 for place in range(12)],
            trials=1,
            template=PasskeyTemplate(digits=1),
            share_prefixes=False,
        )
    verdicts = [bool(read.correct) for read in grid.cells.values()]
    assert verdicts == greedy_verdicts(model, rows, answer=1)
    assert any(verdicts)


# A parser of what is generated


def hidden(text: str) -> str:
    """The key of a prompt, as the needle says it."""
    return text.split("The pass key is ")[1].split(".")[0]


PARSED = PasskeyTemplate(keys=(1, 50_000), parse=r"\d+", answer_tokens=8)
SHORTER = PARSED.model_copy(update={"keys": (5, 300)})  # of one digit to three


@pytest.mark.parametrize(
    ("says", "right"),
    [
        (lambda text: f" {hidden(text)}.", True),
        (lambda text: f" a, {hidden(text)} 7", True),
        (lambda text: f" 7 {hidden(text)}", False),
        (lambda text: f" {hidden(text)}0", False),
        (lambda text: " none", False),
        (lambda text: "", False),
        (lambda text: f" so it is said: {hidden(text)}.", False),  # after the 8 tokens that are generated
    ],
)
def test_the_first_match_of_the_parser_in_what_is_generated_must_be_the_key(tokenizer, says, right):
    model = Speaking(tokenizer, says)
    grid = passkey(model, tokenizer, lengths=[90, 120], depths=[0.0, 1.0], trials=8, template=PARSED)
    assert {cell.correct for cell in grid.cells.values()} == {8 * right}


def test_parsed_keys_of_all_lengths_are_counted_in_their_own_cells(tokenizer):
    model = Speaking(tokenizer, lambda text: hidden(text) if int(hidden(text)) % 2 else "")
    asked = {"lengths": [90, 120], "depths": [0.0, 0.5, 1.0], "trials": 12, "template": SHORTER}
    grid = passkey(model, tokenizer, tokens_per_batch=400, **asked)
    keys = {}
    for length, depth in grid.cells:
        seeds = (seed_of("passkey", 0, length, depth, trial) for trial in range(12))
        keys[length, depth] = [int(draw_needles(SHORTER, depth, 0, seed)[0].key) for seed in seeds]
    assert counts(grid) == {cell: sum(key % 2 for key in drawn) for cell, drawn in keys.items()}
    assert len({len(row) for row in model.asked}) > 2
    assert len(model.asked) == 72
    batches = {len(row): 400 // (90 if len(row) < 90 else 120) for row in model.asked}
    sizes = Counter(map(len, model.asked))
    assert model.calls == sum(math.ceil(count / batches[size]) for size, count in sizes.items())


def test_a_special_token_is_no_answer():
    tokenizer = llama3()
    tokenizer.add_special_tokens({"eos_token": "<7>"})
    ask = functools.partial(
        passkey, lengths=[160], depths=[0.5], template=PARSED.model_copy(update={"keys": (7, 7)})
    )
    assert ask(Speaking(tokenizer, lambda text: " 7"), tokenizer).at(160) == Passkey(4, 4)
    assert ask(Speaking(tokenizer, lambda text: " so"), tokenizer).at(160) == Passkey(0, 4)


def test_a_parser_finds_what_teacher_forcing_finds_on_the_bundled_checkpoint(checkpoint, tokenizer):
    ask = functools.partial(passkey, checkpoint, tokenizer, lengths=(128, 320), depths=(0.2, 0.9), trials=4)
    grid = ask(template=PasskeyTemplate(parse=r"\d{5}", answer_tokens=6))
    assert counts(grid) == counts(ask())
    assert 0 < sum(counts(grid).values()) < 16


# Order, batches, seeds


def key_of(tokenizer: PreTrainedTokenizerFast, row: Tensor) -> str:
    return read(tokenizer, row)[-5:]


def test_neither_order_nor_company_nor_repetition_of_lengths_and_depths_changes_anything(tokenizer):
    def ask(lengths, depths):
        with reading(model := Known(within(90))) as rows:
            cells = passkey(model, tokenizer, lengths=lengths, depths=depths, trials=2).cells
        prompts = [tuple(row.tolist()) for row in rows]
        return {cell: (cells[cell], prompts[2 * i : 2 * i + 2]) for i, cell in enumerate(cells)}

    whole = ask((80, 113, 160), (0.0, 0.3, 1.0))
    assert ask((160, 80, 113, 80), (1, 0, 0.0, 0.3)) == whole
    assert ask(np.array([160, 80, 113]), np.array([1.0, 0.0, 0.3])) == whole
    assert ask((113,), (0.3,)) == {(113, 0.3): whole[113, 0.3]}


def test_every_cell_and_every_seed_has_keys_of_its_own(tokenizer):
    keys = []
    for seed in (0, 1):
        with reading(model := Known(copied)) as rows:
            passkey(model, tokenizer, trials=2, seed=seed, **GRID)
        keys += [key_of(tokenizer, row) for row in rows]
    assert len(set(keys)) == len(keys) == 36


def test_the_keys_of_a_seed_are_the_same_in_every_release(tokenizer):
    with reading(model := Known(copied)) as rows:
        passkey(model, tokenizer, lengths=[1024], depths=[0.0, 0.25], trials=3)
    keys = [key_of(tokenizer, row) for row in rows]
    assert keys == ["50498", "11992", "20779", "28596", "12634", "68427"]


def test_progress_is_told_after_each_batch_up_to_all_prompts(tokenizer):
    told = []
    passkey(
        Known(copied),
        tokenizer,
        lengths=(80, 100),
        depths=(0.0, 1.0),
        trials=3,
        tokens_per_batch=320,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(4, 12), (6, 12), (9, 12), (12, 12)]


# Models of other makes


@pytest.mark.parametrize("model_class", [WithoutPositions, IgnoresPositions])
def test_a_model_that_gives_all_logits_is_scored_the_same(checkpoint, tokenizer, model_class):
    model = model_class(checkpoint.config).eval()
    model.load_state_dict(checkpoint.state_dict())
    grids = [passkey(each, tokenizer, lengths=(128, 1024), trials=1) for each in (checkpoint, model)]
    assert grids[0] == grids[1]
    assert grids[0].at(128).correct > grids[0].at(1024).correct


class Wrapper(nn.Module):
    """Passes keywords on, as PEFT's models do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapper, lambda model: Wrapper(Wrapper(model))])
def test_a_model_is_asked_for_the_logits_of_the_answer_alone_and_for_no_cache(tokenizer, wrap):
    model, calls = Known(copied), []
    model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    passkey(wrap(model), tokenizer, lengths=[160], depths=[0.5], trials=1)
    ((args, kwargs),) = calls
    assert not args
    assert kwargs.keys() == {"input_ids", "use_cache", "logits_to_keep"}
    assert kwargs["use_cache"] is False
    assert kwargs["logits_to_keep"] == 7
    assert kwargs["input_ids"].shape == (1, 160)


def test_a_model_with_an_offloaded_embedding_gets_its_tokens_on_the_cpu(tokenizer):
    model = Known(copied)
    model.embed = nn.Embedding(100_000, 1, device="meta")
    assert passkey(model, tokenizer, lengths=[80]).at(80) == Passkey(20, 20)


def test_logits_that_are_no_numbers_are_an_error(tokenizer):
    model = Known(copied)
    model.head.register_forward_hook(lambda _, __, logits: logits.index_fill(-1, torch.tensor([7]), math.nan))
    with pytest.raises(RopepatchError, match="Known gave logits that are no numbers") as refusal:
        passkey(model, tokenizer, lengths=[80])
    assert refusal.value.hint


def test_tokens_that_a_model_forbids_are_no_error(tokenizer):
    model = Known(copied)
    model.head.register_forward_hook(
        lambda _, __, logits: logits.index_fill(-1, torch.tensor([7]), -math.inf)
    )
    assert passkey(model, tokenizer, lengths=[80]).at(80) == Passkey(20, 20)


def test_a_tokenizer_of_another_model_is_refused(tokenizer):
    with pytest.raises(RopepatchError, match=r"the tokenizer gives token \d+, the model knows 0 to"):
        passkey(tiny_model("llama"), tokenizer, lengths=[80])


# Requests that ask for nothing


PARSED_NAMES = NAMED.model_copy(update={"parse": r"\d+", "answer_tokens": 6})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"lengths": []}, r"lengths must be a list of numbers, got \[\]"),
        ({"lengths": 128}, "lengths must be a list of numbers, got 128"),
        ({"lengths": "128"}, "lengths must be a list of numbers, got '128'"),
        ({"lengths": [128, 128.5]}, "a length must be a whole number of at least 1, got 128.5"),
        ({"lengths": [True]}, "a length must be a whole number of at least 1, got True"),
        ({"depths": ["middle"]}, "a depth must be a number from 0 to 1, got 'middle'"),
        ({"depths": [math.nan]}, "depth must be from 0 to 1, got nan"),
        ({"lengths": [1000, 80, 30]}, "a passkey prompt of 30 tokens has no room"),
        ({"trials": 0}, "trials must be a whole number of at least 1, got 0"),
        ({"distractors": -1}, "distractors must be a whole number of at least 0, got -1"),
        ({"queries": 2}, "queries must be from 1 to the number of needles, 1, got 2"),
        ({"distractors": 1, "template": TEMPLATE}, r"distractors need a template with \{name\}"),
        ({"distractors": 64}, "64 distractors and the needle .* has 64 names and 100000 keys"),
        ({"distractors": 1, "queries": 2, "template": PARSED_NAMES}, "parser takes one query, got 2"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_read(tokenizer, asked, message):
    with (
        reading(model := Known(copied)) as rows,
        pytest.raises(RopepatchError, match=message) as refusal,
    ):
        passkey(model, tokenizer, **({"lengths": [600]} | asked))
    assert refusal.value.hint
    assert "\n" not in str(refusal.value)
    assert not rows
