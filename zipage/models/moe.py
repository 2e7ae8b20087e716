"""Mixture of experts: a router sends every token to the MLPs of a few experts.

Shapes: T' rows, E hidden size, I intermediate size of one expert, X experts, k experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from zipage.attention.backend import padded_rows
from zipage.models.config import MoEConfig
from zipage.models.modules import WeightHolder, silu_mul

if TYPE_CHECKING:
    from zipage.kernels.native.linear import PackedLinear


class MixtureOfExperts(WeightHolder):
    """The experts of one layer and their router.

    A token's output is the sum of its k experts' outputs, weighted by the softmax of the router's
    logits over all experts. In fp32 on the CPU a row's result does not depend on the other rows:
    each expert computes its rows in one matrix product, and the experts of a row are summed in the
    order of their indices.

    Attributes:
        router_weight: ``[X, E]``.
        gate_up_weight: ``[X, 2 I, E]``; rows of gate, then up.
        down_weight: ``[X, E, I]``.
    """

    router_weight: torch.Tensor
    gate_up_weight: torch.Tensor
    down_weight: torch.Tensor

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the weights; `intermediate_size` is that of one expert on this rank."""
        super().__init__()
        self.config = config
        experts = config.num_experts
        shapes = {
            "router_weight": (experts, hidden_size),
            "gate_up_weight": (experts, 2 * intermediate_size, hidden_size),
            "down_weight": (experts, hidden_size, intermediate_size),
        }
        for name, shape in shapes.items():
            self.add_weight(name, *shape, dtype=dtype, device=device)
        self.packed: _PackedExperts | None = None

    def pack(self) -> None:
        """Lay out the weights for the native CPU kernels; the originals are freed."""
        self.packed = _PackedExperts(self)
        for weight in (self.router_weight, self.gate_up_weight, self.down_weight):
            weight.data = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T', E]``, T' a multiple of 4, to ``[T', E]``: on a rank its share of the sum."""
        packed = self.packed
        logits = packed.router(x) if packed else F.linear(x, self.router_weight)
        shares, chosen = torch.topk(
            torch.softmax(logits, dim=-1, dtype=torch.float32), self.config.experts_per_token
        )
        if self.config.renormalise:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        shares = shares.to(x.dtype).flatten()
        order = torch.argsort(chosen.flatten(), stable=True)
        # The number of an expert's rows sets the shapes of its products, so the host must know it.
        counts = torch.bincount(chosen.flatten(), minlength=self.config.num_experts).tolist()
        out = torch.zeros_like(x)
        for expert, entries in enumerate(torch.split(order, counts)):
            if not len(entries):
                continue
            rows = entries // self.config.experts_per_token
            y = packed.compute(expert, x[rows]) if packed else self._compute(expert, x, rows)
            out.index_add_(0, rows, y.mul_(shares[entries, None]))
        return out

    def _compute(self, expert: int, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        padded = F.pad(rows, (0, padded_rows(len(rows)) - len(rows)))
        hidden = silu_mul(F.linear(x[padded], self.gate_up_weight[expert]))
        return F.linear(hidden, self.down_weight[expert])[: len(rows)]


class _PackedExperts:
    """Router and experts laid out for the native CPU kernels."""

    def __init__(self, moe: MixtureOfExperts) -> None:
        from zipage.kernels.native.elementwise import silu_mul
        from zipage.kernels.native.linear import PackedLinear

        self._silu_mul = silu_mul
        self.router = PackedLinear(moe.router_weight)
        self._gate_up = [PackedLinear(weight) for weight in moe.gate_up_weight]
        self._down = [PackedLinear(weight) for weight in moe.down_weight]

    def compute(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """The MLP of one expert over ``x [rows, E]``."""
        down: PackedLinear = self._down[expert]
        return down(self._silu_mul(self._gate_up[expert](x)))
