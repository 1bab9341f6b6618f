"""The parts of `ropepatch.json`; see `ropepatch.extension.record`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import StrictBool, StringConstraints

from ropepatch.model.record_file import Number, Part, Text, Tokens, Whole

Texts = Text | list[Text]
Switch = Annotated[Text, StringConstraints(pattern=r"^--[a-z-]+ \d+$")]  # which a card prints as a command


class Engine(Part):
    """How one inference engine reads the checkpoint; see `ropepatch.extension.engines`.

    Args:
        engine: Its name.
        reads: All of it, partly, or not at all.
        note: What to know.
        switches: Of its command line, without which it does not serve the target.
    """

    engine: Text
    reads: Literal["yes", "partly", "no"]
    note: Text
    switches: list[Switch]


class Verdict(Part):
    """What stock transformers computes from the checkpoint, beside what it was written from.

    Args:
        frequencies: `equal`, to the bit.
        logits: `equal`, `within 3.1e-07`, or why they were not compared.
        compared: Whether the logits were.
        difference: The greatest of a logit (folded: as a share of the largest); None where not compared.
    """

    frequencies: Text
    logits: Text
    compared: StrictBool
    difference: Number | None


class Base(Part):
    """Of the card of the base model what whoever builds on it passes on.

    Args:
        license: The licence, of the Hub's list, or `other`.
        license_name: The name of a licence that is not on that list.
        license_link: Where that licence can be read.
        language: The language or languages of the model.
    """

    license: Texts | None = None
    license_name: Texts | None = None
    license_link: Texts | None = None
    language: Texts | None = None


class Gate(Part):
    """The loss within the old context, in nats per token.

    Args:
        base: The loss of the model before it was trained.
        now: The loss of the trained model.
        increase: By how much the loss rose, as a share of `base`.
        most: The greatest increase allowed.
        passed: Whether the increase is within the one allowed.
    """

    base: Number
    now: Number
    increase: Number
    most: Number
    passed: StrictBool

    @classmethod
    def of(cls, base: float, now: float, most: float) -> Self:
        """The gate of two losses; the record that holds it checks that they are numbers."""
        rise = now / base - 1
        return cls.model_construct(base=base, now=now, increase=rise, most=most, passed=rise <= most)

    def __str__(self) -> str:
        loss = f"short-context loss {self.base:.4f} -> {self.now:.4f} ({self.increase:+.2%})"
        return f"{loss}, {'within' if self.passed else 'beyond'} the {self.most:.2%} allowed"


class LearnedRope(Part):
    """Frequencies that were trained with the weights: parameters of the method `custom`.

    Args:
        start: The parameters before training.
        end: The parameters after it.
    """

    start: dict[Text, Any]
    end: dict[Text, Any]


class Adaptation(Part):
    """How the weights were trained.

    Args:
        recipe: All of its settings.
        run: What names all that decides the weights.
        steps: The number of steps of the optimizer.
        tokens: The tokens read in all.
        processes: How many processes shared the work.
        seconds: The time of all steps, over all sessions.
        device: The device on which it ran.
        gate: What it did to the old context.
        precision: In which precision, and how that was chosen.
        frequencies: What it did to the rope, where that was trained.
    """

    recipe: dict[Text, Any]
    run: Text
    steps: Whole
    tokens: Whole
    processes: Whole = 1
    seconds: Number | None = None
    device: Text | None = None
    precision: dict[Text, Any] | None = None
    gate: Gate
    frequencies: LearnedRope | None = None


class Transfer(Part):
    """Whose adaptation was put onto the model; see `ropepatch.training.transfer`.

    Args:
        adapted: The adapted model.
        base: What it was adapted from.
        base_weights: The fingerprint of that.
        training_free: The loss of the target's last half before, with the rope scaled, in nats per token.
        target_loss: The same loss after.
    """

    adapted: Text
    base: Text
    base_weights: Text
    training_free: Number
    target_loss: Number


class Start(Part):
    """What `--method fit` and `--method auto` were asked, and what they found.

    Args:
        asked: All settings that decide the outcome.
        method: The name of the scaling method.
        parameters: The method's own parameters.
        factor: The factor, where it is not target / L.
    """

    asked: dict[Text, Any]
    method: Text | None = None
    parameters: dict[Text, Any] | None = None
    factor: Number | None = None


class Ranking(Part):
    """The scalings that `--method auto` measured; see `ropepatch.evaluation.ranking`.

    Args:
        rule: By which they were ranked, in sentences.
        rows: Best first.
        recommended: The label of the one to take; None where none helps.
        advice: Why, in sentences.
        warnings: What makes the order doubtful.
        fit: How a fitted one among them was found that was not taken.
    """

    rule: Text
    rows: list[dict[Text, Any]]
    recommended: Text | None
    advice: list[Text]
    warnings: list[Text] | None = None
    fit: dict[Text, Any] | None = None


class Evaluation(Part):
    """What `--eval` measured, in few numbers; see `ropepatch.evaluation.comparisons`.

    Args:
        model: The base.
        trained: Its context, in tokens.
        target: The context to reach.
        tasks: Each with its settings, and results by label.
    """

    model: Text
    trained: Tokens
    target: Tokens
    tasks: list[dict[Text, Any]]
