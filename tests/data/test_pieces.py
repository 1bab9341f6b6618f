"""Long texts are split in pieces: the tokens are those of the whole."""

import tracemalloc

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ropepatch.data import pieces as dividing
from ropepatch.data.pieces import Divider
from ropepatch.data.texts import first_documents, token_ids, windows
from ropepatch.errors import RopepatchError
from ropepatch.model.source import TINY


def byte_level(tiny: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """SmolLM2's way to words: digits alone, then those of GPT-2; tokens of tiny."""
    backend = Tokenizer.from_str(tiny.backend_tokenizer.to_str())
    digits, words = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def metaspace(stories: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """As newer LLaMA tokenizers are written; its vocabulary has a token that holds a space within."""
    backend = Tokenizer.from_str(stories.backend_tokenizer.to_str())
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def crossing() -> PreTrainedTokenizerFast:
    """One that joins `a` and the space behind it, if a `b` has not taken the space."""
    vocabulary = {token: number for number, token in enumerate(["a", "b", " ", "\n", "a ", " b", "aa"])}
    model = models.BPE(vocab=vocabulary, merges=[("a", "a"), (" ", "b"), ("a", " ")])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))


@pytest.fixture(scope="module")
def tokenizers(shared) -> dict[str, PreTrainedTokenizerFast]:
    folders = {name: shared / "checkpoints" / name for name in ("stories-260k", "babyllama-361")}
    loaded = {name: AutoTokenizer.from_pretrained(folder) for name, folder in folders.items()}
    tiny = AutoTokenizer.from_pretrained(TINY)
    made = {"smollm2": byte_level(tiny), "metaspace": metaspace(loaded["stories-260k"])}
    return loaded | made | {"tiny": tiny, "crossing": crossing()}


WORDS = [
    "a",
    "b",
    "aa",
    "Once",
    "upon",
    "'s",
    "don't",
    "3",
    "42",
    ".",
    ",\n",
    "é",
    "e\u0301",
    "中文",
    "🙂",
    "<s>",
]
GAPS = ["", " ", "  ", "\n", "\n\n", " \n", "\t", "\r\n", "\u00a0", "\u3000"]
TEXTS = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(GAPS)), max_size=60)


@pytest.mark.parametrize(
    "name", ["tiny", "stories-260k", "babyllama-361", "smollm2", "metaspace", "crossing"]
)
@settings(max_examples=150, deadline=None)
@given(parts=TEXTS)
@example(parts=[("Once", " ")] * 60)
def test_the_pieces_of_a_text_have_the_tokens_of_the_whole(name, parts, tokenizers):
    tokenizer, text = tokenizers[name], "".join(map("".join, parts))
    if name == "crossing":
        text = "".join(letter for letter in text if letter in "ab \n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dividing, "PIECE", 8)
        divided = list(Divider(tokenizer).pieces(text))
        split = token_ids(tokenizer, [text, text], bos=False)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [ids.tolist() for ids in split] == [whole, whole]
    if parts == [("Once", " ")] * 60 and name != "crossing":
        assert len(divided) > 20


def test_of_a_long_document_no_more_is_split_than_is_read(tokenizers, monkeypatch):
    tokenizer = tokenizers["tiny"]
    text = "Ann has a red ball. " * 200_000  # 4 MB
    given_to_it = []
    encode = type(tokenizer)._encode_plus

    def counting(self, text, *args, **kwargs):
        given_to_it.append(sum(map(len, text)) if isinstance(text, list) else len(text))
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "_encode_plus", counting)
    (ids,) = first_documents(tokenizer, [text], length=1000, count=1)
    assert len(ids) == 1000
    assert sum(given_to_it) < 2**21
    given_to_it.clear()
    long, short, last = token_ids(tokenizer, [text, "Ann", text], length=1000)
    assert len(long) >= 1000 <= len(last)
    assert len(short) < 10
    assert sum(given_to_it) < 2**22


def test_all_of_a_long_document_takes_memory_for_its_tokens_and_not_much_more(tokenizers):
    text = "Ann has a red ball. " * 100_000
    tracemalloc.start()
    (window,) = windows(tokenizers["tiny"], [text], length=200_000, count=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert window[:50] == token_ids(tokenizers["tiny"], [text[:1000]])[0][:50].tolist()
    assert peak < 40 * len(text) / 4 + 2**24


@pytest.mark.parametrize("text", ["\0" * 5000, "中" * 5000])
def test_a_text_that_cannot_be_divided_is_refused_before_it_fills_the_memory(text, tokenizers, monkeypatch):
    monkeypatch.setattr(dividing, "PIECE", 100)
    monkeypatch.setattr(dividing, "LARGEST", 1000)
    with pytest.raises(RopepatchError, match="a document of 5,000 characters has 1,000 together"):
        token_ids(tokenizers["tiny"], [text])
    assert torch.equal(*token_ids(tokenizers["tiny"], [text[:900]] * 2))


def test_the_vocabulary_is_read_once_for_all_long_documents(tokenizers, monkeypatch):
    monkeypatch.setattr(dividing, "PIECE", 64)
    read = []
    monkeypatch.setattr(
        dividing, "_Cuts", lambda tokenizer, make=dividing._Cuts: read.append(1) or make(tokenizer)
    )
    token_ids(tokenizers["tiny"], ["Once upon a time. " * 20] * 5 + ["short"])
    assert read == [1]
