"""An extended checkpoint as its files describe it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ropepatch.attention import REMAPPINGS
from ropepatch.evaluation.results import Comparison, Result, as_read, comparisons
from ropepatch.evaluation.tasks import TASKS
from ropepatch.extension.record import Record
from ropepatch.model.checkpoint import ADAPTER, HUB_ID
from ropepatch.publishing.loading import call, quoted
from ropepatch.scaling import METHODS

# Keys that identify a scaling in records and results
SAME = (
    "method",
    "factor",
    "parameters",
    "target",
)


class Evidence(NamedTuple):
    """One comparison with a result of this checkpoint."""

    group: Comparison
    own: str  # the name of this checkpoint's result
    before: str | None  # the name of the base model's result, if there is one
    stem: str  # the name of its figure's file, without the suffix


@dataclass(frozen=True)
class Extended:
    """The data of a card.

    Args:
        name: A Hub id, or the name of the folder.
        record: The content of ropepatch.json.
        results: The evaluation results.
        files: The names of the files in its folder.
        weights: The fingerprint of its weights; None for an adapter.
        branch: The branch of the Hub id to load it from; None for main.
        loader: The class of transformers that loads it; empty if none does.
        needs_trust: Whether it needs trust_remote_code for that.
    """

    name: str
    record: Record
    results: Sequence[Result] = ()
    files: frozenset[str] = frozenset()
    weights: str | None = None
    branch: str | None = None
    loader: str = "AutoModelForCausalLM"
    needs_trust: bool = False

    @property
    def short_name(self) -> str:
        """The name without its owner."""
        return self.name.rpartition("/")[2]

    @property
    def base_id(self) -> str | None:
        """The Hub id of the base model; None for a local one."""
        on_hub = self.record.revision is not None and HUB_ID.fullmatch(
            self.record.model
        )
        return self.record.model if on_hub else None

    def loaded_by(self, function: str) -> str:
        """Return the call that loads it."""
        return call(
            f"{function}.from_pretrained",
            self.name,
            branch=self.branch,
            code=self.needs_trust,
        )

    @property
    def adapter_loading(self) -> str:
        """The call that loads it as an adapter."""
        folder = quoted(self.name)
        if "/" in self.name:
            folder = call("snapshot_download", self.name, branch=self.branch)
        if self.base_id or self.record.model == "tiny":
            return f"ropepatch.load_adapter({folder})"
        base = quoted(f"path/to/{self.record.model}")
        return f"ropepatch.load_adapter({folder}, base={base})"

    @property
    def shell_name(self) -> str:
        """Its name and branch as words of a command line."""
        branch = f" --revision {shlex.quote(self.branch)}" if self.branch else ""
        return shlex.quote(self.name) + branch

    @property
    def paper(self) -> str:
        """The paper of a method that ropepatch knows; a name in the record is not trusted."""
        method = METHODS.get(self.record.method) or REMAPPINGS.get(self.record.method)
        return "" if method is None else method.paper

    @property
    def is_adapter(self) -> bool:
        """Whether the folder contains only an adapter."""
        return ADAPTER in self.files

    @cached_property
    def evidence(self) -> list[Evidence]:
        """All comparisons with a result of this model."""
        evidence: list[Evidence] = []
        seen: Counter[str] = Counter()
        # The baseline first, the fine-tuned model last
        in_order = sorted(
            self.results, key=lambda one: (one.scaling is not None, one.fine_tuned)
        )
        for group in comparisons(in_order):
            own = [
                name for name, result in group.results.items() if self._is_own(result)
            ]
            before = (
                name for name, result in group.results.items() if result.scaling is None
            )
            if own and group.task in TASKS:
                seen[group.task] += 1
                number = f"-{seen[group.task]}" if seen[group.task] > 1 else ""
                evidence.append(
                    Evidence(group, own[0], next(before, None), f"{group.task}{number}")
                )
        return evidence

    def _is_own(self, result: Result) -> bool:
        scaling = as_read(result.scaling)
        return (
            scaling is not None
            and self.weights is not None
            and result.model.get("weights") == self.weights
            and all(
                scaling.get(key) == as_read(getattr(self.record, key)) for key in SAME
            )
            and result.fine_tuned == (self.record.training is not None)
        )
