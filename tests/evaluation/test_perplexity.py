"""The loss of every token, for any model, and the curve of known losses."""

import math

import pytest
import torch
import torch.nn.functional as F
from loss_models import (
    IgnoresPositions,
    Largest,
    WithoutPositions,
    build,
    expected,
    tokens,
)
from oldest import needs
from torch import nn
from transformers import LlamaForCausalLM

from ropepatch.errors import RopepatchError
from ropepatch.evaluation import perplexity as module
from ropepatch.evaluation.perplexity import LossCurve, LossReader, perplexity


@pytest.fixture(autouse=True)
def chunk(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 12)
    return 12


def warnings_of(caplog):
    return [
        message
        for name, _, message in caplog.record_tuples
        if name == LossReader.__module__
    ]


# The head is the model's own

FAMILIES = {  # and what each does beside a projection
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "falcon": {"new_decoder_architecture": True},
    "gpt2": {},
    "gpt_neox": {},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "gemma4_text": {
        "final_logit_softcapping": 2.0,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "minicpm3": {},
    "falcon_h1": {"lm_head_multiplier": 0.3},
    "llama4_text": {},
    "qwen3_vl": {},
    "mistral3": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_loss_equals_the_one_from_the_models_full_logits(family, caplog):
    needs(family)
    model = build(family, **FAMILIES[family])
    documents = tokens(33, 32, 20)  # the first two are read together
    for ids, nll in zip(documents, perplexity(model, None, documents).nll, strict=True):
        torch.testing.assert_close(nll, expected(model, ids), rtol=1e-5, atol=2e-5)
        assert nll.std() > 0.1
    model.to(torch.bfloat16)
    (narrow,) = perplexity(model, None, documents[2:]).nll
    with torch.no_grad():
        logits = model(documents[2][None]).logits[0, :-1].float()
    torch.testing.assert_close(
        narrow,
        F.cross_entropy(logits, documents[2][1:], reduction="none"),
        rtol=0,
        atol=0.1,
    )
    assert narrow.dtype == torch.float32
    assert not warnings_of(caplog)  # none: in chunks, not all at once


@pytest.mark.parametrize("lengths", [[128], [6] * 60], ids=["one long", "many short"])
def test_no_more_logits_than_a_chunk_exist_at_a_time(lengths, chunk):
    model = build(vocab_size=4000)
    documents = tokens(*lengths, vocabulary=4000)
    with Largest() as chunked:
        perplexity(model, None, documents)
    with Largest() as full, torch.no_grad():
        model(torch.stack(documents))
    assert full.numel == sum(lengths) * 4000
    assert chunked.numel == chunk * 4000


# Models that cannot be read in chunks


class GivesTwoPositions(LlamaForCausalLM):
    def forward(self, input_ids, use_cache=None, logits_to_keep=0):
        keep = (
            0
            if isinstance(logits_to_keep, int)
            else torch.tensor([0, input_ids.shape[1] - 1])
        )
        return super().forward(input_ids, use_cache=use_cache, logits_to_keep=keep)


class LooksAtItsNeighbours(LlamaForCausalLM):
    def forward(self, input_ids, use_cache=None, logits_to_keep=0):
        output = super().forward(
            input_ids, use_cache=use_cache, logits_to_keep=logits_to_keep
        )
        output.logits = output.logits - output.logits.mean(dim=1, keepdim=True) / 2
        return output


DECODERS = {
    "WithoutDecoder": lambda model: None,
    "WithTheHeadForADecoder": lambda model: model.lm_head,
    "WithAnIdleDecoder": lambda model: nn.Identity(),
}


class ShortensItsDecoder(LlamaForCausalLM):
    def forward(self, input_ids, use_cache=None, logits_to_keep=0):
        hidden = self.model(input_ids, use_cache=use_cache)[0]
        return super().forward(
            inputs_embeds=hidden, use_cache=use_cache, logits_to_keep=logits_to_keep
        )


@pytest.mark.parametrize(
    "model_class",
    [
        WithoutPositions,
        IgnoresPositions,
        GivesTwoPositions,
        LooksAtItsNeighbours,
        *(
            type(name, (LlamaForCausalLM,), {"get_decoder": of})
            for name, of in DECODERS.items()
        ),
        ShortensItsDecoder,
    ],
)
def test_a_model_without_chunks_is_scored_with_one_warning(llama, model_class, caplog):
    model = model_class(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    curve = perplexity(model, None, tokens(31, 21))
    for ids, nll in zip(tokens(31, 21), curve.nll, strict=True):
        torch.testing.assert_close(nll, expected(model, ids), rtol=1e-5, atol=1e-5)
    (warning,) = warnings_of(caplog)
    assert model_class.__name__ in warning


# The curve


@pytest.mark.parametrize("places", [2, 10, 32, (0, 2), (5, 9), (9, 40), (31, 32)])
def test_a_mean_is_over_the_tokens_at_a_place(llama, places):
    documents = tokens(32, 10, 31, 9)
    curve = perplexity(llama, None, documents)
    begin, end = places if isinstance(places, tuple) else (1, places)
    losses = [
        float(expected(llama, ids)[t - 1])
        for ids in documents
        for t in range(1, len(ids))
        if begin <= t < end and (places != end or len(ids) >= end)
    ]
    read = curve.between(begin, end) if isinstance(places, tuple) else curve.at(places)
    assert (read.value, read.weight) == pytest.approx(
        (sum(losses) / len(losses), len(losses))
    )


def test_sums_over_documents_are_rounded_once():
    losses = (
        torch.tensor([2.0**53]),
        torch.ones(1),
        torch.ones(1),
    )  # 2**53 + 1 is no float64
    assert (
        LossCurve(losses).at(2).value
        == LossCurve(losses[::-1]).at(2).value
        == (2.0**53 + 2) / 3
    )


CURVE = LossCurve((torch.ones(9), torch.ones(4)))


def test_an_impossible_request_to_a_curve_raises():
    with pytest.raises(RopepatchError, match="has 11 tokens: the longest has 10"):
        CURVE.at(11)
    with pytest.raises(RopepatchError, match=r"has a scored token in \[10, 20\)"):
        CURVE.between(10, 20)


# The model is left as it was


# Errors


@pytest.mark.parametrize(
    ("logit", "message"),
    [
        (math.nan, r"documents\[0\]: the loss of token 1 is nan, expected a number"),
        (-math.inf, r"documents\[1\]: the loss of token 5 is inf, expected a number"),
    ],
)
def test_an_infinite_loss_is_named_by_document_and_token(logit, message, caplog):
    model = build()
    model.lm_head.register_forward_hook(
        lambda _, __, logits: logits.index_fill(-1, torch.tensor([7]), logit)
    )
    with pytest.raises(RopepatchError, match=message):
        perplexity(model, None, [[1, 2, 3], [1, 2, 3, 4, 5, 7, 6, 7]])
    assert not warnings_of(caplog)
