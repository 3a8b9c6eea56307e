"""Operators that differ between CUDA and CPU, and therefore save other tensors.

Fake tensors can pretend to be on a GPU, but without a GPU autograd refuses them. So they stay on the CPU,
and the few functions that choose their operators by device get those of CUDA:

* Dropout is one operator with a mask of 1 byte for each element; on a CPU it is of the element's type.
* Attention is fused wherever ``torch.nn.attention.sdpa_kernel`` allows it: it saves only its inputs and
  outputs. Where only ``SDPBackend.MATH`` is allowed, as before PyTorch 2.0, it saves the matrices of
  all scores, with a dropout as above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten


class CudaKernels(TorchFunctionMode):
    """Mode in which tensors on the CPU are computed with the operators of CUDA."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call CUDA's equivalent of ``func`` if there is one, else ``func``."""
        equivalent = _EQUIVALENTS.get(func)
        return (equivalent or func)(*args, **(kwargs or {}))


def _dropout(
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    """Compute ``F.dropout``. In place there is no fused operator; without effect no operator at all."""
    if inplace or not training or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(  # noqa: PLR0917  (as in torch)
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute ``F.scaled_dot_product_attention`` with the backend that CUDA prefers."""
    if torch.is_autocast_enabled(
        "cpu"
    ):  # autocast casts the arguments of the function, nothing inside
        half = torch.get_autocast_dtype("cpu")
        query, key, value = (one.to(half) for one in (query, key, value))
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (one.repeat_interleave(groups, -3) for one in (key, value))
    bias = _bias(attn_mask, query, key)
    with torch.autocast("cpu", enabled=False):
        return _best_backend(
            query, key, value, bias=bias, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )


def _best_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    cuda: Any = torch.backends.cuda  # untyped
    if cuda.flash_sdp_enabled() and bias is None and query.element_size() == 2:
        return _aten._scaled_dot_product_flash_attention(  # type: ignore[no-any-return]
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    if cuda.mem_efficient_sdp_enabled():
        return _aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )[0]
    return _unfused(
        query, key, value, bias=bias, dropout_p=dropout_p, is_causal=is_causal, scale=scale
    )


def _unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Compute like ATen's ``_scaled_dot_product_attention_math``: in 32 bits, queries and keys scaled."""
    dtype = query.dtype
    cuda: Any = torch.backends.cuda  # untyped
    if query.element_size() == 2 and not cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = query * root @ (key * root).transpose(-2, -1)
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        bias = _bias(causal, query, key)
    if bias is not None:
        scores = scores + bias
    return (_dropout(scores.softmax(-1), dropout_p) @ value).to(dtype)


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return a mask in the form that is added to scores."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        bias = torch.zeros(mask.shape, dtype=query.dtype)
        mask = bias.masked_fill(mask.logical_not(), -math.inf)
    return mask.expand(*query.shape[:-1], key.shape[-2])


_EQUIVALENTS: Mapping[Any, Callable[..., torch.Tensor]] = {
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
}
