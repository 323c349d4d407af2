"""``GemmSpec``: the static description of one gemm, and checks of its configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

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

# From this many elements on, a pass over a matrix is worth its own kernel on a GPU. XLA fuses
# smaller passes with their neighbours.
LARGE_MATRIX = 2**22

# The linear results among D, G and U.
_PAIR = (False, True, True)


@dataclasses.dataclass(frozen=True)
class GemmSpec:
    """The primitive's static parameters.

    They describe one product ``A @ B`` over ``(*batch, m, n)``, or two products with one left
    operand, ``A @ B`` and ``A @ B2``, and the epilogue.

    Every operand is read through its axes (see ``strides``). An axis that is present has the
    result's full extent, and each batch dimension is present in ``a``, ``b`` or ``group_sizes``.

    A product over groups of rows (``problem/ragged.py``) has the groups as its batch dimension.
    Neither ``a`` nor a result by rows has this dimension: ``group_sizes`` divides their rows.

    Attributes:
        axes: the axes of each operand; ``None`` for an operand that is absent.
        out_dtype: dtype of the results.
        precision: canonical ``lax`` precision.
        epilogue: the epilogue. Its ``alpha`` and ``beta`` count if those of ``axes`` are ``None``.
        config: name of the requested kernel configuration, or ``None``.
        packed: whether ``b`` has the columns of both weights of a gated product, those of the gate
            first. There is no ``b2`` then.
        overwrite_c: whether the result takes the memory of ``c``. This is always allowed: XLA
            copies ``c`` first if something else reads ``c`` later or if ``c`` was not donated.
        grouped: the dimension that ``group_sizes`` divides, ``"m"`` or ``"k"``, or ``"none"``.
    """

    axes: Operands
    out_dtype: np.dtype
    precision: Any
    epilogue: Epilogue = PLAIN
    config: str | None = None
    packed: bool = False
    overwrite_c: bool = False
    grouped: str = "none"

    # A product with a user's function as its epilogue is a ``CompiledSpec``.
    function: ClassVar[None] = None

    @property
    def activation(self) -> str | Activation | None:
        """The epilogue's activation."""
        return self.epilogue.activation

    @property
    def alpha(self) -> complex:
        """The factor of the product if it is no operand."""
        return self.epilogue.alpha

    @property
    def beta(self) -> complex:
        """The factor of ``c`` if it is no operand."""
        return self.epilogue.beta

    @property
    def is_gated(self) -> bool:
        """Returns true if there are two products."""
        return self.epilogue.row.accumulators == 2

    @property
    def is_grouped(self) -> bool:
        """Returns true if the product is one over groups of rows."""
        return self.grouped != "none"

    @property
    def transposes_b(self) -> bool:
        """Returns true if the matrices of ``b`` are ``(n, k)``."""
        return self.axes.b[-1] < self.axes.b[-2]

    @property
    def config_of_products(self) -> str | None:
        """The products' configuration if the epilogue is computed separately.

        Kernels for gated products compute D, so the products must not name such a kernel.
        """
        is_row = self.config not in kernel_names.NO_ROWS
        return None if self.is_gated and is_row else self.config

    @property
    def result_count(self) -> int:
        """Number of results."""
        return sum(self.epilogue.results)

    @property
    def work(self) -> str:
        """The work beside the product, as ``KernelConfig.epilogue`` names it.

        The result is that of ``work_of`` of ``cuda/epilogue/work.h``.
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
        """Returns the primitive's operands (or values that belong to them) by name."""
        remaining = iter(values)
        return Operands(*(None if axes is None else next(remaining) for axes in self.axes))

    def select(self, x: Operands) -> Operands:
        """Returns the values of ``x`` whose operands have axes here."""
        pairs = zip(x, self.axes, strict=True)
        return Operands(*(None if axes is None else value for value, axes in pairs))

    def strided(self, shapes: Operands) -> StridedGemm:
        """Returns the gemm in terms of dense row-major operands of these shapes.

        For a gated product, it is the gate's gemm.
        """
        gemm = strided_gemm(self.axes, shapes)
        return dataclasses.replace(gemm, n=gemm.n // 2) if self.packed else gemm

    def result_shape(self, shapes: Operands) -> Shape:
        """Returns the shape of the result for operands of these shapes."""
        gemm = self.strided(shapes)
        batch = () if self.grouped == "m" else gemm.batch
        return (*batch, gemm.m, gemm.n)

    def replace(self, **changes: Any) -> GemmSpec:
        """Returns a copy with changes to some fields, its own or the epilogue's."""
        names = [field.name for field in dataclasses.fields(Epilogue)]
        within = {name: changes.pop(name) for name in names if name in changes}
        if within:
            base = changes.pop("epilogue", self.epilogue)
            changes["epilogue"] = dataclasses.replace(base, **within)
        return dataclasses.replace(self, **changes)

    def with_config(self, config: str | None) -> GemmSpec:
        """Returns a copy with this kernel configuration."""
        return dataclasses.replace(self, config=config)

    def linear(self, **changes: Any) -> GemmSpec:
        """Returns the sum ``Z`` without activation and configuration, changed as asked."""
        epilogue = Epilogue(alpha=self.alpha, beta=self.beta)
        plain = {"epilogue": epilogue, "config": None, "overwrite_c": False}
        return self.replace(**{**plain, **changes})

    def product(self, **changes: Any) -> GemmSpec:
        """Returns the product ``A @ B`` alone, of all columns of ``b``, changed as asked."""
        axes = Operands(self.axes.a, self.axes.b, self.axes.group_sizes)
        spec = GemmSpec(axes, self.out_dtype, self.precision, grouped=self.grouped)
        return spec.replace(**changes)

    def accumulators(self, **changes: Any) -> GemmSpec:
        """Returns the product alone, or both of a gated product, changed as asked."""
        if not self.is_gated:
            return self.product(**changes)
        axes = Operands(self.axes.a, self.axes.b, b2=self.axes.b2)
        pair = Epilogue(self.epilogue.form, results=_PAIR)
        return self.product(axes=axes, epilogue=pair, packed=self.packed).replace(**changes)

    def preactivations(self, **changes: Any) -> GemmSpec:
        """Returns the sums that enter the activation, changed as asked.

        The result lacks the operands that are used after the activation.
        """
        axes = self.axes._replace(**dict.fromkeys(self.epilogue.names_after))
        if self.is_gated:
            config = self.config_of_products
            pair = {"activation": None, "results": _PAIR, "config": config}
            return self.replace(axes=axes, **{**pair, **changes})
        return self.linear(**{"axes": axes, "config": self.config, **changes})

    def only(self, results: Mask) -> GemmSpec:
        """Returns the spec with only these results, and without operands of the others."""
        if results[0] or self.epilogue.is_derivative:
            return self.replace(results=results)
        spec = self.preactivations()
        return spec.replace(results=results) if self.is_gated else spec


def flatten(values: Operands) -> list[Any]:
    """Returns the operands that are present, in the primitive's order."""
    return [value for value in values if value is not None]


def with_kernel_layouts(spec: GemmSpec, shapes: Operands) -> tuple[GemmSpec, Operands]:
    """Returns layouts of ``a`` and ``b`` that a kernel can read.

    Returns:
        ``spec`` with the axes of ``a`` and ``b`` in these layouts, and for each operand the
        permutation to its layout, ``None`` if the operand can stay as it is. An operand is permuted
        only if its innermost axis is a batch dimension, and only if that dimension does not fold.
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
        ValueError: there is no such configuration, it is for another algorithm, or it cannot split
            k. Or it copies 16 bytes at a time, and an operand is not aligned to 16 bytes.
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
            f"accepted: {kernel_names.accepted(name, rows.values())}"
        )
    # XLA computes products with unknown extents.
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
