"""Tables of the documents that say what was measured, from eval/results."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import robustness
from retrieval_speed import EACH, ONCE
from study import counted

import ropepatch
from ropepatch import METHODS
from ropepatch.evaluation.intervals import Mean
from ropepatch.report.printers import markdown_rows

RESULTS = Path(__file__).parents[1] / "eval" / "results"


def result(name: str) -> Any:
    """A file of eval/results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def demo() -> str:
    """Losses and answers by length, before and after, as `ropepatch demo` measures them."""
    heads = {"baseline": "before", "yarn": "after", "floor": "floor"}
    tables = []
    for measure, words in (("loss", "nats per token, first"), ("found", "passkeys found, of 20 at")):
        cells = {
            (result.label, row.length): f"{row.text} ({row.interval})" if row.interval else row.text
            for result in ropepatch.read_results(RESULTS / "demo")
            for row in result.rows
            if row.measure == measure and row.at.keys() == {"length"}
        }
        labels = [label for label in heads if any(label == known for known, _ in cells)]
        lengths = sorted({length for _, length in cells})
        rows = [(f"{length:,} tokens", *(cells[label, length] for label in labels)) for length in lengths]
        tables.append(markdown_rows((words, *(heads[label] for label in labels)), rows))
    return "\n\n".join(tables)


def tiny_checkpoint() -> str:
    """What the card of the bundled checkpoint says of it."""
    record = result("tiny-checkpoint")
    tales, depths = record["tales"], list(record["passkey"]["256"])
    lines = [
        f"- Loss on {tales['tales']} tales of {tales['tokens']} tokens: {tales['loss']:.4f} nats per token, "
        f"{tales['over_floor']:.1%} above the floor of {tales['floor']:.4f} (standard error of the "
        f"difference {tales['excess_standard_error']:.4f}); a reader who forgets every sentence: "
        f"{tales['forgetful']:.4f}",
        "- What a window is worth: over the second half of tales of 2048 tokens a perfect reader pays "
        + ", ".join(f"{nats:.3f} seeing {window} tokens" for window, nats in record["worth"].items()),
        "- Passkeys retrieved, by depth of the key:",
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
        [row for row in one["rows"] if row["measure"] == "loss" and [*row["at"]] == ["length"]]
        for one in results
    )
    rows = [
        [str(same[0]["at"]["length"]), *(f"{math.exp(row['value']):.2f}" for row in same)]
        for same in zip(*by_length, strict=True)
    ]
    return f"{title}\n\n{markdown_rows(['tokens', *(one['label'] for one in results)], rows)}"


# Training-free and adapted

CHOSEN = ("none", "linear", "ntk", "ntk-by-parts", "llama3", "yarn")
ADAPTED = {  # by run: method, and the rows it trains on
    "yarn": "`yarn`, both",
    "linear": "`linear`, both",
    "ntk": "`ntk`, both",
    "short": "`yarn`, rows of 256",
    "true": "`yarn`, rows of 2048",
    "true, time of short": "`yarn`, rows of 2048, the time of rows of 256",
}
LAST = "1024 to 2048"


def training_free() -> str:
    """Every method on tiny at every factor."""
    record = result("tiny-training-free")
    lists = [name for name, kind in METHODS.items() if kind.required()]
    absent = ", ".join(f"`{name}`" for name in lists if name not in record["given"])
    given = ", ".join(f"`{name}` with {values}" for name, values in record["given"].items())
    names = [name for name in METHODS if name not in lists or name in record["given"]]
    tables = [f"**{factor} x**\n\n{_methods(record, factor, names)}" for factor in record["results"]]
    notes = f"Given parameters: {given}. Not measured, because they need lists that a search finds: {absent}."
    return "\n\n".join([*tables, notes])


def training_free_chosen() -> str:
    """Some methods at four times the window."""
    return _methods(result("tiny-training-free"), "4", CHOSEN)


def _methods(record: dict[str, Any], factor: str, names: Iterable[str]) -> str:
    """Loss by stretch and keys by length, one method per row, the floors below."""
    methods, floors = record["results"][factor], record["floors"][factor]
    lengths = list(methods["none"]["passkey"])
    heads = [*(f"nats {span}" for span in floors["floor"]), *(f"keys at {length}" for length in lengths)]
    rows = []
    for name in names:
        if name in methods:
            nats = [_nats(*methods[name]["nats"][span]) for span in floors["floor"]]
            cells = [(cell["correct"], cell["n"]) for cell in methods[name]["passkey"].values()]
            rows.append([f"`{name}`", *nats, *(counted(_found(*cell)) for cell in cells)])
        else:
            rows.append([f"`{name}`", "not yet measured", *[""] * (len(heads) - 1)])
    for name, losses in floors.items():
        rows.append([name, *(_nats(*loss) for loss in losses.values()), *[""] * len(lengths)])
    return markdown_rows(["", *heads], rows)


def _nats(mean: float, reach: float) -> str:
    return f"{mean:.2f} ± {math.ceil(100 * reach) / 100:.2f}"


def _found(correct: int, n: int) -> Mean:
    """The share of passkeys found, each in a haystack of its own."""
    return Mean.of([(1, 1)] * correct + [(0, 1)] * (n - correct), share=True)


def adaptation() -> str:
    """What training reaches, by method and by the rows it trains on."""
    record = result("adaptation")
    runs, floor = record["runs"], record["floor"]
    spans = [span for span in floor if span != "0 to 2048"]

    def cells(name: str, run: dict[str, Any], *rest: str) -> list[str]:
        above = [f"{run['nats'][span]:.3f} ({run['nats'][span] / floor[span] - 1:.1%})" for span in spans]
        return [name, *above, _keys(run), *rest]

    rows = [
        cells(name, runs[key], f"{runs[key]['gate']['increase']:+.1%}", f"{runs[key]['tokens'] / 1e6:.2f} M")
        for key, name in ADAPTED.items()
    ]
    rows += [cells(f"`{name}`, not trained", run, "", "0") for name, run in record["training_free"].items()]
    rows.append(["floor", *(f"{floor[span]:.3f}" for span in spans), "", "", ""])
    stories = runs["babyllama"]
    base = stories["base"]
    text = (
        f"babyllama-361 on {stories['windows']} held-out windows of 2048 tokens, trained on other stories "
        f"by the same settings: {stories['adapted'][LAST]:.3f} nats per token at 1024 to 2048, training-free "
        f"{stories['training-free'][LAST]:.3f}. The base model within its context: {base['0 to 256']:.3f} on "
        f"the first 256 tokens of these windows, {base['1024 to 2048, 256 tokens at a time']:.3f} on the "
        "text of 1024 to 2048, 256 tokens at a time."
    )
    heads = ["", *(f"nats {span}" for span in spans), "keys at 2048", "short context", "tokens"]
    return f"{markdown_rows(heads, rows)}\n\n{text}"


def adaptation_in_short() -> str:
    """Before, scaled, trained: the table of the front page."""
    record = result("adaptation")
    free, floor = record["training_free"], record["floor"]
    runs = {"before": free["none"], "scaled, not trained": free["yarn"], "trained": record["runs"]["yarn"]}
    rows = [
        (name, *(f"{run['nats'][span]:.3f}" for span in ("0 to 256", LAST)), _keys(run))
        for name, run in runs.items()
    ]
    rows.append(("floor", f"{floor['0 to 256']:.3f}", f"{floor[LAST]:.3f}", ""))
    heads = ("`tiny`, 256 to 2048, YaRN", "nats 0 to 256", f"nats {LAST}", "keys at 2048")
    return markdown_rows(heads, rows)


def _keys(run: dict[str, Any]) -> str:
    """The share of the passkeys found at the target, with the interval."""
    share = _found(*run["keys"]["2048"])
    low, high = share.interval()
    return f"{share.value:.0%} ({low:.0%} to {high:.0%})"


# Benchmarks


def costs() -> str:
    """What extending, patching, measuring and training take."""
    extend = result("extend_cost")
    rows = [*_starting(extend), *_patching(), *_perplexity(), *_retrieval(), *_training()]
    machine = extend["environment"]
    heads = f"{machine['cores']} cores, {machine['cpu']}", "median (quartiles)", "ratio (quartiles)"
    return markdown_rows(heads, rows)


Rows = Iterable[Sequence[str]]


def _starting(extend: dict[str, Any]) -> Rows:
    run, files = extend["runs"]["extend"], extend["checkpoint"]
    ratio = extend["ratio_of_seconds"]["extend / imports"]
    yield (
        f"`extend --link-weights`, {files['apparent_gb']:.0f} GB in {files['files']} files",
        f"{_spread(run['seconds'], '.1f')} s, {run['peak_mb']['median']:.0f} MB",
        f"{_spread(ratio, '.2f')} x importing torch and transformers",
    )
    start = result("start_cost")
    for name, what, baseline in (
        ("methods", "`ropepatch methods`", "import torch"),
        ("plan tiny --to 2q", "a wrong length, name or option", "import torch"),
        ("plan tiny --to 2k", "`ropepatch plan`", "import torch, transformers.modeling_utils"),
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


def _perplexity() -> Rows:
    reading = result("perplexity_speed")
    for name, what, each in (
        ("curve", f"perplexity at {len(reading['curve']['lengths'])} lengths to 16 x the context", "length"),
        ("sliding", f"perplexity, {reading['sliding']['protocol'].replace('=', ' ')}", "window"),
    ):
        seconds, ratio = reading[name]["seconds"]["ours"], reading[name]["published / ours"]
        yield (
            what,
            f"{_spread(seconds, '.2f')} s",
            f"{_spread(ratio, '.2f')} x faster than one pass per {each}",
        )
    memory = reading["memory"]["one-pass"]
    yield (
        "memory of perplexity at 32k tokens, 32k vocabulary",
        f"{memory['ours']['net_mib']:.0f} MiB",
        f"{memory['ours / published']:.3f} x that with all logits",
    )


def _retrieval() -> Rows:
    asking = result("retrieval_speed")
    for one in asking["timed"]:
        yield (
            f"retrieval on {one['model']}, {one['answers']} answers at {len(one['lengths'])} lengths to "
            f"{one['lengths'][-1]} tokens",
            f"{_spread(one['seconds'][ONCE], '.1f')} s",
            f"{_spread(one[f'{EACH} / {ONCE}'], '.1f')} x faster than one prompt for each answer",
        )
    for one in asking["counted"]:
        yield (
            f"retrieval to {one['lengths'][-1]} tokens, {one['haystacks']} haystacks, "
            f"{one['keys']} keys of each of {len(one['kinds'])} kinds",
            f"{one['tokens'][ONCE]['all'] / 1e6:.2f} M tokens read",
            f"{one[f'tokens: {EACH} / {ONCE}']['all']:.0f} x fewer than by one prompt for each answer",
        )


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


def attacks() -> str:
    """What damaged files and kills did."""
    heads, *rows = robustness.rows(result("robustness"))
    return markdown_rows(heads, rows)
