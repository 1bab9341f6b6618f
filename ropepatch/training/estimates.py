"""What a recipe costs: tokens, memory and time, by arithmetic from the numbers of config.json.

These are estimates. They hold for decoders like LLaMA, Mistral and Qwen2: a gated MLP, two norms per layer,
no [T, T] mask, and a loss that computes logits in chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ropepatch.settings import refuse_unknown
from ropepatch.training.recipe import Recipe
from ropepatch.training.recipe_sections import Lora

GIB = 2**30
H100_FLOPS = 989e12  # per second: dense bf16, from the data sheet of the H100 SXM
UTILISATION = 0.4  # of that, assumed
CHUNK = 1024  # positions whose logits are in memory at once
ATTENTION_BACKWARD = 2.5  # times the forward: five matrix products against two (arXiv:2205.14135)


@dataclass(frozen=True)
class DecoderShape:
    """The size of a model, as config.json names its numbers; `qkv_bias` is that of Qwen2's q, k and v."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False

    @classmethod
    def of(cls, config: Any) -> DecoderShape | None:
        """The size that a configuration states; None where it lacks one of the numbers."""
        sizes: dict[str, Any] = {size.name: getattr(config, size.name, None) for size in fields(cls)}
        sizes["qkv_bias"] = config.model_type == "qwen2"
        return None if None in sizes.values() else cls(**sizes)

    @property
    def keys(self) -> int:
        """Width of all key heads; that of all query heads is the hidden size."""
        return self.num_key_value_heads * self.hidden_size // self.num_attention_heads

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of one decoder layer, by their names."""
        hidden, mlp, keys = self.hidden_size, self.intermediate_size, self.keys
        return {
            "q_proj": (hidden, hidden),
            "k_proj": (hidden, keys),
            "v_proj": (hidden, keys),
            "o_proj": (hidden, hidden),
            "gate_proj": (hidden, mlp),
            "up_proj": (hidden, mlp),
            "down_proj": (mlp, hidden),
        }

    @property
    def embedding(self) -> int:
        """Weights of the embeddings, and of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def norms(self) -> int:
        """Weights of all norms."""
        return (2 * self.num_hidden_layers + 1) * self.hidden_size

    @property
    def parameters(self) -> int:
        """All weights."""
        matrices = sum(inputs * outputs for inputs, outputs in self.linear.values())
        biases = self.hidden_size + 2 * self.keys if self.qkv_bias else 0
        tables = self.embedding if self.tie_word_embeddings else 2 * self.embedding
        return self.num_hidden_layers * (matrices + biases) + tables + self.norms


SHAPES: Mapping[str, DecoderShape] = {  # of the models that recipes are written for, from their config.json
    "tiny": DecoderShape(192, 512, 4, 6, 6, 1024, 256, tie_word_embeddings=True),
    "HuggingFaceTB/SmolLM2-135M": DecoderShape(576, 1536, 30, 9, 3, 49152, 8192, tie_word_embeddings=True),
    "HuggingFaceTB/SmolLM3-3B": DecoderShape(2048, 11008, 36, 16, 4, 128256, 65536, tie_word_embeddings=True),
    "meta-llama/Llama-2-7b-hf": DecoderShape(4096, 11008, 32, 32, 32, 32000, 4096),
    "meta-llama/Meta-Llama-3-8B": DecoderShape(4096, 14336, 32, 32, 8, 128256, 8192),
    "meta-llama/Llama-3.1-8B": DecoderShape(4096, 14336, 32, 32, 8, 128256, 131072),
    "mistralai/Mistral-7B-v0.3": DecoderShape(4096, 14336, 32, 32, 8, 32768, 32768),
    "Qwen/Qwen2.5-7B-Instruct": DecoderShape(3584, 18944, 28, 28, 4, 152064, 32768, qkv_bias=True),
    "Qwen/Qwen3-8B": DecoderShape(4096, 12288, 36, 32, 8, 151936, 40960),
}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run costs.

    Args:
        tokens: Tokens that all processes read in all steps.
        parameters: Weights of the model.
        trained: How many of them, the adapter included, take steps.
        weights_gib: Memory of the weights, of one process that holds all of them.
        optimizer_gib: Memory of gradients and both moments of Adam.
        activations_gib: Memory of one forward and backward pass, with the logits of one chunk.
        flops: Floating-point operations of the whole run.
    """

    tokens: int
    parameters: int
    trained: int
    weights_gib: float
    optimizer_gib: float
    activations_gib: float
    flops: float

    @property
    def total_gib(self) -> float:
        """Memory at the peak, without what the allocator loses to fragments."""
        return self.weights_gib + self.optimizer_gib + self.activations_gib

    def hours(self, flops_per_second: float = H100_FLOPS * UTILISATION) -> float:
        """Time at a rate, without measuring and saving."""
        return self.flops / flops_per_second / 3600

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return asdict(self) | {"total_gib": self.total_gib, "h100_hours": self.hours()}

    def __str__(self) -> str:
        memory = f"{self.weights_gib:.1f} GiB weights + {self.optimizer_gib:.1f} GiB optimiser"
        memory = f"{memory} + {self.activations_gib:.1f} GiB activations = {self.total_gib:.1f} GiB"
        return f"{self.tokens:,} tokens; {memory}; {self.hours():.1f} h"


def estimate(recipe: Recipe, shape: DecoderShape, *, processes: int = 1) -> Estimate:
    """The cost of a recipe on a model.

    Memory, in bytes: frozen weights take 2 in mixed precision, in which a recipe that states none is taken to
    run, else 4; what is trained takes 4, its gradient 4 and Adam's moments 8; a full fine-tune in mixed
    precision also keeps copies of 2 that autocast makes. Activations: see `activation_bytes`.

    Work, in FLOPs: a matrix product of [n, k] and [k, m] takes 2nkm; causal attention half of the full one,
    over whole rows, whatever documents are in them. Backward takes as much as forward for the inputs, and as
    much again for the weights that are trained; checkpointed layers are computed forward twice. A teacher is
    one more forward pass of the base model.

    Args:
        recipe: What is run.
        shape: The size of the model.
        processes: How many run it side by side, each on its own batches.

    Raises:
        RopepatchError: A window above `tokens_per_batch`, or target modules of another architecture.
    """
    mixed = recipe.precision != "float32"
    windows, per_batch = recipe.data.lengths(shape.max_position_embeddings)
    batches = processes * recipe.trainer.get("gradient_accumulation_steps", 1)
    cycles, rest = divmod(recipe.max_steps, len(windows))
    tokens, flops = 0, 0.0
    for number, window in enumerate(windows):
        read = (cycles + (number < rest)) * batches * (per_batch // window * window)
        tokens += read
        flops += read * flops_per_token(recipe, shape, window)
    adapter, whole = trained_weights(recipe.lora, shape)
    frozen = 2 if mixed else 4
    if recipe.lora is None:
        weights = shape.parameters * (6 if mixed else 4)
    else:
        weights = shape.parameters * frozen + (adapter + whole) * 4
    activations = activation_bytes(recipe, shape, max(per_batch // window * window for window in windows))
    return Estimate(
        tokens=tokens,
        parameters=shape.parameters,
        trained=adapter + whole,
        weights_gib=weights / GIB,
        optimizer_gib=(adapter + whole) * 12 / GIB,
        activations_gib=activations / GIB,
        flops=flops,
    )


def trained_weights(lora: Lora | None, shape: DecoderShape) -> tuple[int, int]:
    """Weights of the adapter, and those of the model that take steps themselves."""
    if lora is None:
        return 0, shape.parameters
    targets = [*shape.linear] if lora.target_modules == "all-linear" else lora.target_modules
    refuse_unknown(targets, shape.linear, "target module")
    ends = [shape.linear[name] for name in dict.fromkeys(targets)]
    size = sum(lora.r * (inputs + outputs) + (outputs if lora.use_dora else 0) for inputs, outputs in ends)
    whole = (shape.norms if lora.train_norms else 0) + (shape.embedding if lora.train_embeddings else 0)
    return shape.num_hidden_layers * size, whole


def activation_bytes(recipe: Recipe, shape: DecoderShape, tokens: int) -> int:
    """Memory of one forward and backward pass over so many tokens, beside weights and gradients.

    With checkpointing: the hidden state of every layer, and one layer at a time at its peak, the backward
    pass of its MLP. It holds six tensors of the MLP's width, four of the attention's and eight float32 ones
    of the hidden size (by the allocations of transformers' LLaMA; the last differ by a fifth with what is
    trained, and an adapter on the MLP takes a fifth more in all). In mixed precision a tensor has 2 bytes a
    number; the hidden states have 4 where the embeddings are trained, which are then float32. Without
    checkpointing all layers are held. The loss adds three float32 copies of a chunk of logits.
    """
    mixed = recipe.precision != "float32"
    embeddings_trained = recipe.lora is None or recipe.lora.train_embeddings
    size = 2 if mixed else 4
    stream = 4 if embeddings_trained or not mixed else 2
    attention = 2 * (shape.hidden_size + shape.keys)
    layer = 32 * shape.hidden_size + size * (attention + 6 * shape.intermediate_size)
    layers = shape.num_hidden_layers
    held = stream * shape.hidden_size * layers + layer if recipe.gradient_checkpointing else layer * layers
    return tokens * held + 3 * 4 * min(CHUNK, tokens) * shape.vocab_size


def flops_per_token(recipe: Recipe, shape: DecoderShape, window: int) -> float:
    """Forward and backward of one token in a row of so many."""
    lora, layers = recipe.lora, shape.num_hidden_layers
    forward = 2 if recipe.gradient_checkpointing else 1
    matrices = 2 * layers * sum(inputs * outputs for inputs, outputs in shape.linear.values())
    attention = 2 * layers * shape.hidden_size * window  # two products of 2 x queries x window / 2
    adapter, _ = trained_weights(lora, shape)
    head_trained = lora is None or (lora.train_embeddings and shape.tie_word_embeddings)
    teacher = matrices + attention + 2 * shape.embedding if recipe.distil else 0
    return (
        teacher
        + matrices * (forward + (2 if lora is None else 1))
        + attention * (forward + ATTENTION_BACKWARD)
        + 2 * adapter * (forward + 2)
        + 2 * shape.embedding * (3 if head_trained else 2)
    )


@dataclass(frozen=True, kw_only=True)
class GpuEstimate:
    """What one of the GPUs holds that share weights (ZeRO-3) and rows (Ulysses), and what a row takes them.

    Args:
        weights_gib: Its share of the weights, and two layers whole: the one at work and the next.
        optimizer_gib: Its share of gradients and moments.
        activations_gib: Its part of a row.
        exchange_gib: Queries, keys, values and what is read, of its part and of all tokens of its heads.
        seconds: Forward and backward of a row, by all, at `UTILISATION`.
    """

    weights_gib: float
    optimizer_gib: float
    activations_gib: float
    exchange_gib: float
    seconds: float

    @property
    def total_gib(self) -> float:
        """Memory at the peak, without what the allocator loses to fragments, and without what is watched."""
        return self.weights_gib + self.optimizer_gib + self.activations_gib + self.exchange_gib


def estimate_gpu(recipe: Recipe, shape: DecoderShape, tokens: int, gpus: int) -> GpuEstimate:
    """The cost of a row of so many tokens, which GPUs share as by `parallel: {sequence: gpus}`.

    What ZeRO-3 splits and Ulysses sends is that of arXiv:2506.13996, without its tiled MLP and without
    offload, neither of which accelerate has switched on.
    """
    whole, part = estimate(recipe, shape, processes=gpus), tokens // gpus
    size = 2 if recipe.precision != "float32" else 4
    layer = size * sum(inputs * outputs for inputs, outputs in shape.linear.values())
    exchanged = 2 * size * part * 2 * (shape.hidden_size + shape.keys)
    flops = tokens * flops_per_token(recipe, shape, tokens)
    return GpuEstimate(
        weights_gib=whole.weights_gib / gpus + 2 * layer / GIB,
        optimizer_gib=whole.optimizer_gib / gpus,
        activations_gib=activation_bytes(recipe, shape, part) / GIB,
        exchange_gib=exchanged / GIB,
        seconds=flops / gpus / (H100_FLOPS * UTILISATION),
    )


def longest_row(recipe: Recipe, shape: DecoderShape, gpus: int, room_gib: float) -> int:
    """The tokens of the longest row that GPUs with so much memory share, in steps of 1,024 for each."""
    step, count = CHUNK * gpus, 0
    while estimate_gpu(recipe, shape, (count + 1) * step, gpus).total_gib <= room_gib:
        count += 1
    return count * step
