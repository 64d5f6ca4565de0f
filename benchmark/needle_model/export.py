"""Write a model folder from a training state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fluxion_sglang.commands import needle

from .data import Generator, Mix
from .model import NeedleModel, Shape


def load(run: Path) -> tuple[NeedleModel, int]:
    """The model of a run's last saved state, and its step."""
    state = torch.load(run / "state.pt", weights_only=False, map_location="cpu")
    model = NeedleModel(Shape(**state["recipe"]["shape"]))
    with torch.no_grad():
        for name, weight in model.weights().items():
            weight.copy_(state["model"][name])
    return model.eval(), int(state["step"])


def write(model: NeedleModel, folder: Path) -> None:
    """Write weights in bf16, configuration and tokenizer in the format of Hugging Face's loaders."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.detach().bfloat16().contiguous() for name, w in model.weights().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = LlamaConfig(**model.shape.hf_config())
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    vocabulary = {symbol: i for i, symbol in enumerate(needle.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        model_max_length=model.shape.positions,
    ).save_pretrained(folder)


@torch.no_grad()
def check(model: NeedleModel, folder: Path) -> float:
    """Share of answer tokens on which Hugging Face's Llama, loaded from the folder, agrees with the training model."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    data = Generator(7)
    agree = []
    for length in (512, 2048):
        batch = data.batch(1, length, Mix(dense=0.5, counting=0.0, pose=0.0))
        tokens = torch.from_numpy(batch.tokens)
        ours, _ = model(tokens, torch.from_numpy(batch.positions))
        same = ours.argmax(-1) == theirs(tokens).logits.argmax(-1)
        agree.append(same.numpy()[batch.kinds > 1])
    return float(np.concatenate(agree).mean())
