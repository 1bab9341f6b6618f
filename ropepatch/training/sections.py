"""The sections of a recipe: its data, its adapter, its frequencies and what is watched."""

from __future__ import annotations

from dataclasses import dataclass

from ropepatch.data.texts import Texts, check, check_length, is_text
from ropepatch.settings import Length, is_amount, is_count


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A source of rows that ropepatch makes itself, for the bundled checkpoint.

    Args:
        generated: One of the materials of `ropepatch.data.tiny.mixture`.
        weight: Its share of the batches, relative to the other sources.

    Raises:
        RopepatchError: One of these is not what it must be.
    """

    generated: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        check("generated", self.generated, is_text(self.generated), "a text")
        check("weight", self.weight, is_amount(self.weight), "a number above 0")


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is read, and in which pieces.

    Args:
        sources: Of documents; rows are drawn from them by weight.
        windows: Tokens of a row; the steps take one value after the other.
        tokens_per_batch: Of one process and one forward pass: rows times tokens per row, at most.
        boundaries: Whether tokens attend to their own document alone.

    Raises:
        RopepatchError: One of these is not what it must be.
    """

    sources: tuple[Texts | Generated, ...]
    windows: tuple[Length, ...]
    tokens_per_batch: Length
    boundaries: bool = True

    def __post_init__(self) -> None:
        check("sources", self.sources, bool(self.sources), "a list of at least one source")
        check("windows", self.windows, bool(self.windows), "a list of at least one length")
        for window in self.windows:
            check_length("windows", window)
        check_length("tokens_per_batch", self.tokens_per_batch)
        check("boundaries", self.boundaries, isinstance(self.boundaries, bool), "true or false")


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A low-rank adapter, in PEFT's words, and what else is trained with it.

    Args:
        r: Its rank.
        lora_alpha: Its scale times r.
        lora_dropout: Of its input.
        target_modules: The linear layers that get one, or `all-linear`.
        use_rslora: Scale by lora_alpha / √r (arXiv:2312.03732).
        use_dora: Train magnitude and direction apart (arXiv:2402.09353).
        loraplus_lr_ratio: The learning rate of B over that of A (arXiv:2402.12354); None for the same.
        train_embeddings: Train the embeddings whole (arXiv:2309.12307), and a tied head with them.
        train_norms: Train the norms.

    Raises:
        RopepatchError: One of these is not what it must be.
    """

    r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] | str = ("q_proj", "k_proj", "v_proj", "o_proj")
    use_rslora: bool = False
    use_dora: bool = False
    loraplus_lr_ratio: float | None = None
    train_embeddings: bool = False
    train_norms: bool = True

    def __post_init__(self) -> None:
        for key in ("r", "lora_alpha"):
            check(key, getattr(self, key), is_count(getattr(self, key)), "a whole number above 0")
        for key in ("use_rslora", "use_dora", "train_embeddings", "train_norms"):
            check(key, getattr(self, key), isinstance(getattr(self, key), bool), "true or false")
        dropout, ratio, targets = self.lora_dropout, self.loraplus_lr_ratio, self.target_modules
        is_share = _is_zero(dropout) or (is_amount(dropout) and dropout < 1)
        check("lora_dropout", dropout, is_share, "from 0 to below 1")
        check("loraplus_lr_ratio", ratio, ratio is None or is_amount(ratio), "a number above 0")
        names = isinstance(targets, tuple) and targets and all(isinstance(name, str) for name in targets)
        check("target_modules", targets, names or targets == "all-linear", "a list of names, or all-linear")


@dataclass(frozen=True, kw_only=True)
class Frequencies:
    """Frequencies and attention factor that are trained with the weights, as logarithms.

    Args:
        learning_rate: Of the logarithms, by the schedule of the weights: at 1.0e-3 a step of Adam changes a
            frequency by up to 0.1 %.

    Raises:
        RopepatchError: It is no number above 0.
    """

    learning_rate: float = 1.0e-3

    def __post_init__(self) -> None:
        rate = self.learning_rate
        check("frequencies.learning_rate", rate, is_amount(rate), "a number above 0 (with a point: 1.0e-3)")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The method `fit`: frequencies learned first, with the weights frozen; see `ropepatch.fit`.

    Args:
        text: Of `fit`: what it learns from, as in a source; None for the texts of the recipe, less what is
            held out.
        field: Of that text.
        split: Of that text.
        steps: Of `fit`: steps of descent.
        init: Of `fit`: the methods to start from, separated by commas; `auto` tries all.

    Raises:
        RopepatchError: One of these is not what it must be.
    """

    text: str | None = None
    field: str = "text"
    split: str = "train"
    steps: int = 100
    init: str = "auto"

    def __post_init__(self) -> None:
        check("text", self.text, self.text is None or is_text(self.text), "a text")
        for key in ("field", "split", "init"):
            check(key, getattr(self, key), is_text(getattr(self, key)), "a text")
        check("steps", self.steps, is_count(self.steps), "a whole number above 0")


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What is measured while it trains, at the old context and at the target.

    Args:
        every: Steps between two measurements; there is one before the first step and one after the last.
        text: Held-out text, as in a source; None for the first tokens of the first source, which are then not
            trained on, or, of generated sources, for the tales of tiny.
        field: Of `text`.
        split: Of `text`.
        windows: Pieces of the target length that are read.
        passkey_trials: Pass keys asked for at the target, at each of five depths; 0 for none.
        max_short_loss_increase: By how much the loss within the old context may be above the base model's.

    Raises:
        RopepatchError: One of these is not what it must be.
    """

    every: int = 100
    text: str | None = None
    field: str = "text"
    split: str = "test"
    windows: int = 8
    passkey_trials: int = 2
    max_short_loss_increase: float = 0.02

    def __post_init__(self) -> None:
        for key in ("every", "windows"):
            check(key, getattr(self, key), is_count(getattr(self, key)), "a whole number above 0")
        check("text", self.text, self.text is None or is_text(self.text), "a text")
        for key in ("field", "split"):
            check(key, getattr(self, key), is_text(getattr(self, key)), "a text")
        trials, increase = self.passkey_trials, self.max_short_loss_increase
        check("passkey_trials", trials, _is_zero(trials) or is_count(trials), "a whole number from 0")
        is_share = _is_zero(increase) or (is_amount(increase) and increase < 1)
        check("max_short_loss_increase", increase, is_share, "a share from 0 to below 1, e.g. 0.02")


def _is_zero(value: object) -> bool:
    return value == 0 and not isinstance(value, bool)
