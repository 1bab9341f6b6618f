"""Tiny random causal language models of every rotary architecture, built from a config's own fields."""

import functools
from copy import deepcopy
from dataclasses import fields
from inspect import signature

import torch
from oldest import BROKEN
from transformers import (
    CONFIG_MAPPING,
    LlamaForCausalLM,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from ropepatch.model.config import loader_of

# Sizes whose estimated cost is compared with what torch allocates and computes.
LLAMA_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
CAUSAL_LM_TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
# Multimodal models without a class for only the language model.
COMPOSITE_TYPES = tuple(
    sorted({*MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES} - {*CAUSAL_LM_TYPES})
)
# absolute, learned or no positions, or (codegen, gptj, roformer) rotary tables without a rotary module
NOT_ROTARY = """
    bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom
    camembert codegen cpmant ctrl data2vec-text electra ernie falcon_mamba git gpt-sw3 gpt2 gpt_bigcode
    gpt_neo gptj inkling2_text inkling_text jamba kimi_linear mamba mamba2 marian mbart megatron-bert
    mpt musicgen musicgen_melody mvp nemotron_h openai-gpt opt pegasus plbart prophetnet reformer
    rembert roberta roberta-prelayernorm roc_bert roformer rwkv trocr whisper xglm xlm xlm-roberta
    xlm-roberta-xl xlnet xlstm xmod zamba
    blip blip-2 florence2 inkling2 inkling2_loop inkling2_loop_text inkling_mm_model instructblip
    instructblipvideo kosmos-2 kosmos-2.5 nemotron_h_omni pix2struct pp_formulanet
    t5gemma2 udop vision-encoder-decoder
"""
# Some need timm, pillow or another model; others need matching sizes of their parts; the two assistants run
# only on the hidden states of their target model.
NOT_BUILT = """
    chameleon cosmos3_edge deepseek_ocr2 evolla fast_vlm fun_asr_nano gemma3n gemma4_assistant
    gemma4_unified_assistant glm5_next granite4_vision granite_docling hunyuan_vl kyutai_speech_to_text
    mistral4 molmo2 muse_spark nemo_speechlm perception_lm qwen3_omni_moe shieldgemma2 voxtral_realtime
"""
ROTARY_TYPES = tuple(
    t
    for t in (*CAUSAL_LM_TYPES, *COMPOSITE_TYPES)
    if t not in {*NOT_ROTARY.split(), *NOT_BUILT.split(), *BROKEN}
)
WEIGHT_SCALE = 6.0
ROPE_KEYS = [
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
]
PER_LAYER_FIELDS = [
    "layer_types",
    "mlp_layer_types",
    "indexer_types",
    "layers_block_type",
    "block_types",
]

SIZES = {  # fields of configs, by their small value
    0.0: "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop",
    0.02: "initializer_range",
    128: "vocab_size intermediate_size ffn_dim vocab_size_per_layer_input",
    64: """
        hidden_size embed_dim backbone_hidden_size max_position_embeddings sliding_window index_topk
        shared_intermediate_size adapter_in_dim adapter_out_dim adapter_input_size
        ext_pw_out_channel mm_embed_dim output_proj_dims
    """,
    1: "depth num_layers bos_token_id n_shared_experts n_group topk_group mamba_n_groups",
    2: """
        eos_token_id num_key_value_heads index_n_heads num_experts_per_tok moe_topk moe_k
        top_k_experts zero_expert_num linear_num_key_heads num_blocks
    """,
    4: """
        num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts
        mamba_n_heads linear_num_value_heads
    """,
    16: """
        head_dim hidden_size_per_layer_input qk_rope_head_dim qk_nope_head_dim v_head_dim
        mamba_d_state mamba_chunk_size linear_key_head_dim linear_value_head_dim mm_posemb_size
        position_embedding_size
    """,
    8: "rotary_dim",
    32: """
        kv_lora_rank q_lora_rank o_lora_rank qk_head_dim index_head_dim expert_ffn_hidden_size
        shared_experts_intermediate_size moe_intermediate_size shared_expert_intermediate_size
        mamba_d_head nemo_conv_channels
    """,
}
SMALL = {"pad_token_id": 0} | {
    name: size for size, names in SIZES.items() for name in names.split()
}

SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_interleaved": True,
    "mrope_section": [3, 3, 2],
}
UNMIXED = SECTIONS | {"mrope_section": [3, 3, 2]}
HALF = SECTIONS | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
QWEN_VL_TEXT = {
    "head_dim": 64,
    "rope_parameters": MROPE | {"partial_rotary_factor": 0.25},
}

SECTIONED = {
    "glm_ocr_text hy_v4_vl_text paddleocr_vl_text qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text": SECTIONS,
    "qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text": MROPE,
    "glm4v_moe_text glm4v_text": HALF,
}
ODD = {
    name: {"rope_parameters": rope}
    for names, rope in SECTIONED.items()
    for name in names.split()
} | {
    "qwen3_5_moe_text": QWEN_VL_TEXT,
    "qwen3_5_text": QWEN_VL_TEXT,
    "apertus1p5": {"image_token_id": 3, "audio_token_id": 4}
    | {"image_token_offset": 8, "audio_token_offset": 16},
    "apertus1p5_vision_tokenizer": {"codebook_size": 8, "base_channels": 32},
    "bailing_hybrid": {"rope_theta": 10000.0},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "use_cache": False,
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3],
    },
    "blt_global_transformer": {"hidden_size": 128},
    "blt_local_decoder": {"hidden_size_global": 128},
    "blt_local_encoder": {"hidden_size_global": 128},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {**MROPE},
            "full_attention": {**MROPE},
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "dots3_note_text": {
        "head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 32],
        "rope_parameters": UNMIXED,
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "deepseek_v4": {"head_dim": 64},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gemma3n_text": {"num_kv_shared_layers": 0, "num_hidden_layers": 2},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "position_embedding_type": "rope",
    },
    "laguna": {"layer_types": ["sliding_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"]},
    "mimo_v2_flash": {"head_dim": 48, "swa_head_dim": 48},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "moshi": {"audio_vocab_size": 32},
    "qwen4_exp_text": QWEN_VL_TEXT
    | {
        "hc_lowrank": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "wavtokenizer_encoder": {"codebook_dim": 64, "codebook_size": 8},
    "zamba2": {"use_mem_rope": True},
    "zaya": {
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid", "hybrid_sliding"],
        "router_hidden_size": 32,
    },
}


def tiny_rope(rope):
    """The unscaled form of a family's default `rope_parameters`, with theta 10000 where it is flat."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {
            kind: value and tiny_rope(value) | {"rope_theta": value["rope_theta"]}
            for kind, value in rope.items()
        }
    kind = "proportional" if rope.get("rope_type") == "proportional" else "default"
    return {key: rope[key] for key in ROPE_KEYS if key in rope} | {
        "rope_type": kind,
        "rope_theta": 10000.0,
    }


@functools.cache
def tiny_fields(config_class):
    """Small values for the fields of a config class, including its sub-configs."""
    names = {field.name for field in fields(config_class)}
    default = config_class()
    renamed = {
        config_class.attribute_map.get(name, name): value
        for name, value in SMALL.items()
    }
    chosen = {name: value for name, value in renamed.items() if name in names}
    if "kv_lora_rank" in names and "num_key_value_heads" in names:
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    kinds = {
        name: list(dict.fromkeys(getattr(default, name, None) or ()))
        for name in PER_LAYER_FIELDS
    }
    kinds = {name: values for name, values in kinds.items() if values and name in names}
    depth = max(2, *map(len, kinds.values()), 0)
    chosen |= {name: (values * depth)[:depth] for name, values in kinds.items()}
    depth_name = config_class.attribute_map.get(
        "num_hidden_layers", "num_hidden_layers"
    )
    if depth_name in names:
        chosen[depth_name] = depth
    if getattr(default, "rope_parameters", None):
        chosen["rope_parameters"] = tiny_rope(default.rope_parameters)
    for name in config_class.sub_configs:
        if (sub_config := getattr(default, name)) is not None:
            chosen[name] = tiny_fields(type(sub_config)) | {
                "model_type": sub_config.model_type
            }
    return chosen | deepcopy(ODD.get(config_class.model_type, {}))


def tiny_config(model_type, **more):
    """A config of a model with a few thousand parameters, and `rope_theta` 10000 where it is flat."""
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**deepcopy(tiny_fields(config_class)) | more)


def tiny_model(model_type, *, seed=0, **more):
    """A float32 model in eval mode whose weights are large enough for its logits to depend on positions."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, **more)
    model = loader_of(config).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.mul_(WEIGHT_SCALE)
            elif name.endswith(".temp"):
                parameter.fill_(1.0)
    return model


TAKEN = signature(LlamaForCausalLM.forward).parameters
# The first since transformers 5.24
CACHE = "cache" if "cache" in TAKEN else "past_key_values"


def into(cache):
    """Arguments that pass a KV cache to a stock model; None for a new one."""
    return {CACHE: cache, "use_cache": True}
