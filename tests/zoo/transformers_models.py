"""transformers: every family whose configuration can be made small."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from penstock.loading import tolerate_missing_torchvision_operators
from tests.zoo.entry import Entry, Inputs
from tests.zoo.transformers_configs import FIRST_WORD, IMAGE, LENGTH, VOCABULARY, small

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
    config = small(chosen.config_class)
    torch.manual_seed(0)
    model: nn.Module = chosen(config)
    return model


# -- inputs -----------------------------------------------------------------------------------


def _tokens(kind: str, labels: bool, rows: int) -> Inputs:
    ids = torch.randint(FIRST_WORD, VOCABULARY, (rows, LENGTH))
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
            given["decoder_input_ids"] = torch.randint(FIRST_WORD, VOCABULARY, (rows, LENGTH))
    else:
        given = {"input_values": torch.randn(rows, 2000)}
    if _takes(kind, "use_cache"):
        given["use_cache"] = False
    return (), given


def _pairs(rows: int) -> Inputs:
    given = _pixels(rows)[1]
    given["input_ids"] = torch.randint(FIRST_WORD, VOCABULARY, (rows, LENGTH))
    given["attention_mask"] = torch.ones(rows, LENGTH, dtype=torch.long)
    return (), given
