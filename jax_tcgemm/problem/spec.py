"""``GemmSpec``, the static description of one gemm, and what is asked of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_tcgemm.kernels import table as kernel_table
from jax_tcgemm.problem.activations import Activation
from jax_tcgemm.problem.alignment import COPY_BYTES, misalignment
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES, resolve_algorithm
from jax_tcgemm.problem.strides import (
    Operands,
    Shape,
    StridedGemm,
    fold,
    has_unit_stride,
    matrix_last,
    permuted,
    strided_gemm,
)

# Elements from which a pass over a matrix is worth a kernel of its own on a GPU: XLA joins what is
# smaller with its neighbours.
LARGE_MATRIX = 2**22


@dataclasses.dataclass(frozen=True)
class GemmSpec:
    """The primitive's static parameters.

    With ``Z = alpha * row_scale * column_scale * (A @ B) + bias`` over ``(*batch, m, n)``, the role
    of C says what becomes of it:

    - ``"add"``: ``D = activation(Z + beta * C)``, what is in brackets being the pre-activation;
    - ``"residual"``: ``D = activation(Z) + beta * C``;
    - ``"factor"``: ``D = activation(Z) * C``;
    - ``"derivative"``: ``D = Z * activation'(C)``;
    - ``"gated_derivative"``: ``D = Z * C2 * activation'(C)``, and ``Z * activation(C)`` is a second
      result: the cotangents of ``g = C`` and ``u = C2`` where ``Z`` is that of
      ``activation(g) * u``.

    Every operand is read through its axes (see ``strides``). An axis that is present has the
    result's full extent, and each batch dimension is present in ``a`` or in ``b``.

    Attributes:
        axes: the axes of each operand; ``None`` for an operand that is absent.
        alpha: the factor of the product while ``axes.alpha`` is ``None``.
        beta: the factor of ``c`` while ``axes.beta`` is ``None``.
        activation: a key of ``ACTIVATIONS``, an ``Activation``, or ``None``.
        precision: canonical ``lax`` precision.
        out_dtype: dtype of the results.
        save_preactivation: whether the pre-activation is a second result.
        config: name of the kernel configuration asked for, or ``None``.
        c_role: what ``c`` is for.
        overwrite_c: whether the result takes the memory of ``c``. It always may; XLA copies ``c``
            first where something else reads it later or where it was not donated.
    """

    axes: Operands
    out_dtype: np.dtype
    precision: Any
    alpha: complex = 1.0
    beta: complex = 1.0
    activation: str | Activation | None = None
    save_preactivation: bool = False
    config: str | None = None
    c_role: str = "add"
    overwrite_c: bool = False

    @property
    def result_count(self) -> int:
        """Number of results."""
        return 1 + (self.save_preactivation or self.c_role == "gated_derivative")

    @property
    def is_derivative(self) -> bool:
        """Whether the product is a cotangent, taken back through the activation at ``c``."""
        return self.c_role in ("derivative", "gated_derivative")

    @property
    def batch_ndim(self) -> int:
        """Number of batch dimensions."""
        return len(self.axes.a) - 2

    def unflatten(self, values: Sequence[Any]) -> Operands:
        """Returns the primitive's operands (or what goes with them) by name."""
        remaining = iter(values)
        return Operands(*(None if axes is None else next(remaining) for axes in self.axes))

    def strided(self, shapes: Operands) -> StridedGemm:
        """Returns the gemm in terms of dense row-major operands of these shapes."""
        return strided_gemm(self.axes, shapes)

    def result_shape(self, shapes: Operands) -> Shape:
        """Returns the shape of the result for operands of these shapes."""
        gemm = self.strided(shapes)
        return (*gemm.batch, gemm.m, gemm.n)

    def linear(self, **changes: Any) -> GemmSpec:
        """Returns the same product without activation and configuration, changed as asked."""
        plain = {"activation": None, "save_preactivation": False, "config": None}
        plain |= {"c_role": "add", "overwrite_c": False}
        return dataclasses.replace(self, **{**plain, **changes})


@dataclasses.dataclass(frozen=True)
class GatedSpec(GemmSpec):
    """The static parameters of the gated primitive.

    ``D = activation(G) * U`` with ``G = A @ B + bias`` and ``U = A @ B2 + bias2``. There is no C,
    no scale, and ``c_role`` and ``save_preactivation`` have no part in it.

    Attributes:
        packed: whether ``b`` has the columns of both weights, those of the gate first, and there is
            no ``b2``.
        results: which of ``D``, ``G``, ``U`` are results, at least one.
    """

    packed: bool = False
    results: tuple[bool, bool, bool] = (True, False, False)

    @property
    def result_count(self) -> int:
        """Number of results."""
        return sum(self.results)

    def strided(self, shapes: Operands) -> StridedGemm:
        """Returns the gemm of the gate in terms of dense row-major operands of these shapes."""
        gemm = strided_gemm(self.axes, shapes)
        return dataclasses.replace(gemm, n=gemm.n // 2) if self.packed else gemm

    def plain(self, **changes: Any) -> GemmSpec:
        """Returns the product ``A @ B`` alone, of all columns of ``b``, changed as asked."""
        axes = Operands(self.axes.a, self.axes.b)
        spec = GemmSpec(axes, self.out_dtype, self.precision)
        return dataclasses.replace(spec, **changes)


def flatten(values: Operands) -> list[Any]:
    """Returns the operands that are present, in the primitive's order."""
    return [value for value in values if value is not None]


def with_kernel_layouts(spec: GemmSpec, shapes: Operands) -> tuple[GemmSpec, Operands]:
    """Says how ``a`` and ``b`` must lie in memory for a kernel to read them.

    Returns:
        ``spec`` with the axes that ``a`` and ``b`` have once they lie so, and for each operand the
        permutation that gets it there, ``None`` where it can stay as it is. Only an operand whose
        innermost axis is a batch dimension is moved, and only if that dimension does not fold.
    """
    gemm = fold(spec.strided(shapes))
    extents = {"a": (gemm.m, gemm.k), "b": (gemm.k, gemm.n)}
    permutations = {
        name: matrix_last(getattr(spec.axes, name))
        for name in ("a", "b")
        if not has_unit_stride(getattr(gemm.strides, name), extents[name])
    }
    axes = {name: permuted(getattr(spec.axes, name)) for name in permutations}
    moved = dataclasses.replace(spec, axes=spec.axes._replace(**axes))
    return moved, Operands(permutations.get("a"), permutations.get("b"))


def check_config(spec: GemmSpec, dtypes: Operands, shapes: Operands) -> None:
    """Checks that the kernel configuration that ``spec`` asks for can compute this gemm.

    Raises:
        ValueError: there is no such configuration, it is of another algorithm, or it copies 16
            bytes at a time and an operand's rows do not lie on multiples of 16 bytes.
    """
    if spec.config is None:
        return
    algorithm = resolve_algorithm(dtypes.a, dtypes.b, spec.out_dtype, spec.precision)
    if algorithm is None:
        raise ValueError(
            f"config={spec.config!r}: no kernel computes a.dtype={dtypes.a}, b.dtype={dtypes.b} to "
            f"{spec.out_dtype} with precision={spec.precision}; accepted here: config=None"
        )
    gated = isinstance(spec, GatedSpec)
    rows = {row.name: row for row in kernel_table.for_algorithm(algorithm) if row.gated == gated}
    if spec.config not in rows:
        kind = f"gated products in {algorithm}" if gated else algorithm
        raise ValueError(
            f"config={spec.config!r} is not a kernel configuration for {kind}, which is what "
            f"a.dtype={dtypes.a}, b.dtype={dtypes.b} and precision={spec.precision} ask for; "
            f"accepted: None or {sorted(rows)}"
        )
    # Products of extents that are not known are computed by XLA.
    are_known = all(isinstance(extent, int) for shape in (shapes.a, shapes.b) for extent in shape)
    if rows[spec.config].copies_whole_chunks and are_known:
        others = sorted(name for name, row in rows.items() if not row.copies_whole_chunks)
        _check_alignment(spec, shapes, INPUT_DTYPES[algorithm].itemsize, others)


def _check_alignment(
    spec: GemmSpec, shapes: Operands, itemsize: int, alternatives: list[str]
) -> None:
    moved, permutations = with_kernel_layouts(spec, shapes)
    shapes = Operands(
        *(
            shape if order is None else tuple(shape[axis] for axis in order)
            for shape, order in zip(shapes, permutations, strict=True)
        )
    )
    gemm = fold(moved.strided(shapes))
    for name in ("a", "b"):
        what = misalignment(gemm, name, itemsize)
        if what is not None:
            raise ValueError(
                f"config={spec.config!r} copies {COPY_BYTES} bytes at a time; {name} has {what} of "
                f"{itemsize} bytes, not a multiple; accepted: None or {alternatives}"
            )
