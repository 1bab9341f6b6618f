"""Public configs, and values that fit no key of a file.

public_configs.json contains the keys of published config.json files that RoPE depends on. Its LongRoPE
factors are shortened, because no check uses them. Two more configs are of extended models.
"""

import json
import random
from copy import deepcopy
from pathlib import Path

PUBLISHED = json.loads(
    (Path(__file__).parent / "public_configs.json").read_text(encoding="utf-8")
)
# Numbers beyond every float, texts that no terminal shows, and nearly valid values.
VALUES = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        3,
        2**31,
        2**62,
        -(10**400),
        10**400,
        0.5,
        1e308,
        -1e-300,
        5e-324,
    ),
    *(
        "",
        "x",
        "0",
        "1x",
        "-1k",
        "1e-5",
        "true",
        "yarn",
        "32k",
        "equal",
        "a\nb",
        "\x1b[2J",
        "\u202eback",
    ),
    *("x" * 5000, "\ud800", "NaN", [1.0] * 1000, {"__float__": "NaN"}, {"\x1b[31m": 1}),
    *(
        [],
        [[]],
        {},
        [None],
        [1, "x"],
        ["yarn"],
        {"name": "yarn"},
        {"task": "perplexity"},
        {"a": {"b": [1]}},
    ),
]


def places(content, path=()):
    """Yield the JSON pointers of all values in a content."""
    yield path
    inner = content.items() if isinstance(content, dict) else ()
    inner = enumerate(content[:2]) if isinstance(content, list | tuple) else inner
    for key, value in inner:
        yield from places(value, (*path, key))


def damaged(content, path, value):
    """A copy of a content with another value at a JSON pointer; `...` removes the key."""
    if not path:
        return None if value is ... else value
    content = deepcopy(content)
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return content


def damages(content, keys, count, seed):
    """Yield a number of contents, each with one value or one of the further keys damaged."""
    draw, inside = random.Random(seed), [*places(content)]
    pointers = [*inside, *((key,) for key in sorted(keys - {*content}))]
    for _ in range(count):
        path = draw.choice(pointers)
        yield damaged(
            content,
            path,
            draw.choice([*VALUES, *[...] * 3] if path in inside else VALUES),
        )
