"""The key-value cache by the name that the stock models of the installed transformers give it."""

from inspect import signature
from typing import Any

from transformers import LlamaForCausalLM

TAKEN = signature(LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in TAKEN else "past_key_values"  # the first since transformers 5.24


def into(cache: Any) -> dict[str, Any]:
    """What tells a stock model to go on from a cache and to fill it; from None, to make one."""
    return {CACHE: cache, "use_cache": True}
