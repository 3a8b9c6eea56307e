"""The keys of a DeepSpeed configuration, and what stands in place of each if no other key decides it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final


class Counterpart(enum.StrEnum):
    """Place of a key's counterpart."""

    SESSION = "session"
    """An argument of ``penstock.offload``."""
    OPTIMIZER = "optimizer"
    """An argument of the optimizer."""
    RANKS = "ranks"
    """Torch's launcher, or FSDP2."""
    SCRIPT = "script"
    """The training script, or the arguments of a trainer."""
    UNSET = "unset"
    """It happens without a setting."""
    NONE = "none"
    """Nothing corresponds."""
    UNKNOWN = "unknown"
    """It is no key that this version knows."""


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key of DeepSpeed's."""

    kind: str | tuple[Any, ...]
    """Type of its value: one of ``KINDS``, or the values that it may have."""
    counterpart: Counterpart = Counterpart.NONE
    text: str = ""
    """Its counterpart in words, or the reason that there is none; empty where other keys decide it."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(
        value, bool
    )  # and finite: see ``read``


def _count(value: Any) -> bool:
    return _number(value) and value >= 0 and value == int(value)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number, value))


KINDS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "flag": (lambda value: isinstance(value, bool), "true or false"),
    "count": (_count, "a whole number, 0 or more"),
    "number": (_number, "a number"),
    "numbers": (_numbers, "a list of numbers"),
    "text": (lambda value: isinstance(value, str), "a string"),
    "object": (lambda value: isinstance(value, dict), "an object"),
    "list": (lambda value: isinstance(value, list), "a list"),
    "any": (lambda value: True, "anything"),
}
"""Types of values: a check, and what a value must be."""
AUTO: Final = "auto"
"""Value that Hugging Face replaces by an argument of its trainer."""
DEVICES: Final = ("none", "cpu", "nvme")

_FSDP_ORDER = "FSDP2 gathers and reduces block by block, and overlaps both with computing"
_READ_ORDER = "what is read ahead follows from the order of uses in the last step"
_RING = (
    "buffers have the size that the flash needs; host_memory= of the optimizer keeps more in memory"
)
_SCALER = "an argument of torch.amp.GradScaler"
_CODED = (
    "quantized communication changes gradients or weights; Penstock leaves communication to torch"
)
_AT_ONCE = "torch.amp.GradScaler lowers its scale at the first overflow"
_LOGGED = "log session.metrics() by this logger"
_WHOLE = "a feature of training itself, which Penstock does not have"

_S, _O, _R, _T, _U, _N = (
    Counterpart.SESSION,
    Counterpart.OPTIMIZER,
    Counterpart.RANKS,
    Counterpart.SCRIPT,
    Counterpart.UNSET,
    Counterpart.NONE,
)


def _keys(prefix: str, **keys: tuple[Any, ...]) -> dict[str, KnownKey]:
    return {prefix + name: KnownKey(*fields) for name, fields in keys.items()}


_ALL: Final[dict[str, KnownKey]] = {
    **_keys(
        "",
        train_batch_size=(
            "count",
            _T,
            "the product of batch, accumulation and ranks; nothing needs to be told",
        ),
        train_micro_batch_size_per_gpu=("count", _T, "batch_size of the DataLoader"),
        gradient_accumulation_steps=("count",),
        managed_gradient_accumulation=("flag", _T, "the loop itself says when to call step()"),
        gradient_clipping=("number",),
        optimizer=("object",),
        scheduler=("object", _T, "torch.optim.lr_scheduler, or lr_scheduler_type of a trainer"),
        zero_optimization=("object",),
        zero_allow_untested_optimizer=(
            "flag",
            _U,
            "on_flash tests whether an optimizer is element-wise, and refuses it otherwise",
        ),
        zero_force_ds_cpu_optimizer=("flag", _U, "updates are torch's own code in any case"),
        bf16=("object",),
        bfloat16=("object",),
        fp16=("object",),
        amp=("object", _T, "torch.autocast and torch.amp.GradScaler; Apex is not needed"),
        torch_autocast=("object",),
        data_types=("object",),
        activation_checkpointing=("object",),
        aio=("object",),
        sparse_gradients=("flag", _N, "optimizers on flash refuse sparse gradients"),
        communication_data_type=("text", _R, "reduce_dtype of FSDP2's MixedPrecisionPolicy"),
        seq_parallel_communication_data_type=("text", _N, _WHOLE),
        prescale_gradients=("flag", _R, "FSDP2's set_gradient_divide_factor"),
        gradient_predivide_factor=("number", _R, "FSDP2's set_gradient_divide_factor"),
        gradient_allreduce_op=("text", _R, "FSDP2's set_gradient_divide_factor; for a sum it is 1"),
        disable_allgather=("flag", _U, _FSDP_ORDER),
        steps_per_print=("count", _T, "print in the loop, or log session.metrics()"),
        wall_clock_breakdown=(
            "flag",
            _U,
            "session.summary() has times and stalls; --trace each span",
        ),
        memory_breakdown=("flag", _U, "session.summary() has the memory of each part"),
        dump_state=("flag", _N, "print(session.summary()) says what was moved"),
        dataloader_drop_last=("flag", _T, "drop_last of the DataLoader"),
        log_level=("text", _N, "Penstock prints warnings, and logs nothing"),
        checkpoint=("object", _T, "penstock.checkpoint.save, or torch.distributed.checkpoint"),
        checkpoint_serialization=("any", _T, "penstock.checkpoint.save"),
        nebula=("object", _T, "penstock.checkpoint.save(..., wait=False)"),
        elasticity=(
            "object",
            _R,
            "torchrun --nnodes MIN:MAX, and checkpoints that any number loads",
        ),
        tensorboard=("object", _T, _LOGGED),
        wandb=("object", _T, _LOGGED),
        comet=("object", _T, _LOGGED),
        csv_monitor=("object", _T, "--event-log FILE has every event as JSON lines"),
        flops_profiler=("object", _T, "torch.profiler; `penstock plan` predicts times"),
        comms_logger=("object", _T, "torch.profiler"),
        autotuning=("object", _U, "policy auto compares plans by replaying them"),
        tensor_parallel=("object", _R, "torch.distributed.tensor.parallel"),
        pipeline=("object", _R, "torch.distributed.pipelining"),
        expert_parallel=(
            "object",
            _N,
            "Penstock moves a weight as a whole, whichever expert is chosen",
        ),
        sequence_parallel_size=("count", _N, _WHOLE),
        compile=("object", _T, "torch.compile, on each block, before the session"),
        graph_harvesting=("flag", _N, "CUDA graphs are not supported"),
        **dict.fromkeys(
            (
                *("compression_training", "quantize_training", "curriculum_learning"),
                *("data_efficiency", "progressive_layer_drop", "eigenvalue", "sparse_attention"),
                *("hybrid_engine", "weight_quantization", "timers"),
            ),
            ("object", _N, _WHOLE),
        ),
        use_data_before_expert_parallelism=("flag", _N, _WHOLE),
    ),
    **_keys(
        "optimizer.",
        type=("text",),
        params=("object",),
        legacy_fusion=("flag", _N, "a choice between DeepSpeed's own kernels"),
    ),
    **_keys(
        "optimizer.params.",
        betas=("numbers",),
        **dict.fromkeys(
            (
                *("lr", "eps", "weight_decay", "momentum", "dampening", "alpha", "rho", "lr_decay"),
                "momentum_decay",
            ),
            ("number",),
        ),
        **dict.fromkeys(
            (
                *("amsgrad", "nesterov", "centered", "torch_adam", "adam_w_mode"),
                *("bias_correction", "set_grad_none", "fp32_optimizer_states"),
            ),
            ("flag",),
        ),
    ),
    **_keys(
        "zero_optimization.",
        stage=((0, 1, 2, 3),),
        offload_optimizer=("object",),
        offload_param=("object",),
        cpu_offload=("flag",),
        cpu_offload_param=("flag",),
        cpu_offload_use_pin_memory=(
            "flag",
            _U,
            "what is copied to a GPU goes through pinned memory",
        ),
        sub_group_size=("count", _U, "tiles of a million parameters; tile= of the optimizer"),
        stage3_max_live_parameters=("count",),
        stage3_max_reuse_distance=("count", _U, "a weight leaves when others need its memory"),
        stage3_prefetch_bucket_size=("count", _U, _READ_ORDER),
        stage3_param_persistence_threshold=(
            "count",
            _U,
            "weights and saved tensors below floor=, 1 MiB, stay in memory",
        ),
        stage3_model_persistence_threshold=("count", _N, "floor= is a limit for each weight"),
        stage3_gather_16bit_weights_on_model_save=("flag", _T, "penstock.weights.save"),
        stage3_gather_fp16_weights_on_model_save=("flag", _T, "penstock.weights.save"),
        **dict.fromkeys(
            (
                *("overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions"),
                *("use_multi_rank_bucket_allreduce", "round_robin_gradients", "legacy_stage1"),
                *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential"),
            ),
            ("flag", _U, _FSDP_ORDER),
        ),
        **dict.fromkeys(
            ("reduce_bucket_size", "allgather_bucket_size", "stage3_module_granularity_threshold"),
            ("count", _U, _FSDP_ORDER),
        ),
        ignore_unused_parameters=("flag", _U, "a parameter without a gradient is not updated"),
        load_from_fp32_weights=("flag", _T, "a matter of what the script loads"),
        elastic_checkpoint=("flag", _U, "another number of ranks loads a checkpoint"),
        pipeline_loading_checkpoint=("flag", _N, "a checkpoint is read at the device's speed"),
        zero_hpz_partition_size=("count", _R, "a mesh of two dimensions for fully_shard (HSDP)"),
        mics_shard_size=("number", _R, "a mesh of two dimensions for fully_shard (HSDP)"),
        mics_hierarchical_params_gather=(
            "flag",
            _R,
            "a mesh of two dimensions for fully_shard (HSDP)",
        ),
        **dict.fromkeys(
            (
                "zero_quantized_weights",
                "zero_quantized_gradients",
                "zero_quantized_nontrainable_weights",
            ),
            ("flag", _N, _CODED),
        ),
        zeropp_loco_param=("object", _N, _CODED),
        memory_efficient_linear=(
            "flag",
            _U,
            "a weight that autograd saves is a reference to its file",
        ),
        override_module_apply=("flag", _U, "Module.apply works as it does in torch"),
        save_muon_momentum_buffer_in_memory=("flag", _N, "states of Muon stay in memory anyway"),
        zenflow=(
            "object",
            _N,
            "updates that are late change results; overlap=True updates in backward",
        ),
        leaf_module=("object", _N, "each module brings its own weights, whatever its kind"),
        log_trace_cache_warnings=("flag", _N, "there is no trace: another order is right, too"),
        enable_sanity_checks=(
            "flag",
            _U,
            "everything that is moved has a checksum (PENSTOCK_VERIFY)",
        ),
    ),
    **_keys(
        "zero_optimization.offload_optimizer.",
        device=(DEVICES,),
        nvme_path=("text",),
        pin_memory=("flag", _U, "gradients and weights of a GPU are copied through pinned memory"),
        buffer_count=("count", _U, _RING),
        buffer_size=("count", _U, _RING),
        pipeline_read=("flag", _U, "records are always read ahead"),
        pipeline_write=("flag", _U, "records are always written behind"),
        fast_init=("flag", _U, "the files of the records are preallocated"),
        ratio=("number", _O, "host_memory=SIZE keeps that many bytes of the states in memory"),
        super_offload=("flag", _N, "updates run on the CPU by torch's own code"),
        cpuadam_cores_perc=("number", _O, "threads= of the optimizer"),
    ),
    **_keys(
        "zero_optimization.offload_param.",
        device=(DEVICES,),
        nvme_path=("text",),
        pin_memory=(
            "flag",
            _U,
            "weights reach a GPU through pinned memory, a part of host_memory=",
        ),
        buffer_count=("count", _U, "reads go straight into the memory of weights_memory="),
        buffer_size=("count", _U, "reads go straight into the memory of weights_memory="),
        max_in_cpu=("count",),
    ),
    **_keys(
        "activation_checkpointing.",
        partition_activations=("flag",),
        cpu_checkpointing=("flag",),
        number_checkpoints=("count", _U, "recompute=True chooses the modules by itself"),
        contiguous_memory_optimization=("flag", _U, "restored tensors have an arena of their own"),
        synchronize_checkpoint_boundary=("flag", _N, "nothing has to be synchronized"),
        profile=("flag", _U, "session.summary() has times and stalls"),
    ),
    **_keys(
        "aio.",
        block_size=("count", _U, "4 MiB; the knob PENSTOCK_IO_PIECE"),
        queue_depth=("count", _U, "6 transfers at once; the knob PENSTOCK_IO_THREADS"),
        thread_count=("count", _U, "6 transfers at once; the knob PENSTOCK_IO_THREADS"),
        intra_op_parallelism=("count", _U, "6 transfers at once; the knob PENSTOCK_IO_THREADS"),
        single_submit=("flag", _U, "transfers are submitted as they come"),
        overlap_events=("flag", _U, "transfers always overlap"),
        use_gds=("flag", _U, "tried when the session opens; the knob PENSTOCK_GPU_DIRECT"),
    ),
    **_keys(
        "bf16.",
        enabled=("flag",),
        bf16_master_weights_and_grads=("flag",),
        bf16_optimizer_states=("flag",),
        immediate_grad_update=("flag", _O, "overlap=True updates as soon as a gradient is final"),
        check_overflow=("flag", _T, "nothing looks for overflow with bfloat16"),
    ),
    **_keys(
        "fp16.",
        enabled=("flag", _T, "torch.autocast(..., torch.float16) and torch.amp.GradScaler"),
        auto_cast=("flag", _T, "torch.autocast"),
        loss_scale=("number", _T, "0: torch.amp.GradScaler; else multiply the loss"),
        initial_scale_power=("count", _T, f"init_scale=2**N, {_SCALER}"),
        loss_scale_window=("count", _T, f"growth_interval, {_SCALER}"),
        hysteresis=("count", _N, _AT_ONCE),
        consecutive_hysteresis=("flag", _N, _AT_ONCE),
        min_loss_scale=("number", _N, "torch.amp.GradScaler has no least scale"),
        fp16_master_weights_and_grads=("flag",),
    ),
    **_keys(
        "torch_autocast.",
        enabled=("flag", _T, "torch.autocast around the forward pass"),
        dtype=("text", _T, "dtype of torch.autocast"),
        lower_precision_safe_modules=(
            "list",
            _R,
            "param_dtype and reduce_dtype of MixedPrecisionPolicy",
        ),
    ),
    **_keys(
        "data_types.",
        grad_accum_dtype=("text", _N, "gradients have the type that autograd gives them"),
        param_dtype=("text", _T, "model.to(dtype)"),
        buffer_dtype=("text", _T, "convert buffers in the script"),
    ),
}
_ALIASES: Final = (("bf16.", "bfloat16."), ("zero_optimization.stage3_", "zero_optimization."))
"""Beginnings of keys, and those that DeepSpeed takes in their place."""
KEYS: Final = _ALL | {
    other + key.removeprefix(beginning): known
    for beginning, other in _ALIASES
    for key, known in _ALL.items()
    if key.startswith(beginning)
}
"""All keys, each with its sections and points between them."""
SECTIONS: Final = frozenset(key.rpartition(".")[0] for key in KEYS) - {""}
"""Keys whose values are read key by key. Other objects are one line."""
