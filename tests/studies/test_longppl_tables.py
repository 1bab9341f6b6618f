"""The table of LongPPL: known rows give known cells."""

import longppl_tables

PLACE = {"model": "m", "factor": 4, "target": 1024}


def row(nats, key, **more):
    parts = [[nats * 10 + change, 10.0] for change in (0, 1, -1)]
    return PLACE | {"all": parts, "short": parts, "key": key, "digest": "d"} | more


def test_a_long_perplexity_stands_beside_its_scorer_with_its_tokens():
    rows = [
        row(1.0, [[2.0, 2.0]] * 3 if scorer == "yarn" else [], scorer=scorer, part=part, method="ntk")
        for scorer in ("itself", "yarn")
        for part in (2, 4)
    ]
    found = longppl_tables.longppl_table(rows)
    assert "| `ntk` | 2.718 | –, 0 tokens | 2.718 [2.718, 2.718], 6 tokens |" in found
