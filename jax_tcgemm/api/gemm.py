"""``gemm``: checks the arguments and makes one ``GemmSpec``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_tcgemm import _compat
from jax_tcgemm.api import arguments, eager, quantized, weight_only, weights
from jax_tcgemm.api import epilogue as epilogues
from jax_tcgemm.lowering import reference
from jax_tcgemm.primitives import gemm as gemm_primitive
from jax_tcgemm.problem.activations import Activation
from jax_tcgemm.problem.arithmetic import accumulator_dtype
from jax_tcgemm.problem.epilogue import Epilogue
from jax_tcgemm.problem.spec import GemmSpec
from jax_tcgemm.problem.strides import Operands
from jax_tcgemm.quantized.packed import is_weight


@eager.one_program(
    *("activation", "transpose_a", "transpose_b", "precision", "preferred_element_type", "config"),
    *("out_sharding", "return_amax", "conjugate_a", "conjugate_b"),
    numbers=("alpha", "beta"),
    functions=("epilogue",),
)
def gemm(
    a: ArrayLike,
    b: Any,
    c: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    alpha: ArrayLike = 1.0,
    beta: ArrayLike = 1.0,
    activation: str | Activation | None = None,
    residual: ArrayLike | None = None,
    row_scale: ArrayLike | None = None,
    column_scale: ArrayLike | None = None,
    a_scale: ArrayLike | None = None,
    b_scale: ArrayLike | None = None,
    out_scale: ArrayLike | None = None,
    return_amax: bool = False,
    transpose_a: bool = False,
    transpose_b: bool = False,
    conjugate_a: bool = False,
    conjugate_b: bool = False,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    config: str | None = None,
    out_sharding: Any = None,
    epilogue: Callable[..., Any] | None = None,
    epilogue_operands: Sequence[Any] = (),
) -> Any:
    """Matrix product with a fused epilogue.

    ``D = activation(alpha * row_scale * column_scale * (op(A) @ op(B)) + beta * C + bias) +
    residual``, where the scales apply to rows and columns.

    On NVIDIA GPUs of compute capability 8.0 and newer this is one hand-written tensor-core kernel
    for bfloat16, float16 and (in TF32 arithmetic) float32 operands. XLA computes the same formula
    in ``jax.numpy`` in these cases, among others (docs/fallback.md):

    - on other platforms;
    - for operands that have no kernel but that ``jnp.matmul`` takes;
    - for a vector or few rows times an unaligned 16-bit matrix (row stride not a multiple of 16
      bytes).

    16-bit operands are accumulated in float32 unless ``precision`` says otherwise. The epilogue is
    computed in float32 (float64 for float64, integers for integers), and the result is rounded
    once. Exception: if k is sharded over devices, a product in bfloat16 is rounded before the
    epilogue.

    The function can be batched and differentiated, forward and reverse and to any order.

    Args:
        a: ``(..., m, k)``, or ``(..., k, m)`` with ``transpose_a``.
        b: ``(..., k, n)``, or ``(..., n, k)`` with ``transpose_b``. Leading dimensions of ``a`` and
            ``b`` broadcast as in ``jnp.matmul``, and a broadcast operand is never copied. ``b`` may
            be a ``PackedWeight`` or a ``Quantized`` beside an ``a`` of floating-point numbers.
            Exact codes of a packed ``b`` are multiplied by bfloat16 or float16 ``a``; each
            dequantized weight is rounded at most once, to the dtype of ``a``, and sums are float32.
            A ``Quantized`` is dequantized to the dtype of ``a`` first, and so is a packed ``b``
            beside other ``a``, with ``transpose_b``, or for a ``precision`` that names other sums.
            Exception: beside few rows, the program packs a large ``Quantized`` in 4 bits
            (docs/quantization.md). A packed ``b`` has no derivative.
        c: broadcasts to ``(..., m, n)``. It does not affect the dtype of the result. The kernel
            adds to ``c`` in place if all of these hold: ``preferred_element_type=jnp.float32``,
            16-bit operands, a float32 ``c`` of the result's shape, ``beta`` is the number 1, no
            activation and no ``residual``. The result then takes the memory of ``c`` if ``c`` was
            donated or is the carry of a loop, and otherwise the memory of a copy.
        bias: ``(n,)`` or ``(..., n)``. Its leading dimensions broadcast against those of the
            result, except ``m``.
        alpha: factor of the product. A Python number is a constant of the compiled program. An
            array of shape ``()`` is an operand, which may be traced and differentiated.
        beta: factor of ``c``, like ``alpha``. It has no effect without ``c``.
        activation: ``None``, ``"relu"``, ``"relu_squared"``, ``"gelu"`` (tanh form, as
            ``jax.nn.gelu``), ``"gelu_exact"``, ``"silu"``, ``"sigmoid"``, ``"tanh"``, or the result
            of ``softcap(cap)`` or ``clip(lower, upper)`` of this package.
        residual: broadcasts to ``(..., m, n)``; added after the activation, without ``beta``. If
            there is a ``c`` too, the residual is added outside the kernel, after the result was
            rounded.
        row_scale: factors of the product's rows, ``(m,)`` or ``(..., m)`` (a scale per token).
        column_scale: factors of the product's columns, ``(n,)`` or ``(..., n)`` (a scale per
            channel). The leading dimensions of both scales broadcast like those of ``bias``.
        a_scale: scale of an 8-bit ``a``, which stands for ``a * a_scale``. The operands must be two
            of float8_e4m3fn or float8_e5m2, or two of int8. The scale is one number, or a float32
            array with as many dimensions as ``a`` whose last two extents divide those of ``a``:
            each element is the scale of one block (docs/quantization.md). It has no derivative.
        b_scale: the same for ``b``.
        out_scale: one number for 8-bit operands. The result is divided by it, clipped to the range
            of ``preferred_element_type`` (an 8-bit type), and rounded.
        return_amax: whether to return a second result for 8-bit operands: the largest absolute
            value of the result before the division by ``out_scale``, in float32.
        transpose_a: whether ``a`` holds the transpose of ``A``; this moves no data. Exception:
            tensor cores read 8-bit operands only along k, so a pass transposes other layouts.
        transpose_b: whether ``b`` holds the transpose of ``B``.
        conjugate_a: whether a complex ``A`` is conjugated; with ``transpose_a``, ``a`` holds its
            conjugate transpose.
        conjugate_b: the same for ``B``.
        precision: as in ``jnp.matmul``, or the name of a ``jax.lax.DotAlgorithmPreset``. ``None``
            means ``jax.default_matmul_precision``. float32 is computed in TF32 unless ``"highest"``
            or a wider preset is requested. Sums of 8-bit floats are those of the tensor cores, to
            about 14 bits. With ``"highest"`` or ``ANY_F8_ANY_F8_F32``, the sums of every 128
            products are added up in float32.
        preferred_element_type: dtype of the result. ``None`` means that of ``jnp.matmul(a, b)``, or
            bfloat16 if there are scales. The kernels write the operands' dtype or float32; a
            conversion to any other dtype follows.
        config: ``None`` uses the tuned configuration (see ``tune``), or else the one that is
            expected to be fastest. The name of a row of ``jax_tcgemm.kernels.table`` selects that
            kernel; ``"/splits=N"`` after the name divides k into N parts that are added up.
            Packed weights have rows of their own (``jax_tcgemm.kernels.packed_configs``).
            ``"xla"`` selects XLA's own operations (a sum in one 16-bit type rounds as in ``jnp``).
            ``"kernel"`` selects the fastest kernel, and raises a ``FallbackError`` on a GPU if no
            kernel computes the product. Derivatives choose their own configuration.
        out_sharding: as in ``jnp.matmul``: a ``PartitionSpec`` or ``NamedSharding`` of the result,
            on a mesh with explicit axes. It is required if the contracted dimensions of both
            operands are sharded. It must not be ``unreduced``.
        epilogue: a ``jax.numpy`` function that replaces the epilogue above. It takes the whole
            product ``op(A) @ op(B)``, ``(..., m, n)``, and ``epilogue_operands``. The product is
            float32 or wider; for integers without scales, int32 or uint32 or wider, or the integer
            type that ``preferred_element_type`` names. On GPUs of compute capability 9.0, for
            operands of 16 bits or fewer and for float32 in TF32, it is compiled into the kernel; on
            GPUs from 8.0 on if autotuning chose that. Elsewhere, and if it cannot be compiled, it
            runs after the product (docs/epilogues.md).
            Values that it closes over are differentiated like its operands.
        epilogue_operands: further arguments of ``epilogue``, pytrees of arrays.

    Returns:
        An array ``(..., m, n)`` with the dtype of ``jnp.matmul(a, b, preferred_element_type=...)``.
        With ``return_amax``, that array and the largest absolute value. With ``epilogue``, its
        results: a pytree of arrays of this shape, or reductions of it, of any dtype.
        ``preferred_element_type`` then converts the floating-point ones.

    Raises:
        NotImplementedError: ``out_sharding`` is ``unreduced``.
        TypeError: an argument's type or dtype is not accepted.
        ValueError: an argument's shape or value is not accepted.

    Example:
        >>> y = gemm(x, w, bias=b, activation="gelu")  # gelu(x @ w + b)
        >>> y.shape
        (8, 256)
        >>> z = gemm(x, w, epilogue=lambda p, y: jnp.tanh(p) * y, epilogue_operands=(y,))
    """
    epilogues.check_operands(epilogue, epilogue_operands)
    a = arguments.matrix("a", a)
    asked = quantized.Asked(a_scale, b_scale, out_scale, return_amax)
    given = {
        "c": c,
        "bias": bias,
        "residual": residual,
        "row_scale": row_scale,
        "column_scale": column_scale,
        "alpha": alpha,
        "beta": beta,
    }
    if is_weight(b):
        weight_only.check_scales(asked)
        left = jnp.swapaxes(a, -1, -2) if transpose_a else a
        weight = weights.multiplied(
            b, left, precision, preferred_element_type, config, transposed=transpose_b
        )
        if weight is not None:
            return weight_only.packed_gemm(
                *(left, weight),
                given=given,
                activation=activation,
                preferred=preferred_element_type,
                config=config,
                out_sharding=_compat.out_sharding_of(out_sharding, "gemm"),
                epilogue=epilogue,
                epilogue_operands=epilogue_operands,
            )
        b = weight_only.dequantized("b", b, "a", a)
    b = arguments.matrix("b", b)
    batch, m, n, k = arguments.extents(a, b, transpose_a, transpose_b)
    arguments.check_flags(conjugate_a=conjugate_a, conjugate_b=conjugate_b)
    a = jnp.conj(a) if conjugate_a else a
    b = jnp.conj(b) if conjugate_b else b
    precision = _compat.canonicalize_precision(precision)
    if quantized.are_taken(asked, a, b, preferred_element_type, precision, out_sharding):
        return quantized.quantized_gemm(
            *(a, b, (*batch, m, n), (bool(transpose_a), bool(transpose_b)), asked),
            given=given,
            activation=activation,
            precision=precision,
            preferred=preferred_element_type,
            config=config,
            epilogue=epilogue,
            epilogue_operands=epilogue_operands,
        )
    a, b, out_dtype = arguments.promoted(a, b, precision, preferred_element_type)
    arguments.check_activation(activation, out_dtype, a, b)
    arguments.check_config(config)
    if epilogue is not None:
        constants = {"alpha": alpha, "beta": beta}
        epilogues.check_alone(
            "gemm",
            c=c,
            bias=bias,
            activation=activation,
            residual=residual,
            row_scale=row_scale,
            column_scale=column_scale,
            out_sharding=out_sharding,
            **{name: x for name, x in constants.items() if not (arguments.is_number(x) and x == 1)},
        )
        (a, a_axes), (b, b_axes) = (
            arguments.placed(a, (*batch, m, k), transpose_a),
            arguments.placed(b, (*batch, k, n), transpose_b),
        )
        spec = GemmSpec(Operands(a_axes, b_axes), out_dtype, precision, config=config)
        shape = (*batch, m, n)
        return epilogues.applied(
            (a, b), spec, shape, epilogue, epilogue_operands, preferred_element_type
        )
    if c is None and residual is not None:
        given["beta"] = 1.0  # the residual takes the place of c
    wide = accumulator_dtype(a.dtype, b.dtype, out_dtype)
    own, constants = arguments.epilogue_operands(given, (*batch, m, n), out_dtype, wide)
    form, added_later = "add", None
    if "residual" in own:
        if "c" in own:  # the kernel takes only one operand of this shape
            added_later = own.pop("residual")
        else:
            own["c"] = own.pop("residual")
            form = "add" if activation is None else "residual"
    placed = {
        "a": arguments.placed(a, (*batch, m, k), transpose_a),
        "b": arguments.placed(b, (*batch, k, n), transpose_b),
        **own,
    }
    operands = Operands(**{name: operand for name, (operand, _) in placed.items()})
    axes = Operands(**{name: axes for name, (_, axes) in placed.items()})
    spec = GemmSpec(
        axes,
        out_dtype,
        precision,
        Epilogue(form, activation, **constants),
        config=config,
        overwrite_c=residual is None and _accumulates(operands, activation, constants, out_dtype),
    )
    out_sharding = _compat.out_sharding_of(out_sharding, "gemm")
    (d,) = gemm_primitive.bind(operands, spec, out_sharding)
    if added_later is None:
        return d
    wide = accumulator_dtype(out_dtype, out_dtype, out_dtype)
    added_later = jnp.broadcast_to(reference.aligned(*added_later), d.shape)
    if out_sharding is not None:
        added_later = _compat.typed_as(d, added_later)
    return (d.astype(wide) + added_later.astype(wide)).astype(out_dtype)


def _accumulates(
    x: Operands, activation: str | Activation | None, constants: dict[str, Any], out_dtype: Any
) -> bool:
    """Checks if this is ``c += A @ B`` in float32, as in gradient accumulation over steps."""
    if x.c is None or activation is not None or constants.get("beta") != 1:
        return False
    sizes = [x.a.dtype.itemsize, x.b.dtype.itemsize]
    return x.c.dtype == out_dtype == "float32" and sizes == [2, 2]
