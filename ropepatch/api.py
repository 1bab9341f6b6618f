"""The public functions with their arguments explained, for Python and the command line.

Importing this module is quick: each body imports what it calls. `ropepatch.cli` derives options and their
help from these signatures.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal, overload

from ropepatch.pipeline.running import say_on_stderr
from ropepatch.progress import bar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    import torch
    from huggingface_hub import HfApi
    from matplotlib.figure import Figure
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ropepatch.attention import Remapped, Remapping
    from ropepatch.doctor import Diagnosis
    from ropepatch.encodings import Encoding, Swap
    from ropepatch.evaluation.curves import LossCurve
    from ropepatch.evaluation.retrieval import Retrieval
    from ropepatch.evaluation.suites import Method, Suite
    from ropepatch.extension.patching import Patch
    from ropepatch.extension.planning import Plan
    from ropepatch.pipeline.choice import Choice
    from ropepatch.pipeline.extension import Extension
    from ropepatch.pipeline.results import HasFigures, Results
    from ropepatch.pipeline.running import Say, Show
    from ropepatch.probing.asking import Probed
    from ropepatch.progress import Advance, Progress
    from ropepatch.publishing.hub import Pushed
    from ropepatch.scaling import Scaling
    from ropepatch.settings import Length
    from ropepatch.training.adaptation import Adapted
    from ropepatch.training.recipe import Recipe

__all__ = [
    *(
        "active",
        "adapt",
        "compare",
        "diagnose",
        "evaluate",
        "explore",
        "extend",
        "fold_attention",
        "load",
    ),
    *("passkey", "patch", "perplexity", "plan", "plot", "probe", "push", "read_recipe", "read_results"),
    *("retrieve", "swap"),
]


def silent(line: str) -> None:
    """Discard a line of progress."""


def _given(arguments: dict[str, Any], *extra: str) -> dict[str, Any]:
    """The arguments of a call, from its `locals()`, with those of `**extra` by name."""
    named = {key: value for key, value in arguments.items() if key not in ("run", "Options", *extra)}
    for name in extra:
        named |= arguments[name]
    return named


# Plan, try and write


def plan(
    model: str | os.PathLike[str] | PreTrainedModel | PreTrainedConfig,
    to: Length | None = None,
    *,
    method: str | Path | Scaling | Remapping = "yarn",
    original: Length | None = None,
    layers: Literal["sliding"] | None = None,
    revision: str | None = None,
    **parameters: Any,
) -> Plan:
    """Show what an extension would change, from the configuration alone.

    No weights are read. For a Hub id only config.json is downloaded.

    Args:
        model: A checkpoint folder, a Hub id, tiny, or a GGUF file.
        to: The target length in tokens, e.g. 32k, or 4x the original length. Default: that of the scaling
            file, or of the factor.
        method: A name from `ropepatch methods`, or a scaling file such as scaling.json.
        original: The original context length, if config.json contains another one: 32k for Qwen3, whose
            config.json contains 40960.
        layers: Pass sliding to scale a model in which only sliding-window layers use RoPE; the default
            refuses it.
        revision: The branch, tag or commit of a Hub id.
        **parameters: A parameter of the method; see `ropepatch methods NAME`. The factor of a scaling
            replaces target / original, and sets the target if `to` is not given. For a model that is already
            scaled with yarn, ramp defaults to rotations.

    The model may also be a loaded one or its configuration; the method a `Scaling` or a `Remapping`.

    Raises:
        RopepatchError: If the model, the target or the method does not allow it.
    """
    given = _given(locals(), "parameters")
    from ropepatch.extension.planning import plan as run

    return run(**given)


@overload
def patch(
    model: nn.Module,
    method: Plan | Scaling,
    *,
    original: Length | None = None,
    layers: Literal["sliding"] | None = None,
) -> Patch: ...
@overload
def patch(model: nn.Module, method: Remapping, *, to: Length, original: Length | None = None) -> Remapped: ...
@overload
def patch(
    model: nn.Module,
    method: str = "yarn",
    *,
    to: Length | None = None,
    original: Length | None = None,
    layers: Literal["sliding"] | None = None,
    **parameters: Any,
) -> Patch | Remapped: ...
def patch(
    model: nn.Module,
    method: Plan | Scaling | Remapping | str = "yarn",
    *,
    to: Length | None = None,
    original: Length | None = None,
    layers: Literal["sliding"] | None = None,
    **parameters: Any,
) -> Patch | Remapped:
    """Apply a RoPE scaling or a position remapping to one loaded model, in memory and reversibly.

    Other models that share its configuration object stay unchanged: this model has a copy until the patch is
    removed.

    Args:
        model: A causal language model, possibly inside a PEFT model.
        method: A plan; a scaling, whose target length is then factor times the original; a position
            remapping; or the name of one, or a scaling file.
        to: The target length, as in `plan`, for a method given by its name and for a position remapping.
        original: The original context length, as in `plan`.
        layers: As in `plan`.
        **parameters: The parameters of a method given by its name.

    Returns:
        A `Patch`; for a position remapping a `Remapped`.

    Raises:
        RopepatchError: If the model is already patched, is not the model of the plan, or cannot be scaled.
    """
    from ropepatch.extension.patching import patch as run

    patched: Patch | Remapped = run(**_given(locals(), "parameters"))
    return patched


def load(
    model: str | Path,
    revision: str | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a checkpoint with its tokenizer, in eval mode.

    Args:
        model: A checkpoint folder, a Hub id, or `tiny`, the bundled checkpoint.
        revision: The branch, tag or commit of a Hub id.
        device: Where to put the model, such as `cuda`. Default: a GPU if there is one. `auto` lets accelerate
            spread it over all GPUs and, if they are too small, the machine's memory.
        dtype: The precision of the weights, such as `torch.bfloat16` or `bfloat16`. Default: that of the
            checkpoint. The RoPE frequencies stay in float32.

    Returns:
        The model and its tokenizer.

    Raises:
        RopepatchError: If there is no such checkpoint, device or dtype, or transformers cannot load it.
    """
    from ropepatch.encodings.loading import load as run

    return run(**_given(locals()))


def extend(
    model: str | os.PathLike[str] | Plan,
    out: str | Path | None = None,
    *,
    to: Length | None = None,
    method: str | None = None,
    original: Length | None = None,
    layers: Literal["sliding"] | None = None,
    settings: Mapping[str, Any] | Sequence[str] | None = None,
    recipe: str | Path | Recipe | None = None,
    distil: bool = False,
    max_short_loss_increase: float | str | None = None,
    evaluate: str | Path | Suite | None = None,
    text: str | Path | None = None,
    field: str = "text",
    split: str | None = None,
    limit: int | None = None,
    link_weights: bool = False,
    reading: bool | None = None,
    include: Sequence[str] = (),
    push: str | None = None,
    private: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    record: Mapping[str, Any] | None = None,
    say: Say = say_on_stderr,
    progress: Progress = bar,
    show: Show = lambda outcome: None,
    **parameters: Any,
) -> Extension:
    """Write a checkpoint with a longer context; stock transformers loads it.

    Without a recipe it needs no training. With a recipe, or with `distil`, it fine-tunes the model at the
    target length. The same call resumes after an interruption. Under torchrun or accelerate several processes
    share the work. A training sets the global random seeds to those of its recipe.

    Args:
        model: A checkpoint folder, a Hub id, tiny, or a GGUF file, which is copied with other RoPE
            parameters.
        out: The folder or GGUF file to write. Default: MODEL-METHOD-TO(-RECIPE) in the working folder, or
            next to MODEL if that is the working folder.
        to: The target length in tokens, e.g. 32k, or 4x the original length. Default: that of the recipe or
            scaling file.
        method: A name from `ropepatch methods`, or a scaling file. Default: that of the recipe, or yarn.
        original: The original context length, if config.json contains another one: 32k for Qwen3, whose
            config.json contains 40960.
        layers: Pass sliding to scale a model in which only sliding-window layers use RoPE; the default
            refuses it.
        settings: A parameter of the method; see `ropepatch methods NAME`.
        recipe: Fine-tune with this recipe at the target length; see `ropepatch recipes`.
        distil: Fine-tune by self-distillation from the base model, on `text` or else on text that the model
            generates; see `ropepatch recipes distil`.
        max_short_loss_increase: The largest increase of the loss within the original context length, 2% or
            0.02. Default: that of the recipe. A checkpoint beyond it is written, but not pushed.
        evaluate: Measure this suite before and after, and write the results into the folder; see `ropepatch
            suites`.
        text: The text for the suite instead of its own, or for distil, but not for a recipe, which names its
            own: a text, JSONL, CSV or Parquet file, a folder of text and JSONL files, a
            `datasets` id, or a dataset saved with `datasets`.
        field: The column or key that contains the text of a document.
        split: The split of a dataset. Default: test, or train for distil.
        limit: Measure at most N pieces of text, N retrieval prompts, and N documents of an lm-eval task.
        link_weights: Hard-link the weight files instead of copying them. This is instant, but a program that
            later rewrites one of them in place also changes the source.
        reading: Write the fingerprint reading.json, with which `ropepatch probe` checks a server. Default:
            write it if that takes at most a minute or two.
        include: Also copy these files, such as examples/*.
        push: Push the checkpoint with its card to this repository on the Hub; see `ropepatch push`. A new one
            has your account's default visibility.
        private: Make the repository of `push` private.
        dry_run: Print the plan and what the recipe would do, and write nothing.
        revision: The branch, tag or commit of a Hub id.
        record: Further entries for ropepatch.json.
        say: A function that takes lines of progress.
        progress: See `ropepatch.progress.bar`.
        show: A function that takes the `Extension` before it is pushed.
        **parameters: Further parameters of the method.

    The model may also be a plan, which contains target and method.

    Raises:
        RopepatchError: If an argument is invalid, the model, target, method or recipe does not allow it, the
            folder exists or cannot be written, the result differs from the plan, or it cannot be pushed.
            Nothing half-written is left behind.
    """
    from ropepatch.pipeline.extension import extend as run
    from ropepatch.pipeline.options import ExtendOptions as Options

    return run(Options(**_given(locals())))


# Measure


def evaluate(
    model: str | os.PathLike[str] | None = None,
    suite: str | Path | Suite | None = None,
    *,
    text: str | Path | None = None,
    field: str = "text",
    split: str = "test",
    lengths: str | Iterable[Length] | None = None,
    methods: str | Iterable[str | dict[str, Any] | Method] = (),
    to: Length | None = None,
    original: Length | None = None,
    windows: int | None = None,
    documents: int | None = None,
    stride: int | None = None,
    bos: bool | None = None,
    gain: bool = False,
    out: str | Path | None = None,
    report: str | Path | None = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    limit: int | None = None,
    seed: int | None = None,
    say: Say = say_on_stderr,
    progress: Progress = bar,
    command: str | None = None,
) -> Results:
    """Measure perplexity by length, with and without RoPE scaling, or run a whole suite.

    Without a suite, the documents of `text` are joined, each after a beginning-of-sequence token, and cut
    into windows of the largest length. The model processes each window once. The first N tokens give the
    perplexity at length N. The stories of tiny are not joined.

    Args:
        model: A checkpoint folder, a Hub id, or tiny. Default: the models of the suite.
        suite: The name of a suite, or a YAML file; see `ropepatch suites`.
        text: A text, JSONL, CSV or Parquet file, a folder of text and JSONL files, a `datasets` id, or a
            dataset saved with `datasets`. Default: that of the suite, or the stories of tiny.
        field: The column or key that contains the text of a document.
        split: The split of a dataset.
        lengths: The lengths to measure in tokens, such as 256,1k,4x. Default: L/2, L, 2L ... `to`, where L is
            the original length.
        methods: Also measure these methods, in memory: names separated by commas, scaling files, all,
            remappings. Default: yarn if `to` is given.
        to: The target length of the methods, such as 32k.
        original: The original context length, if config.json contains another one: 32k for Qwen3, whose
            config.json contains 40960.
        windows: Join the documents and use at most N windows. Default: 24.
        documents: Do not join the documents; use the first N that have the greatest length.
        stride: Slide windows of each length over the text, N tokens at a time. Default: one pass.
        bos: Begin each window of text with a beginning-of-sequence token, or put none anywhere. Default: in
            each window for Gemma, else before each document.
        gain: Also measure the gain from tokens beyond the original context length.
        out: A folder for the results. Results that it already contains are not measured again.
        report: An HTML file to write, with tables and figures.
        revision: The branch, tag or commit of a Hub id.
        device: A device such as cpu, cuda or cuda:1. Default: a GPU if there is one. auto lets accelerate use
            all GPUs and, if they are too small, the machine's memory.
        dtype: float32, bfloat16 or float16. Default: that of the weights, or the faster one on a CPU.
        limit: Measure at most N pieces of text, N retrieval prompts, and N documents of an lm-eval task.
        seed: The random seed of the retrieval prompts. Default: that of the suite.
        say: A function that takes a line for every result.
        progress: See `ropepatch.progress.bar`.
        command: The command line, for the report.

    Raises:
        RopepatchError: If a model, method, suite or text is missing or does not fit, before anything is
            measured; or if `out` contains a result that was measured with other settings.
    """
    from ropepatch.pipeline.evaluation import EvaluateOptions as Options
    from ropepatch.pipeline.evaluation import evaluate as run

    return run(Options(**_given(locals())))


COMPARED = ("linear", "ntk", "ntk-by-parts", "llama3", "yarn")


def compare(
    model: str | os.PathLike[str],
    *,
    to: Length,
    methods: str | Iterable[str] = COMPARED,
    original: Length | None = None,
    text: str | Path | None = None,
    field: str = "text",
    split: str = "test",
    windows: int | None = None,
    haystacks: int | None = None,
    keys: int | None = None,
    out: str | Path | None = None,
    report: str | Path | None = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    seed: int | None = None,
    say: Say = say_on_stderr,
    progress: Progress = bar,
    command: str | None = None,
) -> Choice:
    """Rank methods on a model without training, and recommend one.

    It measures retrieval at the target length, the loss over it, and the short-context loss. The guide
    "Measure" contains the rule of the ranking, and `--json` prints it. If no method can be recommended, the
    advice is not to extend.

    Args:
        model: A checkpoint folder, a Hub id, or tiny.
        to: The target length in tokens, e.g. 8k, or 4x the original length.
        methods: Names separated by commas (see `ropepatch methods`) or scaling files. all stands for every
            static scaling without required parameters, remappings for every position remapping.
        original: The original context length, if config.json contains another one: 32k for Qwen3, whose
            config.json contains 40960.
        text: A text, JSONL, CSV or Parquet file, a folder of text and JSONL files, a `datasets` id, or a
            dataset saved with `datasets`. Default, for tiny only: its stories.
        field: The column or key that contains the text of a document.
        split: The split of a dataset.
        windows: Use at most N windows of the text. Default: 24.
        haystacks: The number of retrieval prompts; 0 for none. Default: 10, or 20 for tiny.
        keys: Questions of each kind per prompt and length. Default: 8, or 1 for tiny.
        out: A folder for the results. Results that it already contains are not measured again.
        report: An HTML file to write, with tables and figures.
        revision: The branch, tag or commit of a Hub id.
        device: A device such as cpu, cuda or cuda:1. Default: a GPU if there is one.
        dtype: float32, bfloat16 or float16. Default: that of the weights, or the faster one on a CPU.
        seed: The random seed of the retrieval prompts.
        say: A function that takes lines of progress, and the methods that are left out.
        progress: See `ropepatch.progress.bar`.
        command: The command line, for the report.

    Raises:
        RopepatchError: If the model, the target, a named method or the text does not allow it.
    """
    from ropepatch.pipeline.choice import CompareOptions as Options
    from ropepatch.pipeline.choice import compare as run

    return run(Options(**_given(locals())))


def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Iterable[str | Sequence[int] | Tensor],
    *,
    length: int | None = None,
    window: int | None = None,
    stride: int | None = None,
    bos: bool = True,
    chunk: int = 1024,
    tokens_per_batch: int | None = None,
    keep: Path | None = None,
    split: bool = False,
    progress: Advance | bool | None = None,
) -> LossCurve:
    """Compute the loss of every token but the first of each document, in the order of the documents.

    The model processes each document in one pass, so every token sees all tokens before it, and the first N
    tokens of the curve are those of a pass over N tokens. An exception are frequencies that depend on the
    input length, as in stock ``dynamic`` and ``longrope``: there the length of the whole document decides.
    With a window and a stride, windows slide over each document, and each token counts once, in the first
    window that contains it.

    Memory, in addition to the weights and one forward pass of the decoder over a batch: ``chunk`` x
    vocabulary logits in the model's dtype and twice that in float32, 8 bytes per token of the documents held,
    and 4 bytes per scored token. A model that cannot return single positions needs the logits of a whole
    window at once, and logs a warning.

    Windows of one length are batched, up to ``tokens_per_batch`` tokens. Batches depend only on the
    documents, so the order of the documents changes no bit of the result.

    Args:
        model: A causal language model of transformers; put in eval mode, and back into its earlier mode.
        tokenizer: The tokenizer for documents that are text, without special tokens of its own; None if all
            documents are token ids.
        documents: Texts or token ids. A collection is tokenised whole before the first pass, an iterator 256
            documents at a time, which are batched together.
        length: Tokens of each document to use, beginning-of-sequence token included; None for all.
        window: Tokens per forward pass; None for one pass.
        stride: Tokens between the beginnings of two windows, from 1 to window - 1.
        bos: Put the tokenizer's beginning-of-sequence token before each text, if it has one; token ids stay
            as they are.
        chunk: Positions whose logits are in memory at one time.
        tokens_per_batch: The most tokens per batch; a longer window is a batch of its own. None for 8192, or
            1024 on a CPU, whose caches are too small for more.
        keep: A folder for the losses of finished batches, from which the next call with the same documents,
            windows and ``tokens_per_batch`` resumes. Use it for one model only.
        split: Share the batches among the processes that torchrun or accelerate started, if any; every
            process passes the same documents and gets the same curve, to the bit that of one process with as
            many threads.
        progress: A function of (tokens done, tokens in total), both of this process, called after each batch;
            the total is None for an iterator. True for a progress bar, in a terminal or in a notebook with
            ipywidgets.

    Returns:
        The losses in nats, as a `LossCurve`.

    Raises:
        RopepatchError: If there are no documents, one has fewer than 2 tokens, a token id is outside the
            vocabulary, a loss is not finite, or the settings score nothing.
    """
    from ropepatch.evaluation.perplexity import perplexity as run

    return run(**_given(locals()))


def retrieve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lengths: str | Iterable[Length],
    haystacks: int = 10,
    keys: int = 8,
    kinds: Sequence[str] | None = None,
    seed: int = 0,
    texts: Sequence[str] | None = None,
    chat: bool = False,
    read_once: bool = True,
    tokens_per_batch: int | None = None,
    keep: Path | None = None,
    split: bool = False,
    progress: Advance | bool | None = None,
) -> Retrieval:
    """Measure retrieval from long prompts, at several lengths and at all depths.

    The model processes each prompt once, up to the greatest length. At every length the questions are asked
    on its KV cache, by teacher forcing: an answer is correct if each of its tokens is the most probable one,
    as in greedy decoding. The first answer of a run is checked against that to a whole prompt, at the least
    and the greatest length (on a CPU, the greatest up to 16,384 tokens); with one key, at every length. If
    they differ, or if the frequencies depend on the input length (stock `dynamic`, `longrope` with two sets
    of factors), every prompt is processed whole, with a warning.

    Args:
        model: A causal language model of transformers, patched or not; put in eval mode, and back into its
            earlier mode.
        tokenizer: The tokenizer of the model.
        lengths: The lengths of the prompts in tokens, answer included: `[4096, 8192]` or `"4k,8k"`.
        haystacks: The number of prompts; an interval needs at least three.
        keys: Questions of each kind per prompt and length.
        kinds: Names from `ropepatch.data.haystack.KINDS`. None for `number`, `sentence`, `chain` and `fact`,
            unless the tokenizer cannot write them or the least length is too short; a warning names those.
        seed: The random seed of the prompts.
        texts: The text around the needles; None for the built-in filler.
        chat: Put prompt and question into the tokenizer's chat template.
        read_once: Process each prompt once; if False, every question is a prompt of its own.
        tokens_per_batch: Tokens that the questions of a batch see in total. None for 16,384 on a CPU and
            262,144 elsewhere.
        keep: A folder for the answers to finished prompts, from which the next call with the same arguments
            resumes. Use it for one model and these arguments only.
        split: Share the prompts among the processes that torchrun or accelerate started, if any; every
            process passes the same arguments and gets the same result.
        progress: A function of (tokens done, tokens in total), both of this process. True for a progress bar,
            in a terminal or in a notebook with ipywidgets.

    Returns:
        The answers, with accuracies and log-probs by length and kind, as a `Retrieval`.

    Raises:
        RopepatchError: If the arguments fit no prompt (see `Haystacks`), or logits are NaN.
    """
    from ropepatch.evaluation.retrieval import retrieve as run

    return run(**_given(locals()))


def passkey(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lengths: str | Iterable[Length],
    haystacks: int = 20,
    **options: Any,
) -> Retrieval:
    """Measure passkey accuracy: `retrieve` with a single key per prompt.

    Args:
        model: See `retrieve`, also for the options.
        tokenizer: The tokenizer of the model.
        lengths: The lengths of the prompts in tokens: `[4096, 8192]` or `"4k,8k"`.
        haystacks: Prompts per length.
        **options: Further arguments of `retrieve`, such as `seed`, `texts`, `chat`, `split` and `progress`.

    Returns:
        The answers, as a `Retrieval`.

    Raises:
        RopepatchError: See `retrieve`.
    """
    from ropepatch.settings import refuse_unknown

    known = {*(retrieve.__kwdefaults__ or {})} - {"keys", "kinds"}
    refuse_unknown(options, sorted(known), "argument of passkey")
    return retrieve(
        model, tokenizer, lengths=lengths, haystacks=haystacks, keys=1, kinds=("passkey",), **options
    )


def read_results(place: str | Path) -> Results:
    """Read the results of `evaluate`, `compare` or `extend(evaluate=)` from a folder or a file.

    Args:
        place: A folder in which every JSON file is a result; a checkpoint with an `evaluation` folder; or one
            result file.

    Raises:
        RopepatchError: If there is no such place, it contains no results, or a file is not a result.
    """
    from ropepatch.pipeline.results import read_results as run

    return run(place)


def plot(what: Plan | HasFigures | str | Path, name: str | None = None) -> Figure:
    """Draw a plan, measurements, or the results in a folder or a file; see `read_results`.

    Args:
        what: A `Plan`, an `Extension`, a `Choice`, `Results`, or a folder or file of results.
        name: The name of the figure, as in `Results.plot`; a plan has only one.

    Raises:
        RopepatchError: If there is nothing to draw, no figure of that name, or no matplotlib.
    """
    from ropepatch.pipeline.results import plot as run

    return run(what, name)


# Train


def read_recipe(name: str) -> Recipe:
    """Read a bundled recipe by its name, or a YAML file.

    Args:
        name: The name, or the path of the file.

    Raises:
        RopepatchError: If there is no such recipe, it is not YAML, or a key is missing, unknown or invalid.
    """
    from ropepatch.training.recipe import read_recipe as run

    return run(name)


def adapt(
    plan: Plan,
    recipe: Recipe,
    out: str | Path,
    *,
    max_short_loss_increase: float | None = None,
    say: Say = silent,
    progress: Progress = bar,
) -> Adapted:
    """Fine-tune a model at the target length of a plan, and write the result.

    The folder ``OUT.run`` contains the checkpoints during the training. The same call resumes from the last
    intact one after an interruption, and the result is the same, on a CPU to the bit. Under torchrun or
    accelerate every process calls it. It sets the global random seeds to those of the recipe.

    Args:
        plan: The extension.
        recipe: The training; its own model, target and method are ignored.
        out: The folder to write.
        max_short_loss_increase: The largest relative increase of the loss within the original context length;
            None for that of the recipe.
        say: A function that takes lines of progress.
        progress: A function that takes the number of finished steps; see `ropepatch.progress.bar`.

    Returns:
        The folder and the short-context check, as an `Adapted`.

    Raises:
        RopepatchError: If the plan cannot be saved, the recipe does not fit the model, a text is missing, the
            folder exists, contains another run or cannot be written, or the loss is not a number.
    """
    from ropepatch.training.adaptation import adapt as run

    return run(**_given(locals()))


def active(model: nn.Module) -> Patch | Remapped | Swap | None:
    """The patch, position remapping or swapped encoding of a model or of a copy of it, or None.

    Its `remove()` restores the model.

    Args:
        model: A causal language model, possibly inside a PEFT model.
    """
    from ropepatch.attention import mapped
    from ropepatch.encodings import swapped
    from ropepatch.extension.patching import active as patched

    return patched(model) or mapped(model) or swapped(model)


def swap(model: nn.Module, encoding: str | Encoding, **parameters: Any) -> Swap:
    """Replace the position encoding of one loaded model, in memory and reversibly.

    A model that was trained with RoPE has to be trained with the new encoding; before that its loss is about
    that of shuffled text. New parameters are drawn from torch's generator; seed it first. With PEFT, swap
    first, and train them with `modules_to_save=["rotary_emb.module"]`.

    Args:
        model: A LLaMA-like causal language model, possibly inside a PEFT model.
        encoding: A name from `ENCODINGS`, or an encoding made by `make_encoding`.
        **parameters: The parameters of an encoding given by its name.

    Raises:
        RopepatchError: If there is no such encoding, or the model is patched, swapped or not LLaMA-like.
    """
    from ropepatch.encodings import swap as run

    return run(model, encoding, **parameters)


# Look and publish


def diagnose(
    model: str | Path | nn.Module,
    revision: str | None = None,
    *,
    measure: bool = True,
    repair: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Diagnosis:
    """Find mistakes in the RoPE configuration of a checkpoint or an adapter.

    Args:
        model: A checkpoint folder, an adapter's folder, a Hub id, or tiny.
        revision: The branch, tag or commit of a Hub id.
        measure: Read all weights, and look for NaN and infinity. Without it only config.json of a Hub id is
            downloaded.
        repair: Recompute the rotary modules of a loaded model from its configuration, in float32 and in
            place. `findings` are then those that are left, `repaired` those that were fixed. The model may be
            within PEFT, torch.compile or FSDP. Another RoPE than the configuration's is an error: with it
            nothing is measured or patched. Rounding to 16 bits is a warning, as `model.to(torch.bfloat16)`
            causes it. Skipped are RoPE modules patched by ropepatch, modules not built from a configuration,
            and tensors on the meta device or sharded over processes.
        progress: A function of (bytes read, bytes in total).

    Returns:
        The findings, as a `Diagnosis`.

    Raises:
        RopepatchError: If there is no such checkpoint, its config.json is not a JSON object, or the module
            contains no transformers model.
    """
    from ropepatch.doctor import diagnose as run

    return run(**_given(locals()))


def probe(
    server: str | nn.Module,
    checkpoint: str | os.PathLike[str] | None = None,
    *,
    model: str = "",
    save_reading: bool = False,
    timeout: float = 600.0,
    revision: str | None = None,
    say: Say = silent,
    progress: Advance = lambda done, total: None,
) -> Probed:
    """Check that a server applies the RoPE scaling of an extended checkpoint.

    It asks the server for the next token after prefixes of the text in the fingerprint reading.json, which
    `extend` writes. An API key, if the server needs one, is read from ROPEPATCH_API_KEY.

    Args:
        server: The address of a server with OpenAI's completions API, such as http://localhost:8000.
        checkpoint: The checkpoint that the server runs: a folder or a Hub id. Default: the server's own model
            name.
        model: The model name on the server. Default: the first that it lists.
        save_reading: Run the checkpoint and write its reading.json anew.
        timeout: Seconds to wait for one answer.
        revision: The branch, tag or commit of a Hub id.
        say: A function that takes lines of progress.
        progress: A function of (answered positions, positions in total).

    In place of a server, a model that is loaded for its training can be checked. It runs in eval mode and
    stays as it was.

    Returns:
        The verdict and the differences, as a `Probed`.

    Raises:
        RopepatchError: If there is no server, no checkpoint written by ropepatch, or no fingerprint of it.
    """
    from ropepatch.probing.asking import probe as run

    return run(**_given(locals()))


def push(
    folder: str | Path | Plan,
    repo: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    force: bool = False,
    card: bool = True,
    include: Sequence[str] = (),
    say: Say = silent,
    api: HfApi | None = None,
) -> Pushed:
    """Push a checkpoint or an adapter, with its card, to the Hub.

    It uploads what ropepatch wrote and what transformers and engines load: the changed files, in one commit,
    checked afterwards. The same call resumes an interrupted push, without sending files again. A README.md on
    the Hub that ropepatch did not write stays. The token is that of `hf auth login` or HF_TOKEN.

    Args:
        folder: A checkpoint that `extend` wrote and verified.
        repo: owner/name on the Hub, or name in your own namespace; created if it does not exist.
        private: Make the repository private.
        dry_run: Print the files to upload and the card; send and write nothing.
        revision: The branch, created from main if it does not exist. Default: main.
        force: Push a checkpoint that was not verified or failed the short-context check, and replace weights
            there that ropepatch did not write.
        card: Write the model card into the folder first, unless its README.md is your own.
        include: Also upload these files, such as examples/*.
        say: A function that takes lines of progress.
        api: The Hub client. Default: the usual one, with your token.

    The folder may also be a plan, whose checkpoint is then written to a temporary folder.

    Raises:
        RopepatchError: If the folder contains no sound checkpoint or it is not verified, a name is invalid,
            there is no token, a file contains a secret, the repository is public but should be private or
            contains weights of others, or the Hub refuses.
    """
    from ropepatch.publishing.hub import push as run

    return run(**_given(locals()))


def fold_attention(
    model: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Path:
    """Write a checkpoint whose attention factor a is 1 and whose queries are a^2 times as large.

    The logits stay the same: a multiplies cos and sin, hence every attention logit by a^2. The RoPE
    parameters are saved so that every engine that supports them uses a factor of 1.

    Args:
        model: A checkpoint folder or a Hub id.
        out: The folder to write; it must not exist.
        revision: The branch, tag or commit of a Hub id.
        progress: A function of (bytes written, bytes in total).

    Returns:
        The folder.

    Raises:
        RopepatchError: If there is no factor to fold, the queries have no weights of their own, or stock
            transformers computes other logits from the result; nothing is left behind then.
    """
    from ropepatch.publishing.folding import fold_attention as run

    return run(model, out, revision=revision, progress=progress)


def explore(
    model: str | os.PathLike[str] | None = None,
    *,
    out: str | Path = "explorer.html",
    tiny: bool = True,
    revision: str | None = None,
) -> Path:
    """Write an interactive page on why RoPE fails beyond the original context length, and what fixes it.

    It is one HTML file that needs no network.

    Args:
        model: A checkpoint folder, a Hub id, or tiny, to start with; only its config.json is read.
        out: The HTML file to write.
        tiny: Include the bundled model, which runs in the page; adds 2.7 MB.
        revision: The branch, tag or commit of a Hub id.

    Returns:
        The file.

    Raises:
        RopepatchError: If the file exists or cannot be written, or the model's RoPE cannot be extended.
    """
    from ropepatch.gallery.explorer import explore as run

    return run(model, out=out, tiny=tiny, revision=revision)
