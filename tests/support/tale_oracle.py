"""Exact token probabilities of synthetic stories, by brute force from the definition of the process.

Shares no code with `ropepatch.data.tiny.tales`. Every `log_probs` gives the log-probability of each token
of a story given the tokens before it, as a list; the first token is certain.
"""

import math
import re
from collections import defaultdict
from itertools import product

import numpy as np

from ropepatch.data.tiny.grammar import KINDS

# Stories of the bundled grammar, from their words.

# The value and its subject: the second half of every sentence with a fact.
FACTS = [
    re.compile(pattern)
    for pattern in (
        r"(\w+) greets (\w+)\.",
        r"(\w+) called (\w+)\.",
        r"(\w+) is how they know (\w+)\.",
        r"(\w+) is an old (\w+)\.",
        r"(\w+) is a fine (\w+)\.",
        r"(\w+) the (\w+)\.",
        r"(\d+) opens chest (\w+)\.",
        r"(\d+) for chest (\w+)\.",
    )
]


class Words:
    """Probabilities of stories of the bundled grammar, from all sentences with all values."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        rows = [
            (kind.share / len(kind.subjects) / len(kind.forms), form, subject, value)
            for kind in KINDS
            for subject in kind.subjects
            for form in kind.forms
            for value in kind.values or [""]
        ]
        texts = [
            " " + form.format(subject=subject, value=value)
            for _, form, subject, value in rows
        ]
        split = tokenizer(texts, add_special_tokens=False).input_ids
        self.tokens = np.full((len(rows), max(map(len, split)) + 1), -1)
        for row, ids in enumerate(split):
            self.tokens[row, : len(ids)] = ids
        self.share = np.array([share for share, *_ in rows])
        self.values = {
            subject: kind.values
            for kind in KINDS
            for subject in kind.subjects
            if kind.values
        }
        self.rows_of = defaultdict(list)
        for row, (_, _, subject, _) in enumerate(rows):
            self.rows_of[subject].append(row)
        self.value = [value for *_, value in rows]
        self.uniform = self.share / np.array(
            [len(self.values.get(subject, " ")) for _, _, subject, _ in rows]
        )

    def given_value(self, subject, seen):
        """The sentences of a subject, and their probabilities once a value of it has occurred."""
        rows = self.rows_of[subject]
        return rows, self.share[rows] * np.array(
            [self.value[row] == seen for row in rows]
        )

    def log_probs(self, ids):
        pieces = [self.tokenizer.decode([token]) for token in ids]
        result = [0.0]
        for position in range(1, len(ids)):
            ends = [at for at in range(position) if pieces[at] in (".", "<s>")]
            begin = ends[-1] + 1
            weights = self.uniform.copy()
            text = "".join(pieces[:begin])
            for seen, subject in {
                m.groups() for pattern in FACTS for m in pattern.finditer(text)
            }:
                if subject in self.values:
                    rows, chances = self.given_value(subject, seen)
                    weights[rows] = chances
            offset = position - begin
            fits = (self.tokens[:, :offset] == ids[begin:position]).all(axis=1)
            before = weights[fits]
            after = before[self.tokens[fits, offset] == ids[position]]
            result.append(math.log(after.sum() / before.sum()))
        return result


# Small stories: Bayes over every hidden assignment of values.


class Assignments:
    """Probabilities of stories of a few sentences: (text with {value}, share, subject or None, values)."""

    def __init__(self, tokenizer, sentences):
        values = {
            subject: pool for _, _, subject, pool in sentences if subject is not None
        }

        def split(text, value):
            text = " " + text.replace("{value}", value)
            return tuple(tokenizer(text, add_special_tokens=False).input_ids)

        worlds = (
            dict(zip(values, chosen, strict=True))
            for chosen in product(*values.values())
        )
        self.worlds = [
            [
                (split(text, world.get(subject, "")), share)
                for text, share, subject, _ in sentences
            ]
            for world in worlds
        ]

    def log_probs(self, ids):
        result, beliefs = [0.0], [{None: 1.0} for _ in self.worlds]
        for token in ids[1:]:
            before = sum(sum(belief.values()) for belief in beliefs)
            beliefs = [
                self._next(world, belief, token)
                for world, belief in zip(self.worlds, beliefs, strict=True)
            ]
            result.append(
                math.log(sum(sum(belief.values()) for belief in beliefs) / before)
            )
        return result

    @staticmethod
    def _next(world, belief, token):
        following = defaultdict(float)
        for state, chance in belief.items():
            if state is not None and state[1] + 1 < len(world[state[0]][0]):
                options = [((state[0], state[1] + 1), 1.0)]
            else:
                options = [
                    ((sentence, 0), share) for sentence, (_, share) in enumerate(world)
                ]
            for (sentence, offset), share in options:
                if world[sentence][0][offset] == token:
                    following[sentence, offset] += chance * share
        return following
