"""peft: adapters of every kind on small models of transformers."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

from torch import nn

from tests.zoo.entry import Entry
from tests.zoo.forms import named, table, words

_CONFIGS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 4, "lora_dropout": 0.1},
    "LoraConfig, DoRA": {"r": 4, "use_dora": True},
    "IA3Config": {},
    "LoHaConfig": {"r": 4},
    "LoKrConfig": {"r": 4},
    "OFTConfig": {"r": 0, "oft_block_size": 8},
    "VeraConfig": {"r": 4},
    "FourierFTConfig": {"n_frequency": 16},
    "BOFTConfig": {"boft_block_size": 4},
    "VBLoRAConfig": {"num_vectors": 16, "vector_length": 8},
    "PromptTuningConfig": {"num_virtual_tokens": 4},
    "PrefixTuningConfig": {"num_virtual_tokens": 4},
}
_LAYERS = {
    "llama": ["q_proj", "v_proj"],
    "bert": ["query", "value"],
}


def entries() -> list[Entry]:
    """Each kind on a decoder and on an encoder."""
    form = named(input_ids=words(12, 64))
    rows = {
        f"{config} on {base}": (partial(_built, base, config), form)
        for base in _LAYERS
        for config in _CONFIGS
    }
    return table("peft", rows)


def _base(name: str) -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    if name == "llama":
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=4, use_cache=False)
        return transformers.LlamaForCausalLM(config)
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


def _built(base: str, config: str) -> nn.Module:
    import peft

    warnings.simplefilter("ignore")
    options = dict(_CONFIGS[config])
    if "Tuning" in config:
        options["task_type"] = "CAUSAL_LM" if base == "llama" else "FEATURE_EXTRACTION"
    else:
        options["target_modules"] = _LAYERS[base]
    if config == "IA3Config":
        options["feedforward_modules"] = []
    model: nn.Module = peft.get_peft_model(
        _base(base), getattr(peft, config.split(",")[0])(**options)
    )
    return model
