"""A tiny GPT-2 learns this file under Hugging Face's Trainer (`pip install transformers accelerate`).

    python examples/hf_trainer.py
    penstock run --device-memory 24MiB --flash . examples/hf_trainer.py

Nothing is downloaded. With `--checkpointing` its blocks are recomputed in backward; both work together.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

CONTEXT = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    set_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    samples = [{"input_ids": ids, "labels": ids} for ids in text.unfold(0, CONTEXT, 8)]
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=CONTEXT,
            n_embd=256,
            n_layer=3,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        if options.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        result = Trainer(model, arguments, train_dataset=samples).train()
    print(f"mean loss {result.training_loss:.4f}")
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("sha256 of all weights:", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
