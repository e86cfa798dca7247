"""Random problems, seeded: what the contract and exhaustive tests run on."""

from __future__ import annotations

from random import Random

from elbowroom.problem import Chain, Graph, Join, Node, Saving, Stage, Step, Tower, Towers


def random_chain(rng: Random, stages: int, *, alternatives: bool = False, any_gradients: bool = False) -> Chain:
    """A chain with unequal sizes, overheads and zero times.

    A gradient is at most as large as its activation, unless `any_gradients` (docs/design/floating.md says why).
    """
    input_bytes = rng.randint(0, 4)
    return Chain(
        input_bytes,
        rng.randint(0, 4 if any_gradients else input_bytes),
        tuple(_stage(rng, i, alternatives, any_gradients) for i in range(1, stages + 1)),
    )


def _stage(rng: Random, index: int, alternatives: bool, any_gradients: bool) -> Stage:
    output = rng.randint(0, 5)
    forward_time, forward_overhead = rng.randint(0, 4), rng.randint(0, 3)
    ways = []
    if alternatives and rng.random() < 0.5:
        # No alternative's forward is cheaper than the stage's own: see docs/design/memory-model.md.
        way = Saving(
            forward_time=forward_time + rng.choice([0, 0, 1]),
            backward_time=rng.randint(0, 5),
            saved_bytes=output + rng.randint(0, 5),
            forward_overhead_bytes=forward_overhead + rng.randint(0, 2),
            backward_overhead_bytes=rng.randint(0, 3),
        )
        ways.append(way)
    return Stage(
        f"s{index}",
        forward_time,
        rng.randint(0, 4),
        output,
        output + rng.randint(0, 5),
        rng.randint(0, 5 if any_gradients else output),
        forward_overhead,
        rng.randint(0, 3),
        tuple(ways),
    )


def byte_chain(rng: Random, stages: int) -> Chain:
    """A chain with sizes of real networks, in bytes that share no divisor, and times in seconds."""

    def size() -> int:
        return rng.randint(1_000_000, 60_000_000)

    made = []
    for i in range(stages):
        output = size()
        made.append(
            Stage(
                f"s{i}",
                rng.uniform(1e-3, 9e-3),
                rng.uniform(1e-3, 9e-3),
                output,
                output + size(),
                output,
                size() // 20,
                size() // 10,
            )
        )
    return Chain(size(), size(), tuple(made))


def random_join(rng: Random, branches: int, longest: int) -> Join:
    lengths = tuple(rng.randint(0, longest) for _ in range(branches))
    keep = tuple(rng.randint(0, 1) for _ in range(branches))
    return Join(lengths, rng.randint(0, 3), rng.randint(0, 3), rng.randint(0, 3), keep)


def random_graph(rng: Random, nodes: int, density: float = 0.4) -> Graph:
    """Small sizes and times; edges lead from lower to higher numbers, shuffled."""
    names = list(range(nodes))
    rng.shuffle(names)
    edges = [(names[i], names[j]) for j in range(nodes) for i in range(j) if rng.random() < density]
    return Graph(tuple(Node(f"v{v}", rng.randint(0, 5), rng.randint(0, 6)) for v in range(nodes)), tuple(edges))


def random_towers(rng: Random, towers: int, longest: int, *, saves: bool | None = None) -> Towers:
    """Small times and sizes; steps of both kinds unless told which."""

    def step(i: int) -> Step:
        output = rng.randint(0, 4)
        kind = rng.random() < 0.5 if saves is None else saves
        return Step(
            f"s{i}",
            rng.randint(0, 4),
            rng.randint(0, 4),
            output,
            rng.randint(0, 4),
            output + rng.randint(0, 4) if kind else None,
            rng.randint(0, 2),
            rng.randint(0, 2),
            rng.randint(0, 3),
        )

    def tower() -> Tower:
        steps = tuple(step(i) for i in range(rng.randint(0, longest)))
        return Tower(rng.randint(0, 4), rng.randint(0, 4), steps, rng.randint(0, 1))

    return Towers(tuple(tower() for _ in range(towers)), rng.randint(0, 3), rng.randint(0, 2), rng.randint(0, 1))


def towers_like(join: Join) -> Towers:
    """The same problem in bytes: every value takes one, and operations write over what they read last."""
    step = Step("", join.forward_time, join.backward_time, 1, 1)
    made = (
        Tower(1, 1, (step,) * length, keep) for length, keep in zip(join.lengths, join.keep_gradients, strict=True)
    )
    return Towers(tuple(made), join.loss_time, in_place=1)
