"""Tables of measurements in the documents, from eval/results."""

import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from study import by, counted, share, table

from ropepatch import METHODS
from ropepatch.report.printers import markdown_rows

RESULTS = Path(__file__).parents[1] / "eval" / "results"


@cache
def result(name: str) -> Any:
    """A file of eval/results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def tiny_checkpoint() -> str:
    """The measurements on the card of the bundled checkpoint."""
    (record,) = result("tiny-checkpoint")["rows"]
    tales, depths = record["tales"], list(record["passkey"]["256"])
    lines = [
        f"- Loss on {tales['tales']} held-out stories of {tales['tokens']} tokens: {tales['loss']:.4f} "
        f"nats/token, {tales['over_floor']:.1%} above the floor of {tales['floor']:.4f} (standard "
        f"error of the difference {tales['excess_standard_error']:.4f}); a model that forgets every "
        f"earlier sentence: {tales['forgetful']:.4f}",
        "- The least possible loss over the second half of stories of 2048 tokens: "
        + ", ".join(
            f"{nats:.3f} with the last {window} tokens"
            for window, nats in record["worth"].items()
        ),
        "- Passkey accuracy, by depth of the needle:",
        "",
    ]
    rows = [
        (length, *(f"{cell['correct']}/{cell['n']}" for cell in cells.values()))
        for length, cells in record["passkey"].items()
    ]
    return "\n".join([*lines, markdown_rows(("tokens", *depths), rows)])


def babyllama() -> str:
    """Perplexity by length under every scaling."""
    results = result("babyllama-4x")
    first = results[0]
    title = (
        f"Perplexity of the first tokens of {first['parameters']['pieces']} windows of "
        f"{first['parameters']['lengths'][-1]} tokens "
        f"({first['env']['dtype'].removeprefix('torch.')}, {first['env']['device']}):"
    )
    by_length = (
        [
            row
            for row in one["rows"]
            if row["measure"] == "loss" and [*row["at"]] == ["length"]
        ]
        for one in results
    )
    rows = [
        [
            str(same[0]["at"]["length"]),
            *(f"{math.exp(row['value']):.2f}" for row in same),
        ]
        for same in zip(*by_length, strict=True)
    ]
    return f"{title}\n\n{markdown_rows(['tokens', *(one['label'] for one in results)], rows)}"


# Training-free and trained

TRAINED = {  # by run: method, and the training sequences
    "yarn": "`yarn`, both lengths",
    "linear": "`linear`, both lengths",
    "ntk": "`ntk`, both lengths",
    "short": "`yarn`, sequences of 256",
    "true": "`yarn`, sequences of 2048",
    "true, time of short": "`yarn`, sequences of 2048, in the time of sequences of 256",
}
LAST = "1024 to 2048"


def training_free() -> str:
    """All methods on tiny at all factors."""
    rows = result("tiny-training-free")["rows"]
    given = {row["method"]: row["given"] for row in rows if row.get("given")}
    lists = [
        name for name, kind in METHODS.items() if kind.required() and name not in given
    ]
    tables = [
        f"**{factor} x**\n\n{_methods(factor, [name for name in METHODS if name not in lists])}"
        for (factor,) in by(rows, "factor")
    ]
    parameters = ", ".join(f"`{name}` with {values}" for name, values in given.items())
    absent = ", ".join(f"`{name}`" for name in lists)
    notes = (
        f"Parameters that are not defaults: {parameters}. "
        f"Not measured, because a search has to find their factors: {absent}."
    )
    return "\n\n".join([*tables, notes])


def _methods(factor: int, names: Iterable[str]) -> str:
    """Loss by positions and passkey accuracy by length, one method per row, the floors below."""
    rows = {
        row["method"]: row
        for row in result("tiny-training-free")["rows"]
        if row["factor"] == factor
    }
    floors = {name: row for name, row in rows.items() if "floor" in name}
    columns: dict[str, Any] = {"": lambda name: name if name in floors else f"`{name}`"}
    for span in rows["none"]["nats"]:
        columns[f"loss, {span}"] = lambda name, span=span: (
            _nats(*rows[name]["nats"][span]) if name in rows else "not yet measured"
        )
    for length in rows["none"]["keys"]:
        columns[f"passkey accuracy at {length}"] = lambda name, length=length: (
            ""
            if name in floors or name not in rows
            else counted(share(*rows[name]["keys"][length]))
        )
    return table([*names, *floors], columns)


def _nats(mean: float, reach: float) -> str:
    return f"{mean:.2f} ± {math.ceil(100 * reach) / 100:.2f}"


def trained() -> str:
    """Loss and passkey accuracy after training, by method and training sequences."""
    runs = {row["run"]: row for row in result("adaptation")["rows"]}
    floor = runs["floor"]["nats"]
    names = TRAINED | {
        f"{name}, not trained": f"`{name}`, not trained" for name in ("none", "yarn")
    }
    columns: dict[str, Any] = {"": lambda run: names.get(run, run)}
    for span in floor:
        if span != "0 to 2048":
            columns[f"loss, {span}"] = lambda run, span=span: _above(
                runs[run]["nats"][span], floor[span]
            )
    columns |= {
        "passkey accuracy at 2048": lambda run: _keys(runs[run]),
        "short-context loss": lambda run: (
            f"{runs[run]['short_context']['increase']:+.1%}" if run in TRAINED else ""
        ),
        "tokens": lambda run: (
            ""
            if run == "floor"
            else f"{runs[run]['tokens'] / 1e6:.2f} M"
            if run in TRAINED
            else "0"
        ),
    }
    stories = runs["babyllama"]
    base = stories["base"]
    text = (
        f"babyllama-361 on {stories['pieces']} held-out windows of 2048 tokens, trained on other stories "
        f"with the same settings: loss {stories['adapted'][LAST]:.3f} nats/token at positions 1024 to 2048, "
        f"{stories['training-free'][LAST]:.3f} without training. The base model: {base['0 to 256']:.3f} on "
        f"the first 256 tokens of these windows, {base['1024 to 2048, 256 tokens at a time']:.3f} on the "
        "text of positions 1024 to 2048, 256 tokens at a time."
    )
    return f"{table([*names, 'floor'], columns)}\n\n{text}"


def _above(nats: float, floor: float) -> str:
    return f"{nats:.3f}" if nats == floor else f"{nats:.3f} ({nats / floor - 1:.1%})"


def trained_in_short() -> str:
    """Before, scaled, trained: the table of the front page."""
    rows = {row["run"]: row for row in result("adaptation")["rows"]}
    runs = {
        "before": rows["none, not trained"],
        "scaled, not trained": rows["yarn, not trained"],
        "trained": rows["yarn"],
        "floor": rows["floor"],
    }
    columns = {
        "`tiny`, 256 to 2048, YaRN": lambda one: one[0],
        "loss, 0 to 256": lambda one: f"{one[1]['nats']['0 to 256']:.3f}",
        f"loss, {LAST}": lambda one: f"{one[1]['nats'][LAST]:.3f}",
        "passkey accuracy at 2048": lambda one: _keys(one[1]),
    }
    start = result("adaptation")["recorded"][rows["yarn"]["recorded"]]
    note = (
        "`tiny` (1,967,808 parameters); losses in nats/token over 24 held-out stories, n = 100 passkeys, "
        "95 % intervals; one training; "
        f"{start['env']['dtype'].removeprefix('torch.')} on a {start['env']['device'].upper()}, "
        f"{start['date']}; `python eval/studies/adaptation/adaptation.py --work DIR` at cdb1cd37; "
        "`eval/results/adaptation.json`."
    )
    return f"{table(runs.items(), columns)}\n\n{note}"


def _keys(run: dict[str, Any]) -> str:
    """Passkey accuracy at the target length, with the interval."""
    if "keys" not in run:
        return ""
    found = share(*run["keys"]["2048"])
    low, high = found.interval()
    return f"{found.value:.0%} ({low:.0%} to {high:.0%})"


# Benchmarks

Rows = Iterable[Sequence[str]]


def costs() -> str:
    """What starting, patching and training take."""
    return _costs([*_starting(), *_patching(), *_training()])


def costs_in_short() -> str:
    """The first row of each benchmark."""
    makers = _starting(), _patching(), _training()
    return _costs([next(iter(rows)) for rows in makers])


def _costs(rows: Rows) -> str:
    machine = result("start_cost")["environment"]
    heads = (
        f"{machine['cores']} cores, {machine['cpu']}",
        "median (quartiles)",
        "ratio (quartiles)",
    )
    return markdown_rows(heads, rows)


def _starting() -> Rows:
    start = result("start_cost")
    for name, what, baseline in (
        ("methods", "`ropepatch methods`", "import torch"),
        ("plan tiny --to 2q", "a wrong length, name or option", "import torch"),
        (
            "plan tiny --to 2k",
            "`ropepatch plan`",
            "import torch, transformers.modeling_utils",
        ),
    ):
        yield (
            what,
            f"{_spread(start['cpu_seconds'][name], '.2f')} s of CPU time",
            f"{_spread(start['ratio'][f'{name} / {baseline}'], '.2f')} x `{baseline}`",
        )


def _patching() -> Rows:
    patch = result("patch_overhead")
    for one in patch["forward"]:
        ratio = _spread(one["ratios"]["patched / native"], ".3f")
        what = f"forward of {one['tokens']} tokens, {one['mode']}"
        yield what, "", f"{ratio} x the same scaling in stock transformers"
    yield "`patch()`", f"{_spread(patch['patch_milliseconds']['patch'], '.1f')} ms", ""


def _training() -> Rows:
    training = result("train_cost")
    speed, memory = training["speed"], training["memory"]
    yield (
        f"a training step of {training['tokens']} tokens, 32k vocabulary",
        f"{_spread(speed['tokens_per_second']['ours'], '.0f')} tokens/s, {memory['ours']['net_mib']:.0f} MiB",
        f"{_spread(speed['ours / stock'], '.2f')} x the speed and "
        f"{memory['ours / stock']:.2f} x the memory of one with all logits",
    )


def _spread(figure: dict[str, float], form: str) -> str:
    return f"{figure['median']:{form}} ({figure['q1']:{form}} to {figure['q3']:{form}})"
