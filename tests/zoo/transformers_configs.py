"""Configurations of transformers' classes, made small by rules about their settings' names."""

from __future__ import annotations

import re
from typing import Any

VOCABULARY, LENGTH, IMAGE, PATCH = 99, 16, 64, 16
LAYERS, WIDTH, HEADS = 2, 32, 4
IMAGE_TOKEN, VIDEO_TOKEN, AUDIO_TOKEN, FIRST_WORD = 3, 4, 5, 10

_LAYER_COUNTS = (
    r"num_hidden_layers|n_layers?|num_layers|(encoder|decoder|e|d)_layers|layers|depth"
    r"|num_(encoder|decoder|hidden)_layers|(encoder|decoder)_num_hidden_layers"
    r"|(speech_|text_)?(encoder|decoder)_layers|conf_num_hidden_layers"
)
# What a number under this name becomes, if it is larger; the first rule that matches counts.
_SIZES: list[tuple[str, int]] = [
    (r"type_vocab_size|additional_vocab_size|vocab_size_per_layer_input|.*vocab_size", VOCABULARY),
    (r"pad_token_id|pad_token_index", 0),
    (r"bos_token_id|cls_token_id", 1),
    (r"(eos|sep|decoder_start|forced_eos)_token_id", 2),
    (r"image_token_(id|index)|image_patch_id", IMAGE_TOKEN),
    (r"video_token_(id|index)", VIDEO_TOKEN),
    (r"audio_token_(id|index)", AUDIO_TOKEN),
    (r"vision_start_token_id|image_start_token_id", 6),
    (r"vision_end_token_id|image_end_token_id", 7),
    (r".*token_(id|index)|im_\w+_id|unk_index|mask_index", 8),
    (_LAYER_COUNTS + "|num_kv_shared_layers", LAYERS),
    (r"first_k_dense_replace|num_dense_layers|n_group|num_expert_group|topk_group", 1),
    (r".*num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num|num_query_groups", 2),
    (r"linear_num_key_heads|.*n_groups|index_kpool", 2),
    (r"qk_head_dim", 16),
    (r".*head_?dim|d_kv|(mamba_)?d_head|dim_head|kv_channels|attention_key_size|.*head_size", 8),
    (r".*heads?|.*nhead", HEADS),
    (r".*lora_rank|qk_(rope|nope)_head_dim|v_head_dim|hidden_size_per_layer_input", 8),
    (r".*(dt|time_step)_rank|rotary_dim|laurel_rank|num_groups", 4),
    (r"(mamba_)?expand(_factor)?", 1),
    (r"(mamba_)?(d_state|state_size)|ssm_state_size", 8),
    (r".*(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim|feed_forward_size)", 64),
    (r"intermediate_dim|dim_ff|dff|.*feedforward_dim|dim_feedforward|intermediate_size_mlp", 64),
    (r".*max_position_embeddings|n_positions|n_ctx|max_seq_len|.*max_\w*length|max_pos_emb", 64),
    (r"max_(encoder|decoder|2d)_position_embeddings|max_(source|target)_positions", 64),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts|num_expert|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_topk|top_?k_experts|num_selected_experts|moe_(k|top_k)", 2),
    (r"(pretrain_)?image_size|resolution", IMAGE),
    (r"image_embedding_size", IMAGE // PATCH),
    (r"num_blocks", 1),
    (r"mm_tokens_per_image", (IMAGE // PATCH) ** 2),
    (r"patch_size", PATCH),
    (r"(sliding|attention)_window(_size)?|sliding_window_size|local_attention.*", 8),
    (r".*chunk_size|block_size|index_topk\w*|context_size|index_block_size", 8),
    (r"mask_(time|feature)_length", 2),
    (r"num_mel_bins|feature_size|n_mel_bins|input_feat_per_channel", 16),
    (r"num_conv_pos_embeddings|num_conv_pos_embedding_groups|conv_pos_kernel_size", 4),
    (r"num_queries|num_query_tokens|.*num_latents|.*n_latents|latent_query_num|num_denoising", 8),
    (r"num_embeddings|codebook_size|num_codevectors_per_group", 16),
    (r"train_num_points|two_stage_num_proposals|num_negatives", 16),
    (r"input_feat_size|feature_projection_input_dim|input_dim|hidden_size_global", WIDTH),
    (
        r"upsample_groups|n_embd|d_model|d_inner|.*_inplanes|\w*pos_feats|classifier_proj_size",
        WIDTH,
    ),
    (r"(.*_)?(kernel|stride)_size", 7),
    (r"(.*_)?window_size", 2),  # patches; where it is more, they are pixels
    (r"(.*_)?(size|dim|dims|channels|width|rank|dimension|d_ssm|d_latents)", WIDTH),
]
# Names of lists whose elements are widths, and shrink with the widths of their neighbours.
_WIDTHS = (
    r".*(dims?|sizes|channels|dimensions|filters|hidden_size|embed_dim)"
    r"|.*(channel_list|dim_per_stage)"
)
# What has no default, but has to be a number.
_REQUIRED = (
    r"head_dim|.*token_(id|index)|n_routed_experts|num_experts_per_tok|num_key_value_heads|vocab_size"
    r"|layer_norm_eps"
)
_INDEXES = r".*(indexes|indices|idxs|_layers|layer_ids)|out_indices|mlp_only_layers|spatial_target"
_DIVISOR = 8  # of hierarchical models' widths: keeps the ratios between stages


def shrunk(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that have to change for a small model, also those of configurations within."""
    kept = _kept_layers(settings)
    changed: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and ("config" in name or "model_type" in value):
            changed[name] = _shrunk_within(value, name, kept)
        elif isinstance(value, dict) and name in ("rope_parameters", "rope_scaling"):
            changed[name] = _shrunk_rotation(value)
        elif isinstance(value, list):
            changed[name] = _shrunk_list(name, value, kept, settings)
        elif type(value) is int or value is None:
            changed[name] = _shrunk_number(name, value, kept, settings)
    for name in ("stage_names", "out_features"):  # follow from the number of layers
        if "stage_names" in settings:
            changed[name] = None
    return {n: v for n, v in changed.items() if n not in settings or v != settings[n]}


def _shrunk_within(value: dict[str, Any], name: str, kept: list[int]) -> dict[str, Any]:
    if name == "per_layer_config":  # a layer's number: what differs in it
        by_number = {int(k): shrunk_whole(v) for k, v in value.items()}
        return {str(new): by_number[old] for new, old in enumerate(kept) if old in by_number}
    return shrunk_whole(value)


def shrunk_whole(settings: dict[str, Any]) -> dict[str, Any]:
    """All settings, with those changed that have to."""
    whole = {**settings, **shrunk(settings)}
    return {n: v for n, v in whole.items() if n not in ("stage_names", "out_features")}


def _layers(settings: dict[str, Any]) -> int:
    if _in_stages(settings):  # its lists are about these
        return 0
    counts = [v for n, v in settings.items() if re.fullmatch(_LAYER_COUNTS, n) and type(v) is int]
    return max(counts, default=0)


def _in_stages(settings: dict[str, Any]) -> bool:
    return isinstance(settings.get("depths"), list) or "embed_dim_per_stage" in settings


def _kept_layers(settings: dict[str, Any]) -> list[int]:
    """Which layers stay: one of each kind where lists say how they differ, and two at least."""
    count = _layers(settings)
    lists = [v for n, v in settings.items() if isinstance(v, list) and len(v) == count > LAYERS]
    lists = [v for v in lists if len(set(map(str, v))) < len(v) // 2 + 1]
    kinds: dict[str, int] = {}
    for number in range(count):
        kinds.setdefault(str([values[number] for values in lists]), number)
    first = sorted(kinds.values())[:4]
    if len(settings.get("out_indices") or ()) == 4 and "stage_names" in settings:
        return list(range(4))  # a backbone that gives all of them
    first = first if len(first) > 1 else list(range(min(count, LAYERS)))
    return first * 2 if settings.get("num_kv_shared_layers") else first


def _shrunk_list(name: str, value: list[Any], kept: list[int], settings: dict[str, Any]) -> Any:
    count = _layers(settings)
    if name in ("eos_token_id", "bos_token_id"):
        return 2
    indexes = re.fullmatch(_INDEXES, name) and value == sorted(set(value))
    if len(value) == count > LAYERS and not indexes:
        value = [value[number] for number in kept]
    numbers = bool(value) and all(type(v) is int for v in value)
    if numbers and name in ("image_size", "input_size"):
        return [IMAGE] * len(value)
    if name in ("depths", "layers", "num_block_repeats", "stage_num_blocks") and numbers:
        return [min(v, 2) for v in value]
    if name == "attention_window":
        return [8 for _ in value]
    if numbers and "stage_names" in settings and name == "out_indices":
        last = [len(kept)] if len(value) == 1 else list(range(1, len(kept) + 1))
        return value if "depths" in settings else last
    if numbers and indexes and count:
        return [*dict.fromkeys(min(v, len(kept) - 1) for v in value)]
    scaled = "width_coefficient" in settings  # keeps the widths themselves
    if numbers and re.fullmatch(_WIDTHS, name) and max(value) >= 32 and not scaled:
        return [v if v < 8 else v // _DIVISOR for v in value]
    return value


def _shrunk_number(name: str, value: int | None, kept: list[int], settings: dict[str, Any]) -> Any:
    rule = next((r for pattern, r in _SIZES if re.fullmatch(pattern, name)), None)
    if rule is None:
        return value
    if value is None:
        return rule if re.fullmatch(_REQUIRED, name) else None
    if "token" in name or name in ("vocab_size", "image_size"):
        return rule
    if re.fullmatch(_LAYER_COUNTS, name):
        return min(max(len(kept), 1), value)
    if name == "num_kv_shared_layers":  # each kind of layer twice: one writes, one shares
        return len(kept) // 2 if value else 0
    if _in_stages(settings) and re.fullmatch(_WIDTHS, name) and value >= 32:
        return value // _DIVISOR
    if name == "num_key_value_heads" and value == settings.get("num_attention_heads"):
        return min(HEADS, value)
    if name == "window_size" and value > 100:
        return value
    if name == "head_dim" and value == _full_head(settings):
        return 16
    return min(rule, value) if value >= 0 else value


def _full_head(settings: dict[str, Any]) -> int:
    """Of heads in two parts, of which one turns with the position."""
    return (settings.get("qk_nope_head_dim") or 0) + (settings.get("qk_rope_head_dim") or 0)


def _shrunk_rotation(value: dict[str, Any]) -> dict[str, Any]:
    """Angles of rotary positions that suit heads of eight."""
    changed: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, dict):
            changed[name] = _shrunk_rotation(inner)
        elif name == "mrope_section":
            changed[name] = [1, 1, 0] if "partial_rotary_factor" in value else [2, 1, 1]
        elif name == "partial_rotary_factor":
            changed[name] = min(max(inner, 0.5), 1.0)
        else:
            changed[name] = inner
    if "rope_theta" in value and "mrope_section" not in value:  # its default is for large heads
        changed["mrope_section"] = [1, 1, 0] if "partial_rotary_factor" in value else [2, 1, 1]
    return changed


def small(model: Any) -> Any:
    """A small configuration for this class of models."""
    kind = model.config_class
    needed = _NEEDED.get(kind.__name__, {})
    changed = _merged(needed, shrunk(kind(**needed).to_dict()))
    for name in (kind.__name__, model.__name__):
        changed = _merged(changed, _SPECIAL.get(name, {}))
    config = kind(**changed)
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = getattr(config, "decoder_start_token_id", None) or 0
    return config


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    merged = dict(first)
    for name, value in second.items():
        inner = merged.get(name)
        both = isinstance(inner, dict) and isinstance(value, dict)
        merged[name] = _merged(inner, value) if both else value
    return merged


# Without these, a configuration cannot even be made with defaults.
_NEEDED: dict[str, dict[str, Any]] = {
    "AutoformerConfig": {"prediction_length": 8},
    "InformerConfig": {"prediction_length": 8},
    "TimeSeriesTransformerConfig": {"prediction_length": 8},
    "TimmBackboneConfig": {"backbone": "resnet18"},
    "Gemma4AssistantConfig": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
# Chameleon's names of the words that stand for pieces of a picture: digits as letters.
_PIECES = {
    f"IMGIMG{''.join(chr(ord('A') + int(digit)) for digit in str(n))}Z": 20 + n for n in range(16)
}
_SMALL_NET = {"architecture": "mobilenetv3_small_050", "model_args": {}}
_ANGLES = {"rope_type": "default", "rope_theta": 10000.0}
# What no rule about names can know.
_SPECIAL: dict[str, dict[str, Any]] = {
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},  # its cache needs attention
    "AlignConfig": {
        "projection_dim": 80,
        "vision_config": {"width_coefficient": 0.25, "hidden_dim": 320},
    },
    "AriaConfig": {"projector_patch_to_query_dict": {(IMAGE // PATCH) ** 2: 8}},
    "BeitConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "BridgeTowerConfig": {
        "hidden_size": 64,
        "text_config": {"hidden_size": 64},
        "vision_config": {"hidden_size": 64},
    },
    "BltConfig": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "Blip2ForImageTextRetrieval": {"qformer_config": {"use_qformer_text_input": True}},
    "ChameleonConfig": {"vocabulary_map": {"<image>": IMAGE_TOKEN, **_PIECES}},
    "CohereCompassConfig": {"text_config": {"rope_parameters": {"full_attention": _ANGLES}}},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": _ANGLES}},
    "DPTConfig": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "Data2VecVisionConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "DbrxConfig": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "DeepseekOcr2Config": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "DetrConfig": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "DiffusionGemmaConfig": {
        "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    },
    "EfficientNetConfig": {"width_coefficient": 0.25, "hidden_dim": 320},
    "Emu3Config": {"vocabulary_map": {"<image>": IMAGE_TOKEN, "<|extra_200|>": 4}},
    "Ernie4_5_VLMoeConfig": {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 2]}}},
    "FastVlmConfig": {"vision_config": {"hidden_size": 3072}},
    "Gemma3nConfig": {"vision_config": _SMALL_NET},
    "LayoutLMv3Config": {"coordinate_size": 6, "shape_size": 4},
    "LiltConfig": {"hidden_size": 96},
    "Swin2SRConfig": {"embed_dim": 24},
    "Sapiens2Config": {
        "head_config": {
            "upsample_out_channels": [16],
            "upsample_kernel_sizes": [4],
            "conv_out_channels": [16],
            "conv_kernel_sizes": [1],
        }
    },
    "Mask2FormerConfig": {"feature_size": WIDTH},
    "Molmo2Config": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "Pix2StructConfig": {"vision_config": {"patch_embed_hidden_size": 768}},
    "Step3p7Config": {"text_config": {"sliding_window": 8}},
    "FunAsrNanoConfig": {"adaptor_config": {"intermediate_size": WIDTH // 4}},
    "MoonshineConfig": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4},
    "Dots1Config": {"n_shared_experts": 1},
    "Dots3NoteConfig": {"text_config": {"head_dim": 16}},
    "Dots3NoteTextConfig": {"head_dim": 16},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "MobileViTConfig": {"hidden_sizes": [16, 24, 32]},
    "PerceiverConfig": {
        "max_position_embeddings": LENGTH,
        "d_latents": WIDTH,
        "num_cross_attention_heads": 1,
    },
    "Qwen4ExpConfig": {"text_config": _INDEXER},
    "Qwen4ExpTextConfig": _INDEXER,
    "ReformerModelWithLMHead": {"is_decoder": True},
    "ReformerConfig": {  # it takes the seeds of dropout and hashing from the system
        "hash_seed": 0,
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 2,
    },
    "XmodConfig": {"default_language": "en_XX"},
    "ZoeDepthConfig": {"bottleneck_features": WIDTH},
    "ZambaConfig": {
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 16,
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention"] * 2 + ["hybrid", "linear_attention"] * 2,
    },
    "Zamba2Config": {
        "hybrid_layer_ids": [2, 4],
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 16,
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention"] * 2 + ["hybrid", "linear_attention"] * 2,
    },
}
