"""Every code of a finding by its usual severity, and why it matters."""

from __future__ import annotations

from typing import Literal

Severity = Literal["error", "warning", "remark"]

ERRORS = {
    # One value of config.json
    "key-misspelled": "no reader knows the key: its value has no effect",
    "not-a-number": "readers compute with it and end in a TypeError",
    "impossible-value": "readers stop at it, or silently compute something else",
    "window-not-integer": "transformers 5 and other strict readers refuse the configuration",
    "key-missing": "transformers ends in a KeyError or a TypeError",
    "type-missing": "transformers 5 silently leaves the rope unscaled, older ones refuse to load",
    "type-unknown": "transformers warns, then ends in a KeyError when it builds the model",
    "head-dim-null": "transformers 5 computes with it and ends in a TypeError",
    "transformers-refuses": "the checkpoint does not load",
    # What is stated in several places
    "theta-lost": "without it readers take their own default, mostly 10000, or stop",
    "keys-contradict": "readers follow different keys, so that one checkpoint is two models",
    "original-missing": "transformers silently takes max_position_embeddings, perhaps extended, for it",
    "factor-contradicts-lengths": "transformers scales by the factor, others by the windows: one is wrong",
    # One scaling
    "factor-below-one": "the rope rotates faster than in pretraining; transformers only warns",
    "betas-swapped": "the ramp runs the wrong way: fast pairs are slowed and slow ones not",
    "bands-swapped": "the ramp runs the wrong way: fast pairs are slowed and slow ones not",
    "attention-factor-zero": "queries and keys become 0 and attention uniform",
    "list-length": "transformers only warns, then ends in an error when it builds the model",
    # Files
    "file-unreadable": "the checkpoint does not load, or silently takes defaults in place of the file",
    "weights-damaged": "the checkpoint does not load",
    "shard-missing": "the checkpoint does not load, or takes random tensors in place of missing ones",
    "index-wrong": "the checkpoint does not load, or takes random tensors in place of missing ones",
    "weights-named": "transformers loads the file it names, other programs do not; ropepatch refuses it",
    "weights-pickled": "a pickle can run code when it is loaded; ropepatch and careful servers refuse it",
    "weights-misfit": "the model loads with random tensors in their place, or not at all",
    "weights-not-finite": "the model answers NaN to any text",
    "frequencies-contradict": "transformers computes config.json's; the model may be trained with these",
    # Attention maps
    "map-not-read": "transformers silently loads it without the map, and reads beyond trained distances",
    "map-unknown": "nothing loads it",
    "map-wrong": "transformers computes something else than was verified, or stops; ropepatch refuses it",
    "map-without-code": "transformers does not find the code of the map, or runs other code",
    "map-code-changed": "loading the checkpoint with trust_remote_code=True runs it",
    "map-other-code": "loading the checkpoint with trust_remote_code=True runs it, too",
    # Adapters
    "adapter-base-missing": "its rope is unknown",
    "adapter-base-changed": "the adapter's changes are differences to the weights it was trained on",
}
WARNINGS = {
    "scaling-ignored": "the rope is not scaled, whatever the factor says",
    "only-new-keys": "transformers 4, mlx-lm and others silently take no scaling and base 10000",
    "differs-from-record": "the checkpoint was verified with other values than it now has",
    "factor-rounded": "transformers scales by the factor, vLLM's LongRoPE and mlx-lm by the windows",
    "factor-is-integer": "vLLM stops at it under linear, early transformers 4 refuses to load",
    "tokenizer-behind": "with truncation the tokenizer cuts texts there, without it warns",
    "generation-behind": "generate() stops there, prompt included",
    "attention-factor-inverted": "it flattens attention, where longer contexts need sharper attention",
    "attention-factor-unread": "under longrope they compute it from the two windows alone",
    "mscale-alone": "transformers ignores it; DeepSeek's own code, SGLang and mlx-lm compute with it",
    "truncate-ignored": "llama.cpp, TGI, mlx-lm, by layer type transformers 5, compute other frequencies",
    "switches-against-cache": "keys cached before keep the old rotation, unlike a text that is read at once",
    "reading-of-other-weights": "`ropepatch probe` calls a server wrong that computes the checkpoint rightly",
    "weights-twice": "other programs may load them, and they may be another model's",
    "frequencies-rounded": "programs that load them, unlike transformers, rotate by rounded angles",
    "map-code-unknown": "loading the checkpoint with trust_remote_code=True runs it",
    "adapter-base-lacks-rope": "PEFT, vLLM and transformers load the adapter with the rope of its base",
}
REMARKS = {
    "factor-exceeds-window": "some models (Yarn-Mistral, AFM) have a larger factor than needed and load well",
    "window-left-behind": "Qwen documents it so; a program that takes it for its limit never scales",
    "linear-multiplied": "right for Vicuna and LongChat; deepseek-coder's is the extended window already",
    "encoding-swapped": "stock transformers refuses it on purpose: the rope it states is not the model's",
    "attention-map": "transformers refuses it without that code on purpose; no other engine runs it",
    "not-in-transformers": "only config.json could be checked, not what is computed from it",
    "adapter-without-record": "programs load the adapter onto the base, which is right if it was trained so",
}
CODES: dict[str, tuple[Severity, str]] = {
    **{code: ("error", why) for code, why in ERRORS.items()},
    **{code: ("warning", why) for code, why in WARNINGS.items()},
    **{code: ("remark", why) for code, why in REMARKS.items()},
}
