"""What a backend for operators on rows is given and must do. Knows tensors; knows no layer and no model."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from hybridserve.kernels.registry import Backend

if TYPE_CHECKING:
    import torch


class PointwiseBackend(Backend):
    """Operators that read a row and write it, and are bound by the number of calls and of passes."""

    @abstractmethod
    def rms_norm(
        self,
        x: torch.Tensor,  # [T, n]
        weight: torch.Tensor,  # [n], of any dtype
        eps: float,
        sizes: tuple[int, ...],  # of the segments that make up a row; their sum is n
    ) -> torch.Tensor:
        """weight * x / sqrt(mean(x^2) + eps), the mean being that of the element's own segment of its row.

        Computed in float32; [T, n] in x's dtype (arXiv 1910.07467).
        """

    @abstractmethod
    def add_rms_norm(
        self,
        x: torch.Tensor,  # [T, n], overwritten by the sum
        residual: torch.Tensor,  # [T, n]
        weight: torch.Tensor,  # [n], of any dtype
        eps: float,
    ) -> torch.Tensor:
        """x += residual, rounded to x's dtype; returns `rms_norm` of that, with one segment a row."""

    @abstractmethod
    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of rows [T, 2 n], gate columns first; [T, n] (SwiGLU, arXiv 2002.05202)."""

    @abstractmethod
    def rotate(
        self,
        x: torch.Tensor,  # [T, heads, head_dim]
        cos: torch.Tensor,  # [T, 1, half], 2 * half <= head_dim
        sin: torch.Tensor,  # [T, 1, half]
    ) -> torch.Tensor:
        """Pairs (i, i + half) of each head are turned by their token's angles, the rest of a head stays
        (arXiv 2104.09864); [T, heads, head_dim]."""

    @abstractmethod
    def keep_top_k(self, probs: torch.Tensor, top_k: torch.Tensor) -> None:
        """Zero all but each row's k largest, in place; ties with the k-th are kept.

        probs [D, V] float32 from 0 to 1, top_k [D] int64: 0 keeps all.
        """

    @abstractmethod
    def keep_top_p(self, probs: torch.Tensor, top_p: torch.Tensor) -> None:
        """Zero all but each row's nucleus, in place: the most likely elements before which less than
        p of the row's sum lies, and those as likely as the last of them (arXiv 1904.09751).

        probs [D, V] float32 from 0 to 1, top_p [D] float32: 1 keeps all, and 0 the largest.
        """

    @abstractmethod
    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each row's largest element is, the first of those that are equal, and whether all of the row
        are finite; if not because of more than -infinity, the place means nothing.

        logits [R, V] float32 with V > 0; [R] int64, [R] bool.
        """

    @abstractmethod
    def draw(
        self,
        logits: torch.Tensor,  # [R, V] float32
        rows: torch.Tensor,  # [D] int64, which of them are drawn from
        temperature: torch.Tensor,  # [D] float32, taken as 1e-5 where it is less
        uniform: torch.Tensor,  # [D] float64 in [0, 1)
        *,
        min_p: torch.Tensor | None = None,  # [D] float32
        top_k: torch.Tensor | None = None,  # [D] int64
        top_p: torch.Tensor | None = None,  # [D] float32
    ) -> torch.Tensor:
        """Tokens [D] int64 by the inverse of the cumulative distribution of softmax(logits / temperature):
        the first where the sum of it and all before it exceeds `uniform` of the sum of all.

        Before that, everything less than min_p times the largest is zeroed, then `keep_top_k` and
        `keep_top_p` keep what they keep. Quotients are rounded to float32, and so may exponentials be, whose
        sums are float64's: backends may differ where `uniform` is within a few 1e-7 of an edge between two
        tokens, or what is kept is decided by as little. -1 where there is nothing to draw: all of a row is
        -infinity, or some quotient NaN or infinity.
        """
