"""tsai: networks for time series, of three channels and 24 steps."""

from __future__ import annotations

import importlib
from functools import partial

from torch import nn

from tests.zoo.entry import Entry
from tests.zoo.forms import numbers, table

_MODELS = (
    *("FCN.FCN", "ResNet.ResNet", "InceptionTime.InceptionTime", "XceptionTime.XceptionTime"),
    *("ResCNN.ResCNN", "RNN.LSTM", "RNN.GRU", "RNN_FCN.LSTM_FCN", "RNN_FCN.GRU_FCN"),
    *("RNN_FCN.MLSTM_FCN", "MLP.MLP", "gMLP.gMLP", "TST.TST", "TSTPlus.TSTPlus"),
    *("FCNPlus.FCNPlus", "ResNetPlus.ResNetPlus", "XCM.XCM", "XResNet1d.xresnet1d18"),
    *("OmniScaleCNN.OmniScaleCNN", "TransformerModel.TransformerModel", "mWDN.mWDN"),
    *("InceptionTimePlus.InceptionTimePlus", "TSiTPlus.TSiTPlus", "RNNPlus.LSTMPlus"),
    *("ConvTranPlus.ConvTranPlus", "TSSequencerPlus.TSSequencerPlus", "XCMPlus.XCMPlus"),
    *("RNN_FCNPlus.MGRU_FCNPlus", "XceptionTimePlus.XceptionTimePlus"),
)
_WITHOUT_LENGTH = {
    *("FCN.FCN", "ResNet.ResNet", "InceptionTime.InceptionTime", "XceptionTime.XceptionTime"),
    *("ResCNN.ResCNN", "RNN.LSTM", "RNN.GRU", "FCNPlus.FCNPlus"),
    *("ResNetPlus.ResNetPlus", "XResNet1d.xresnet1d18", "TransformerModel.TransformerModel"),
}


def entries() -> list[Entry]:
    """All of them."""
    return table("series", {name: (partial(_built, name), numbers((3, 24))) for name in _MODELS})


def _built(name: str) -> nn.Module:
    module, kind = name.split(".")
    found = getattr(importlib.import_module(f"tsai.models.{module}"), kind)
    options = {} if name in _WITHOUT_LENGTH else {"seq_len": 24}
    model: nn.Module = found(3, 2, **options)
    return model
