"""Every public verb with its arguments explained, for Python and the command line; nothing heavy is imported.

A body imports its room and calls it. `ropepatch.cli` derives options and their help from these signatures.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal, overload

from ropepatch import files
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
    from ropepatch.extension.gguf import GgufPlan
    from ropepatch.extension.patching import Patch
    from ropepatch.extension.planning import Plan
    from ropepatch.fitting import Fitted
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
        "choose",
        "compare",
        "diagnose",
        "evaluate",
        "explore",
        "extend",
        "fit",
        "fold_attention",
        "load",
    ),
    *("passkey", "patch", "perplexity", "plan", "plot", "probe", "push", "read_recipe", "read_results"),
    *("retrieve", "swap"),
]


def silent(line: str) -> None:
    """Say nothing."""


def _given(arguments: dict[str, Any], *extra: str) -> dict[str, Any]:
    """The arguments of a call, from its `locals()`, those of `**extra` by name."""
    named = {key: value for key, value in arguments.items() if key not in ("run", "Options", *extra)}
    for name in extra:
        named |= arguments[name]
    return named


def _check_files(**files: object) -> None:
    """Refuse a suite or a recipe by its name or file, as far as its keys tell, before torch is imported."""
    from ropepatch import settings

    for what, file in files.items():
        if isinstance(file, str | os.PathLike):
            folder = settings.RECIPES if what == "recipe" else settings.SUITES
            settings.check_keys(os.fspath(file), folder, what)


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
) -> Plan | GgufPlan:
    """Show what an extension would change, from the configuration alone.

    No weights are read; of a Hub id only config.json is downloaded.

    Args:
        model: A checkpoint folder, a Hub id, or tiny; a GGUF file; or a loaded model, or its configuration.
        to: The target length in tokens: 32k, or 4x the original; that of a scaling file or of the factor
            of a `Scaling` if not given.
        method: A name that `ropepatch methods` lists, or a scaling file such as fitted.json; in Python also a
            `Scaling`.
        original: The original context length, where config.json says another: 32k of Qwen3, whose says 40960.
        layers: sliding scales a model whose sliding-window layers alone rotate, which is refused otherwise.
        revision: The branch, tag or commit of a Hub id.
        **parameters: A parameter of the method; see `ropepatch methods NAME`. `factor` of a scaling replaces
            target / original, and gives the target if `to` is left out. On a model that is already scaled
            yarn's `ramp` is rotations if not given.

    Raises:
        RopepatchError: If the model, the target or the method does not allow it.
    """
    given = _given(locals(), "parameters")
    if isinstance(model, str | os.PathLike) and files.is_gguf(model):
        from ropepatch.extension.gguf import plan as of_file

        return of_file(**given)
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
    """Scale the rope of one loaded model, or remapping its distances, in memory and reversibly.

    Another model with the same configuration object is unchanged: this one has a copy until the patch is
    removed.

    Args:
        model: A causal language model, possibly inside a PEFT model.
        method: A plan; a scaling, whose target is then factor times the original length; a position
            remapping; or the name of one, or a scaling file.
        to: The target length of a method by its name, as in `plan`.
        original: The original context length, as in `plan`.
        layers: As in `plan`.
        **parameters: The parameters of a method by its name.

    Returns:
        A `Patch`; of a position remapping a `Remapped`.

    Raises:
        RopepatchError: If the model is patched already, is not the one the plan is for, or cannot be scaled.
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
        model: A checkpoint folder, a Hub id, or `tiny`, the checkpoint that comes with ropepatch.
        revision: The branch, tag or commit of a Hub id.
        device: Where the model is put, such as `cuda`; a GPU, if there is one, if not given; `auto` for all
            GPUs and, where they have no room, the machine's memory, by accelerate.
        dtype: The precision of its weights, such as `torch.bfloat16` or `bfloat16`; the one that it asks for
            if not given. The frequencies stay in float32.

    Raises:
        RopepatchError: If there is no such checkpoint, device or dtype, or transformers cannot load it.
    """
    from ropepatch.encodings.loading import load as run

    return run(**_given(locals()))


def extend(
    model: str | os.PathLike[str] | Plan | GgufPlan,
    out: str | Path | None = None,
    *,
    to: Length | None = None,
    method: str | None = None,
    allow_code: bool = False,
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
    dry_run: bool = False,
    revision: str | None = None,
    record: Mapping[str, Any] | None = None,
    say: Say = say_on_stderr,
    progress: Progress = bar,
    show: Show = lambda outcome: None,
    **parameters: Any,
) -> Extension:
    """Write a checkpoint with a longer context; stock transformers loads it.

    Without a recipe it is training-free. With one, or with `distil`, the model is trained at the new context:
    the same call resumes after an interruption, and several processes share the work under torchrun or
    accelerate; the global random seeds are set to the recipe's.

    Args:
        model: A checkpoint folder, a Hub id, or tiny; a GGUF file, of which a copy with another rope is made;
            or a plan, which says target and method.
        out: The folder or GGUF file to make; MODEL-METHOD-TO(-RECIPE) here if not given.
        to: The target length in tokens: 32k, or 4x the original; that of the recipe or scaling file if not
            given.
        method: A name that `ropepatch methods` lists; or a scaling file, fit, which learns one, or auto,
            which chooses one. That of the recipe, or yarn, if not given.
        allow_code: Let `method=auto` choose a position remapping, too, which only transformers runs, with
            trust_remote_code=True.
        original: The original context length, where config.json says another: 32k of Qwen3, whose says 40960.
        layers: sliding scales a model whose sliding-window layers alone rotate, which is refused otherwise.
        settings: A parameter of the method, also one that is called like an argument here, as text of fit;
            see `ropepatch methods NAME`.
        recipe: Train it at the new context by this recipe; see `ropepatch recipes`.
        distil: Train it by self-distillation, on `text` or else on what it writes itself; `ropepatch recipes
            distil` says how.
        max_short_loss_increase: By how much training may raise the loss within the original context, as a
            share, 2% or 0.02; what the recipe says if not given. A checkpoint beyond it is written and not
            pushed.
        evaluate: Measure this suite before and after, into the folder; see `ropepatch suites`.
        text: What the suite measures on in place of its own text, or fit and auto read: a text, JSONL,
            CSV or Parquet file, a folder of the first two, a `datasets` id, or a set saved by `datasets`.
        field: The column or key of a document's text.
        split: The part of a `datasets` id or a saved set that is read; test if not given, or train to fit on.
        limit: Measure at most so many pieces of text, haystacks, documents of an lm-eval task.
        link_weights: Hard-link the weight files instead of copying them: instant, but a program that later
            rewrites one of them in place also changes the source.
        reading: Write reading.json, by which `ropepatch probe` tells whether a server computes the
            checkpoint; if not given, where it takes a minute or two at most.
        include: Files to carry along that are no part of a checkpoint, such as examples/*.
        push: Push it to this repository on the Hub, with its card; see `ropepatch push`.
        dry_run: Print the plan and what the recipe will do, and write nothing. fit and auto search first,
            which takes its time.
        revision: The branch, tag or commit of a Hub id.
        record: What ropepatch.json says beside what it says by itself.
        say: Takes lines that tell how far it is.
        progress: See `ropepatch.progress.bar`.
        show: Takes what is found on the way: the `Choice` of auto, the `Fitted` of fit, and the `Extension`
            before it is pushed.
        **parameters: Further parameters of the method.

    Raises:
        RopepatchError: If an argument is not what it must be, the model, the target, the method or the recipe
            does not allow it, the folder exists or cannot be written, the result differs from the plan, or it
            cannot be pushed. Nothing half-written is left behind.
    """
    _check_files(recipe=recipe, suite=evaluate)
    from ropepatch.pipeline.extension import extend as run
    from ropepatch.pipeline.options import ExtendOptions as Options

    return run(Options(**_given(locals())))


# Measure


def evaluate(
    model: str | os.PathLike[str] | None = None,
    suite: str | Path | Suite | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
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
    positions: int | None = None,
    scorer: str | Path | None = None,
    served_as: str = "",
    timeout: float | None = None,
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
    """Measure perplexity by length, unscaled and scaled, or a whole suite.

    Without a suite, the documents of `text` are joined, each after a beginning-of-sequence token, and cut
    into windows of the largest length. Every window is read once, and its first N tokens give the perplexity
    at length N. The tales of tiny are read one by one.

    Of a server, such as http://localhost:8080, what it serves is measured, by the suite served if none is
    given: the same questions and texts as of its `checkpoint`, so that their results compare. A key, where it
    wants one, is read from ROPEPATCH_API_KEY.

    Args:
        model: A checkpoint folder, a Hub id, or tiny; those of the suite if not given. Or the address of a
            server with OpenAI's completions API.
        suite: Run a suite: its name, or a YAML file; see `ropepatch suites`.
        checkpoint: What a server serves, for its tokenizer: a folder or a Hub id; the server's own name of it
            if not given.
        text: A text, JSONL, CSV or Parquet file, a folder of the first two, a `datasets` id, or a set saved
            by `datasets`; that of the suite, or the tales of tiny, if not given.
        field: The column or key of a document's text.
        split: The part of a `datasets` id or a saved set that is read.
        lengths: Tokens to read, such as 256,1k,4x; L/2, L, 2L ... `to` if not given.
        methods: Also measure the model scaled so, in memory: names separated by commas, scaling files, all,
            remappings. With `to` alone, yarn.
        to: The target length of the methods, such as 32k.
        original: The original context length, where config.json says another: 32k of Qwen3, whose says 40960.
        windows: Join the documents and read at most so many windows; 24 if not given.
        documents: Do not join: read so many, the first that have the greatest length.
        stride: Slide windows of each length, so many tokens at a time; one pass if not given.
        bos: Put a beginning-of-sequence token before each document; done if not given.
        gain: Also measure what tokens beyond the original context bring.
        positions: Score so many tokens of each window, drawn from stretches of one length; all if not given,
            or 256 of a server that tells one at a time.
        scorer: A checkpoint that chooses the key tokens of LongPPL.
        served_as: The name of the model at a server; the first that it lists if not given.
        timeout: Seconds for one answer of a server; 600 if not given.
        out: A folder for the results; what it holds already is not measured again.
        report: An HTML file to write, with tables and figures.
        revision: The branch, tag or commit of a Hub id.
        device: cpu, cuda or cuda:1, say; a GPU, if there is one, if not given; auto for all GPUs and, where
            they have no room, the machine's memory, by accelerate.
        dtype: float32, bfloat16 or float16; that of the weights, or the faster one on a CPU, if not given.
        limit: Measure at most so many pieces of text, haystacks, documents of an lm-eval task.
        seed: Draw the haystacks from it; that of the suite if not given.
        say: Takes a line for every result.
        progress: See `ropepatch.progress.bar`.
        command: The command line that asked, for the report.

    Raises:
        RopepatchError: A model, method, suite or text that is not there or does not fit, before anything is
            measured; or a result in `out` that was measured with other settings.
    """
    _check_files(suite=suite)
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
    """Rank methods on a model, training-free, and recommend one.

    Measured are retrieval at the target, the loss over it and the short-context loss. The log-probability of
    the answers ranks, if the model finds any within its original context, then the loss. The recommendation
    may be not to extend at all: a method must be significantly better than the baseline by one of both, and
    not significantly worse by the other (paired t-tests; 5 % over all methods, by Holm). A fit learns from
    that part of the text which is not read for the ranking.

    Args:
        model: A checkpoint folder, a Hub id, or tiny.
        to: The target length in tokens: 8k, or 4x the original.
        methods: Names separated by commas (see `ropepatch methods`), files that fit wrote, all for every
            static scaling that needs no parameters, remappings for every position remapping, fit for one
            fitted to the model; linear,ntk,ntk-by-parts,llama3,yarn if not given.
        original: The original context length, where config.json says another: 32k of Qwen3, whose says 40960.
        text: A text, JSONL, CSV or Parquet file, a folder of the first two, a `datasets` id, or a set saved
            by `datasets`; the tales of tiny if not given.
        field: The column or key of a document's text.
        split: The part of a `datasets` id or a saved set that is read.
        windows: Read at most so many windows of the text; 24 if not given.
        haystacks: Long texts to find keys in; 0 for none; 10, or 20 for tiny, if not given.
        keys: Questions of each kind, haystack and length; 8, or 1 for tiny, if not given.
        out: A folder for results and fit; what it holds already is not measured again.
        report: An HTML file to write, with tables and figures.
        revision: The branch, tag or commit of a Hub id.
        device: cpu, cuda or cuda:1, say; a GPU, if there is one, if not given.
        dtype: float32, bfloat16 or float16; that of the weights, or the faster one on a CPU, if not given. A
            fit chooses its own.
        seed: Draw the haystacks from it.
        say: Takes lines that tell how far it is, and what takes no part.
        progress: See `ropepatch.progress.bar`.
        command: The command line that asked, for the report.

    Raises:
        RopepatchError: The model, the target, a method that is named or the text does not allow it.
    """
    from ropepatch.pipeline.choice import CompareOptions as Options
    from ropepatch.pipeline.choice import choose as run

    return run(Options(**_given(locals()), allow_code=False))


def choose(
    model: str | os.PathLike[str],
    *,
    to: Length,
    methods: str | Iterable[str] | None = None,
    allow_code: bool = False,
    **options: Any,
) -> Choice:
    """Measure methods and a fit on a model, training-free, rank them as `compare` does, and choose one.

    The windows of text that rank are none of those that the fit has seen, and the tales of tiny are others.

    Args:
        model: A checkpoint folder, a Hub id, or `tiny`.
        to: The target length, as in `compare`.
        methods: As in `compare`; all that the model allows, and a fit if one can be made, if not given.
        allow_code: Whether these are the position remappings, too, which only transformers runs, by code that
            comes with the checkpoint.
        **options: What else `compare` takes.

    Raises:
        RopepatchError: The model, the target, a method that is named or the text does not allow it.
    """
    from ropepatch.pipeline.choice import CompareOptions as Options
    from ropepatch.pipeline.choice import choose as run
    from ropepatch.settings import refuse_unknown

    defaults = compare.__kwdefaults__ or {}
    refuse_unknown(options, defaults, "argument of choose")
    return run(
        Options(**defaults | options | {"model": model, "to": to, "methods": methods}, allow_code=allow_code)
    )


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
    """Read documents and keep the loss of every token but their first, in the order of the documents.

    Each document is read in one pass, so that every token sees all tokens before it, and the first N tokens
    of the curve are what a pass over N tokens alone would give. (Not if the frequencies follow the length of
    the input, as those of stock ``dynamic`` and ``longrope``: then the document's whole length decides for
    all its tokens.) With a window and a stride, windows of so many tokens slide over each document, and each
    token counts once, in the first window that holds it.

    Memory, besides the weights and what one forward pass of the decoder over a batch takes: ``chunk`` x
    vocabulary logits in the model's dtype and twice that in float32, 8 bytes per token of the documents that
    are held, and 4 bytes per scored token in all. A model that cannot give single positions needs the logits
    of a whole window at once, and a warning says so.

    Windows of one length are read together, as many as ``tokens_per_batch`` holds. What is read together
    follows from the documents alone, so their order changes nothing, to the bit.

    Args:
        model: A causal language model of transformers; put in eval mode and back into the mode it was in.
        tokenizer: Splits the documents that are text, without special tokens of its own; None if all
            documents are token ids.
        documents: Texts or token ids. A collection is tokenised whole before any of it is read; an iterator
            256 documents at a time, which are batched among themselves.
        length: Tokens read of each document, beginning-of-sequence token included; None for all.
        window: Tokens read at once; None for one pass.
        stride: Tokens from one window's beginning to the next one's, from 1 to window - 1.
        bos: Put the tokenizer's beginning-of-sequence token before each text, if it has one; token ids are
            taken as they are.
        chunk: Positions whose logits are held in memory at one time.
        tokens_per_batch: The most tokens read together; a longer window is read by itself. None for 8192, or
            1024 on a CPU, whose caches more do not fit.
        keep: A folder in which the losses of each batch are kept as they come and found by the next call with
            the same documents, windows and ``tokens_per_batch``. It must belong to this model alone.
        split: Deal the batches to the processes that torchrun or accelerate started, if any;
            every process gives the same documents and is returned the same curve, to the bit that of one
            process with as many threads.
        progress: Called as (tokens read, tokens to read), both by this process, after each batch; how many
            there are to read is None for an iterator. True for a bar, in a terminal or in a notebook with
            ipywidgets.

    Raises:
        RopepatchError: No documents, one of fewer than 2 tokens, a token id outside the vocabulary, a loss
            that is not finite, or settings that score nothing.
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
    """Ask for what stands in long texts, at several lengths and at all depths.

    Each haystack is read once, up to the greatest length; at the stop of every length its questions are asked
    on the cache, by teacher forcing: an answer is found if each of its tokens is the most probable one, which
    is what greedy decoding gives. The first answer of a run is compared with that to a whole prompt, at the
    least and at the greatest length (with one key, at every length); where they differ, and where frequencies
    follow the length of the input (stock `dynamic`, `longrope` with two sets of factors), every prompt is
    read whole, and a warning says so.

    Args:
        model: A causal language model of transformers, patched or not; put in eval mode and back.
        tokenizer: The model's.
        lengths: Of the prompts, in tokens, the answer included: `[4096, 8192]` or `"4k,8k"`.
        haystacks: How many, at least three for an interval.
        keys: Questions of each kind, haystack and length.
        kinds: Names from `ropepatch.data.haystack.KINDS`; None for `number`, `sentence`, `chain` and `fact`,
            as far as the tokenizer writes them and the least length has room; a warning names the others.
        seed: From which all that is drawn follows.
        texts: What stands around the needles; None for our own filler.
        chat: Put haystack and question into the tokenizer's chat template.
        read_once: Whether a haystack is read once; if not, every question is a prompt of its own.
        tokens_per_batch: Tokens that the questions of a batch see, all together; None for 16,384 on a CPU and
            262,144 elsewhere.
        keep: A folder in which the answers to each haystack are kept as they come, and found by the next call
            with the same arguments. It must belong to this model and these arguments alone.
        split: Deal the haystacks to the processes that torchrun or accelerate started, if any;
            every process gives the same arguments and is returned the same.
        progress: Called as (tokens read, tokens to read), both by this process. True for a bar, in a terminal
            or in a notebook with ipywidgets.

    Raises:
        RopepatchError: Arguments that fit no haystack (see `Haystacks`), or NaN logits.
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
    """Ask for the one key that each haystack hides: `retrieve` with a single key.

    Args:
        model: See `retrieve`, as for the options.
        tokenizer: The model's.
        lengths: Of the prompts, in tokens: `[4096, 8192]` or `"4k,8k"`.
        haystacks: Answers per length.
        **options: `seed`, `texts`, `chat`, `split`, `progress` and the like.

    Raises:
        RopepatchError: See `retrieve`.
    """
    return retrieve(**_given(locals(), "options"), keys=1, kinds=("passkey",))


def read_results(place: str | Path) -> Results:
    """The results in a folder that `evaluate`, `compare` or `extend(evaluate=)` wrote, or in one file.

    Args:
        place: The folder, all of whose JSON files are results; a checkpoint with such an `evaluation`; or
            one such file.

    Raises:
        RopepatchError: There is no such place, it holds no results, or a file is none.
    """
    from ropepatch.pipeline.results import read_results as run

    return run(place)


def plot(what: Plan | HasFigures | str | Path, name: str | None = None) -> Figure:
    """A figure of a plan, of what was measured, or of results in a folder or a file; see `read_results`.

    Args:
        what: A `Plan`, an `Extension`, a `Choice`, `Results`, or the place of results.
        name: Which figure, as in `Results.plot`; of a plan there is one.

    Raises:
        RopepatchError: There is nothing to draw, no figure of that name, or no matplotlib.
    """
    from ropepatch.pipeline.results import plot as run

    return run(what, name)


# Learn and train


def fit(
    model: str | Path,
    *,
    to: Length,
    original: Length | None = None,
    text: str | Path | None = None,
    field: str = "text",
    split: str = "train",
    steps: int = 200,
    minutes: float | None = None,
    init: str = "auto",
    teacher: str = "auto",
    queries: bool = True,
    seed: int = 0,
    revision: str | None = None,
    device: str | None = None,
    work: Path | None = None,
    progress: Progress = bar,
    say: Say = silent,
) -> Fitted:
    """Learn the frequencies by which a model reads at a target, and phases.

    Nothing but the query weights changes, and no text is needed: the model learns to expect what it expects
    under a position remapping, on text that it writes itself, and to answer questions on what stands far
    before in it, of the kinds that it can answer within its window. Windows and questions that nothing is
    learned from validate: on them the outcome reads neither target nor original context worse than YaRN, and
    finds no less.

    Processes that torchrun started share the starts, the race of the best of them and the validation
    windows; what they return is the same, to the bit that of one process with as many threads.

    Args:
        model: A checkpoint folder, a Hub id, or tiny.
        to: The target length in tokens: 32k, or 4x the original.
        original: The original context length, where config.json says another: 32k of Qwen3, whose says 40960.
        text: A text, JSONL, CSV or Parquet file, a folder of the first two, a `datasets` id, or a set saved
            by `datasets`; what the model writes itself, or the tales of tiny, if not given.
        field: The column or key of a document's text.
        split: The part of a `datasets` id or a saved set that is read.
        steps: Steps of gradient descent.
        minutes: End after about so much time, over all calls, with the best until then; a third is for the
            starts. If not given it ends as `steps` says, which does not depend on the machine.
        init: Methods to start from, separated by commas, yarn say, which is quick; auto tries all and
            mixtures.
        teacher: The position remapping under which the base model teaches; auto for rerope, where the model
            can have a remapping; none for the text's own tokens.
        queries: Learn an amplitude and a phase for each query head and rotary pair, too, which are folded
            into the query weights; without, no weight changes.
        seed: Draw the order of the windows, the random starts and what the model writes from it.
        revision: The branch, tag or commit of a Hub id.
        device: cpu, cuda or cuda:1, say; a GPU, if there is one, if not given.
        work: A folder for the state of a fit: the same call resumes from it after an interruption.
        progress: Called with the name of each stage; see `ropepatch.progress.bar`.
        say: Takes a line on where the model is read, and in which precision.

    Raises:
        RopepatchError: If the model, the target, the text or a setting does not allow it.
    """
    from ropepatch.fitting import fit as run

    return run(**_given(locals()))


def read_recipe(name: str) -> Recipe:
    """A recipe that comes with ropepatch, by its name, or that of a YAML file.

    Args:
        name: The name, or the path of the file.

    Raises:
        RopepatchError: No such recipe, no YAML, a key missing, or one unknown or of the wrong kind.
    """
    _check_files(recipe=name)
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
    """Train a model to read at the target of a plan, and write what came out.

    Meanwhile the folder ``OUT.run`` holds the checkpoints. Called again after an interruption, it resumes
    from the last sound one, and what comes out is the same, on a CPU to the bit. Under torchrun or accelerate
    every process calls it. The global random seeds are set to the recipe's.

    Args:
        plan: What is extended, and how.
        recipe: How it is trained; its own model, target and method are left aside.
        out: The folder to make.
        max_short_loss_increase: By how much the loss within the original context may rise, as a share; None
            for what the recipe says.
        say: Called with lines that tell how far it is.
        progress: Takes how many steps are done; see `ropepatch.progress.bar`.

    Raises:
        RopepatchError: If the plan cannot be saved, the recipe does not fit the model, a text is not there,
            the folder exists, holds another run or cannot be written, or the loss is no number.
    """
    from ropepatch.training.adaptation import adapt as run

    return run(**_given(locals()))


def active(model: nn.Module) -> Patch | Remapped | Swap | None:
    """The patch, the position remapping or the swapped encoding of a model, or of a copy of one, or None.

    Its `remove()` takes it out.

    Args:
        model: A causal language model, possibly inside a PEFT model.
    """
    from ropepatch.attention import mapped
    from ropepatch.encodings import swapped
    from ropepatch.extension.patching import active as patched

    return patched(model) or mapped(model) or swapped(model)


def swap(model: nn.Module, encoding: str | Encoding, **parameters: Any) -> Swap:
    """Put another position encoding into one loaded model, in memory and reversibly.

    A model that was trained with a rope has to be trained with the new encoding: until then its loss is that
    of shuffled text. New parameters are drawn from torch's generator; seed it first. With PEFT swap first,
    and train them by `modules_to_save=["rotary_emb.module"]`.

    Args:
        model: A LLaMA-like causal language model, possibly inside a PEFT model.
        encoding: One of `ENCODINGS`, or what `make_encoding` returned.
        **parameters: The parameters of an encoding that is given by its name.

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
) -> Diagnosis:
    """Find what is wrong with the rope of a checkpoint, an adapter or a loaded model.

    Args:
        model: A checkpoint folder, an adapter's folder, a Hub id, or tiny; or a loaded model.
        revision: The branch, tag or commit of a Hub id.
        measure: Look for NaN and infinity among the weights; of a Hub id without it only config.json is
            downloaded.
        repair: Write what the configuration of a loaded model computes into its rotary modules, in float32
            and where they are; `findings` are then what is left, and `repaired` what there was. The model
            may be within PEFT, torch.compile or FSDP. Errors are memory that nothing was written to, zeros,
            another scaling or length: with them nothing is measured or patched. Rounding to 16 bits is a
            warning, as `model.to(torch.bfloat16)` asks for it. Not compared are a rope that ropepatch put
            there, a module that is not built from a configuration, and what is on the meta device or of
            which this process holds a shard.

    Raises:
        RopepatchError: If there is no such checkpoint, its config.json is no JSON object, or the module holds
            no transformers model.
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
    """Tell whether a server computes the rope of an extended checkpoint.

    A server is asked for the next token after growing parts of the text of reading.json, which `extend`
    writes. A key, where it wants one, is read from ROPEPATCH_API_KEY.

    Args:
        server: The address of a server with OpenAI's completions API, such as http://localhost:8000; or a
            loaded model, before its training. It reads in eval mode, and is left as it was.
        checkpoint: What it serves: a folder or a Hub id; the server's own name of it if not given.
        model: The name of the model at the server; the first that it lists if not given.
        save_reading: Read the checkpoint, and write its reading.json anew.
        timeout: Seconds for one answer.
        revision: The branch, tag or commit of a Hub id.
        say: Takes lines that tell how far it is.
        progress: Called with the positions that are answered and their number.

    Raises:
        RopepatchError: There is no server, no checkpoint of ropepatch, or no reading of it.
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

    What ropepatch wrote goes there, and what transformers and engines read: the files that changed, in one
    commit, checked afterwards. The same call resumes an
    interrupted push: files that arrived are not sent again. A README.md on the Hub that ropepatch did not
    write stays. The token is that of `hf auth login` or HF_TOKEN.

    Args:
        folder: A checkpoint that `extend` wrote and verified; or a plan, whose checkpoint is written into a
            temporary folder.
        repo: owner/name on the Hub, or name in your own namespace; made if it is not there.
        private: Make the repository private.
        dry_run: Say what would be uploaded, with the card, and send and write nothing.
        revision: The branch, made from main if it is not there; main if not given.
        force: Push what was not verified or failed the short-context check, and replace weights that
            ropepatch did not write there.
        card: Write the model card into the folder first, unless its README.md is your own.
        include: Files to carry along that are no part of a checkpoint, such as examples/*.
        say: Takes lines of progress.
        api: The Hub; the usual one, with your token, if not given.

    Raises:
        RopepatchError: If the folder holds no sound checkpoint or nothing verified it, a name is invalid,
            there is no token, a file holds a secret, the repository is public but should be private or
            holds weights of others, or the Hub refuses.
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

    The logits stay: a multiplies cos and sin, hence every attention logit by a^2. Its rope is saved so that
    every engine that reads it at all takes 1 for the factor.

    Args:
        model: A checkpoint folder or a Hub id.
        out: The folder to make; it must not exist.
        revision: The branch, tag or commit of a Hub id.
        progress: Called with the bytes written so far and in all.

    Returns:
        The folder.

    Raises:
        RopepatchError: If there is no factor to fold, the queries have no weights of their own, or stock
            transformers computes other logits from the outcome; nothing is left behind then.
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
    """Show as a page why a rope fails, and what mends it.

    It is one HTML file that needs no network.

    Args:
        model: A checkpoint folder, a Hub id, or tiny, to start with; its config.json alone is read.
        out: The HTML file to write.
        tiny: Let the bundled model read in the page, which takes 2.7 MB.
        revision: The branch, tag or commit of a Hub id.

    Returns:
        The file.

    Raises:
        RopepatchError: The file exists or cannot be written, or the model has no rope that can be extended.
    """
    from ropepatch.gallery.explorer import explore as run

    return run(model, out=out, tiny=tiny, revision=revision)
