"""Numbers of the explorer are means over tokens, and its prompts hold what they ask for."""

import pytest

from ropepatch.gallery.explorer.tiny import reading_once


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
