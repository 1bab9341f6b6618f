"""Tables of guides with a few rows of longer ones."""

from pages_tables import Outcome, answers_of, found, kinds_of, mean
from registries import PRESETS, plan_of

from ropepatch.evaluation.results import BASELINE
from ropepatch.report.printers import markdown_rows

METHODS = {
    BASELINE: "original model",
    "linear": "`linear` (position interpolation)",
    **{name: f"`{name}`" for name in ("ntk", "llama3", "yarn", "dca")},
}
MODELS = (
    *(
        "Qwen/Qwen3-8B",
        "Qwen/Qwen2.5-7B-Instruct",
        "meta-llama/Llama-3.1-8B",
        "mistralai/Mistral-7B-v0.3",
    ),
    *("google/gemma-3-4b-it", "openai/gpt-oss-20b", "HuggingFaceTB/SmolLM3-3B"),
)


def accuracy(outcome: Outcome) -> str:
    """Retrieval accuracy by kind, at the original length and at the target."""
    places = [
        (kind, n)
        for kind in kinds_of(outcome.first)
        for n in (outcome.window, outcome.target)
    ]
    rows = []
    for method, title in METHODS.items():
        cells = []
        for kind, length in places:
            share = mean(
                outcome.methods[method], answers_of(found, kind, length), share=True
            )
            low, high = share.interval()
            cells.append(f"{share.value:.0%} [{low:.0%}, {high:.0%}]")
        rows.append((title, *cells))
    return markdown_rows(("", *(f"`{kind}`, {n:,}" for kind, n in places)), rows)


def models() -> str:
    """Which engines apply a plan by YaRN, of models that many use."""
    presets, rows, engines = {one["model"]: one for one in PRESETS}, [], list[str]()
    for model in MODELS:
        plan = plan_of(presets[model])
        lengths = (
            f"{plan.config.rope.original_max_position_embeddings:,} → {plan.target:,}"
        )
        rope_type = f"`{plan.rope_parameters['rope_type']}`"
        rows.append(
            (f"`{model}`", lengths, rope_type, *(line.reads for line in plan.engines))
        )
        engines = [line.engine for line in plan.engines]
    return markdown_rows(("model", "context length", "`rope_type`", *engines), rows)
