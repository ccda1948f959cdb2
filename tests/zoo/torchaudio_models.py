"""torchaudio: models of speech and music, on short waves or a few frames of features.

Its extension is compiled for CUDA and loads with no other torch. torchaudio goes without it if the
files are not there (requirements-zoo.txt has the command); no model here needs it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Entry, Inputs
from tests.zoo.forms import Form, both, lengths, numbers, table, words

_WAVE = 400
_CONFORMER = {
    "input_dim": 16,
    "num_heads": 2,
    "ffn_dim": 32,
    "num_layers": 3,
    "depthwise_conv_kernel_size": 7,
    "dropout": 0.1,
}
_EMFORMER = {
    "input_dim": 16,
    "num_heads": 2,
    "ffn_dim": 32,
    "num_layers": 3,
    "segment_length": 4,
    "dropout": 0.1,
    "left_context_length": 2,
    "right_context_length": 1,
}
_WAV2VEC2: dict[str, Any] = {
    "extractor_mode": "group_norm",
    "extractor_conv_layer_config": [(16, 10, 5), (16, 3, 2)],
    "extractor_conv_bias": False,
    "encoder_embed_dim": 16,
    "encoder_projection_dropout": 0.1,
    "encoder_pos_conv_kernel": 8,
    "encoder_pos_conv_groups": 2,
    "encoder_num_layers": 2,
    "encoder_num_heads": 2,
    "encoder_attention_dropout": 0.1,
    "encoder_ff_interm_features": 32,
    "encoder_ff_interm_dropout": 0.1,
    "encoder_dropout": 0.1,
    "encoder_layer_norm_first": False,
    "encoder_layer_drop": 0.1,
}
_FRAMES = 39  # that these convolutions make of a wave
_LAYER_NORM = {"extractor_mode": "layer_norm", "encoder_layer_norm_first": True}
_HUBERT = {
    "mask_prob": 0.8,
    "mask_selection": "static",
    "mask_other": 0.0,
    "mask_length": 4,
    "no_mask_overlap": False,
    "mask_min_space": 1,
    "mask_channel_prob": 0.0,
    "mask_channel_selection": "static",
    "mask_channel_other": 0.0,
    "mask_channel_length": 4,
    "no_mask_channel_overlap": False,
    "mask_channel_min_space": 1,
    "skip_masked": False,
    "skip_nomask": False,
    "num_classes": 8,
    "final_dim": 8,
    "feature_grad_mult": 0.1,
}
_RNNT = {
    "input_dim": 16,
    "encoding_dim": 16,
    "num_symbols": 8,
    "segment_length": 8,
    "right_context_length": 2,
    "time_reduction_input_dim": 8,
    "time_reduction_stride": 2,
    "transformer_num_heads": 2,
    "transformer_ffn_dim": 32,
    "transformer_num_layers": 2,
    "transformer_dropout": 0.1,
    "transformer_activation": "gelu",
    "transformer_left_context_length": 4,
    "transformer_max_memory_size": 0,
    "transformer_weight_init_scale_strategy": "depthwise",
    "transformer_tanh_on_mem": True,
    "symbol_embedding_dim": 16,
    "num_lstm_layers": 2,
    "lstm_layer_norm": True,
    "lstm_layer_norm_epsilon": 1e-3,
    "lstm_dropout": 0.1,
}


def _spoken(rows: int) -> Inputs:
    """Texts, the longest first, and the spectrograms of how they are read."""
    texts, spoken = torch.randint(1, 16, (rows, 6)), torch.randn(rows, 8, 10)
    return (texts, 6 - torch.arange(rows) // 3, spoken, torch.full((rows,), 10)), {}


_MODELS: dict[str, tuple[str, dict[str, Any], Form]] = {
    "Conformer": ("Conformer", _CONFORMER, both(numbers((20, 16)), lengths(20, 15))),
    "Conformer, convolution first": (
        "Conformer",
        {**_CONFORMER, "convolution_first": True, "use_group_norm": True},
        both(numbers((20, 16)), lengths(20, 15)),
    ),
    "ConvTasNet": (
        "ConvTasNet",
        {
            "enc_num_feats": 16,
            "msk_num_feats": 8,
            "msk_num_hidden_feats": 16,
            "msk_num_layers": 2,
            "msk_num_stacks": 2,
            "msk_activate": "relu",
        },
        numbers((1, _WAVE)),
    ),
    "DeepSpeech": (
        "DeepSpeech",
        {"n_feature": 16, "n_hidden": 24, "n_class": 8, "dropout": 0.1},
        numbers((1, 20, 16)),
    ),
    "Emformer": ("Emformer", _EMFORMER, both(numbers((9, 16)), lengths(8, 6))),
    "Emformer, with memory": (
        "Emformer",
        {**_EMFORMER, "max_memory_size": 2, "tanh_on_mem": True},
        both(numbers((9, 16)), lengths(8, 6)),
    ),
    "HDemucs": (
        "HDemucs",
        {
            "sources": ["drums", "other"],
            "audio_channels": 1,
            "channels": 8,
            "nfft": 1024,
            "depth": 5,
        },
        numbers((1, 4096)),
    ),
    "HuBERTPretrainModel": (
        "hubert_pretrain_model",
        {**_WAV2VEC2, **_HUBERT},
        both(numbers((_WAVE,)), words(_FRAMES, 8)),
    ),
    "HuBERTPretrainModel, whole gradients": (
        "hubert_pretrain_model",
        {**_WAV2VEC2, **_HUBERT, "feature_grad_mult": None},
        both(numbers((_WAVE,)), words(_FRAMES, 8)),
    ),
    "RNNT": (
        "emformer_rnnt_model",
        _RNNT,
        both(numbers((18, 16)), lengths(16, 12), words(5, 8), lengths(5, 4)),
    ),
    "SquimObjective": (
        "squim_objective_model",
        {
            "feat_dim": 16,
            "win_len": 16,
            "d_model": 16,
            "nhead": 2,
            "hidden_dim": 16,
            "num_blocks": 2,
            "rnn_type": "LSTM",
            "chunk_size": 10,
        },
        numbers((_WAVE,)),
    ),
    "Tacotron2": (
        "Tacotron2",
        {
            "n_mels": 8,
            "n_symbol": 16,
            "symbol_embedding_dim": 16,
            "encoder_embedding_dim": 16,
            "decoder_rnn_dim": 16,
            "attention_rnn_dim": 16,
            "attention_hidden_dim": 8,
            "attention_location_n_filter": 4,
            "attention_location_kernel_size": 5,
            "prenet_dim": 8,
            "postnet_n_convolution": 3,
            "postnet_embedding_dim": 16,
        },
        _spoken,
    ),
    "Wav2Letter": (
        "Wav2Letter",
        {"num_classes": 8, "input_type": "mfcc", "num_features": 16},
        numbers((16, 100)),
    ),
    "Wav2Vec2Model": ("wav2vec2_model", {**_WAV2VEC2, "aux_num_out": 8}, numbers((_WAVE,))),
    "Wav2Vec2Model, with lengths": (
        "wav2vec2_model",
        {**_WAV2VEC2, **_LAYER_NORM, "aux_num_out": None},
        both(numbers((_WAVE,)), lengths(_WAVE, 300)),
    ),
    "WavLM": (
        "wavlm_model",
        {**_WAV2VEC2, "encoder_num_buckets": 8, "encoder_max_distance": 16, "aux_num_out": 8},
        numbers((_WAVE,)),
    ),
    "WaveRNN": (
        "WaveRNN",
        {
            "upsample_scales": [2, 2],
            "n_classes": 16,
            "hop_length": 4,
            "n_res_block": 2,
            "n_rnn": 16,
            "n_fc": 16,
            "n_freq": 8,
            "n_hidden": 16,
            "n_output": 16,
        },
        numbers((1, 24), (1, 8, 10)),
    ),
}


def entries() -> list[Entry]:
    """All of them."""
    rows = {
        name: (partial(_built, kind, options), form)
        for name, (kind, options, form) in _MODELS.items()
    }
    rows["SquimSubjective"] = (_subjective, numbers((_WAVE,), (300,)))
    return table("torchaudio", rows)


def _built(kind: str, options: dict[str, Any]) -> nn.Module:
    import torchaudio

    model: nn.Module = getattr(torchaudio.models, kind)(**options)
    return model


def _subjective() -> nn.Module:
    """The function of the library takes only large encoders."""
    from torchaudio.models.squim.subjective import Predictor, SquimSubjective

    encoder = _built("wav2vec2_model", {**_WAV2VEC2, "aux_num_out": None})
    model: nn.Module = SquimSubjective(encoder, nn.Linear(16, 8), Predictor(16, 5))
    return model
