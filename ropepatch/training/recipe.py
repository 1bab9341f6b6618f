"""A recipe: how a model is fine-tuned at a longer context length; from strict YAML."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Required, get_type_hints

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WrapValidator,
    model_validator,
    with_config,
)
from transformers import TrainingArguments
from typing_extensions import TypedDict

from ropepatch.attention import REMAPPINGS, Remapping, make_remapping
from ropepatch.data.positions import Positions
from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.measuring import (
    Method,
    NamedMethod,
    WrittenScaling,
    read_method,
)
from ropepatch.settings import (
    RECIPES,
    Amount,
    Count,
    Length,
    PartShare,
    Settings,
    Several,
    Text,
    Weight,
    Whole,
    find_shipped,
    named_in,
    relative_length,
)

SELF = "self"  # the source that the model generates
QUESTIONS = "questions"  # the source of questions about distant text of another source


class Generated(Settings):
    """A generated source of training sequences.

    Args:
        generated: `self`, documents within the original length that the model generates; `questions`, about
            distant text of the source before them, of kinds that the model answers within the original
            length; or, for the bundled checkpoint, one of the materials of `ropepatch.data.tiny.materials`.
        weight: Share of the batches, relative to the other sources.
    """

    generated: Text
    weight: Amount = 1.0


def _kind_of_source(content: Any) -> str:
    is_generated = isinstance(content, Generated) or (
        isinstance(content, dict) and "generated" in content
    )
    return "Generated" if is_generated else "Texts"


RowSource = Annotated[
    Annotated[Texts, Tag("Texts")] | Annotated[Generated, Tag("Generated")],
    Discriminator(_kind_of_source),
]
Modules = Several[Text] | Literal["all-linear"]


class Data(Settings):
    """The training data and the length of its sequences.

    Args:
        sources: The sources of documents; sequences are drawn from them by weight.
        windows: Tokens per training sequence; with several values the steps cycle through them.
        tokens_per_batch: Most tokens in one forward pass of one process.
        boundaries: Whether tokens attend only to their own document.
    """

    sources: Several[RowSource]
    windows: Several[Length]
    tokens_per_batch: Length
    boundaries: bool = True

    @property
    def generated(self) -> list[str | None]:
        """What each source generates; None for a text."""
        return [getattr(source, "generated", None) for source in self.sources]

    def lengths(self, trained: int) -> tuple[list[int], int]:
        """The tokens of each window and those of a batch, for an original length of ``trained`` tokens."""
        room = relative_length(self.tokens_per_batch, trained)
        windows = [relative_length(window, trained) for window in self.windows]
        for window in windows:
            if not 2 <= window <= room:
                raise RopepatchError(
                    f"data.windows must be from 2 to tokens_per_batch ({room}), got {window}",
                    hint="raise data.tokens_per_batch, or lower data.windows",
                )
        return windows, room


class Lora(Settings):
    """A low-rank adapter, and other weights that are trained with it.

    The keys from `r` to `init_lora_weights` have the names and meanings of `peft.LoraConfig`; they are those
    whose adapters can be merged into the weights of the base.

    Args:
        r: Rank.
        lora_alpha: Scale times r.
        lora_dropout: Dropout of the adapter's input.
        target_modules: The linear layers with an adapter, or `all-linear`.
        exclude_modules: Linear layers without an adapter.
        target_parameters: Weights with an adapter that are in no linear layer, such as those of experts.
        rank_pattern: Other ranks, by the name of the layer.
        alpha_pattern: Other values of `lora_alpha`, by the name of the layer.
        use_rslora: Divide by the square root of the rank (arXiv:2312.03732).
        use_dora: Train magnitudes and directions apart (arXiv:2402.09353).
        init_lora_weights: The initial weights: true for PEFT's, `gaussian` or `orthogonal`.
        train_embeddings: Train all weights of the embeddings (arXiv:2309.12307), and of a tied head.
        train_norms: Train the norms.
    """

    r: Count = 16
    lora_alpha: Count = 32
    lora_dropout: PartShare = 0.0
    target_modules: Modules = ("q_proj", "k_proj", "v_proj", "o_proj")
    exclude_modules: Several[Text] | None = None
    target_parameters: Several[Text] | None = None
    rank_pattern: dict[str, Count] | None = None
    alpha_pattern: dict[str, Weight] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    init_lora_weights: Literal[True, "gaussian", "orthogonal"] = True
    train_embeddings: bool = False
    train_norms: bool = True


def remapping_of(content: Any) -> Remapping:
    """Return the position remapping of a recipe, given by name or as a mapping with name and parameters."""
    parameters = dict(content) if isinstance(content, dict) else {"name": content}
    return make_remapping(parameters.pop("name", None), **parameters)


def _written_remapping(content: Any) -> Any:
    remapping_of(content)
    return content


class Distil(Settings):
    """Self-distillation: the targets are the base model's token distributions.

    The teacher is the base model, without the adapter and the new scaling, in the same memory. It processes
    every training sequence at its true positions, also where the student gets skipped ones.

    Args:
        remapping: The teacher's position remapping for sequences beyond the original length; a name, or a
            mapping with the name and the parameters.
        temperature: T, of both distributions; the loss is T² KL(teacher || student) (arXiv:1503.02531).
        cross_entropy: Share of the cross-entropy of the text in the loss.
        auto_size: Train on the longest sequences for which the device has the memory and needs about an hour,
            instead of `data.windows`, and raise the learning rate below a hidden size of 576.
    """

    remapping: Annotated[
        str | dict[str, Any],
        BeforeValidator(
            _written_remapping,
            json_schema_input_type=Annotated[str, named_in(REMAPPINGS)] | NamedMethod,
        ),
    ] = "rerope"
    temperature: Amount = 2.0
    cross_entropy: PartShare = 0.0
    auto_size: bool = False


class Watch(Settings):
    """The evaluation during training, at the original and the target length.

    Args:
        every: Steps between two evaluations; there is also one before the first step and one after the last.
        text: Held-out text, as in a source; None for the first tokens of the first source, which are then not
            trained on, or for held-out stories of tiny if the sources are generated. Self-generated text has
            no loss at the target, because its documents end within the original length.
        field: The field of `text`.
        split: The split of `text`.
        windows: Number of evaluated texts of the target length (of the original length if `target` is false).
        target: Whether to evaluate at the target; if not, only within the original length and without
            passkeys. With skipped positions no sequence is then longer than the original length.
        passkey_trials: Passkeys at the target, at each of five depths; 0 for none.
        max_short_loss_increase: Allowed increase of the loss within the original length, as a share.
    """

    every: Count = 100
    text: Text | None = None
    field: Text = "text"
    split: Text = "test"
    windows: Count = 8
    target: bool = True
    passkey_trials: Whole = 2
    max_short_loss_increase: PartShare = 0.02


# Arguments of transformers' `TrainingArguments` that change no weight
FREE = (
    "logging_steps",
    "save_steps",
    "save_total_limit",
    "report_to",
    "run_name",
    "dataloader_num_workers",
    "ddp_timeout",
)
# Those that a recipe may also set; ropepatch or the launcher sets the others.
PASSED_ON = (
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "optim",
    "optim_args",
    "neftune_noise_alpha",
    "tf32",
    "full_determinism",
    "torch_compile",
    "bf16",
    "fp16",
    "ddp_find_unused_parameters",
)
TYPES = get_type_hints(TrainingArguments)
ARGUMENTS = {key: TYPES[key] for key in (*PASSED_ON, *FREE)} | {
    "max_steps": Required[Count],
    "learning_rate": Required[Amount],
    "gradient_accumulation_steps": Count,
    "save_total_limit": Annotated[int, Field(ge=2)],
}
if TYPE_CHECKING:
    TrainerArguments = dict[str, Any]
else:
    TrainerArguments = with_config(ConfigDict(extra="forbid", strict=True))(
        TypedDict("TrainerArguments", ARGUMENTS, total=False)
    )


MERGEKIT = (
    "mergekit",
    "it describes a merge and no training: merge first, then train the merged checkpoint",
)
# By a key of its recipes: another program, and which of its keys correspond to ropepatch's
PROGRAMS = {
    "merge_method": MERGEKIT,
    "gate_mode": MERGEKIT,
    "base_model": (
        "axolotl",
        "base_model is MODEL, sequence_len data.windows, datasets data.sources, lora_r lora.r",
    ),
    "stage": (
        "LLaMA-Factory",
        "model_name_or_path is MODEL, cutoff_len data.windows, dataset data.sources, lora_rank lora.r",
    ),
    "model_name_or_path": (
        "TRL",
        "model_name_or_path is MODEL, max_length data.windows, dataset_name data.sources, lora_r lora.r",
    ),
    "policy": (
        "NeMo RL",
        "policy.model_name is MODEL, policy.max_total_sequence_length data.windows, data data.sources",
    ),
    "training": (
        "unsloth",
        "model is MODEL, training.max_seq_length data.windows, data.dataset data.sources, lora.lora_r lora.r",
    ),
}


class Recipe(Settings):
    """How a model is fine-tuned at a longer context length.

    Args:
        model: The checkpoint; the command line may name another.
        to: The target length.
        method: The RoPE scaling.
        data: The training data.
        positions: The positions of the tokens of a training sequence.
        lora: The adapter; None to train all weights.
        distil: Self-distillation instead of cross-entropy; None for cross-entropy.
        trainer: Arguments of transformers' `TrainingArguments`; `max_steps` and `learning_rate` are required.
            Without `bf16` and `fp16` the precision follows from the hardware: bfloat16 with CUDA 8.0, AMX or
            AVX512_BF16, else float32.
        watch: The evaluation during training.
        gradient_checkpointing: Recompute activations in the backward pass instead of keeping them; `offload`
            also holds what is kept, a hidden state per layer, in the memory of the host.
        quantization: `4bit` keeps frozen weights in 4 bits (QLoRA, arXiv:2305.14314), with bitsandbytes on a
            CUDA GPU; the adapter is merged into the unquantised weights. None for their own precision.
        save: `merged`, a complete checkpoint, or only the `adapter`.
        seed: The seed of the adapter's weights, the order of the data and the positions.
    """

    model: Text
    to: Length
    method: Annotated[
        Method, BeforeValidator(read_method, json_schema_input_type=WrittenScaling)
    ] = Field(default_factory=lambda: Method(name="yarn"))
    data: Data
    positions: Positions
    lora: Lora | None
    trainer: Annotated[
        TrainerArguments, WrapValidator(lambda content, fits: fits(content) and content)
    ]
    distil: Distil | None = None
    watch: Watch = Watch()
    gradient_checkpointing: bool | Literal["offload"] = False
    quantization: Literal["4bit"] | None = None
    save: Literal["merged", "adapter"] = "merged"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, content: Any) -> Any:
        """Name the program whose recipe this is, and the keys that correspond."""
        for key, (program, hint) in PROGRAMS.items():
            if isinstance(content, dict) and key in content:
                raise RopepatchError(
                    f"this is a recipe of {program}, expected one of ropepatch",
                    hint=hint,
                )
        return content

    def check(self) -> None:
        """Raise `RopepatchError` for conflicting settings, and for unsupported arguments of the Trainer."""
        needs_adapter = {
            "save: adapter": self.save == "adapter",
            "distil": self.distil is not None,
            "quantization: 4bit": self.quantization is not None,
        }
        for setting, is_set in needs_adapter.items():
            if is_set and self.lora is None:
                raise RopepatchError(
                    f"{setting} needs a LoRA adapter, got lora: null",
                    hint=f"set lora, or drop {setting}",
                )
        names = self.data.generated
        before_questions = [
            before for before, name in pairwise(["", *names]) if name == QUESTIONS
        ]
        if set(before_questions) - {None, SELF}:
            raise RopepatchError(
                "generated: questions must follow a text in data.sources",
                hint="put it after a text, or after generated: self",
            )
        if QUESTIONS in names and self.distil is None:
            raise RopepatchError(
                "generated: questions needs distil",
                hint="add distil: {}, or drop this source",
            )
        if self.trainer.get("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy"):
            raise RopepatchError(
                "trainer.lr_scheduler_type must not depend on an evaluation",
                hint="use e.g. cosine",
            )
        if self.trainer.get("bf16") and self.trainer.get("fp16"):
            raise RopepatchError(
                "trainer.bf16 and trainer.fp16 cannot both be set",
                hint="drop one of them",
            )

    @property
    def max_steps(self) -> int:
        """Optimiser steps."""
        count: int = self.trainer["max_steps"]
        return count

    @property
    def accumulated(self) -> int:
        """Batches of a process in one step."""
        count: int = self.trainer.get("gradient_accumulation_steps", 1)
        return count

    def reads_beyond(self, trained: int) -> bool:
        """Whether some training sequences are longer than the original length of ``trained`` tokens."""
        return max(self.data.lengths(trained)[0]) > trained

    @property
    def precision(self) -> str | None:
        """The dtype that `bf16` or `fp16` in `trainer` sets; None, for the fastest, if neither is there."""
        if self.trainer.get("fp16"):
            return "float16"
        if self.trainer.get("bf16"):
            return "bfloat16"
        return "float32" if {"bf16", "fp16"} & self.trainer.keys() else None

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-ready data."""
        return self.model_dump() | {
            "method": {"name": self.method.name} | self.method.parameters
        }


def read_recipe(name: str) -> Recipe:
    """Read a bundled recipe by its name, or a YAML file.

    Args:
        name: The name, or the path of the file.

    Raises:
        RopepatchError: If there is no such recipe, it is not YAML, or a key is missing, unknown or invalid.
    """
    return Recipe.from_yaml(find_shipped(name, RECIPES, "recipe"))
