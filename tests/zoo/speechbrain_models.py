"""speechbrain: models of its recipes, on short waves or a few frames of features.

It imports torchaudio: see torchaudio_models.py.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Entry, Inputs
from tests.zoo.forms import Build, Form, both, lengths, numbers, table, words

_FEATURES = numbers((20, 16))
_SHARES = lengths(1.0, 0.75)  # of the frames
_WIDTHS = {"num_layers": 1, "d_model": 16, "nhead": 2, "d_ffn": 32}


def _texts(rows: int) -> Inputs:
    """Five words for every second row and six for the others; a 0 is padding."""
    chosen = torch.randint(1, 20, (rows, 6))
    chosen[1::2, -1] = 0
    return (chosen,), {}


def _timed(rows: int) -> Inputs:
    """Texts, how many frames each of their words takes, and the pitch and energy of the frames."""
    times = torch.randint(1, 4, (rows, 6))
    most = int(times.sum(1).max())
    return (*_texts(rows)[0], times, torch.rand(rows, most) + 1, torch.rand(rows, most) + 1), {}


def _spoken(rows: int) -> Inputs:
    """Texts, the longest first, and the spectrograms of how they are read: one argument."""
    chosen = torch.randint(1, 20, (rows, 6))
    long = torch.full((rows,), 10)
    return ((chosen, 6 - torch.arange(rows) // 3, torch.randn(rows, 8, 10), 6, long),), {}


def _noisy(rows: int) -> Inputs:
    """Waves, steps of the diffusion, and spectrograms."""
    return (torch.randn(rows, 1, 512), torch.randint(10, (rows,)), torch.randn(rows, 8, 2)), {}


def _units(rows: int) -> Inputs:
    """Codes of ten stretches of speech."""
    return (torch.randint(20, (rows, 10, 1)),), {}


def _masked(rows: int) -> Inputs:
    """Waves, and which of their frames are hidden."""
    return (torch.randn(rows, 400), torch.rand(rows, 38) < 0.3), {}


_TRANSFORMER: dict[str, Any] = {
    "tgt_vocab": 20,
    "input_size": 16,
    "d_model": 16,
    "nhead": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "d_ffn": 32,
    "causal": False,
    "max_length": 64,
}
_RELATIVE = {"attention_type": "RelPosMHAXL", "normalize_before": True, "kernel_size": 7}
_CRDNN: dict[str, Any] = {
    "input_size": 16,
    "cnn_channels": [4, 4],
    "rnn_layers": 2,
    "rnn_neurons": 8,
    "dnn_neurons": 8,
}
_GENERATOR: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 1,
    "resblock_type": "1",
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
    "resblock_kernel_sizes": [3, 5],
    "upsample_kernel_sizes": [4, 4],
    "upsample_initial_channel": 16,
    "upsample_factors": [2, 2],
}
_UNITS = {**_GENERATOR, "vocab_size": 20, "embedding_dim": 8, "attn_dim": 8}
_FAST_SPEECH = {
    **{f"{part}_num_layers": 2 for part in ("enc", "dec")},
    **{f"{part}_num_head": 2 for part in ("enc", "dec")},
    **{f"{part}_{size}": 16 for part in ("enc", "dec") for size in ("d_model", "k_dim", "v_dim")},
    **{f"{part}_ffn_dim": 32 for part in ("enc", "dec")},
    **{f"{part}_dropout": 0.1 for part in ("enc", "dec")},
    **{f"{part}_pred_kernel_size": 3 for part in ("dur", "pitch", "energy")},
    "normalize_before": False,
    "ffn_type": "1dcnn",
    "ffn_cnn_kernel_size_list": [3, 1],
    "n_char": 20,
    "n_mels": 8,
    "postnet_embedding_dim": 16,
    "postnet_kernel_size": 5,
    "postnet_n_convolutions": 3,
    "postnet_dropout": 0.1,
    "padding_idx": 0,
    "variance_predictor_dropout": 0.1,
}
_XVECTOR = {
    "in_channels": 16,
    "tdnn_blocks": 3,
    "tdnn_channels": [16, 16, 16],
    "tdnn_kernel_sizes": [5, 3, 1],
    "tdnn_dilations": [1, 2, 1],
    "lin_neurons": 8,
}

_MODELS: dict[str, tuple[str, dict[str, Any], Form]] = {
    "ContextNet": (
        "ContextNet.ContextNet",
        {
            "input_shape": (8, 20, 16),
            "out_channels": 16,
            "conv_channels": [8, 8, 16],
            "strides": [1, 2, 1],
            "num_blocks": 3,
            "num_layers": 2,
            "inner_dim": 4,
        },
        _FEATURES,
    ),
    "ConvolutionFrontEnd": (
        "convolution.ConvolutionFrontEnd",
        {
            "input_shape": (8, 20, 16),
            "num_blocks": 2,
            "num_layers_per_block": 2,
            "out_channels": [4, 4],
            "kernel_sizes": [3, 3],
            "strides": [1, 2],
            "dilations": [1, 1],
            "residuals": [True, True],
        },
        _FEATURES,
    ),
    "CRDNN": ("CRDNN.CRDNN", _CRDNN, _FEATURES),
    "CNNTransformerSE": (
        "transformer.TransformerSE.CNNTransformerSE",
        {**_WIDTHS, "num_layers": 2, "output_size": 9},
        _FEATURES,
    ),
    "DiffWave": (
        "DiffWave.DiffWave",
        {
            "input_channels": 8,
            "residual_layers": 2,
            "residual_channels": 8,
            "dilation_cycle_length": 2,
            "total_steps": 10,
        },
        _noisy,
    ),
    "ECAPA_TDNN": (
        "ECAPA_TDNN.ECAPA_TDNN",
        {
            "input_size": 16,
            "lin_neurons": 8,
            "channels": [16, 16, 16, 16, 32],
            "attention_channels": 8,
            "res2net_scale": 2,
            "se_channels": 8,
        },
        both(_FEATURES, _SHARES),
    ),
    "EnhanceResnet": (
        "EnhanceResnet.EnhanceResnet",
        {
            "n_fft": 64,
            "win_length": 4,
            "hop_length": 2,
            "channel_counts": [4, 4],
            "dense_nodes": 16,
        },
        numbers((800,)),
    ),
    "ESPnetVGG": (
        "ESPnetVGG.ESPnetVGG",
        {
            "input_shape": (8, 20, 16),
            "cnn_channels": [4, 8],
            "rnn_layers": 2,
            "rnn_neurons": 8,
            "projection_neurons": 8,
        },
        _FEATURES,
    ),
    "FastSpeech2": ("FastSpeech2.FastSpeech2", _FAST_SPEECH, _timed),
    "HifiganGenerator": ("HifiGAN.HifiganGenerator", _GENERATOR, numbers((8, 10))),
    "UnitHifiganGenerator": ("HifiGAN.UnitHifiganGenerator", _UNITS, _units),
    "MetricGAN's EnhancementGenerator": (
        "MetricGAN.EnhancementGenerator",
        {},
        both(numbers((20, 257)), _SHARES),
    ),
    "MetricGAN's MetricDiscriminator": ("MetricGAN.MetricDiscriminator", {}, numbers((2, 24, 24))),
    "ResNet": (
        "ResNet.ResNet",
        {
            "input_size": 16,
            "channels": [8, 8, 16, 16],
            "block_sizes": [1, 1, 1, 1],
            "lin_neurons": 8,
        },
        _FEATURES,
    ),
    "RNNLM": (
        "RNNLM.RNNLM",
        {"output_neurons": 20, "embedding_dim": 8, "rnn_neurons": 16, "dnn_neurons": 16},
        words(6, 20),
    ),
    "SepformerWrapper": (
        "dual_path.SepformerWrapper",
        {
            "encoder_out_nchannels": 16,
            "masknet_chunksize": 10,
            "intra_numlayers": 1,
            "inter_numlayers": 1,
            "intra_nhead": 2,
            "inter_nhead": 2,
            "intra_dffn": 32,
            "inter_dffn": 32,
        },
        numbers((160,)),
    ),
    "Tacotron2": (
        "Tacotron2.Tacotron2",
        {
            "n_mel_channels": 8,
            "n_symbols": 20,
            "symbols_embedding_dim": 16,
            "encoder_embedding_dim": 16,
            "attention_rnn_dim": 16,
            "attention_dim": 8,
            "attention_location_n_filters": 4,
            "attention_location_kernel_size": 5,
            "decoder_rnn_dim": 16,
            "prenet_dim": 8,
            "postnet_embedding_dim": 16,
            "postnet_n_convolutions": 3,
        },
        _spoken,
    ),
    "TransformerASR": (
        "transformer.TransformerASR.TransformerASR",
        _TRANSFORMER,
        both(_FEATURES, _texts),
    ),
    "TransformerASR, with lengths": (
        "transformer.TransformerASR.TransformerASR",
        _TRANSFORMER,
        both(_FEATURES, _texts, _SHARES),
    ),
    "TransformerASR, Conformer": (
        "transformer.TransformerASR.TransformerASR",
        {**_TRANSFORMER, **_RELATIVE, "encoder_module": "conformer"},
        both(_FEATURES, _texts),
    ),
    "TransformerASR, Branchformer": (
        "transformer.TransformerASR.TransformerASR",
        {
            **_TRANSFORMER,
            **_RELATIVE,
            "encoder_module": "branchformer",
            "csgu_linear_units": 32,
        },
        both(_FEATURES, _texts),
    ),
    "TransformerLM": (
        "transformer.TransformerLM.TransformerLM",
        {"vocab": 20, "d_model": 16, "nhead": 2, "num_encoder_layers": 2, "d_ffn": 32},
        _texts,
    ),
    "Xvector": ("Xvector.Xvector", _XVECTOR, _FEATURES),
    "Xvector, with lengths": ("Xvector.Xvector", _XVECTOR, both(_FEATURES, _SHARES)),
}


def entries() -> list[Entry]:
    """Those that are one class, and those that a recipe puts together."""
    rows: dict[str, tuple[Build, Form]] = {
        name: (partial(_made, kind, **options), form)
        for name, (kind, options, form) in _MODELS.items()
    }
    waves = numbers((160,))
    rows |= {
        "ConvTasNet": (partial(Separator, _conv_tasnet), waves),
        "DPRNN": (partial(Separator, _dual_path), waves),
        "RE-SepFormer": (partial(Separator, _resource_efficient), waves),
        "CRDNN with AttentionalRNNDecoder": (Recognizer, both(_FEATURES, _texts, _SHARES)),
        "UnitHifiganGenerator, with durations": (_with_durations, _units),
        "wav2vec 2.0": (Pretrained, _masked),
    }
    return table("speechbrain", rows)


def _made(name: str, **options: Any) -> nn.Module:
    """A class of `speechbrain.lobes.models`."""
    module, _, kind = name.rpartition(".")
    found = importlib.import_module(f"speechbrain.lobes.models.{module}")
    model: nn.Module = getattr(found, kind)(**options)
    return model


def _conv_tasnet() -> nn.Module:
    sizes = {"N": 16, "B": 8, "H": 16, "P": 3, "X": 2, "R": 2, "C": 2}
    return _made("conv_tasnet.MaskNet", **sizes)


def _dual_path() -> nn.Module:
    within, across = (
        _made("dual_path.SBRNNBlock", input_size=16, hidden_channels=8, num_layers=1)
        for _ in range(2)
    )
    return _made(
        "dual_path.Dual_Path_Model",
        in_channels=16,
        out_channels=16,
        intra_model=within,
        inter_model=across,
        num_layers=2,
        K=10,
    )


def _resource_efficient() -> nn.Module:
    within, across = (
        _made("resepformer.SBTransformerBlock_wnormandskip", **_WIDTHS) for _ in range(2)
    )
    return _made(
        "resepformer.ResourceEfficientSeparator",
        input_dim=16,
        layer=2,
        unit=16,
        segment_size=10,
        mem_type="av",
        seg_model=within,
        mem_model=across,
    )


def _with_durations() -> nn.Module:
    options = {**_UNITS, "duration_predictor": True, "var_pred_hidden_dim": 8}
    return _made("HifiGAN.UnitHifiganGenerator", **options)


class Separator(nn.Module):
    """`recipes/WSJ0Mix/separation/train.py`: masks for what two voices have of a wave."""

    def __init__(self, masks: Build) -> None:
        super().__init__()
        self.encoder = _made("dual_path.Encoder", kernel_size=16, out_channels=16)
        self.masks = masks()
        self.decoder = _made(
            "dual_path.Decoder",
            in_channels=16,
            out_channels=1,
            kernel_size=16,
            stride=8,
            bias=False,
        )

    def forward(self, mixture: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(mixture)
        apart = torch.stack([encoded] * 2) * self.masks(encoded)
        return torch.cat([self.decoder(apart[k]).unsqueeze(-1) for k in range(2)], dim=-1)


class Recognizer(nn.Module):
    """`recipes/LibriSpeech/ASR/seq2seq/train.py`: an encoder, and a decoder with attention."""

    def __init__(self) -> None:
        super().__init__()
        from speechbrain.nnet.RNN import LSTM, AttentionalRNNDecoder

        self.encoder = _made("CRDNN.CRDNN", **_CRDNN, rnn_class=LSTM)
        self.embedding = nn.Embedding(20, 8)
        self.decoder = AttentionalRNNDecoder(
            rnn_type="gru",
            attn_type="location",
            hidden_size=8,
            attn_dim=8,
            num_layers=1,
            enc_dim=8,
            input_size=8,
            channels=4,
            kernel_size=5,
            dropout=0.1,
        )
        self.by_time, self.by_word = nn.Linear(8, 20), nn.Linear(8, 20)

    def forward(
        self, features: torch.Tensor, text: torch.Tensor, shares: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        encoded = self.encoder(features)
        decoded, _ = self.decoder(self.embedding(text), encoded, shares)
        return self.by_time(encoded).log_softmax(-1), self.by_word(decoded).log_softmax(-1)


class Pretrained(nn.Module):
    """`recipes/LibriSpeech/self-supervised-learning/wav2vec2/train_sb_wav2vec2.py`."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor = _made(
            "wav2vec.W2VLatentExtractor",
            out_channels=[16, 16],
            kernel_sizes=[11, 3],
            strides=[5, 2],
        )
        layers = _made("transformer.Transformer.TransformerEncoder", **{**_WIDTHS, "num_layers": 2})
        self.encoder = _made(
            "wav2vec.EncoderWrapper", in_dim=16, embedding_dim=16, latent_encoder=layers
        )
        self.quantiser = _made("wav2vec.W2VTargetQuantiser", in_dim=16, out_dim=8, num_vars=4)
        self.projection = nn.Linear(16, 8)

    def forward(self, waves: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        latents = self.extractor(waves)
        embedded = self.encoder(latents, mask=mask)["embeddings"]
        targets, about = self.quantiser(latents)
        return self.projection(embedded), targets, about["diversity_loss"]
