"""Answers for lowering, partitioning and the log: does a kernel compute this, and if not, why?"""

from jax_tcgemm.lowering.fallback.functions import (
    FEW_ROWS,
    SlowerThanXla,
    slower_function,
    unfit_for_functions,
)
from jax_tcgemm.lowering.fallback.kernels import no_kernel, no_ragged_kernel, slower_than_xla
from jax_tcgemm.lowering.fallback.planes import no_complex_kernel, no_planes, possible_planes
from jax_tcgemm.lowering.fallback.strict import (
    SETTING,
    FallbackError,
    is_strict,
    lenient,
    report,
)

__all__ = [
    "FEW_ROWS",
    "SETTING",
    "FallbackError",
    "SlowerThanXla",
    "is_strict",
    "lenient",
    "no_complex_kernel",
    "no_kernel",
    "no_planes",
    "no_ragged_kernel",
    "possible_planes",
    "report",
    "slower_function",
    "slower_than_xla",
    "unfit_for_functions",
]
