"""A fit that takes no time."""

from ropepatch.extension.planning import plan_method
from ropepatch.fitting.fitting import Fitted
from ropepatch.model.checkpoint import Checkpoint

DIVISORS = tuple(1.0 + pair / 4 for pair in range(16))


def fake_fits(monkeypatch) -> list[dict]:
    """Let every fit return `DIVISORS`, and collect the arguments of each call in the returned list."""
    calls = []

    def fit(model, **options):
        calls.append({"model": model} | options)
        scaling = {"method": "custom", "divisors": DIVISORS, "attention_factor": 1.1}
        record = {"start": "yarn", "text": str(options["text"])}
        source = model if isinstance(model, Checkpoint) else Checkpoint.find(model)
        return Fitted(plan_method(source, scaling.pop("method"), scaling, options["to"]), record)

    monkeypatch.setattr("ropepatch.fitting.fitting.fit", fit)
    return calls
