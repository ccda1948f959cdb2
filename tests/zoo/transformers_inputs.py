"""Inputs that transformers' models take: of the forms there are, the first that a model accepts.

Models of pictures, videos and sounds disagree about the form (patches or pixels, frames before
or after frequencies, sizes beside them or not), so that the forms are tried on the model. Text
beside them has as many places for features as the model asks for in its complaint.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Inputs
from tests.zoo.transformers_configs import (
    AUDIO_TOKEN,
    FIRST_WORD,
    IMAGE,
    IMAGE_TOKEN,
    LENGTH,
    PATCH,
    VIDEO_TOKEN,
    VOCABULARY,
    WIDTH,
)

Form = Callable[[Any, int], dict[str, Any]]
"""A configuration and a number of rows: arguments."""


# These read several sequences for each row.
_CODEBOOKS = {"MusicgenForCausalLM": 4, "MusicgenMelodyForCausalLM": 4}


def several_for_each_row(kind: str) -> dict[str | int, tuple[int, int]]:
    """The arguments of `tokens` that have several entries for each row, see `Entry.batch_dim`."""
    return {"input_ids": (0, _CODEBOOKS[kind])} if kind in _CODEBOOKS else {}


def words(rows: int, length: int = LENGTH) -> torch.Tensor:
    """Text without special tokens."""
    return torch.randint(FIRST_WORD, VOCABULARY, (rows, length))


def takes(kind: str, argument: str) -> bool:
    """Whether the class's forward has this argument."""
    import transformers

    return argument in inspect.signature(getattr(transformers, kind).forward).parameters


def tokens(kind: str, labels: bool, rows: int) -> Inputs:
    """Text alone, with labels and a mask that pads, or without both."""
    ids = words(rows * _CODEBOOKS.get(kind, 1))
    given: dict[str, Any] = {"input_ids": ids}
    if labels and kind not in _CODEBOOKS:
        mask = torch.ones_like(ids)
        mask[0, -4:] = 0
        given |= {"attention_mask": mask, "labels": ids.clone()}
    elif takes(kind, "decoder_input_ids"):
        given["decoder_input_ids"] = ids.clone()
    return (), given


class PatchesInRows(nn.Module):
    """A model that takes the patches of all pictures in one long list, given them by rows.

    By itself it cannot be captured: a batch is cut into rows, and the list is longer than these.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, pixel_values: torch.Tensor, **others: Any) -> Any:
        """As the model's own, with one more dimension in front of the patches."""
        if "image_grid_thw" in others:
            pixel_values = pixel_values.flatten(0, 1)
        return self.model(pixel_values=pixel_values, **others)


# -- forms of pictures and videos -------------------------------------------------------------


def _pixels(_: Any, rows: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(rows, 3, IMAGE, IMAGE)}


def _pixels_and_sizes(_: Any, rows: int) -> dict[str, Any]:
    return _pixels(_, rows) | {"image_sizes": torch.full((rows, 2), IMAGE)}


def _tiles(_: Any, rows: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(rows, 1, 3, IMAGE, IMAGE)}


def _tiles_and_sizes(_: Any, rows: int) -> dict[str, Any]:
    tiles = torch.randn(rows, 3, 3, IMAGE, IMAGE)
    return {"pixel_values": tiles, "image_sizes": torch.full((rows, 2), IMAGE)}


def _flat_patches(config: Any, rows: int) -> dict[str, Any]:
    vision = getattr(config, "vision_config", config)
    patch = getattr(vision, "patch_size", PATCH)
    frames = getattr(vision, "temporal_patch_size", 1)
    grid = torch.tensor([[1, 4, 4]] * rows)
    flat = torch.randn(rows, 16, 3 * frames * patch * patch)
    return {"pixel_values": flat, "image_grid_thw": grid}


def _typed_patches(config: Any, rows: int) -> dict[str, Any]:
    return _flat_patches(config, rows) | {"mm_token_type_ids": None}


def _square_patches(config: Any, rows: int) -> dict[str, Any]:
    patch = getattr(getattr(config, "vision_config", config), "patch_size", PATCH)
    grid = torch.tensor([[1, 4, 4]] * rows)
    return {"pixel_values": torch.randn(rows, 16, 3, patch, patch), "image_grid_thw": grid}


def _typed_square_patches(config: Any, rows: int) -> dict[str, Any]:
    return _square_patches(config, rows) | {"mm_token_type_ids": None}


def _masked_patches(config: Any, rows: int) -> dict[str, Any]:
    patch = getattr(getattr(config, "vision_config", config), "patch_size", PATCH)
    return {
        "pixel_values": torch.randn(rows, 16, 3 * patch * patch),
        "pixel_attention_mask": torch.ones(rows, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * rows),
    }


def _video(config: Any, rows: int) -> dict[str, Any]:
    vision = getattr(config, "vision_config", config)
    frames = getattr(vision, "num_frames", None) or getattr(vision, "frames_per_clip", 2)
    return {"pixel_values": torch.randn(rows, frames, 3, IMAGE, IMAGE)}


def _video_beside(config: Any, rows: int) -> dict[str, Any]:
    return {"pixel_values_videos": _video(config, rows)["pixel_values"]}


def _task_beside(config: Any, rows: int) -> dict[str, Any]:
    length = getattr(config, "task_seq_len", LENGTH)
    return _pixels(config, rows) | {"task_inputs": torch.randint(0, 50, (rows, length))}


def _flattened(_: Any, rows: int) -> dict[str, Any]:
    """Positions beside the pixels of patches."""
    patches = torch.randn(rows, 16, 3 * PATCH * PATCH + 2)
    patches[..., :2] = torch.arange(16)[:, None].expand(16, 2) // torch.tensor([4, 1]) % 4 + 1
    return {"flattened_patches": patches}


def _tiles_and_mask(_: Any, rows: int) -> dict[str, Any]:
    return _tiles(_, rows) | {"image_attention_mask": torch.ones(rows, LENGTH, 1).long()}


def _asked_beside(config: Any, rows: int) -> dict[str, Any]:
    return _pixels(config, rows) | {"qformer_input_ids": words(rows)}


def _asked_video(config: Any, rows: int) -> dict[str, Any]:
    return _video(config, rows) | {"qformer_input_ids": words(rows)}


def _boxes_beside(config: Any, rows: int) -> dict[str, Any]:
    return _pixels(config, rows) | {"bbox": torch.rand(rows, LENGTH, 4).sort().values}


def _mask_of_places(config: Any, rows: int) -> dict[str, Any]:
    mask = torch.zeros(rows, LENGTH, dtype=torch.long)
    mask[:, : getattr(config, "latent_query_num", 8)] = 1
    return _pixels(config, rows) | {"image_embeds_position_mask": mask}


def _picture_as_words(_: Any, rows: int) -> dict[str, Any]:
    return {"input_ids": words(rows)}


def _words_and_boxes(_: Any, rows: int) -> dict[str, Any]:
    return {"bbox": torch.randint(0, 60, (rows, LENGTH, 4)).sort().values}


def _document(_: Any, rows: int) -> dict[str, Any]:
    return _pixels(_, rows) | _words_and_boxes(_, rows)


def _words_and_pixels(_: Any, rows: int) -> dict[str, Any]:
    return {"input_ids": words(rows)} | _pixels(_, rows)


def _series(config: Any, rows: int) -> dict[str, Any]:
    channels = getattr(config, "num_input_channels", 1)
    return {"past_values": torch.randn(rows, config.context_length, channels)}


def _numbers(config: Any, rows: int) -> dict[str, Any]:
    return {"past_values": torch.randn(rows, config.context_length)}


def _forecast(config: Any, rows: int) -> dict[str, Any]:
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    return {
        "past_values": torch.rand(rows, past),
        "past_time_features": torch.rand(rows, past, config.num_time_features),
        "past_observed_mask": torch.ones(rows, past),
        "future_values": torch.rand(rows, future),
        "future_time_features": torch.rand(rows, future, config.num_time_features),
    }


def _decisions(config: Any, rows: int) -> dict[str, Any]:
    return {
        "states": torch.randn(rows, LENGTH, config.state_dim),
        "actions": torch.randn(rows, LENGTH, config.act_dim),
        "rewards": torch.randn(rows, LENGTH, 1),
        "returns_to_go": torch.randn(rows, LENGTH, 1),
        "timesteps": torch.arange(LENGTH).expand(rows, LENGTH).clone(),
    }


def _regions(config: Any, rows: int) -> dict[str, Any]:
    features = torch.randn(rows, 8, config.visual_feat_dim)
    return {"visual_feats": features, "visual_pos": torch.rand(rows, 8, 4)}


def _queries(config: Any, rows: int) -> dict[str, Any]:
    return {"query_embeds": torch.randn(rows, 8, config.hidden_size)}


# -- forms of sounds --------------------------------------------------------------------------


def _wave(_: Any, rows: int) -> dict[str, Any]:
    return {"input_values": torch.randn(rows, 2000)}


def _frequencies(name: str, *sizes: int) -> Form:
    return lambda _, rows: {name: torch.randn(rows, *sizes)}


def _frequencies_and_mask(*sizes: int) -> Form:
    return lambda _, rows: {
        "input_features": torch.randn(rows, *sizes),
        "input_features_mask": torch.ones(rows, 128, dtype=torch.long),
    }


FORMS: dict[str, list[Form]] = {
    "picture": [
        _pixels,
        _task_beside,
        _masked_patches,
        _video,
        _video_beside,
        _picture_as_words,
        lambda c, rows: {"inputs": _pixels(c, rows)["pixel_values"]},
    ],
    "picture and text": [
        _pixels,
        _typed_patches,
        _flat_patches,
        _typed_square_patches,
        _square_patches,
        _pixels_and_sizes,
        _tiles,
        _tiles_and_sizes,
        _masked_patches,
        _video_beside,
        _video,
        _flattened,
        _tiles_and_mask,
        _asked_beside,
        _asked_video,
        _boxes_beside,
        _mask_of_places,
    ],
    "sound": [
        _wave,
        _frequencies("input_features", 16, 128),
        _frequencies("input_features", 128, 16),
        _frequencies("input_features", 128, 32),
        _frequencies("input_features", 128, 64),
        _frequencies("input_features", 128, 112),
        _frequencies("input_values", 64, 16),
        _frequencies("input_values", 128, 16),
        _frequencies_and_mask(16, 128),
        _frequencies_and_mask(128, 16),
    ],
}


FORMS["anything"] = [
    _document,
    _words_and_boxes,
    _words_and_pixels,
    *FORMS["picture"],
    *FORMS["picture and text"],
    *FORMS["sound"],
    _frequencies("input_values", 1, 2000),
    _frequencies("pixel_values", 16, 3 * PATCH * PATCH),
    _series,
    _numbers,
    _forecast,
    _decisions,
    _regions,
    _queries,
]


# -- choosing ---------------------------------------------------------------------------------


def chosen(build: Callable[[], nn.Module], kind: str, what: str, labels: bool, rows: int) -> Inputs:
    """Arguments in the first form that the model accepts."""
    form, places = _accepted(build, kind, what, labels)
    config = _built(build).config
    return (), _arguments(kind, what, form(config, rows), places, labels)


@cache
def _built(build: Callable[[], nn.Module]) -> Any:
    return build()


@cache
def _accepted(
    build: Callable[[], nn.Module], kind: str, what: str, labels: bool
) -> tuple[Form, int]:
    model = _built(build)
    problems = []
    state = torch.get_rng_state()
    for form in FORMS[what]:
        places = getattr(model.config, "num_query_tokens", 0)
        for _ in range(3):  # a complaint says how many features there are
            try:
                given = _named(kind, _arguments(kind, what, form(model.config, 3), places, labels))
                with torch.no_grad():
                    model(**given)
                torch.set_rng_state(state)
                return form, places
            except Exception as error:
                problems.append(f"{form.__name__}: {type(error).__name__}: {error}")
                asked = re.search(r"features:? \(?(\d+)", str(error))
                if asked is None:
                    break
                # Some count the numbers of the features, not the features.
                same = places == int(asked[1]) // 3
                places = places // WIDTH if same else int(asked[1]) // 3
    told = [p.splitlines()[0][:150] for p in problems]
    raise ValueError(" / ".join([p for p in told if "it takes no" not in p] or told))


def _named(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """The same, unless the class would swallow some of it unseen."""
    unknown = [name for name in given if not takes(kind, name)]
    if unknown:
        raise TypeError(f"it takes no {unknown[0]}")
    return given


def _arguments(
    kind: str, what: str, given: dict[str, Any], places: int, labels: bool
) -> dict[str, Any]:
    rows = len(next(iter(given.values())))
    if what != "picture" and takes(kind, "input_ids"):
        ids = torch.cat([_places(given, rows, places), words(rows)], dim=1)
        given["input_ids"] = ids
        if takes(kind, "attention_mask"):
            given["attention_mask"] = torch.ones_like(ids)
        if "mm_token_type_ids" in given:
            given["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    if takes(kind, "decoder_input_ids"):
        given["decoder_input_ids"] = words(rows)
    if labels and takes(kind, "labels") and "decoder_input_ids" not in given:
        classes = torch.randint(0, 2, (rows,))
        given["labels"] = classes if what == "picture" else given["input_ids"].clone()
    return given


def _places(given: dict[str, Any], rows: int, places: int) -> torch.Tensor:
    token = IMAGE_TOKEN
    if "pixel_values_videos" in given:
        token = VIDEO_TOKEN
    elif "pixel_values" not in given:
        token = AUDIO_TOKEN
    return torch.full((rows, places), token)
