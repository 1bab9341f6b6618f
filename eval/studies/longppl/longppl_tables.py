"""The tables of `longppl_study.py` and `long_ce_study.py`, from their files; docs/tables.py writes them."""

from __future__ import annotations

from longppl_study import OWN, YARN
from study import Row, averaged, by_case, excess, signed

from ropepatch.evaluation.intervals import Mean
from ropepatch.report.printers import markdown_rows
from ropepatch.report.tables import perplexity_text


def long_perplexity(row: Row) -> str:
    """exp of the mean loss of the key tokens with its interval, and how many they are."""
    key = Mean.of(row["key"])
    if not key.clusters:
        return "–, 0 tokens"
    low, high = key.interval()
    between = "" if key.missing else f" [{perplexity_text(low)}, {perplexity_text(high)}]"
    return f"{perplexity_text(key.value)}{between}, {key.weight:,.0f} tokens"


def longppl_table(rows: list[Row]) -> str:
    """For each checkpoint, every scaling by every scorer, with the paper's stride of the short window."""
    blocks = []
    for (model, factor, target), here in by_case(rows).items():
        paper = [row for row in here if row["part"] == 4]
        scorers = list(dict.fromkeys(row["scorer"] for row in paper))
        heads = ["scaling", "perplexity", *(f"LongPPL, tokens chosen by {scorer}" for scorer in scorers)]
        heads += [f"{head}, moved by L/2" for head in heads[2:4]]
        lines = []
        for method in dict.fromkeys(row["method"] for row in paper):
            of = {(row["scorer"], row["part"]): row for row in here if row["method"] == method}
            cells = [long_perplexity(of[scorer, 4]) for scorer in scorers]
            cells += [long_perplexity(of[scorer, 2]) for scorer in (OWN, YARN)]
            lines.append([f"`{method}`", perplexity_text(Mean.of(of[OWN, 4]["all"]).value), *cells])
        title = f"**{model}, {target // factor:,} to {target:,} tokens**, {len(paper[0]['all'])} documents"
        blocks.append(f"{title}\n\n{markdown_rows(heads, lines)}")
    return "\n\n".join(blocks)


def long_ce_table(rows: list[Row]) -> str:
    """For each checkpoint the trainings, and what LongCE changes in the same one, paired by document."""
    heads = ["loss", "LongCE", "perplexity", "first L", "LongPPL", "LongCE less plain, nats, by seed: all"]
    heads += ["first L", "key tokens"]
    spans = ("all", "short", "key")
    blocks = []
    for (model, factor, target), here in by_case(rows).items():
        lines = []
        for loss, weighed in dict.fromkeys((row["loss"], row.get("long_ce")) for row in here):
            fits, plain = (
                [row for row in here if (row["loss"], row.get("long_ce")) == (loss, which)]
                for which in (weighed, False)
            )
            mean = averaged(fits, *spans)
            texts = [perplexity_text(Mean.of(mean[span]).value) for span in spans[:2]]
            changed = ["–"] * len(spans)
            if weighed:
                pairs = [(row, other) for row in fits for other in plain if row["seed"] == other["seed"]]
                changed = ["; ".join(signed(excess(*pair, span)) for pair in pairs) for span in spans]
            named = "–" if weighed is None else "yes" if weighed else "no"
            lines.append([loss, named, *texts, long_perplexity(mean), *changed])
        title = f"**{model}, {target // factor:,} to {target:,} tokens**"
        blocks.append(f"{title}\n\n{markdown_rows(heads, lines)}")
    return "\n\n".join(blocks)
