"""Adapters (LoRA) of a tiny Llama learn this file, over frozen weights (`pip install transformers peft`).

The frozen weights can rest on flash: they are read when a block needs them, and never written again.

    python examples/peft_lora.py
    penstock run --weights flash --weights-memory 6MiB --memory 64MiB --flash . examples/peft_lora.py

Both print the same. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

CONTEXT = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    set_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    windows = text.unfold(0, CONTEXT, 8)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            max_position_embeddings=CONTEXT,
        )
    )
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    adapters = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    for step in range(options.steps):
        ids = windows[torch.randint(len(windows), (options.batch,))]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    print("sha256 of the frozen weights:", checksum(frozen))
    print("sha256 of the adapters:", checksum(adapters))


def checksum(weights: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for weight in weights:
        found.update(weight.detach().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
