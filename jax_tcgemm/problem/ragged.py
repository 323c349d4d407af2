"""``RaggedSpec``: the static description of a product over groups of rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_tcgemm.problem.activations import Activation
from jax_tcgemm.problem.epilogue import PLAIN, Epilogue, Mask


@dataclasses.dataclass(frozen=True)
class RaggedSpec:
    """The static parameters of both primitives.

    Attributes:
        out_dtype: dtype of the results.
        precision: canonical ``lax`` precision.
        transpose_rhs: whether ``rhs`` is ``(g, n, k)``.
        epilogue: the epilogue of each group's product, of the form ``"add"``.
        config: name of the requested kernel configuration, or ``None``.
    """

    out_dtype: np.dtype
    precision: Any
    transpose_rhs: bool = False
    epilogue: Epilogue = PLAIN
    config: str | None = None

    @property
    def activation(self) -> str | Activation | None:
        """The epilogue's activation."""
        return self.epilogue.activation

    @property
    def result_count(self) -> int:
        """Number of results."""
        return sum(self.epilogue.results)

    def only(self, results: Mask) -> RaggedSpec:
        """Returns the spec with only these results."""
        # The pre-activation alone equals the result of a call without an activation.
        epilogue = dataclasses.replace(self.epilogue, results=results) if results[0] else PLAIN
        return dataclasses.replace(self, epilogue=epilogue)
