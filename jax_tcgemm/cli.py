"""The command ``jax-tcgemm``.

Without a subcommand it prints the installation, checks the kernels and measures a few products. The
output is meant for bug reports.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm import _core
from jax_tcgemm.api.gemm import gemm
from jax_tcgemm.api.quantization import quantize
from jax_tcgemm.problem.packed import BITS
from jax_tcgemm.quantized.packed import PackedWeight, pack
from jax_tcgemm.tools import doctor
from jax_tcgemm.tools.chain import default_device
from jax_tcgemm.transforms.tune import tune
from jax_tcgemm.tuning import cache, lookup
from jax_tcgemm.tuning.tunings import Tunings


def _check(args: argparse.Namespace) -> int:
    """Prints the installation and checks the kernels; returns 1 if a result is wrong."""
    seed = args.seed if args.seed is not None else int(np.random.default_rng().integers(10**6))
    device = default_device()
    doctor.print_installation(device)
    failures = doctor.run_checks(device.platform == "gpu", seed, args.jobs)
    return 1 if failures else 0


def _bench(args: argparse.Namespace) -> int:
    """Prints the table of speeds."""
    if default_device().platform == "gpu" and _core.kernel_names():
        doctor.print_speed()
    else:
        reason = "JAX has no GPU here" if _core.kernel_names() else "the build has no kernels"
        print(f"\nNo speed table: {reason}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    """Prints the installation and checks the kernels."""
    status = _check(args)
    print("FAILED" if status else "OK")
    return status


def _report(args: argparse.Namespace) -> int:
    """Does what ``doctor`` and ``bench`` do."""
    status = _check(args)
    if not args.no_speed:
        _bench(args)
    print(f"\n{'FAILED' if status else 'OK'}")
    return status


def _tune(args: argparse.Namespace) -> int:
    """Measures products and keeps the choices in the cache folder, or in a file."""
    if default_device().platform != "gpu":
        print("tune: there is no GPU here")
        return 1
    if args.weight is not None and (args.transpose_a or args.transpose_b):
        print("tune: packed weights have no transpose; accepted beside --weight: --group, --dtype")
        return 1
    if args.weight is None and args.group is not None:
        print("tune: --group is for packed weights; accepted beside --weight")
        return 1
    if args.out is not None and not args.out.absolute().parent.is_dir():
        print(f"tune: there is no folder {args.out.parent} for the file")
        return 1
    dtype = args.dtype
    found = Tunings()
    for m, n, k in args.products:
        a = jax.ShapeDtypeStruct((k, m) if args.transpose_a else (m, k), dtype)
        b = jax.ShapeDtypeStruct((n, k) if args.transpose_b else (k, n), dtype)
        flags = {"transpose_a": args.transpose_a, "transpose_b": args.transpose_b}
        if args.weight is not None:
            tile = (-1 if args.group is None else args.group, 1)
            packed = functools.partial(_packed, dtype=args.weight, tile=tile)
            b, flags = jax.eval_shape(packed, b), {}
        found |= tune(functools.partial(gemm, **flags), a, b, progress=False)
    print(found)
    if args.out is not None:
        found.save(args.out)
        return 0
    reasons = {cache.write(*key, entry) for key, entry in found.entries.items()} - {None}
    for reason in reasons:
        print(f"tune: the choices are not kept: {reason}")
    return 1 if reasons else 0


def _packed(w: jax.Array, dtype: str, tile: tuple[int, int]) -> PackedWeight:
    return pack(quantize(w, dtype, tile=tile, scale_dtype=w.dtype))


def _cache(args: argparse.Namespace) -> int:
    """Prints what the cache folder holds; saves the choices, or removes choices and kernels."""
    folder = cache.base()
    if folder is None:
        reason = f"{cache.SETTING} is empty, or there is no home folder of that name"
        print(f"There is no cache folder: {reason}")
        return 1
    if args.save is not None:
        cache.everything().save(args.save)
    if args.clear:
        for path in [*folder.glob("tunings-*"), *folder.glob("cubins-*")]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    files = [path for path in folder.rglob("*") if path.is_file()]
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    print(f"folder: {folder} ({len(files)} files, {megabytes:.1f} MB)")
    print(f"measured choices: {len(cache.everything())} ({lookup.SETTING}={lookup.mode()})")
    return 0


def _product(text: str) -> tuple[int, int, int]:
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isascii() and part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no product; accepted: 16x4096x4096")
    m, n, k = map(int, parts)
    if min(m, n, k) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is empty; accepted: extents from 1 on")
    return m, n, k


def _dtype(text: str) -> np.dtype:
    try:
        dtype = jnp.dtype(text)
    except TypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype; accepted: bfloat16") from error
    if not jnp.issubdtype(dtype, jnp.number):
        raise argparse.ArgumentTypeError(f"{text!r} holds no numbers; accepted: bfloat16")
    return dtype


def _number(least: int, *others: int) -> Callable[[str], int]:
    """Returns a type of arguments: integers from ``least`` on, and others."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least and value not in others:
            accepted = " or ".join([f"{least} and more", *map(str, others)])
            raise argparse.ArgumentTypeError(f"{text} is too small; accepted: {accepted}")
        return value

    parse.__name__ = "integer"  # for the errors of argparse
    return parse


def _checks(**defaults: Any) -> argparse.ArgumentParser:
    """Returns a parser of the arguments for the checks.

    A command has them without defaults, which would replace what stands before the command.
    """
    checks = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    text = "of the random problems; by default a new one"
    checks.add_argument("--seed", type=_number(0), help=text)
    checks.add_argument("--jobs", type=_number(1), help="threads")
    checks.set_defaults(**defaults)
    return checks


def _parser() -> argparse.ArgumentParser:
    jobs = min(16, os.cpu_count() or 1)
    parser = argparse.ArgumentParser(
        prog="jax-tcgemm",
        description="Without a command: prints the installation, checks results, measures speed.",
        parents=[_checks(seed=None, jobs=jobs)],
    )
    parser.add_argument("--no-speed", action="store_true", help="leave the speed table out")
    parser.set_defaults(run=_report)
    commands = parser.add_subparsers(title="commands", metavar="")

    def command(
        run: Callable[[argparse.Namespace], int], name: str, text: str, **options: Any
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, **options)
        added.set_defaults(run=run)
        return added

    command(_doctor, "doctor", "print the installation and check the kernels", parents=[_checks()])
    command(_bench, "bench", "time a few products beside jnp.matmul")
    tuned = command(_tune, "tune", "measure products and keep the fastest choices")
    tuned.add_argument("products", nargs="+", type=_product, metavar="MxNxK")
    text = "of both operands; default bfloat16"
    tuned.add_argument("--dtype", type=_dtype, default="bfloat16", help=text)
    tuned.add_argument("--transpose-a", action="store_true", help="a is (k, m)")
    tuned.add_argument("--transpose-b", action="store_true", help="b is (n, k)")
    tuned.add_argument("--weight", choices=BITS, help="b is a packed weight of this dtype")
    text = "rows of the packed weight that share a scale; default all"
    tuned.add_argument("--group", type=_number(1, -1), help=text)
    tuned.add_argument("--out", type=pathlib.Path, metavar="FILE", help="instead of the cache")
    kept = command(_cache, "cache", "print what the cache folder holds")
    kept.add_argument("--save", type=pathlib.Path, metavar="FILE", help="of all measured choices")
    kept.add_argument("--clear", action="store_true", help="remove all choices and kernels")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: command line; by default the process's.

    Returns:
        The exit status: 0, or 1 if anything is wrong.
    """
    args = _parser().parse_args(arguments)
    try:
        return args.run(args)
    except (OSError, ValueError) as error:
        print(f"jax-tcgemm: {error}", file=sys.stderr)
        return 1
