"""Generation for architectures of transformers: are the tokens those of one device?"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers

import penstock as ps
from tests.generation.subjects import expected, padded
from tests.zoo.transformers_configs import small

CAUSAL = (
    *("GPT2LMHeadModel", "GPTNeoForCausalLM", "GPTNeoXForCausalLM", "GPTJForCausalLM"),
    *("OPTForCausalLM", "BloomForCausalLM", "FalconForCausalLM", "MptForCausalLM"),
    *("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "PhiForCausalLM"),
    *("Phi3ForCausalLM", "StableLmForCausalLM", "CohereForCausalLM", "Olmo2ForCausalLM"),
    *("GraniteForCausalLM", "GlmForCausalLM", "XGLMForCausalLM", "CodeGenForCausalLM"),
)
EXPERTS = (
    *("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"),
    *("DeepseekV3ForCausalLM", "GptOssForCausalLM"),
)
WINDOWS = (
    *("MistralForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Starcoder2ForCausalLM"),
    *("Cohere2ForCausalLM", "Olmo3ForCausalLM"),
)
STATES = (
    *("MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM"),
    *("RwkvForCausalLM", "Lfm2ForCausalLM"),
)
ENCODERS = (
    *("T5ForConditionalGeneration", "MT5ForConditionalGeneration"),
    *("BartForConditionalGeneration", "MBartForConditionalGeneration"),
    *("PegasusForConditionalGeneration", "MarianMTModel"),
    *("BlenderbotForConditionalGeneration", "LEDForConditionalGeneration"),
)
KINDS = {
    "causal": CAUSAL,
    "mixture of experts": EXPERTS,
    "sliding window": WINDOWS,
    "state space or recurrent": STATES,
    "encoder and decoder": ENCODERS,
}
EVERYWHERE = (*CAUSAL[:12], *EXPERTS[:4], *WINDOWS[:4], *STATES[:4], *ENCODERS[:6])
"""Those that are generated with in worker processes and under torchrun, too."""
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 10},
    "sampled": {"max_new_tokens": 8, "do_sample": True},
    "beams": {"max_new_tokens": 6, "num_beams": 3},
}
_ROWS, _LENGTH = 4, 7


def built(name: str) -> Any:
    """A small model with random weights, whose special tokens are in its vocabulary."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(small(kind)).eval()
    config = model.generation_config
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    config.forced_eos_token_id = config.forced_bos_token_id = None
    return model


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """Rows of several lengths, padded on the left."""
    vocabulary = getattr(model.config.get_text_config(decoder=True), "vocab_size", None) or 64
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(3, min(vocabulary, 64), (_ROWS, _LENGTH), generator=made)
    mask = torch.ones_like(ids)
    for row, count in ((1, 2), (3, 3)):
        mask[row, :count] = ids[row, :count] = 0
    return {"input_ids": ids, "attention_mask": mask}


def check(name: str, workers: Any, stages: int, device: str = "cpu") -> dict[str, str]:
    """For each mode `"exact"`, what is wrong, or why there is nothing to compare.

    Args:
        name: the class, of transformers.
        workers: of the pipeline.
        stages: how many.
        device: that of the model and of every worker.
    """
    warnings.simplefilter("ignore")
    model = built(name).to(device)
    batch = {n: v.to(device) for n, v in inputs(model).items()}
    example = dict(batch)
    if model.config.is_encoder_decoder:
        example["decoder_input_ids"] = batch["input_ids"][:, :4]
    groups = [{n: v[a : a + 2] for n, v in batch.items()} for a in range(0, _ROWS, 2)]
    found: dict[str, str] = {}
    wanted: dict[str, torch.Tensor] = {}
    for mode, options in MODES.items():
        try:
            wanted[mode] = padded(expected(model, groups, **options))
        except Exception as error:
            found[mode] = f"not possible without Penstock: {_short(error)}"
    try:
        pipe = ps.Pipeline(
            model,
            kwargs=example,
            devices=None if workers == "torchrun" else [device] * stages,
            workers=workers,
            num_microbatches=2,
            schedule="1f1b",
            replicas=1,
            threads_per_worker=1,
            audit=None,
            progress=None,
        )
    except ps.PenstockError as error:
        return found | {mode: f"no pipeline: {_short(error)}" for mode in wanted}
    with pipe:
        for mode, want in wanted.items():
            try:
                tokens = pipe.generate(**batch, seed=0, group_size=2, **MODES[mode])
                found[mode] = "exact" if torch.equal(tokens, want) else "other tokens"
            except Exception as error:
                found[mode] = f"error: {_short(error)}"
    return {mode: found[mode] for mode in MODES}


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
