"""Documents and scores of the ropepatch_* tasks; the header of each YAML file states its protocol."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import datasets
import torch
from transformers import AutoConfig, AutoTokenizer

from ropepatch.data.haystack import Haystacks
from ropepatch.data.texts import stream_texts
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.tasks import doublings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase


SHORTEST = 256  # tokens, of the default lengths

Splits = dict[str, datasets.Dataset]


# Passkeys


def passkeys(
    *,
    max_seq_lengths: Sequence[int] = (),
    haystacks: int = 20,
    seed: int = 0,
    **metadata: Any,
) -> Splits:
    """A row for every passkey: the prompt and the answer as text, and the length."""
    lengths = _lengths("ropepatch_passkey", max_seq_lengths, metadata)
    tokenizer = _tokenizer(metadata)
    plan = Haystacks(
        lengths=lengths, count=haystacks, keys=1, kinds=("passkey",), seed=seed
    )
    rows = []
    for haystack in plan.make(tokenizer):
        ((length, (question,)),) = haystack.asked.items()
        ids = torch.cat([haystack.ids[: haystack.stops[length]], question.ids])
        prompt, answer = _decoded(tokenizer, ids.tolist(), question.answer.tolist())
        rows.append({"prompt": prompt, "answer": answer, "length": length})
    return _test_split(rows)


def _decoded(
    tokenizer: PreTrainedTokenizerBase, question: list[int], answer: list[int]
) -> tuple[str, str]:
    """A prompt and its answer as texts that the harness tokenises to exactly these tokens."""
    ids = question + answer
    bos = tokenizer.bos_token or ""
    # The harness adds none after a literal BOS
    special = {"add_special_tokens": False} if bos else {}

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    def decode_body(tokens: list[int]) -> str:
        return bos + decode(tokens[1:] if bos else tokens)

    for write in (decode_body, decode):  # tokenizers differ in the space after the BOS
        whole, context = write(ids), write(question)
        encoded = [tokenizer.encode(text, **special) for text in (whole, context)]
        if whole.startswith(context) and encoded == [ids, question]:
            return context, whole[len(context) :]
    raise RopepatchError(
        f"a prompt of {len(ids)} tokens has other tokens when its text is encoded with "
        f"{type(tokenizer).__name__}",
        hint="the harness can only pass text: use ropepatch.passkey",
    )


def passkey_scores(
    doc: dict[str, Any], results: list[tuple[float, bool]]
) -> dict[str, float]:
    """The score of a passkey, 1 if correct: for the mean over all, and for that over its length."""
    ((_, greedy),) = results
    return {"acc": float(greedy), f"acc_{doc['length']}": float(greedy)}


# Retrieval


def questions(
    *,
    max_seq_lengths: Sequence[int] = (),
    kinds: Sequence[str] = ("number", "sentence"),
    haystacks: int = 2,
    keys: int = 8,
    seed: int = 0,
    **metadata: Any,
) -> Splits:
    """A row for every question: the prompt and the answer as text, the kind and the length."""
    lengths = _lengths("ropepatch_retrieval", max_seq_lengths, metadata)
    tokenizer = _tokenizer(metadata)
    plan = Haystacks(
        lengths=lengths, count=haystacks, keys=keys, kinds=kinds, seed=seed
    )
    rows = []
    for haystack in plan.make(tokenizer):
        for length, asked in haystack.asked.items():
            for question in asked:
                ids = torch.cat([haystack.ids[: haystack.stops[length]], question.ids])
                prompt, answer = (
                    tokenizer.decode(part, clean_up_tokenization_spaces=False)
                    for part in (ids, question.answer)
                )
                kind = question.kind
                rows.append(
                    {"prompt": prompt, "answer": answer, "kind": kind, "length": length}
                )
    return _test_split(rows)


def retrieval_scores(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The score of a question, 1 if the generated text begins with the answer."""
    (text,) = results
    found = float(text.strip().startswith(doc["answer"].strip()))
    return {"acc": found, f"acc_{doc['kind']}_{doc['length']}": found}


# Long documents


def long_documents(
    *,
    text: str = "",
    field: str = "text",
    split: str = "test",
    add_bos_token: bool | None = None,
    **metadata: Any,
) -> Splits:
    """A row for every document, with the number of its tokens."""
    tokenizer = _tokenizer(metadata)
    if add_bos_token is not False and tokenizer.encode("a") != tokenizer.encode(
        "a", add_special_tokens=False
    ):
        raise RopepatchError(
            "the harness would count the special tokens that the tokenizer adds to a text",
            hint="--model_args pretrained=...,add_bos_token=False",
        )
    documents = _documents("ropepatch_long_perplexity", text, field, split)
    encoded = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
    pairs = zip(documents, encoded, strict=True)
    return _test_split(
        [{"text": document, "tokens": len(ids)} for document, ids in pairs]
    )


def perplexity_scores(
    doc: dict[str, Any], results: list[float]
) -> dict[str, tuple[float, int]]:
    """The log-likelihood of a document and its length, in each unit."""
    (log_likelihood,), text = results, doc["text"]
    units = {
        "token": doc["tokens"],
        "word": len(re.split(r"\s+", text)),
        "byte": len(text.encode()),
    }
    return {
        f"{unit}_perplexity": (log_likelihood, count) for unit, count in units.items()
    }


# Metadata of the harness


def _lengths(task: str, lengths: Sequence[int], metadata: dict[str, Any]) -> list[int]:
    """The lengths, ascending, within the limit of the model; default: 256 and its doublings."""
    limit = _window(metadata)
    if not lengths and limit is None:
        raise RopepatchError(
            f"{task} needs max_seq_lengths",
            hint="--metadata '{\"max_seq_lengths\": [4096, 8192]}'",
        )
    ordered = sorted(
        {
            int(length)
            for length in lengths or doublings(2 * min(SHORTEST, limit), limit)
        }
    )
    if limit is not None and ordered[-1] > limit:
        raise RopepatchError(
            f"{task} needs {ordered[-1]} tokens, but the model's max_length is {limit}",
            hint="use shorter lengths; set max_length in model_args only if the model supports it",
        )
    return ordered


def _window(metadata: dict[str, Any]) -> int | None:
    """The tokens beyond which the harness truncates a prompt; None if only the backend has the limit."""
    if metadata.get("max_length"):
        return int(metadata["max_length"])
    if not metadata.get("pretrained"):
        return None
    config = AutoConfig.from_pretrained(metadata["pretrained"], **_safely(metadata))
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def _tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerBase:
    name = metadata.get("tokenizer") or metadata.get("pretrained")
    if not name:
        raise RopepatchError(
            "the task needs the model's tokenizer",
            hint='--metadata \'{"tokenizer": "FOLDER_OR_ID"}\'',
        )
    return AutoTokenizer.from_pretrained(name, **_safely(metadata))


def _safely(metadata: dict[str, Any]) -> dict[str, Any]:
    """Options for the requested revision without its code; trust_remote_code=None would prompt on stdin."""
    return {
        "revision": str(metadata.get("revision") or "main"),
        "trust_remote_code": False,
    }


def _documents(task: str, text: str, field: str, split: str) -> list[str]:
    if not text:
        raise RopepatchError(
            f"{task} needs a text", hint='--metadata \'{"text": "SOURCE"}\''
        )
    return list(stream_texts(text, field=field, split=split))


def _test_split(rows: list[dict[str, Any]]) -> Splits:
    return {"test": datasets.Dataset.from_list(rows)}
