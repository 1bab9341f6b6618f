"""Exact token probabilities of synthetic stories, by enumeration of all sentences with all values.

Shares no code with `ropepatch.data.tiny.tales`.
"""

import math
from collections import defaultdict


class Stories:
    """Stories of these sentences: (text with {value}, share, subject or None, values); the shares sum to 1."""

    def __init__(self, tokenizer, sentences):
        rows = [
            (text.replace("{value}", value), share, subject, value, max(len(values), 1))
            for text, share, subject, values in sentences
            for value in values or [""]
        ]
        texts = [f" {text}" for text, *_ in rows]
        split = tokenizer(texts, add_special_tokens=False).input_ids
        self.starting = defaultdict(list)  # by the first token
        for ids, (_, *row) in zip(split, rows, strict=True):
            self.starting[ids[0]].append((ids, *row))

    def sentences(self, first, known):
        """The sentences from a first token, by their probability once these values have occurred."""
        for ids, share, subject, value, choices in self.starting[first]:
            if subject not in known:
                yield ids, share / choices, subject, value
            elif value == known[subject]:
                yield ids, share, subject, value

    def log_probs(self, ids):
        """The log-probability of each token given those before it; the first is certain."""
        result, known, offset = [0.0], {}, 0
        for token in ids[1:]:
            if offset == 0:
                before, possible = 1.0, list(self.sentences(token, known))
            else:
                possible = [row for row in possible if row[0][offset] == token]
            after = sum(share for _, share, *_ in possible)
            result.append(math.log(after / before))
            before, offset = after, offset + 1
            if len(possible[0][0]) == offset:
                ((_, _, subject, value),) = possible
                known[subject] = value
                offset = 0
        return result
