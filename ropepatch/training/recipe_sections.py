"""The sections of a recipe: its data, its teacher, its adapter, its frequencies and what is watched."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag

from ropepatch.attention import MAPS, AttentionMap, make_map
from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.suites import NamedMethod
from ropepatch.settings import (
    Amount,
    Count,
    Length,
    OneOf,
    PartShare,
    Settings,
    Several,
    Text,
    Whole,
    expected,
    refuse_unknown,
    relative_length,
)

SELF = "self"  # the source that is written by the model itself


class Generated(Settings):
    """A source of rows that no text is needed for.

    Args:
        generated: `self`, which the model writes itself, in documents within its context; or, for the bundled
            checkpoint, one of the materials of `ropepatch.data.tiny.materials`.
        weight: Its share of the batches, relative to the other sources.
    """

    generated: Text
    weight: Amount = 1.0


def _kind_of_source(content: Any) -> str:
    is_generated = isinstance(content, Generated) or (isinstance(content, dict) and "generated" in content)
    return "Generated" if is_generated else "Texts"


def _some(content: Any) -> Any:
    return content if isinstance(content, list | tuple) else (content,)


RowSource = Annotated[
    Annotated[Texts, Tag("Texts")] | Annotated[Generated, Tag("Generated")], Discriminator(_kind_of_source)
]
Windows = Annotated[Several[Length], BeforeValidator(_some, json_schema_input_type=Length | Several[Length])]
Modules = Annotated[Several[Text] | Literal["all-linear"], expected("a list of names, or all-linear")]


class Data(Settings):
    """What is read, and in which pieces.

    Args:
        sources: Where documents come from; rows are drawn from them by weight.
        windows: Tokens of a row; the steps take one value after the other.
        tokens_per_batch: Rows times tokens per row, at most, in one forward pass of one process.
        boundaries: Whether tokens attend to their own document alone.
    """

    sources: Several[RowSource]
    windows: Windows
    tokens_per_batch: Length
    boundaries: bool = True

    def lengths(self, trained: int) -> tuple[list[int], int]:
        """The tokens of each window and those of a batch, for an old context of ``trained`` tokens.

        Raises:
            RopepatchError: A batch has no room for a row.
        """
        room = relative_length(self.tokens_per_batch, trained)
        windows = [relative_length(window, trained) for window in self.windows]
        for window in windows:
            if not 2 <= window <= room:
                raise RopepatchError(
                    f"a window must be from 2 tokens to the {room} of tokens_per_batch, got {window}",
                    hint="raise tokens_per_batch, or lower windows",
                )
        return windows, room


class Lora(Settings):
    """A low-rank adapter, in PEFT's words, and what else is trained with it.

    Args:
        r: Its rank.
        lora_alpha: Its scale times r.
        lora_dropout: The dropout of its input.
        target_modules: The linear layers that get one, or `all-linear`.
        use_rslora: Scale by lora_alpha / √r (arXiv:2312.03732).
        use_dora: Train magnitude and direction apart (arXiv:2402.09353).
        loraplus_lr_ratio: The learning rate of B over that of A (arXiv:2402.12354); None for the same.
        train_embeddings: Train the embeddings whole (arXiv:2309.12307), and a tied head with them.
        train_norms: Train the norms.
    """

    r: Count = 16
    lora_alpha: Count = 32
    lora_dropout: PartShare = 0.0
    target_modules: Modules = ("q_proj", "k_proj", "v_proj", "o_proj")
    use_rslora: bool = False
    use_dora: bool = False
    loraplus_lr_ratio: Amount | None = None
    train_embeddings: bool = False
    train_norms: bool = True


def map_of(content: Any) -> AttentionMap:
    """The attention map that a recipe names, or describes by a mapping with its name and parameters.

    Raises:
        RopepatchError: No such map or parameter, or one outside its domain.
    """
    parameters = dict(content) if isinstance(content, dict) else {"name": content}
    name = parameters.pop("name", None)
    refuse_unknown([name], MAPS, "map")
    return make_map(name, **parameters)


def _written_map(content: Any) -> Any:
    map_of(content)
    return content


class Distil(Settings):
    """The model is distilled from itself: what it expects takes the place of the text's tokens.

    The teacher is the base model, without the adapter and the new scaling, in the same memory. It reads every
    row where its tokens truly stand, also where the student reads it at skipped positions.

    Args:
        map: The attention map under which the teacher reads what is longer than the context it was trained
            to read; a name, or a mapping with the name and the parameters.
        temperature: T, of both distributions; the loss is T² KL(teacher || student) (arXiv:1503.02531).
        cross_entropy: The share of the cross-entropy of the text in the loss.
        top_k: How many of the teacher's likeliest tokens are told apart, the others taken as one; None for
            all.
    """

    map: Annotated[
        str | dict[str, Any],
        BeforeValidator(_written_map, json_schema_input_type=Annotated[str, OneOf(MAPS)] | NamedMethod),
    ] = "rerope"
    temperature: Amount = 2.0
    cross_entropy: PartShare = 0.0
    top_k: Count | None = None


class Parallel(Settings):
    """How processes share a row.

    Args:
        sequence: How many processes share each row, by DeepSpeed's Ulysses; it divides the processes, the
            heads and the window.
    """

    sequence: Count = 1


class FrequencyTraining(Settings):
    """Frequencies and attention factor that are trained with the weights, as logarithms.

    Args:
        learning_rate: The learning rate of the logarithms, by the schedule of the weights: at 1.0e-3 a step
            of Adam changes a frequency by up to 0.1 %.
    """

    learning_rate: Amount = 1.0e-3


class Fit(Settings):
    """The method `fit`: frequencies learned first, with the weights frozen; see `ropepatch.fit`.

    Args:
        text: What a fit learns from, as in a source; None for the texts of the recipe, less what is
            held out.
        field: The field of that text.
        split: The split of that text.
        steps: The steps of descent of a fit.
        init: The methods that a fit starts from, separated by commas; `auto` tries all.
    """

    text: Text | None = None
    field: Text = "text"
    split: Text = "train"
    steps: Count = 100
    init: Text = "auto"


class Watch(Settings):
    """What is measured while it trains, at the old context and at the target.

    Args:
        every: Steps between two measurements; there is one before the first step and one after the last.
        text: Held-out text, as in a source; None for the first tokens of the first source, which are then not
            trained on, or, of generated sources, for the tales of tiny. Of what the model writes itself no
            loss at the target is measured: its documents end within the old context.
        field: The field of `text`.
        split: The split of `text`.
        windows: Pieces of the target's length, or of the old context's, that are read.
        target: Whether it is read up to the target; if not, within the old context alone, and no passkeys are
            asked for: with rows at skipped positions, nothing longer than the old context is ever read.
        passkey_trials: Passkeys asked for at the target, at each of five depths; 0 for none.
        max_short_loss_increase: By how much the loss within the old context may be above the base model's.
    """

    every: Count = 100
    text: Text | None = None
    field: Text = "text"
    split: Text = "test"
    windows: Count = 8
    target: bool = True
    passkey_trials: Whole = 2
    max_short_loss_increase: PartShare = 0.02
