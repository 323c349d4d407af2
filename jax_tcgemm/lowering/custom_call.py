"""The custom call of a gemm: operands as the kernels take them, and attributes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import _core, _extension
from jax_tcgemm.kernels.arithmetic import PLANE_PRODUCTS, PlaneProduct
from jax_tcgemm.kernels.names import MEASURED, by_name, read_config
from jax_tcgemm.kernels.table import BY_NAME
from jax_tcgemm.lowering import devices, reference
from jax_tcgemm.problem.activations import resolve
from jax_tcgemm.problem.alignment import (
    most_split_bytes,
    named_split_bytes,
    padding_bytes,
    plane_bytes,
    split_bytes,
)
from jax_tcgemm.problem.arithmetic import INPUT_DTYPES, written_dtype
from jax_tcgemm.problem.spec import GemmSpec, flatten, with_kernel_layouts
from jax_tcgemm.problem.strides import ROLES, Operands, StridedGemm, fold

# The most batch dimensions of the custom call: the kernel walks the batch with this many strides.
MAX_BATCH_NDIM = _core.MAX_BATCH_RANK

_FLOAT32 = jnp.dtype(jnp.float32)

# Operands without strides in the call: those of another operand serve for both, or the call has no
# groups.
_WITHOUT_STRIDES = ("b2", "c2", "group_sizes")
_WITHOUT_FLAG = ("has_a", "has_b", "has_group_sizes")


def custom_call(x: Operands, spec: GemmSpec, algorithm: str) -> list[jax.Array]:
    """Computes the primitive by one custom call and the copies and conversions it needs.

    Args:
        x: the operands.
        spec: the primitive's parameters.
        algorithm: the kernel algorithm, or the name of a product of planes.

    Returns:
        The results that ``spec`` requests.
    """
    x, spec = _laid_out(x, spec)
    written = spec.epilogue.written
    results = iter(_emitted(x, spec.replace(results=written), algorithm))
    return spec.epilogue.picked([next(results) if is_there else None for is_there in written])


def _emitted(x: Operands, spec: GemmSpec, algorithm: str) -> list[jax.Array]:
    """Emits the custom call and the conversions that its element types need."""
    planes = PLANE_PRODUCTS.get(algorithm)
    in_dtype = _FLOAT32 if planes else INPUT_DTYPES[algorithm]
    out_dtype = _FLOAT32 if planes else written_dtype(algorithm, spec.out_dtype)
    x = converted(x, in_dtype, out_dtype)
    shapes = shapes_of(x)
    strided = fold(spec.strided(shapes))
    result = jax.ShapeDtypeStruct(spec.result_shape(shapes), out_dtype)
    results = (result,) * spec.result_count
    padding, workspace = workspace_bytes(strided, spec, in_dtype.itemsize, planes)
    call = jax.ffi.ffi_call(
        _extension.GEMM_TARGET,
        (*results, jax.ShapeDtypeStruct((workspace,), jnp.uint8)) if workspace else results,
        input_output_aliases={2: 0} if _can_overwrite_c(x, spec, result) else None,
    )
    named = attributes(strided, spec, algorithm, padding, has_workspace=workspace > 0)
    outputs = call(*flatten(x), **named)
    return [output.astype(spec.out_dtype) for output in outputs[: len(results)]]


def workspace_bytes(
    gemm: StridedGemm, spec: GemmSpec, itemsize: int, planes: PlaneProduct | None
) -> tuple[int, int]:
    """Returns the bytes for padded copies or planes, and those of the whole workspace."""
    if planes is not None:
        total = plane_bytes(gemm, planes.count)
        return total, total
    if spec.is_gated:
        return 0, 0
    if spec.config is None:
        padding = padding_bytes(gemm, itemsize)
        return padding, padding + split_bytes(gemm)
    if spec.config == MEASURED:
        padding = padding_bytes(gemm, itemsize)
        return padding, padding + _measured_split_bytes(gemm)
    name, splits = read_config(spec.config)
    row = by_name(name)
    padding = padding_bytes(gemm, itemsize) if row.copies_whole_chunks else 0
    tile_m, tile_n = row.tile_m * row.cluster_m, row.tile_n * row.cluster_n
    return padding, padding + named_split_bytes(gemm, splits, tile_m, tile_n)


def _measured_split_bytes(gemm: StridedGemm) -> int:
    """Returns enough bytes for each row that is timed with k split."""
    splits = most_split_bytes(gemm) // max(1, 4 * gemm.m * gemm.n)
    if splits < 2:
        return 0
    rows = [row for name, row in BY_NAME.items() if _core.row_facts(name).splits_k]
    tiles = {(row.tile_m * row.cluster_m, row.tile_n * row.cluster_n) for row in rows}
    return max((named_split_bytes(gemm, splits, *tile) for tile in tiles), default=0)


def _can_overwrite_c(x: Operands, spec: GemmSpec, result: jax.ShapeDtypeStruct) -> bool:
    """Checks if ``c``, the third operand, may be overwritten and has the result's layout."""
    if x.c is None or not spec.overwrite_c:
        return False
    return x.c.dtype == result.dtype and spec.axes.c == tuple(range(len(result.shape)))


def converted(x: Operands, in_dtype: np.dtype, out_dtype: np.dtype) -> Operands:
    """Converts operands to the element types that the kernels take."""

    def convert(name: str, operand: jax.Array | None) -> jax.Array | None:
        if operand is None:
            return None
        if name in ("a", "b", "b2"):
            return operand.astype(in_dtype)
        # The addends have the result's type or float32; c and c2 have one type.
        alike = {"c": (x.c, x.c2), "c2": (x.c, x.c2), "bias": (x.bias,), "bias2": (x.bias2,)}
        group = [other for other in alike.get(name, ()) if other is not None]
        if group and all(other.dtype == out_dtype for other in group):
            return operand
        return operand.astype(_FLOAT32)

    return Operands(*map(convert, x._fields, x))


def shapes_of(x: Operands) -> Operands:
    """Returns the shapes of the operands that are present."""
    return Operands(*(None if operand is None else operand.shape for operand in x))


def _laid_out(x: Operands, spec: GemmSpec) -> tuple[Operands, GemmSpec]:
    """Copies the operands that the kernel cannot read in place, which is rare."""
    spec, permutations = with_kernel_layouts(spec, shapes_of(x))
    x = Operands(
        *(
            operand if order is None else lax.transpose(operand, order)
            for operand, order in zip(x, permutations, strict=True)
        )
    )
    if len(fold(spec.strided(shapes_of(x))).batch) <= MAX_BATCH_NDIM:
        return x, spec
    return with_dense_batch(x, spec)


def with_dense_batch(x: Operands, spec: GemmSpec) -> tuple[Operands, GemmSpec]:
    """Broadcasts every operand over the whole batch, which then folds into one dimension."""
    gemm = spec.strided(shapes_of(x))
    extents = {"m": gemm.m, "n": gemm.n, "k": gemm.k}
    dense, axes = [], []
    for operand, operand_axes, roles in zip(x, spec.axes, ROLES, strict=True):
        if operand is None:
            dense.append(None)
            axes.append(None)
            continue
        shape = (*gemm.batch, *(extents[role] for role in roles))
        dense.append(jnp.broadcast_to(reference.aligned(operand, operand_axes), shape))
        axes.append(tuple(range(len(shape))))
    return Operands(*dense), spec.replace(axes=Operands(*axes))


def attributes(
    gemm: StridedGemm,
    spec: GemmSpec,
    algorithm: str,
    padding: int,
    *,
    has_workspace: bool,
    pairs_of_b: bool = False,
) -> dict[str, Any]:
    """Returns the attributes of the custom call; ``cuda/ffi/attributes.h`` has the same names."""
    has = {f"has_{name}": axes is not None for name, axes in spec.axes._asdict().items()}
    strides = {
        f"{name}_strides": np.asarray(values, np.int64)
        for name, values in gemm.strides._asdict().items()
        if name not in _WITHOUT_STRIDES
    }
    return {
        "m": np.int64(gemm.m),
        "n": np.int64(gemm.n),
        "k": np.int64(gemm.k),
        "batch_shape": np.asarray(gemm.batch, np.int64),
        **strides,
        **{name: present for name, present in has.items() if name not in _WITHOUT_FLAG},
        "has_aux": spec.result_count > 1,
        "has_workspace": has_workspace,
        "padding_bytes": np.int64(padding),
        "alpha": np.float32(np.real(spec.alpha)),
        "beta": np.float32(np.real(spec.beta)),
        "c_role": spec.epilogue.row.c_role,
        **resolve(spec.activation).attributes,
        "gated": spec.is_gated,
        "pairs_of_b": pairs_of_b,
        "beside_collectives": devices.is_one_of_several() and contracts_rows(gemm),
        "b2_offset": np.int64(second_weight_offset(gemm, spec)),
        "algorithm": algorithm,
        "config": spec.config or "",
    }


def contracts_rows(gemm: StridedGemm) -> bool:
    """Checks if this is ``x.T @ y`` of row-major operands, as for the gradients of weights.

    Only the optimizer waits for the sum of these gradients over devices, so XLA lets the next
    product begin beside the collective. The program waits for the sums of other products.
    """
    return gemm.strides.a[-1] != 1 and gemm.strides.b[-2] != 1


def second_weight_offset(gemm: StridedGemm, spec: GemmSpec) -> int:
    """Returns the number of elements before the second half of a packed weight."""
    return gemm.n * gemm.strides.b[-1] if spec.packed else 0
