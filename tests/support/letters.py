"""A tokenizer with one token per letter."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BOS, EOS = 0, 1
VOCABULARY = {
    "<s>": BOS,
    "</s>": EOS,
    **{letter: 2 + i for i, letter in enumerate("abcdefgh")},
}


def letter_tokenizer(vocabulary=VOCABULARY, **special):  # one token per letter
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)
