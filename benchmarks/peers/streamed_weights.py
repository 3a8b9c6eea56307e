"""Peers whose weights rest on disk: one side of ``macro/weights.py``, a JSON line for each step.

Runs in an environment of its own, without Penstock: torch, and the package of the side. A job has two
stages. ``prepare`` writes the weights of the benchmark's decoder in the peer's own format, without a
limit of memory; ``measure`` makes the steps within the control group of the benchmark.

* ``accelerate``: ``disk_offload``. It has no training; the mode ``full`` counts what its step changes.
* ``airllm``: PyPI ``airllm``, with ``transformers``.
* ``slowllama``: a checkout of ``okuvshynov/slowllama``, with ``sentencepiece``. LoRA only.
* ``deepspeed``: ZeRO-3, weights and states on NVMe. Needs a compiler and libaio's headers.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "macro"))
import _weights_model
import _weights_steps
import torch
from torch import nn

EPS = torch.finfo(torch.float32).eps
"""Of a ``torch.nn.RMSNorm`` that was given none."""
RANK = 8


def main():
    job = json.loads(sys.argv[1])
    stdout = os.fdopen(os.dup(1), "w")  # all that a peer prints goes to stderr
    os.dup2(2, 1)
    run(job, stdout)
    os._exit(0)  # some peers abort at exit


def run(job, stdout):
    side = SIDES[job["side"]]
    if job["stage"] == "prepare":
        side.prepare(job)
        return
    _weights_steps.enter(*job["groups"])
    side(job).measure(stdout)


def decoder(job, adapted=False):
    """The benchmark's decoder, with its weights."""
    torch.manual_seed(0)
    model = _weights_model.Decoder(shape_of(job), getattr(torch, job["dtype"]))
    if adapted:
        _weights_model.adapt(model)
    return model


def shape_of(job):
    return _weights_model.SHAPES[job["shape"]]


class Side:
    """One peer."""

    def __init__(self, job):
        self.job = job

    @staticmethod
    def prepare(job):
        """Write the weights."""

    def measure(self, stdout):
        _weights_steps.serve(self.step, self.job, to=stdout)

    @torch.no_grad()
    def step(self, ids):
        return _weights_steps.sampled(self.logits(ids))


class Accelerate(Side):
    @staticmethod
    def prepare(job):
        from accelerate.utils import offload_state_dict  # noqa: PLC0415

        offload_state_dict(job["folder"], decoder(job).state_dict())

    def __init__(self, job):
        from accelerate import disk_offload  # noqa: PLC0415

        super().__init__(job)
        with torch.device("meta"):
            self.model = decoder(job)
        disk_offload(self.model, job["folder"], execution_device="cpu")

    def logits(self, ids):
        return self.model(ids)

    def measure(self, stdout):
        if self.job["mode"] == "full":
            _weights_steps.write(self.trained(), stdout)
        else:
            super().measure(stdout)

    def trained(self):
        """How many tensors get a gradient in a step that raises nothing, and how many files change."""
        before, parameters = self.files(), list(self.model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        loss = _weights_model.loss_of(self.model, next(_weights_steps.all_ids(self.job)))
        loss.backward()
        optimizer.step()
        return {
            "loss": loss.item(),
            "gradients": sum(each.grad is not None for each in parameters),
            "changed_files": sum(before[name] != now for name, now in self.files().items()),
            "tensors": len(parameters),
        }

    def files(self):
        return {
            path.name: hashlib.sha256(path.read_bytes()).digest()
            for path in Path(self.job["folder"]).glob("*.dat")
        }


class AirLLM(Side):
    @staticmethod
    def prepare(job):
        from safetensors.torch import save_file  # noqa: PLC0415
        from transformers import LlamaConfig  # noqa: PLC0415

        shape = shape_of(job)
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            rms_norm_eps=EPS,
            tie_word_embeddings=False,
            torch_dtype=job["dtype"],
        ).save_pretrained(job["folder"])
        tensors = hugging_face(decoder(job))
        index = {
            "metadata": {},
            "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors"),
        }
        Path(job["folder"], "model.safetensors.index.json").write_text(json.dumps(index))
        save_file(
            tensors,
            Path(job["folder"], "model-00001-of-00001.safetensors"),
            metadata={"format": "pt"},
        )
        AirLLM(job)  # the first construction writes a file for each layer

    def __init__(self, job):
        import airllm  # noqa: PLC0415

        class Model(airllm.AirLLMBaseModel):
            def get_tokenizer(self, hf_token=None):
                return None  # the folder has none

        super().__init__(job)
        self.model = Model(job["folder"], device="cpu", dtype=getattr(torch, job["dtype"]))

    def logits(self, ids):
        return self.model(ids, use_cache=False).logits


def hugging_face(model):
    """The tensors of a decoder by the names of ``LlamaForCausalLM``."""
    found = {
        "model.embed_tokens.weight": model.tokens.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.head.weight,
    }
    for number, block in enumerate(model.blocks):
        query, key, value = block.qkv.weight.chunk(3)
        for name, tensor in {
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": block.out.weight,
            "mlp.gate_proj": block.gate.weight,
            "mlp.up_proj": block.up.weight,
            "mlp.down_proj": block.down.weight,
            "input_layernorm": block.before.weight,
            "post_attention_layernorm": block.between.weight,
        }.items():
            found[f"model.layers.{number}.{name}.weight"] = tensor
    return {name: tensor.detach().clone() for name, tensor in found.items()}


class SlowLlama(Side):
    @staticmethod
    def prepare(job):
        model, ours = slowllama(job, init_frozen=True), decoder(job, adapted=True)
        heads = shape_of(job).heads
        adapters = []
        with torch.no_grad():
            for block, layer in zip(ours.blocks, model.layers, strict=True):
                attention, base = layer.attention.loaded_inner(), block.qkv.base.weight
                query, key, value = base.chunk(3)
                attention.wq.weight.copy_(paired(query, heads))
                attention.wk.weight.copy_(paired(key, heads))
                attention.wv.weight.copy_(value)
                attention.wo.weight.copy_(block.out.weight)
                layer.attention.save(attention)
                forward = layer.feed_forward.loaded_inner()
                forward.w1.weight.copy_(block.gate.weight)
                forward.w2.weight.copy_(block.down.weight)
                forward.w3.weight.copy_(block.up.weight)
                layer.feed_forward.save(forward)
                adapters.append([each.down.weight for each in (block.qkv.query, block.qkv.value)])
        model.tok_embeddings.save(ours.tokens)
        model.output.save(ours.head)
        torch.save(adapters, Path(job["folder"], "adapters.pt"))

    def __init__(self, job):
        super().__init__(job)
        self.model = slowllama(job, init_frozen=False)
        downs = torch.load(Path(job["folder"], "adapters.pt"))
        layers = self.model.lora_layers
        with torch.no_grad():
            for layer, (query, value) in zip(layers, downs, strict=True):
                layer["q_lora"].A.weight.copy_(query)
                layer["v_lora"].A.weight.copy_(value)
        trained = [
            each for layer in layers for lora in layer.values() for each in lora.parameters()
        ]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def step(self, ids):
        targets = torch.cat((ids[:, 1:], ids.new_full((1, 1), -1)), dim=1)
        loss = self.model.manual_loop(ids, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss]


def slowllama(job, init_frozen):
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # it loads modules, as torch did until 2.5
    sys.path.insert(0, job["slowllama"])
    from llama2 import Transformer  # noqa: PLC0415
    from model_config import ModelArgs  # noqa: PLC0415

    shape, dtype = shape_of(job), getattr(torch, job["dtype"])
    return Transformer(
        ModelArgs(
            dim=shape.hidden,
            n_layers=shape.layers,
            n_heads=shape.heads,
            multiple_of=1,
            ffn_dim_multiplier=(shape.inner + 0.5) / int(8 * shape.hidden / 3),
            norm_eps=EPS,
            max_seq_len=job["tokens"],
            compute_dtype=dtype,
            frozen_dtype=dtype,
            lora_rank=RANK,
            lora_alpha=RANK,
            lora_dropout=0.0,
            served_model_path=job["folder"],
            cached_data_path=job["folder"],
            init_frozen=init_frozen,
            vocab_size=shape.vocabulary,
        )
    )


def paired(weight, heads):
    """Rows of queries or keys for rotations of neighbours, in place of halves."""
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


class Loss(nn.Module):
    """A decoder that returns its loss, as DeepSpeed wants it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return _weights_model.loss_of(self.model, ids)


class DeepSpeed(Side):
    def __init__(self, job):
        from _deepspeed import deepspeed  # noqa: PLC0415

        super().__init__(job)
        with deepspeed.zero.Init(config_dict_or_path=self.config(), remote_device="nvme"):
            model = Loss(decoder(job))
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=self.config()
        )

    def config(self):
        job, shape = self.job, shape_of(self.job)
        largest = shape.hidden * max(shape.vocabulary, shape.inner, 3 * shape.hidden)
        nvme = {"device": "nvme", "nvme_path": job["folder"], "pin_memory": False}
        return {
            "train_batch_size": 1,
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 12_000_000,
                "overlap_comm": False,
                "offload_param": {
                    **nvme,
                    "buffer_count": 8,
                    "buffer_size": largest,
                    "max_in_cpu": 0,
                },
                "offload_optimizer": {
                    **nvme,
                    "buffer_count": 12,
                    "pipeline_read": True,
                    "pipeline_write": True,
                },
            },
            "aio": {"block_size": 1 << 20, "queue_depth": 16, "overlap_events": True},
        }

    def step(self, ids):
        loss = self.engine(ids)
        self.engine.backward(loss)
        self.engine.step()
        return [loss.item()]


SIDES = {
    "accelerate": Accelerate,
    "airllm": AirLLM,
    "slowllama": SlowLlama,
    "deepspeed": DeepSpeed,
}

if __name__ == "__main__":
    main()
