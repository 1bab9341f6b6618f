"""What was measured, in a sentence, in tables and in figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ropepatch.evaluation.comparisons import FLOOR
from ropepatch.publishing.card.markdown import code, plain, table
from ropepatch.publishing.card.names import shown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ropepatch.evaluation.results import Row
    from ropepatch.publishing.card.extended import Evidence, Extended

MISSING = "–"
TITLES = {"perplexity": "Perplexity and loss", "passkey": "Pass keys", "lm-eval": "lm-eval"}
FIGURES = "evaluation/{}.png"  # within the folder of the checkpoint


def headline(made: Extended) -> str:
    """What came out at the target, a sentence for each task of ours; empty where nothing was measured."""
    return " ".join(filter(None, map(_outcome, made.evidence)))


def _outcome(found: Evidence) -> str:
    if found.last is None:
        return ""
    length, own = found.last
    before = found.row(length, found.before)
    if found.group.task == "passkey":
        base = "" if before is None else f"; the base model finds {_found(before)}"
        return f"Of the pass keys at {length:,} tokens it finds {_keys(own, '95 % interval ')}{base}."
    base = (
        "" if before is None else f"; the base model: {before['nats']:.3f}, perplexity {perplexity(before)}"
    )
    loss = f"{own['nats']:.3f} nats per token{_interval(own)}, perplexity {perplexity(own)}"
    return f"Its loss at {length:,} tokens of {_text(found)} is {loss}{base}."


def sections(made: Extended) -> Iterator[str]:
    """A section for every comparison, and one on the old context."""
    for found in made.evidence:
        task = found.group.task
        yield f"### {TITLES.get(task, plain(task))}"
        yield _method(found)
        yield _scores(found) if task == "lm-eval" else _by_length(found)
        if found.stem in made.captions:
            yield f"![{plain(made.captions[found.stem])}]({FIGURES.format(found.stem)})"
    if old := [*_old_context(made)]:
        yield "### Within the old context"
        yield "\n".join(f"- {line}" for line in old)
    if made.evidence:
        yield "These numbers come from the result files in [evaluation](evaluation)."
    if made.evidence and "evaluation.html" in made.files:
        yield "[evaluation.html](evaluation.html) shows more of them."


def _method(found: Evidence) -> str:
    given, own = found.group.parameters, found.group.results[found.own]
    if found.group.task == "perplexity":
        pieces = f"{given['pieces']:,} pieces of " if "pieces" in given else ""
        tokens = f", {given['tokens']:,} tokens in all" if "tokens" in given else ""
        stride = f", stride {given['stride']:,}" if given.get("stride") else ""
        protocol = f"; protocol {code(given['protocol'])}{stride}" if "protocol" in given else ""
        words = [f"{pieces}{_text(found)}{tokens}{protocol}."]
        words.append(
            "In each cell the perplexity, and below it the loss in nats per token with its 95 % interval, "
            "from drawing whole documents again."
        )
    elif found.group.task == "passkey":
        depths = ", ".join(f"{depth:.0%}" for depth in given.get("depths", ()))
        others = f", among {given['distractors']:,} other keys" if given.get("distractors") else ""
        words = [
            f"{given['trials']:,} keys at each length and depth ({depths}){others}, seed {given['seed']}."
        ]
        words.append("A key is found if greedy decoding would say it to the last token.")
        words.append("Intervals: Wilson's, 95 %.")
    else:
        limit = f", {given['limit']:,} documents of each" if given.get("limit") else ""
        words = [f"Tasks of lm-eval{limit}; value ± standard error."]
    env = [f"{name} {own.env[name]}" for name in ("transformers", "torch") if name in own.env]
    place = [str(own.env[name]).removeprefix("torch.") for name in ("device", "dtype") if name in own.env]
    if env and place:
        words.append(f"Measured on {plain(', '.join([*place, *env]))}.")
    return " ".join(words)


def _by_length(found: Evidence) -> str:
    group = found.group
    cell = _key_cell if group.task == "passkey" else _loss_cell
    columns = [*group.results]
    rows = []
    floor = {} if group.floor is None else {row["length"]: row for row in group.floor.tables["by_length"]}
    for length in group.lengths():
        cells = [_cell(cell, found.row(length, name)) for name in columns]
        cells += [_cell(cell, floor.get(length))] if floor else []
        rows.append([f"{length:,}", *cells])
    return table(["tokens", *_heads(found), *([FLOOR] if floor else [])], rows)


def _heads(found: Evidence) -> list[str]:
    return [
        f"**{plain(name)}** (this checkpoint)" if name == found.own else plain(name)
        for name in found.group.results
    ]


def _scores(found: Evidence) -> str:
    scores = {
        name: {(row["task"], row["metric"]): row for row in rows}
        for name, rows in found.group.rows("scores").items()
    }
    keys = dict.fromkeys(key for rows in scores.values() for key in rows)
    rows = [
        [
            *map(plain, key),
            *(_cell(_score_cell, scores.get(name, {}).get(key)) for name in found.group.results),
        ]
        for key in keys
    ]
    return table(["task", "metric", *_heads(found)], rows)


def _old_context(made: Extended) -> Iterator[str]:
    """What the extension did to what the model could before."""
    for found in made.evidence:
        own, before = (found.row(made.window, name) for name in (found.own, found.before))
        if own is None or before is None or found.group.task == "lm-eval":
            continue
        if found.group.task == "passkey":
            yield f"Pass keys at {made.window:,} tokens: {_found(before)} before, {_found(own)} after."
        else:
            then, now = _nats(before), _nats(own)
            yield f"Loss at {made.window:,} tokens of {_text(found)}: {then} before, {now} after."
    if made.adaptation and (gate := made.adaptation.get("gate")):
        change = (
            f"{gate['base']:.3f} nats per token before, {gate['now']:.3f} after ({gate['increase']:+.2%})"
        )
        verdict = f"{'within' if gate['passed'] else '**beyond**'} the {gate['most']:.2%} allowed"
        watched = f"Loss on the text that was watched during the training{made.folded}"
        yield f"{watched}: {change}, {verdict}."


def _text(found: Evidence) -> str:
    return plain(shown_name(str(found.group.parameters.get("text", "text"))))


def _cell(cell: Callable[[Row], str], row: Row | None) -> str:
    return MISSING if row is None else cell(row)


def _loss_cell(row: Row) -> str:
    return f"{perplexity(row)}<br>{_nats(row)}"


def _key_cell(row: Row) -> str:
    return _keys(row)


def _score_cell(row: Row) -> str:
    if row["value"] is None:
        return MISSING
    error = row.get("stderr")
    return f"{row['value']:.4g}" + (f" ± {error:.2g}" if isinstance(error, int | float) else "")


def _nats(row: Row) -> str:
    return f"{row['nats']:.3f}{_interval(row, '')}"


def _interval(row: Row, level: str = "95 % interval ") -> str:
    low, high = row.get("interval") or (None, None)
    return "" if low is None or high is None else f" ({level}{low:.3f} to {high:.3f})"


def _found(row: Row) -> str:
    return f"{row['correct']:,} of {row['n']:,}"


def _keys(row: Row, before: str = "") -> str:
    low, high = row["interval"]
    return f"{_found(row)} ({before}{low:.0%} to {high:.0%})"


def perplexity(row: Row) -> str:
    """A perplexity as it is read: 1.702, 29.41, 1,734, 1.3e+06; ∞ where no number holds it."""
    value = row["perplexity"]
    if value is None:
        return "∞"
    digits = 3 if value < 10 else 2 if value < 100 else 0
    return f"{value:,.{digits}f}" if value < 1e4 else f"{value:.1e}"
