"""The tensors of a quantized module in GPTQ, AWQ and compressed-tensors files.

All three store eight 4-bit codes in an int32. ``m = code - zero`` times the scale is the weight.
The layouts, for a weight of k x n in ``groups`` groups along k:

- GPTQ: ``qweight`` (k / 8, n), where nibble i of word r is row 8 r + i. ``qzeros``
  (groups, n / 8), where nibble i is column 8 c + i. The stored number is the zero point minus 1
  in the format ``gptq``, and the zero point in ``gptq_v2``. ``scales`` (groups, n). ``g_idx`` (k,)
  is the group of each row.
- AWQ (``gemm``): ``qweight`` (k, n / 8) and ``qzeros`` (groups, n / 8), where nibble i is column
  8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]. ``scales`` (groups, n).
- compressed-tensors (``pack-quantized``): ``weight_packed`` (n, k / 8), where nibble i is column
  8 c + i of the (n, k) matrix. ``weight_zero_point`` (n / 8, groups), where nibble i is row 8 r +
  i. ``weight_scale`` (n, groups). ``weight_shape`` has n and k. ``weight_g_idx`` (k,).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.checkpoints.scheme import Scheme, refused
from jax_tcgemm.quantized.arrays import Quantized
from jax_tcgemm.quantized.packed import pack

_IN_A_WORD = 8
_SYMMETRIC_ZERO = 8
_IN_ORDER = tuple(range(_IN_A_WORD))
# The nibble that holds each of eight columns.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_SCALE_DTYPES = ("float16", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Format:
    """The tensors of one quantized module.

    Attributes:
        codes: name of the codes after that of the module.
        scales: name of the scales.
        zeros: name of the zero points.
        shape: name of the shape ``(n, k)``; ``None`` if the file has none.
        groups: name of the group of each k; ``None`` if the file has none.
        is_transposed: whether matrices are stored as ``(n, k)``.
        codes_axis: the axis of ``codes`` along which a word holds eight of them.
        order: the nibble that holds each of eight codes.
    """

    codes: str
    scales: str
    zeros: str
    shape: str | None
    groups: str | None
    is_transposed: bool
    codes_axis: int
    order: tuple[int, ...] = _IN_ORDER

    @property
    def suffixes(self) -> tuple[str, ...]:
        names = (self.codes, self.scales, self.zeros, self.shape, self.groups)
        return tuple(name for name in names if name is not None)

    def modules(self, names: Iterable[str]) -> frozenset[str]:
        """Returns the quantized modules: scales alone are those of an activation."""
        parts = [name.rpartition(".") for name in names]
        of_codes = {*self.suffixes} - {self.scales}
        return frozenset(module for module, _, last in parts if last in of_codes)

    def module_of(self, name: str, modules: Collection[str]) -> str | None:
        """Returns which of the modules a tensor of this name belongs to, or ``None``."""
        module, _, last = name.rpartition(".")
        return module if last in self.suffixes and module in modules else None


FORMATS = {
    "gptq": Format("qweight", "scales", "qzeros", None, "g_idx", False, 0),
    "awq": Format("qweight", "scales", "qzeros", None, None, False, 1, _AWQ_ORDER),
    "compressed-tensors": Format(
        *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        is_transposed=True,
        codes_axis=1,
    ),
}


def weight(module: str, tensors: Mapping[str, np.ndarray], scheme: Scheme, packed: bool) -> Any:
    """Returns the weight of one module, ``(k, n)``.

    Args:
        module: name of the module.
        tensors: all tensors of the checkpoint.
        scheme: how the module is quantized.
        packed: whether to return a ``PackedWeight`` or a ``Quantized``.

    Raises:
        ValueError: a tensor is missing, or its shape, dtype or content is not accepted.
    """
    form = FORMATS[scheme.method]
    codes = _tensor(module, form.codes, tensors)
    scales = _tensor(module, form.scales, tensors)
    n, k = _extents(module, form, codes, tensors)
    groups = _groups(module, form, scheme, k)
    _check(module, form.codes, codes, _words((k, n), form, form.codes_axis), ("int32",))
    _check(module, form.scales, scales, _stored((groups, n), form), _SCALE_DTYPES)
    zeros = None
    if scheme.method != "compressed-tensors" or not scheme.symmetric:
        zeros = _tensor(module, form.zeros, tensors)
        axis = 0 if form.is_transposed else 1
        _check(module, form.zeros, zeros, _words((groups, n), form, axis), ("int32",))
        zeros = _zero_points(module, form, scheme, zeros, n)
    if form.groups is not None:
        _check_groups(module, form, tensors, k, k // groups)
    axis = form.codes_axis
    if form.is_transposed:
        # On CPUs, XLA of JAX 0.8.0 writes beyond arrays of 4 bits that it transposes.
        codes, scales = (np.ascontiguousarray(x.T) for x in (codes, scales))
        axis = 1 - axis
    return _decoded(codes, scales, zeros, axis=axis, order=form.order, shape=(k, n), packed=packed)


@functools.partial(jax.jit, static_argnames=("axis", "order", "shape", "packed"))
def _decoded(
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    *,
    axis: int,
    order: tuple[int, ...],
    shape: tuple[int, int],
    packed: bool,
) -> Any:
    """Returns the weight.

    Args:
        codes: words of eight codes of ``(k, n)``.
        scales: ``(groups, n)``.
        zeros: ``(groups, n)``.
        axis: along which a word holds eight codes.
        order: the nibble that holds each of eight codes.
        shape: k and n.
        packed: whether to return a ``PackedWeight`` or a ``Quantized``.
    """
    values = _nibbles(lax.bitcast_convert_type(codes, jnp.uint32), axis, order)
    values = values[: shape[0], : shape[1]].astype(jnp.int8)
    if zeros is None:
        q = Quantized((values - _SYMMETRIC_ZERO).astype(jnp.int4), scales)
    else:
        q = Quantized(values.astype(jnp.uint4), scales, zeros)
    return pack(q) if packed else q


def _nibbles(words: Any, axis: int, order: tuple[int, ...]) -> Any:
    """Returns eight codes for each word, next to each other along ``axis``.

    Args:
        words: matrix of uint32, of NumPy or JAX.
        axis: 0 or 1.
        order: the nibble of each of the eight.
    """
    shifts = 4 * np.array(order, np.uint32).reshape([-1, 1] if axis == 0 else [-1])
    parts = (words[:, None, :] if axis == 0 else words[:, :, None]) >> shifts & 15
    shape = list(words.shape)
    shape[axis] *= _IN_A_WORD
    return parts.reshape(shape)


def _zero_points(
    module: str, form: Format, scheme: Scheme, words: np.ndarray, n: int
) -> np.ndarray | None:
    """Returns zero points as int8 ``(groups, n)``, or ``None`` if the scheme is symmetric.

    GPTQ's format adds 1 to the stored number, so its zero points are 1 to 16.

    Raises:
        ValueError: the scheme is symmetric and a zero point is not 8.
    """
    axis = 0 if form.is_transposed else 1
    stored = _nibbles(words.view(np.uint32), axis, form.order)
    zeros = (stored.T if form.is_transposed else stored)[:, :n] + np.uint32(scheme.zero_offset)
    if not scheme.symmetric:
        return zeros.astype(np.int8)
    if (wrong := zeros != _SYMMETRIC_ZERO).any():
        accepted = f"a zero point of {_SYMMETRIC_ZERO}, because sym=True"
        raise refused("checkpoint", joined(module, form.zeros), int(zeros[wrong][0]), accepted)
    return None


def joined(module: str, suffix: str) -> str:
    """Returns the name of a tensor of a module; the module of a file with one layer has no name."""
    return f"{module}.{suffix}" if module else suffix


def _tensor(module: str, suffix: str, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    key = joined(module, suffix)
    if key not in tensors:
        raise ValueError(f"the checkpoint has no {key}, which the module {module!r} needs")
    return tensors[key]


def _extents(
    module: str, form: Format, codes: np.ndarray, tensors: Mapping[str, np.ndarray]
) -> tuple[int, int]:
    """Returns ``(n, k)``."""
    if codes.ndim != 2:
        raise refused("checkpoint", f"{joined(module, form.codes)}.shape", codes.shape, "a matrix")
    if form.shape is not None:
        stored = _tensor(module, form.shape, tensors)
        if stored.shape != (2,) or stored.dtype.kind not in "iu":
            accepted = "two integers, n and k"
            raise refused("checkpoint", joined(module, form.shape), stored.tolist(), accepted)
        n, k = map(int, stored)
        return n, k
    extents = list(codes.shape)
    extents[form.codes_axis] *= _IN_A_WORD
    return extents[1], extents[0]


def _groups(module: str, form: Format, scheme: Scheme, k: int) -> int:
    """Returns the number of groups along k."""
    if scheme.group == -1:
        return 1
    if k % scheme.group:
        accepted = f"a divisor of k={k} of the module {module!r}"
        raise refused("checkpoint", "group_size", scheme.group, accepted)
    return k // scheme.group


def _stored(shape: tuple[int, int], form: Format) -> tuple[int, int]:
    """Returns the stored shape of a matrix ``(k or groups, n)``."""
    first, second = shape
    return (second, first) if form.is_transposed else shape


def _words(shape: tuple[int, int], form: Format, axis: int) -> tuple[int, ...]:
    """Returns the shape of the words that hold a matrix ``(k or groups, n)``."""
    stored = list(_stored(shape, form))
    stored[axis] = -(-stored[axis] // _IN_A_WORD)
    return tuple(stored)


def _check(
    module: str, suffix: str, x: np.ndarray, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> None:
    """Checks the dtype and the shape of one tensor."""
    key = joined(module, suffix)
    if x.dtype.name not in dtypes:
        raise refused("checkpoint", f"{key}.dtype", x.dtype.name, ", ".join(dtypes))
    if x.shape != shape:
        raise refused("checkpoint", f"{key}.shape", x.shape, str(shape))


def _check_groups(
    module: str, form: Format, tensors: Mapping[str, np.ndarray], k: int, group: int
) -> None:
    """Checks that consecutive k form the groups, whatever ``desc_act`` says.

    Raises:
        ValueError: the groups are permuted.
    """
    assert form.groups is not None
    key = joined(module, form.groups)
    if key not in tensors:
        return
    found = tensors[key]
    _check(module, form.groups, found, (k,), ("int32", "int64"))
    if form.is_transposed and (found == -1).all():
        return  # compressed-tensors stores this for no permutation
    expected = np.arange(k) // group
    if (wrong := found != expected).any():
        at = int(np.argmax(wrong))
        accepted = f"{expected[at]}: the reader takes no permuted groups (desc_act, actorder)"
        raise refused("checkpoint", f"{key}[{at}]", int(found[at]), accepted)
