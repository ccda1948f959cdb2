"""transformers: every family whose configuration can be made small."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache, partial

import torch
from torch import nn

from penstock.loading import tolerate_missing_torchvision_operators
from tests.zoo.entry import Entry
from tests.zoo.transformers_configs import small
from tests.zoo.transformers_inputs import (
    PatchesInRows,
    chosen,
    several_for_each_row,
    takes,
    tokens,
)

_TOKENS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
# A task, what its models take, and whether with labels.
_OTHERS = {
    "IMAGE_CLASSIFICATION": ("picture", True),
    "SEMANTIC_SEGMENTATION": ("picture", False),
    "IMAGE_SEGMENTATION": ("picture", False),
    "UNIVERSAL_SEGMENTATION": ("picture", False),
    "OBJECT_DETECTION": ("picture", False),
    "DEPTH_ESTIMATION": ("picture", False),
    "MASKED_IMAGE_MODELING": ("picture", False),
    "VIDEO_CLASSIFICATION": ("picture", True),
    "CTC": ("sound", False),
    "AUDIO_CLASSIFICATION": ("sound", False),
    "SPEECH_SEQ_2_SEQ": ("sound", False),
    "ZERO_SHOT_IMAGE_CLASSIFICATION": ("picture and text", False),
    "IMAGE_TEXT_TO_TEXT": ("picture and text", True),
    "MULTIMODAL_LM": ("sound", True),
    "": ("anything", False),  # models of types that none of these tasks has
}
# These fail without a picture, or with more than text alone.
_NEVER_ALONE = ("GitForCausalLM",)
# No rule makes these small.
_LARGE = (
    *("PeAudioVideoEncoder", "PeAudioVideoModel", "PeVideoEncoder", "PeVideoModel"),
    *("UnivNetModel", "VibeVoiceForConditionalGeneration", "VitsModel"),
    *("VibeVoiceAcousticTokenizerDecoderModel", "VibeVoiceAcousticTokenizerModel"),
)


def entries() -> list[Entry]:
    """All of these tasks; language models with labels and a mask that pads, and without."""
    found: dict[str, Entry] = {}  # a class may serve several tasks
    for task, kind in _classes():
        build = partial(_built, kind)
        if task not in _TOKENS:
            what, labels = _OTHERS[task]
            name = kind
            if task == "IMAGE_TEXT_TO_TEXT":
                name, build = f"{kind} with pictures", partial(_for_pictures, kind)
            inputs = partial(chosen, build, kind, what, labels)
            entry = Entry(name, "transformers", build, inputs, rows=3, model=kind)
            found.setdefault(name, entry)
        elif kind not in _NEVER_ALONE:
            for labels, name in ((True, kind), (False, f"{kind} without labels")):
                inputs = partial(tokens, kind, labels)
                entry = Entry(name, "transformers", build, inputs, rows=3, model=kind)
                several = several_for_each_row(kind)
                found.setdefault(name, replace(entry, batch_dim=several))
    return list(found.values())


@cache
def _classes() -> list[tuple[str, str]]:
    """Tasks and the names of the classes that serve them."""
    tolerate_missing_torchvision_operators()
    from transformers.models.auto import modeling_auto

    found = []
    served: set[str] = set()  # by a task that is not about text alone
    types: set[str] = set()
    for task in (*_TOKENS, *_OTHERS):
        middle = f"_FOR_{task}" if task else ""
        names = getattr(modeling_auto, f"MODEL{middle}_MAPPING_NAMES")
        for model_type, kinds in names.items():
            for kind in (kinds,) if isinstance(kinds, str) else kinds:
                known = kind in served or not (task or model_type not in types)
                if (task in _TOKENS or not known) and kind not in _LARGE:
                    found.append((task, kind))
        types |= set(names)
        served |= {kind for served_by, kind in found if served_by not in _TOKENS}
    return list(dict.fromkeys(found))


def _built(kind: str) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    model_class = getattr(transformers, kind)
    config = small(model_class)
    torch.manual_seed(0)
    model: nn.Module = model_class(config)
    return model


def _for_pictures(kind: str) -> nn.Module:
    model = _built(kind)
    return PatchesInRows(model) if takes(kind, "image_grid_thw") else model
