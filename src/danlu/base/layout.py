"""Layouts: how many ranks each parallel axis has, solved from what the user gave and explained where it cannot be.

A layout is five degrees that multiply to the number of processes. From the slowest links to the fastest:

    pp            pipeline stages
    dp_replicate  copies of the model
    dp_shard      ranks that split what a copy holds (ZeRO)
    cp            ranks that split a sequence
    tp            ranks that split every matrix

Rank = (((pp * dp_replicate + replica) * dp_shard + shard) * cp + context) * tp + tensor: neighbours in a node are
tensor parallel peers, which talk most. Degrees are numbers, so the planner can reason about a cluster on a laptop:
nothing here imports torch. Each rule says what was seen, and which values would be legal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from danlu.base.errors import UserError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Ranks per axis; their product is the number of processes."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Ranks that a layer's experts are spread over: some of those that would hold the same ones."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The degrees in the order of `AXES`."""
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pp * self.data * self.cp * self.tp

    @property
    def data(self) -> int:
        """Number of data ranks: those with rows of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """Ranks as experts see them: pp, copies of an expert's part, parts of an expert, ep, tp."""
        inner = self.dp_shard * self.cp
        if inner % self.ep == 0:
            return (self.pp, self.dp_replicate, inner // self.ep, self.ep, self.tp)
        return (self.pp, self.data * self.cp // self.ep, 1, self.ep, self.tp)

    def __str__(self) -> str:
        named = [*zip(AXES, self.shape, strict=True), ("ep", self.ep)]
        parts = [f"{name}={size}" for name, size in named if size > 1]
        return " x ".join(parts) or "one process"


def solve_degrees(wanted: Mapping[str, int | None], *, world_size: int, zero: int, ep: int = 1) -> Degrees:
    """Return the degrees for ``world_size`` processes.

    Args:
        wanted: degree of each axis of `AXES`; -1 takes what is left (at most one). None, for the two data axes only,
            means that nobody asked: if no axis takes the rest, ``dp_shard`` does under ZeRO and ``dp_replicate``
            otherwise.
        world_size: number of processes.
        zero: ZeRO stage, 0 to 3.
        ep: expert parallel degree, which reuses ranks of the others.

    Raises:
        UserError: two axes take the rest, a degree is not positive, or the product is not ``world_size``.
    """
    degrees = {axis: wanted.get(axis) for axis in AXES}
    for axis, size in degrees.items():
        if size is not None and size < 1 and size != -1:
            raise UserError(
                "a parallel degree is a positive number", where=f"parallel.{axis}", seen=size, legal="-1, 1, …"
            )
    rest = [axis for axis, size in degrees.items() if size == -1]
    if len(rest) > 1:
        raise UserError(
            "only one axis can take what is left", where=f"parallel.{rest[1]}", seen=f"{' = '.join(rest)} = -1"
        )
    taker = "dp_shard" if zero else "dp_replicate"
    if not rest and degrees[taker] is None:
        rest = [taker]
    given = {axis: size for axis, size in degrees.items() if size is not None and axis not in rest}
    product = 1
    for size in given.values():
        product *= size
    if world_size % product or (not rest and product != world_size):
        raise _bad_product(given, rest, product, world_size)
    solved = {**dict.fromkeys(AXES, 1), **given, **dict.fromkeys(rest, world_size // product)}
    return Degrees(**solved, ep=ep)


def _bad_product(given: Mapping[str, int], rest: list[str], product: int, world_size: int) -> UserError:
    named = {axis: size for axis, size in given.items() if size > 1} or given
    factors = " x ".join(f"{axis}={size}" for axis, size in named.items()) or "all 1"
    seen = f"{factors}{f' = {product}' if len(named) > 1 else ''} on {world_size} processes"
    axis = max(named, key=lambda name: named[name])
    others = product // given[axis]
    divisors = [size for size in range(1, world_size + 1) if world_size % (size * others) == 0]
    exact = [world_size // others] if world_size % others == 0 else []
    legal = ", ".join(map(str, divisors if rest else exact))
    return UserError(
        "the parallel degrees must multiply to the number of processes",
        where=f"parallel.{axis}",
        seen=seen,
        legal=f"{axis} = {legal or 'nothing with these other degrees'}",
        hint=f"start {product} processes, or set one degree to -1 (what is left)",
    )


def check_tensor(tp: int, *, num_heads: int, num_kv_heads: int, mlp_size: int) -> None:
    """Raise `UserError` where a model cannot be split over ``tp`` ranks.

    Query heads must divide. Key/value heads divide, or are fewer than the ranks and divide them: then each is held by
    ``tp / num_kv_heads`` ranks. The vocabulary need not divide (it is padded, and padding never counts).
    """
    legal = [degree for degree in range(1, num_heads + 1) if _splits(degree, num_heads, num_kv_heads, mlp_size)]
    if not _splits(tp, num_heads, num_kv_heads, mlp_size):
        raise UserError(
            "the model's heads and MLP do not split over these tensor parallel ranks",
            where="parallel.tp",
            seen=f"tp={tp}; {num_heads} query heads, {num_kv_heads} key/value heads, MLP width {mlp_size}",
            legal=", ".join(map(str, legal)),
            hint="tp divides query heads and MLP width, and divides the key/value heads or is a multiple of them",
        )


def _splits(tp: int, num_heads: int, num_kv_heads: int, mlp_size: int) -> bool:
    kv_fits = num_kv_heads % tp == 0 or tp % num_kv_heads == 0
    return num_heads % tp == 0 and kv_fits and mlp_size % tp == 0


def check_expert(degrees: Degrees, *, num_experts: int | None, zero: int) -> None:
    """Raise `UserError` where experts cannot be spread over ``degrees.ep`` ranks.

    Args:
        degrees: the layout.
        num_experts: experts of a layer; None for a model without.
        zero: ZeRO stage, which then splits each expert over the ranks that are left: ep has to lie inside a copy.
    """
    if degrees.ep == 1:
        return
    if num_experts is None:
        raise UserError(
            "the model has no experts to spread", where="parallel.ep", seen=degrees.ep, legal="1 (the default)"
        )
    ranks = degrees.dp_shard * degrees.cp if zero else degrees.data * degrees.cp
    if ranks % degrees.ep or num_experts % degrees.ep:
        over = "dp_shard x cp" if zero else "dp_replicate x cp"
        legal = [size for size in range(1, ranks + 1) if ranks % size == 0 and num_experts % size == 0]
        raise UserError(
            "experts are spread evenly, over ranks that would hold the same ones",
            where="parallel.ep",
            seen=f"ep={degrees.ep}; {num_experts} experts, {over} = {ranks} ranks",
            legal=", ".join(map(str, legal)),
        )


def check_pipeline(pp: int, *, num_layers: int, num_virtual: int = 1) -> None:
    """Raise `UserError` where there are fewer blocks than stages."""
    if pp * num_virtual > num_layers:
        legal = [degree for degree in range(1, num_layers + 1) if degree * num_virtual <= num_layers]
        raise UserError(
            "a pipeline has at least one block a stage",
            where="parallel.pp" if pp > 1 else "parallel.pp_virtual",
            seen=f"{pp} x {num_virtual} stages for {num_layers} blocks",
            legal=f"pp = {', '.join(map(str, legal)) or 'none'} with pp_virtual = {num_virtual}",
        )
