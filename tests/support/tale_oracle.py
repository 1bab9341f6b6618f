"""What a reader of a tale can know, by brute force from how the process is defined.

Shares no code with `ropepatch.data.tiny.tales`. Every `log_probs` gives the log-probability of each token
of a tale given the ``window`` tokens before it (all of them if None), as a list; the first token is
certain.
"""

import math
import re
from collections import defaultdict
from functools import cache
from itertools import product

import numpy as np

from ropepatch.data.tiny.grammar import KINDS


def visible(position: int, window: int | None) -> slice:
    return slice(0 if window is None else max(0, position - window), position)


# Tales: from the words.

# The value, or what the window has left of it, and whose it is: the second half of every fact sentence.
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
    """Reads tales of the bundled grammar: every sentence with every value, and how probable each is."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        rows = [
            (kind.share / len(kind.subjects) / len(kind.forms), form, subject, value)
            for kind in KINDS
            for subject in kind.subjects
            for form in kind.forms
            for value in kind.values or [""]
        ]
        texts = [" " + form.format(subject=subject, value=value) for _, form, subject, value in rows]
        split = tokenizer(texts, add_special_tokens=False).input_ids
        self.tokens = np.full((len(rows), max(map(len, split)) + 1), -1)
        for row, ids in enumerate(split):
            self.tokens[row, : len(ids)] = ids
        self.share = np.array([share for share, *_ in rows])
        self.values = {subject: kind.values for kind in KINDS for subject in kind.subjects if kind.values}
        self.rows_of = defaultdict(list)
        for row, (_, _, subject, _) in enumerate(rows):
            self.rows_of[subject].append(row)
        self.value = [value for *_, value in rows]
        self.uniform = self.share / np.array(
            [len(self.values.get(subject, " ")) for _, _, subject, _ in rows]
        )

    @cache  # noqa: B019  # an oracle lives as long as its test
    def told(self, subject, seen):
        """Of the subject's sentences, how probable each value is for who has seen this much of it."""
        rows = self.rows_of[subject]
        values = [self.value[row] for row in rows]
        fits = np.array([value.endswith(seen) if seen.isdigit() else value == seen for value in values])
        possible = len({self.value[row] for row, fit in zip(rows, fits, strict=True) if fit})
        return rows, self.share[rows] * fits / possible

    def log_probs(self, ids, window=None):
        pieces = [self.tokenizer.decode([token]) for token in ids]
        result = [0.0]
        for position in range(1, len(ids)):
            span = visible(position, window)
            ends = [at for at in range(span.start, position) if pieces[at] in (".", "<s>")]
            begin = ends[-1] + 1
            weights = self.uniform.copy()
            text = "".join(pieces[span.start : begin])
            for seen, subject in {m.groups() for pattern in FACTS for m in pattern.finditer(text)}:
                if subject in self.values:
                    rows, chances = self.told(subject, seen)
                    weights[rows] = chances
            offset = position - begin
            fits = (self.tokens[:, :offset] == ids[begin:position]).all(axis=1)
            before = weights[fits]
            after = before[self.tokens[fits, offset] == ids[position]]
            result.append(math.log(after.sum() / before.sum()))
        return result


# Tales: Bayes over every hidden assignment of values, and every place where the window may cut a sentence.


class Assignments:
    """Reads tales of a few sentences, given as (text with {value}, share, subject or None, values)."""

    def __init__(self, tokenizer, sentences):
        values = {subject: pool for _, _, subject, pool in sentences if subject is not None}

        def split(text, value):
            text = " " + text.replace("{value}", value)
            return tuple(tokenizer(text, add_special_tokens=False).input_ids)

        worlds = (dict(zip(values, chosen, strict=True)) for chosen in product(*values.values()))
        self.worlds = [
            [(split(text, world.get(subject, "")), share) for text, share, subject, _ in sentences]
            for world in worlds
        ]

    def log_probs(self, ids, window=None):
        # How probable it is that a sentence begins at an index; every world has the same lengths.
        begins = [0.0, 1.0]
        for index in range(2, len(ids)):
            begins.append(sum(s * begins[index - len(t)] for t, s in self.worlds[0] if index - len(t) >= 1))
        result = [0.0]
        for position in range(1, len(ids)):
            span = visible(position, window)
            before = after = 0.0
            for world in self.worlds:
                reading = self._first(world, ids, span.start, begins)
                for index in range(span.start + 1, position):
                    reading = self._next(world, reading, ids[index])
                before += sum(reading.values())
                after += sum(self._next(world, reading, ids[position]).values())
            result.append(math.log(after / before))
        return result

    @staticmethod
    def _first(world, ids, start, begins):
        """How probable it is that the first visible token stands at {(sentence, offset)}."""
        if start == 0:
            return {None: 1.0}
        return {
            (sentence, offset): begins[start - offset] * share
            for sentence, (tokens, share) in enumerate(world)
            for offset, token in enumerate(tokens)
            if token == ids[start] and start - offset >= 1
        }

    @staticmethod
    def _next(world, reading, token):
        following = defaultdict(float)
        for state, chance in reading.items():
            if state is not None and state[1] + 1 < len(world[state[0]][0]):
                options = [((state[0], state[1] + 1), 1.0)]
            else:
                options = [((sentence, 0), share) for sentence, (_, share) in enumerate(world)]
            for (sentence, offset), share in options:
                if world[sentence][0][offset] == token:
                    following[sentence, offset] += chance * share
        return following
