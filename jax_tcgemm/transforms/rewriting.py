"""Rewrites a jaxpr so that this package computes its products: graph, regions, new jaxpr."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

from jax.extend import core

from jax_tcgemm._compat import jaxprs
from jax_tcgemm.epilogue import identity
from jax_tcgemm.primitives.unpacked import pack_p
from jax_tcgemm.problem.log import log
from jax_tcgemm.transforms import kernel_calls, loops
from jax_tcgemm.transforms.fused import Fused, as_jaxpr
from jax_tcgemm.transforms.graph import Atom, Graph, Node, Value, graph_of, inner_nodes
from jax_tcgemm.transforms.neighbours import with_views
from jax_tcgemm.transforms.products import is_on_device
from jax_tcgemm.transforms.regions import with_regions
from jax_tcgemm.transforms.report import Decision
from jax_tcgemm.transforms.scattered_rows import scatter_in_float32

_PRODUCTS = frozenset({"dot_general", "ragged_dot_general"})
# Jaxprs with these are rewritten.
_FOLLOWED = _PRODUCTS | {pack_p.name}
# The parameters of loops that hold their bodies.
_BODIES = {"scan": "jaxpr", "while": "body_jaxpr"}
# Operations that run other operations; the rewriting also covers the latter.
_LOOKED_INTO = jaxprs.OTHER_CALLS | {"scan", "while", "cond", "shard_map"}


class Rewriting:
    """Rewrites the jaxprs of one program; traces equal parts only once.

    Attributes:
        decisions: how each product is computed.
    """

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self._jaxprs: dict[tuple[Any, ...], tuple[Any, Any, list[Decision]]] = {}
        self._has_products: dict[int, tuple[Any, bool]] = {}
        self._calls: dict[tuple[bytes, tuple[Any, ...]], Any] = {}
        self._digests = identity.Digests()

    def rewritten(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        is_stacked: Sequence[bool] = (),
        is_sliced: Sequence[bool] = (),
        is_kept: Sequence[bool] = (),
    ) -> tuple[Any, list[Any]]:
        """Returns the jaxpr rewritten to this package's products, and its constants.

        Args:
            jaxpr: the operations.
            consts: their constants.
            is_stacked: for each result, whether the caller stacks it, as ``scan`` does.
            is_sliced: for each argument, whether the caller slices it out of a larger array.
            is_kept: for each argument, whether a loop passes it in each turn.
        """
        graph = with_regions(graph_of(jaxpr, consts, is_stacked, is_sliced))
        kept = [value for value, each in zip(graph.arguments, is_kept, strict=False) if each]
        return _Emission(self, graph, with_views(kept, graph.items)).jaxpr(jaxpr)

    def has_products(self, eqn: Any) -> bool:
        """Returns true if an operation that runs others contains a product."""
        for value in eqn.params.values():
            for jaxpr in map(jaxprs.jaxpr_of, value if type(value) is tuple else (value,)):
                if jaxpr is not None and self._multiplies(jaxpr):
                    return True
        return False

    def _multiplies(self, jaxpr: Any) -> bool:
        known = self._has_products.get(id(jaxpr))
        if known is None:
            found = any(
                eqn.primitive.name in _FOLLOWED
                or (eqn.primitive.name in _LOOKED_INTO and self.has_products(eqn))
                for eqn in jaxpr.eqns
            )
            # The reference to the jaxpr prevents reuse of its id.
            known = self._has_products[id(jaxpr)] = jaxpr, found
        return known[1]

    def parameters(
        self, node: Node, sliced: Collection[Value], *, may_pack: bool
    ) -> dict[str, Any]:
        """Returns the parameters of an operation, with the jaxprs among them rewritten.

        Args:
            node: the operation.
            sliced: as for ``Graph``.
            may_pack: whether ``loops`` may pack weights before the operation, if it is a loop.
        """
        passed: tuple[tuple[bool, ...], ...] = (), (), ()
        if node.name == "scan":
            passed = *jaxprs.scan_parts(node.eqn), ()
        elif node.name not in ("cond", "while"):  # for these, XLA copies a slice in any case
            passed = (), tuple([isinstance(x, Value) and x in sliced for x in node.inputs]), ()
        is_loop = may_pack and node.name in _BODIES
        of_body = *passed[:2], loops.kept_arguments(node.eqn) if is_loop else ()
        return {
            key: self._parameter(value, of_body if key == _BODIES.get(node.name) else passed)
            for key, value in node.params.items()
        }

    def _parameter(self, value: Any, passed: tuple[tuple[bool, ...], ...]) -> Any:
        """Rewrites a parameter; ``passed`` has the last arguments of ``rewritten``."""
        if type(value) is tuple and value and all(jaxprs.jaxpr_of(x) is not None for x in value):
            return tuple(self._parameter(x, passed) for x in value)
        jaxpr = jaxprs.jaxpr_of(value)
        if jaxpr is None or not self._multiplies(jaxpr):
            return value
        key = id(value), passed
        if key in self._jaxprs:
            _, made, decisions = self._jaxprs[key]
            self.decisions += decisions
            return made
        count = len(self.decisions)
        new, consts = self.rewritten(jaxpr, getattr(value, "consts", ()), *passed)
        made = jaxprs.with_jaxpr(value, jaxprs.closed(new, consts))
        if made is None:
            made = value
            del self.decisions[count:]
        self._jaxprs[key] = value, made, self.decisions[count:]
        return made

    def call(self, item: Node | Fused) -> Any:
        """Returns a closed jaxpr that computes a product or a region.

        Returns:
            The jaxpr. If no kernel supports the epilogue, a string that says why.
        """
        own = (item.is_sequence_last, item.stored) if isinstance(item, Node) else ()
        key = self._digests.of(as_jaxpr(item)), own
        if key not in self._calls:
            try:
                self._calls[key] = kernel_calls.traced(item)
            except kernel_calls.NoKernelError as error:
                self._calls[key] = str(error)
        return self._calls[key]


def _has_kernel(call: Any) -> bool:
    """Returns true if this package computes any part of a product."""
    eqns = (each for eqn in call.jaxpr.eqns for each in inner_nodes(eqn, jaxprs.CALLS))
    return any("tcgemm" in eqn.primitive.name for eqn in eqns)


def _type(aval: Any) -> str:
    return _named(aval.dtype, aval.shape)


@functools.lru_cache(maxsize=1024)
def _named(dtype: Any, shape: tuple[Any, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


class _Emission:
    """Converts a graph to the equations of a jaxpr."""

    def __init__(self, rewriting: Rewriting, graph: Graph, kept: Collection[Value]):
        self.rewriting, self.graph, self.kept = rewriting, graph, kept
        self.atoms: dict[Value, Any] = {}
        self.eqns: list[Any] = []
        self.constants = dict(graph.constants)

    def jaxpr(self, old: Any) -> tuple[Any, list[Any]]:
        """Returns the graph as a jaxpr with the arguments of ``old``, and its constants."""
        for item in self.graph.items:
            self.add(item)
        results = [self.atom(x) for x in self.graph.results]
        constants = {self.atom(value): array for value, array in self.constants.items()}
        new = old.replace(constvars=[*constants], eqns=self.eqns, outvars=results)
        return new, [*constants.values()]

    def atom(self, atom: Atom) -> Any:
        """Returns the variable of a value; returns a literal unchanged."""
        if not isinstance(atom, Value):
            return atom
        found = self.atoms.get(atom, atom.var)
        if found is None:
            found = self.atoms[atom] = jaxprs.new_var(atom.aval)
        return found

    def decide(self, products: Sequence[Node], way: str, reason: str, saved_bytes: int = 0) -> None:
        """Records how one product, or both products of a gated layer, are computed.

        See ``Decision`` for the arguments.
        """
        first = products[0]
        factors = [*first.inputs[:2], *(other.inputs[1] for other in products[1:])]
        self.note(factors, first.outputs[0], way, reason, first.eqn, saved_bytes)

    def note(
        self,
        factors: Sequence[Any],
        result: Any,
        way: str,
        reason: str,
        eqn: Any,
        saved_bytes: int = 0,
    ) -> None:
        """Records a decision about the product ``eqn`` of these factors."""
        operands = ", ".join(_type(x.aval) for x in factors)
        product = f"{operands} -> {_type(result.aval)}"
        decision = Decision(product, way, reason, saved_bytes, jaxprs.source_of(eqn))
        self.rewriting.decisions.append(decision)
        log(f"fuse: {product}: {way}" + (f": {reason}" if reason else ""))

    def add(self, item: Node | Fused, reason: str = "") -> None:
        """Adds the equations of an item.

        Args:
            item: the item to add.
            reason: why a product has no epilogue, if it might have had one.
        """
        if isinstance(item, Fused):
            call = self.rewriting.call(item)
            names = " ".join(node.name for node in item.nodes)
            if isinstance(call, str):
                reason = f"no epilogue ({call}): {names}"
                for node in item.apart():
                    self.add(node, reason)
                return
            results = f"{len(item.outputs)} result{'s' * (len(item.outputs) > 1)}: {names}"
            self.decide(item.products, "kernel with epilogue", results, item.saved_bytes)
            self.inline(call, item, item.products[0])
        elif item.name in _PRODUCTS and (why := item.fallback_reason or item.plain_reason):
            self.decide([item], "XLA", why)
            self.keep(item)
        elif item.name in _PRODUCTS and is_on_device(item):
            call = self.rewriting.call(item)
            if _has_kernel(call):
                if item.is_sequence_last:
                    reason = "written with the sequence last, as attention reads it"
                if item.stored is not None:
                    reason = item.stored.reason
                self.decide([item], "kernel", reason)
            else:
                self.decide([item], "XLA", "no kernel for such types or extents")
            self.inline(call, item, item)
        elif item.name in _LOOKED_INTO and self.rewriting.has_products(item.eqn):
            self.inner(item)
        elif (scatter := scatter_in_float32(item)) is not None:
            added, kept = item.inputs[2], item.outputs[0]
            log(f"fuse: {_type(added.aval)} added to rows of {_type(kept.aval)}: in float32")
            self.inline(scatter, item, item)
        else:
            self.keep(item)
            self.note_inside(item)

    def note_inside(self, item: Node) -> None:
        """Records products that are not rewritten: those of the host and in custom derivatives."""
        if item.name in _PRODUCTS:
            self.decide([item], "XLA", "computed by the host")
        elif item.name in jaxprs.CUSTOM_CALLS:
            for eqn in inner_nodes(item.eqn, jaxprs.CALLS):
                if eqn.primitive.name in _PRODUCTS:
                    self.note(eqn.invars[:2], eqn.outvars[0], "XLA", f"within {item.name}", eqn)

    def inner(self, node: Node) -> None:
        """Adds an operation that runs others."""
        if node.name == "shard_map":
            self.inline(_by_shards(self.rewriting, node), node, node)
        else:
            self.outside(node)

    def outside(self, node: Node) -> None:
        """Adds an operation that runs others; packs weights before it if it is a loop."""
        is_kept = [isinstance(x, Value) and x in self.kept for x in node.inputs]
        count = len(self.rewriting.decisions)
        run = eqn = None
        for may_pack in (True, False):
            del self.rewriting.decisions[count:]
            params = self.rewriting.parameters(node, self.graph.sliced, may_pack=may_pack)
            eqn = node.eqn.replace(params=params)
            try:
                own = is_kept if may_pack else [False] * len(is_kept)
                run = loops.with_weights_packed_before(node, eqn, own)
                break
            except loops.TooLargeError:
                log(f"fuse: the weights of a {node.name} are packed in each turn: they are large")
        if run is None:
            self.keep(node, eqn)
        else:
            self.inline(run, node, node)

    def keep(self, node: Node, eqn: Any = None) -> None:
        """Adds an equation unchanged, apart from its variables and name stack."""
        eqn = node.eqn if eqn is None else eqn
        invars, outvars = [*map(self.atom, node.inputs)], [*map(self.atom, node.outputs)]
        if invars != eqn.invars or outvars != eqn.outvars or node.scope is not None:
            source = jaxprs.with_scope(eqn.source_info, node.scope)
            eqn = eqn.replace(invars=invars, outvars=outvars, source_info=source)
        self.eqns.append(eqn)

    def inline(self, closed: Any, item: Node | Fused, origin: Node) -> None:
        """Adds the equations of a jaxpr that computes an item.

        Args:
            closed: computes the item's outputs from its inputs without the literals.
            item: the item.
            origin: the node that gives the equations their name stack and source line.
        """
        jaxpr = closed.jaxpr
        env = dict(zip(jaxpr.invars, map(self.atom, item.taken), strict=True))
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            constant = Value(var.aval)
            self.constants[constant] = const
            env[var] = self.atom(constant)
        made = {var for eqn in jaxpr.eqns for var in eqn.outvars}
        for var, value in zip(jaxpr.outvars, item.outputs, strict=True):
            if isinstance(var, core.Literal):
                self.atoms[value] = var
            elif var in made and var not in env:
                env[var] = self.atom(value)
            else:
                self.atoms[value] = env[var]
        source = jaxprs.with_scope(origin.eqn.source_info, origin.scope)
        for eqn in jaxpr.eqns:
            env.update((x, jaxprs.new_var(x.aval)) for x in eqn.outvars if x not in env)
            inner = jaxprs.with_scope(eqn.source_info, source.name_stack)
            self.eqns.append(
                eqn.replace(
                    invars=[x if isinstance(x, core.Literal) else env[x] for x in eqn.invars],
                    outvars=[env[x] for x in eqn.outvars],
                    source_info=source.replace(name_stack=inner.name_stack),
                )
            )


def _by_shards(rewriting: Rewriting, node: Node) -> Any:
    """Returns a closed jaxpr of a ``shard_map`` with its function rewritten."""
    inner = jaxprs.jaxpr_of(node.params["jaxpr"])

    def run(*values: Any) -> list[Any]:
        new, consts = rewriting.rewritten(inner, ())
        return jaxprs.eval_jaxpr(new, consts, *values)

    def compute(node: Node, values: list[Any]) -> list[Any]:
        return jaxprs.by_shards(node.eqn, run, values)

    return kernel_calls.traced_call(node, compute)
