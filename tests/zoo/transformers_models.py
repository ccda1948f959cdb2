"""transformers: every family whose configuration can be made small."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from penstock.loading import tolerate_missing_torchvision_operators
from tests.zoo.entry import Entry, Inputs

VOCABULARY, LENGTH, IMAGE = 99, 16, 32

# What a setting of this name becomes; the first rule that matches counts.
_SIZES: list[tuple[str, Any]] = [
    (r"vocab_size_per_layer_input|.*vocab_size", VOCABULARY),
    (r"(num_)?(hidden_|encoder_|decoder_)?layers|n_layers?|num_hidden_layers", 2),
    (
        r"(encoder|decoder)_(num_)?(hidden_)?layers|num_(encoder|decoder)_layers|e_layers|d_layers",
        2,
    ),
    (r"num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num", 2),
    (r".*(attention_heads|n_heads?|num_heads|nhead|encoder_attention_heads)", 4),
    (r".*head_dim|d_kv|kv_channels|attention_key_size|head_size", 8),
    (r".*(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim|feed_forward_size)", 64),
    (r"(decoder_|encoder_|text_|hidden_)?(hidden_size|d_model|n_embd|dim|embed_dim)", 32),
    (r"embedding_size|word_embed_proj_dim|projection_dim|hidden_dim|pooler_hidden_size", 32),
    (r".*max_position_embeddings|n_positions|max_seq_len|max_sequence_length|max_length", 64),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_topk|top_?k_experts|num_selected_experts", 2),
    (r"image_size", IMAGE),
    (r"patch_size", 8),
    (r"(pad|bos|eos|sep|cls|mask|unk|decoder_start)_token_id", 1),
    (r"q_lora_rank|kv_lora_rank|qk_rope_head_dim|qk_nope_head_dim|v_head_dim", 8),
    (r"num_mel_bins|num_codebook_vectors", 16),
    (r"max_source_positions|max_target_positions", 64),
]
_TOKENS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
_IMAGES = ("IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "IMAGE_SEGMENTATION")
_AUDIO = ("CTC", "AUDIO_CLASSIFICATION", "SPEECH_SEQ_2_SEQ")
_PAIRS = ("ZERO_SHOT_IMAGE_CLASSIFICATION",)


def entries() -> list[Entry]:
    """All of these tasks; language models with labels and a mask that pads, and without."""
    found: list[Entry] = []
    for task, kind in _classes():
        if task in _TOKENS:
            found += [
                _entry(task, kind, partial(_tokens, kind, labels)) for labels in (True, False)
            ]
        elif task in _IMAGES:
            found.append(_entry(task, kind, _pixels))
        elif task in _AUDIO:
            found.append(_entry(task, kind, partial(_sound, kind)))
        else:
            found.append(_entry(task, kind, _pairs))
    names = {}
    for entry in found:  # a class may serve several tasks
        names.setdefault(entry.name, entry)
    return list(names.values())


def _entry(task: str, kind: str, inputs: Callable[[int], Inputs]) -> Entry:
    plain = isinstance(inputs, partial) and task in _TOKENS and not inputs.args[1]
    name = f"{kind} without labels" if plain else kind
    return Entry(name, "transformers", partial(_built, kind), inputs, rows=3)


@cache
def _classes() -> list[tuple[str, str]]:
    """Tasks and the names of the classes that serve them."""
    tolerate_missing_torchvision_operators()
    from transformers.models.auto import modeling_auto

    found = []
    for task in (*_TOKENS, *_IMAGES, *_AUDIO, *_PAIRS):
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for kind in names.values():
            found += [(task, k) for k in ((kind,) if isinstance(kind, str) else kind)]
    return list(dict.fromkeys(found))


def _built(kind: str) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    chosen = getattr(transformers, kind)
    model: nn.Module | None = None
    problems = []
    for config in _small(chosen.config_class):
        try:
            torch.manual_seed(0)
            model = chosen(config)
            break
        except Exception as error:
            problems.append(error)
    if model is None:
        raise problems[-1]
    return model


def _small(kind: Any) -> Iterator[Any]:
    """Configurations of this class: one with all rules applied, and more cautious ones."""
    settings = kind().to_dict()
    for rules in (_SIZES, [r for r in _SIZES if r[1] != 8], _SIZES[:2] + _SIZES[-5:]):
        try:
            config = kind(**_shrunk(settings, rules))
        except Exception:
            continue
        if hasattr(config, "use_cache"):
            config.use_cache = False
        yield config


def _shrunk(settings: dict[str, Any], rules: list[tuple[str, Any]]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, value in settings.items():
        rule = next((r for pattern, r in rules if re.fullmatch(pattern, name)), None)
        if isinstance(value, dict) and name.endswith("_config"):
            changed[name] = {**value, **_shrunk(value, rules)}
        elif rule is not None and (type(value) is int or (value is None and "token_id" in name)):
            changed[name] = rule if "token_id" in name else min(rule, value or rule)
        elif name == "layer_types" and isinstance(value, list):
            changed[name] = [*dict.fromkeys(value)][:2] * 2
    if isinstance(changed.get("layer_types"), list):
        changed["layer_types"] = changed["layer_types"][:2]
    return changed


# -- inputs -----------------------------------------------------------------------------------


def _tokens(kind: str, labels: bool, rows: int) -> Inputs:
    ids = torch.randint(3, VOCABULARY, (rows, LENGTH))
    given: dict[str, Any] = {"input_ids": ids}
    if labels:
        mask = torch.ones_like(ids)
        mask[0, -4:] = 0
        given |= {"attention_mask": mask, "labels": ids.clone()}
    elif _takes(kind, "decoder_input_ids"):
        given["decoder_input_ids"] = ids.clone()
    if _takes(kind, "use_cache"):
        given["use_cache"] = False
    return (), given


def _takes(kind: str, argument: str) -> bool:
    import inspect

    import transformers

    return argument in inspect.signature(getattr(transformers, kind).forward).parameters


def _pixels(rows: int) -> Inputs:
    return (), {"pixel_values": torch.randn(rows, 3, IMAGE, IMAGE)}


def _sound(kind: str, rows: int) -> Inputs:
    if _takes(kind, "input_features"):
        given: dict[str, Any] = {"input_features": torch.randn(rows, 16, 128)}
        if _takes(kind, "decoder_input_ids"):
            given["decoder_input_ids"] = torch.randint(3, VOCABULARY, (rows, LENGTH))
    else:
        given = {"input_values": torch.randn(rows, 2000)}
    if _takes(kind, "use_cache"):
        given["use_cache"] = False
    return (), given


def _pairs(rows: int) -> Inputs:
    given = _pixels(rows)[1]
    given["input_ids"] = torch.randint(3, VOCABULARY, (rows, LENGTH))
    given["attention_mask"] = torch.ones(rows, LENGTH, dtype=torch.long)
    return (), given
