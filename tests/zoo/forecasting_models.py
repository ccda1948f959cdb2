"""pytorch_forecasting: its models, made of a data set and given batches of its loader."""

from __future__ import annotations

import warnings
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Entry, Inputs
from tests.zoo.forms import table

_ENCODER, _DECODER = 8, 4
_MODELS: dict[str, dict[str, Any]] = {
    "TemporalFusionTransformer": {
        "hidden_size": 8,
        "attention_head_size": 2,
        "hidden_continuous_size": 4,
    },
    "DeepAR": {"hidden_size": 8, "rnn_layers": 2},
    "RecurrentNetwork": {"hidden_size": 8, "rnn_layers": 2},
    "DecoderMLP": {"hidden_size": 8, "n_hidden_layers": 2},
    "TiDEModel": {"hidden_size": 8, "temporal_decoder_hidden": 8},
    "NHiTS": {"hidden_size": 8},
    "NBeats": {"widths": [8, 8], "num_blocks": [2, 2], "num_block_layers": [2, 2]},
    "NBeatsKAN": {"widths": [8, 8], "num_blocks": [1, 1], "num_block_layers": [1, 1]},
    "TimeXer": {"hidden_size": 8, "n_heads": 2, "e_layers": 2, "d_ff": 8, "patch_length": 4},
}
_ALONE = ("NBeats", "NBeatsKAN")  # they take the target alone


def entries() -> list[Entry]:
    """Each on series of three groups."""
    return table(
        "forecasting",
        {
            name: (partial(_built, name, options), partial(_batch, _kind(name)))
            for name, options in _MODELS.items()
        },
    )


def _kind(name: str) -> str:
    if name in _ALONE:
        return "alone"
    return "reals" if name == "TimeXer" else "all"


@cache
def _data(kind: str) -> Any:
    """A data set of the series: with the target alone, with real covariates, or with all."""
    import pandas
    from pytorch_forecasting import TimeSeriesDataSet
    from pytorch_forecasting.data import GroupNormalizer

    times, groups = range(60), "abc"
    frame = pandas.DataFrame(
        {
            "time": [t for _ in groups for t in times],
            "group": [g for g in groups for _ in times],
            "month": [str(t % 4) for _ in groups for t in times],
            "price": [float(t % 7) for _ in groups for t in times],
            "value": [float((t * k) % 11) + 1 for k, _ in enumerate(groups, 1) for t in times],
        }
    )
    covariates: dict[str, Any] = {
        "alone": {},
        "reals": {"time_varying_known_reals": ["price"]},
        "all": {
            "static_categoricals": ["group"],
            "time_varying_known_categoricals": ["month"],
            "time_varying_known_reals": ["price"],
        },
    }
    return TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=_ENCODER,
        min_encoder_length=_ENCODER,
        max_prediction_length=_DECODER,
        min_prediction_length=_DECODER,
        time_varying_unknown_reals=["value"],
        target_normalizer=GroupNormalizer(groups=["group"]),
        **covariates[kind],
    )


def _batch(kind: str, rows: int) -> Inputs:
    x, _ = next(iter(_data(kind).to_dataloader(train=True, batch_size=rows)))
    return ({k: v for k, v in x.items() if isinstance(v, torch.Tensor)},), {}


def _built(name: str, options: dict[str, Any]) -> nn.Module:
    import pytorch_forecasting.models as found

    warnings.simplefilter("ignore")
    data = _data(_kind(name))
    given = dict(options)
    if name == "TimeXer":
        given |= {"context_length": _ENCODER, "prediction_length": _DECODER}
    model: nn.Module = getattr(found, name).from_dataset(data, **given)
    return model
