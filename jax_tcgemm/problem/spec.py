"""``GemmSpec``, the static description of one gemm, and what is asked of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_tcgemm.kernels import names as kernel_names
from jax_tcgemm.problem.activations import Activation
from jax_tcgemm.problem.alignment import COPY_BYTES, misalignment
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES, resolve_algorithm
from jax_tcgemm.problem.epilogue import PLAIN, Epilogue, Mask, Use
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

# Of D, G and U the results that are linear.
_PAIR = (False, True, True)


@dataclasses.dataclass(frozen=True)
class GemmSpec:
    """The primitive's static parameters.

    One product ``A @ B`` over ``(*batch, m, n)``, or two of one left operand, ``A @ B`` and
    ``A @ B2``; then what the epilogue makes of them.

    Every operand is read through its axes (see ``strides``). An axis that is present has the
    result's full extent, and each batch dimension is present in ``a`` or in ``b``.

    Attributes:
        axes: the axes of each operand; ``None`` for an operand that is absent.
        out_dtype: dtype of the results.
        precision: canonical ``lax`` precision.
        epilogue: what becomes of the accumulators. ``alpha`` and ``beta`` there count while those
            of ``axes`` are ``None``.
        config: name of the kernel configuration asked for, or ``None``.
        packed: whether ``b`` has the columns of both weights of a gated product, those of the gate
            first, and there is no ``b2``.
        overwrite_c: whether the result takes the memory of ``c``. It always may; XLA copies ``c``
            first where something else reads it later or where it was not donated.
    """

    axes: Operands
    out_dtype: np.dtype
    precision: Any
    epilogue: Epilogue = PLAIN
    config: str | None = None
    packed: bool = False
    overwrite_c: bool = False

    @property
    def activation(self) -> str | Activation | None:
        """The epilogue's activation."""
        return self.epilogue.activation

    @property
    def alpha(self) -> complex:
        """The factor of the product where it is no operand."""
        return self.epilogue.alpha

    @property
    def beta(self) -> complex:
        """The factor of ``c`` where it is no operand."""
        return self.epilogue.beta

    @property
    def is_gated(self) -> bool:
        """Whether there are two products."""
        return self.epilogue.row.accumulators == 2

    @property
    def config_of_products(self) -> str | None:
        """What ``config`` asks of its products where the epilogue is computed apart.

        Kernels for gated products compute D, so that none is to be named.
        """
        is_row = self.config not in kernel_names.NO_ROWS
        return None if self.is_gated and is_row else self.config

    @property
    def result_count(self) -> int:
        """Number of results."""
        return sum(self.epilogue.results)

    @property
    def work(self) -> str:
        """How much there is to do beside the product, in the words of ``KernelConfig.epilogue``.

        As ``work_of`` of ``cuda/epilogue/work.h``.
        """
        axes, c_use = self.axes, self.epilogue.row.uses.get("c")
        is_sum = (
            not self.is_gated
            and self.activation is None
            and self.result_count == 1
            and axes.row_scale is axes.column_scale is None
            and (axes.c is None or c_use in (Use.ADDEND, Use.RESIDUAL))
        )
        if not is_sum:
            return "any"
        is_product = axes.c is axes.bias is axes.alpha is None and self.alpha == 1
        return "none" if is_product else "sum"

    @property
    def batch_ndim(self) -> int:
        """Number of batch dimensions."""
        return len(self.axes.a) - 2

    @property
    def operand_names(self) -> tuple[str, ...]:
        """Names of the primitive's operands, in their order."""
        return tuple(name for name, axes in self.axes._asdict().items() if axes is not None)

    def unflatten(self, values: Sequence[Any]) -> Operands:
        """Returns the primitive's operands (or what goes with them) by name."""
        remaining = iter(values)
        return Operands(*(None if axes is None else next(remaining) for axes in self.axes))

    def select(self, x: Operands) -> Operands:
        """Returns those of ``x`` that have axes here."""
        pairs = zip(x, self.axes, strict=True)
        return Operands(*(None if axes is None else value for value, axes in pairs))

    def strided(self, shapes: Operands) -> StridedGemm:
        """Returns the gemm in terms of dense row-major operands of these shapes.

        Of a gated product the gate's.
        """
        gemm = strided_gemm(self.axes, shapes)
        return dataclasses.replace(gemm, n=gemm.n // 2) if self.packed else gemm

    def result_shape(self, shapes: Operands) -> Shape:
        """Returns the shape of the result for operands of these shapes."""
        gemm = self.strided(shapes)
        return (*gemm.batch, gemm.m, gemm.n)

    def replace(self, **changes: Any) -> GemmSpec:
        """Returns a copy of which some fields, or some of its epilogue, are others."""
        names = [field.name for field in dataclasses.fields(Epilogue)]
        within = {name: changes.pop(name) for name in names if name in changes}
        if within:
            base = changes.pop("epilogue", self.epilogue)
            changes["epilogue"] = dataclasses.replace(base, **within)
        return dataclasses.replace(self, **changes)

    def linear(self, **changes: Any) -> GemmSpec:
        """Returns the sum ``Z`` without activation and configuration, changed as asked."""
        epilogue = Epilogue(alpha=self.alpha, beta=self.beta)
        plain = {"epilogue": epilogue, "config": None, "overwrite_c": False}
        return self.replace(**{**plain, **changes})

    def product(self, **changes: Any) -> GemmSpec:
        """Returns the product ``A @ B`` alone, of all columns of ``b``, changed as asked."""
        spec = GemmSpec(Operands(self.axes.a, self.axes.b), self.out_dtype, self.precision)
        return spec.replace(**changes)

    def accumulators(self, **changes: Any) -> GemmSpec:
        """Returns the product alone, or both of a gated product, changed as asked."""
        if not self.is_gated:
            return self.product(**changes)
        axes = Operands(self.axes.a, self.axes.b, b2=self.axes.b2)
        pair = Epilogue(self.epilogue.form, results=_PAIR)
        return self.product(axes=axes, epilogue=pair, packed=self.packed).replace(**changes)

    def preactivations(self, **changes: Any) -> GemmSpec:
        """Returns the sums that the activation is of, changed as asked.

        Without the operands that come after it.
        """
        axes = self.axes._replace(**dict.fromkeys(self.epilogue.names_after))
        if self.is_gated:
            config = self.config_of_products
            pair = {"activation": None, "results": _PAIR, "config": config}
            return self.replace(axes=axes, **{**pair, **changes})
        return self.linear(**{"axes": axes, "config": self.config, **changes})

    def only(self, results: Mask) -> GemmSpec:
        """Returns the same with these results alone, without operands that others need."""
        if results[0] or self.epilogue.is_derivative:
            return self.replace(results=results)
        spec = self.preactivations()
        return spec.replace(results=results) if self.is_gated else spec


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
        ValueError: there is no such configuration, it is of another algorithm or does not split k,
            or it copies 16 bytes at a time and an operand's rows do not lie on multiples of that.
    """
    if not kernel_names.is_row(spec.config):
        return
    algorithm = resolve_algorithm(dtypes.a, dtypes.b, spec.out_dtype, spec.precision)
    if algorithm is None:
        raise ValueError(
            f"config={spec.config!r}: no kernel computes a.dtype={dtypes.a}, b.dtype={dtypes.b} to "
            f"{spec.out_dtype} with precision={spec.precision}; accepted here: config=None"
        )
    table = kernel_names.for_algorithm(algorithm)
    rows = {row.name: row for row in table if row.gated == spec.is_gated}
    name, _ = kernel_names.read_config(spec.config)
    if not kernel_names.can_be(spec.config, algorithm, gated=spec.is_gated):
        kind = f"gated products in {algorithm}" if spec.is_gated else algorithm
        raise ValueError(
            f"config={spec.config!r} is not a kernel configuration for {kind}, which is what "
            f"a.dtype={dtypes.a}, b.dtype={dtypes.b} and precision={spec.precision} ask for; "
            f"accepted: {kernel_names.NO_ROWS}, {sorted(rows)}, and ROW/splits=N of "
            f"{sorted(name for name, row in rows.items() if row.splits_k)}"
        )
    # Products of extents that are not known are computed by XLA.
    are_known = all(isinstance(extent, int) for shape in (shapes.a, shapes.b) for extent in shape)
    if rows[name].copies_whole_chunks and are_known:
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
