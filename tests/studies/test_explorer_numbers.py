"""Numbers of the explorer are means over tokens, and its prompts hold what they ask for."""

import json

import pytest
from explorer_numbers import RESULTS, measured_from

from ropepatch.gallery.explorer.tiny import reading_once


def test_a_loss_over_pieces_counts_tokens():
    (tiny,) = (
        one
        for one in measured_from(RESULTS)
        if (one["model"], one["target"], one["kind"]) == ("tiny", 1024, "maps")
    )
    rows = json.loads((RESULTS / "attention-maps.json").read_text())["rows"]
    pieces = [
        piece
        for row in rows
        if (row["model"], row["factor"], row["kind"], row["method"]) == ("tiny", 4, "loss", "yarn")
        for piece in row["all"]
    ]
    mean = sum(nats for nats, _ in pieces) / sum(tokens for _, tokens in pieces)
    assert tiny["loss"]["yarn"][1] == pytest.approx(mean, abs=1e-4)


def test_a_prompt_has_its_length_and_hides_near_its_depth_the_key_that_it_asks_for():
    words, prompts = reading_once()["words"], reading_once()["prompts"]
    assert len({(prompt["length"], prompt["depth"]) for prompt in prompts}) == 9
    for prompt in prompts:
        ids, key, (begin, end) = prompt["ids"], prompt["key"], prompt["needle"]

        def text(first, last, ids=ids):
            return "".join(words[token] for token in ids[first:last]).strip()

        assert len(ids) == prompt["length"]
        assert text(begin, end) == f"The pass key is {key}. Keep it well: {key} is the pass key."
        assert text(prompt["question"], -prompt["answer"]) == "What is the pass key? The pass key is"
        assert text(-prompt["answer"], None) == key
        assert prompt["depth"] == pytest.approx((begin + end) / 2 / prompt["question"], abs=0.1)
