"""Methods for graphs side by side on random graphs with skips: least budgets, times at the same budget, seconds.

    python benchmarks/graphs.py [--nodes 12 20 30 40]

Every graph is a chain with some edges that skip up to five nodes. `milp` takes only graphs of up to 60 nodes.
"""

from __future__ import annotations

import argparse
import time
from random import Random

from elbowroom.problem import Graph, Node
from elbowroom.solve import METHODS, Options, solve
from elbowroom.solve.milp import MOST_NODES

NAMES = ("store-all", "chen", "lower-sets-approx", "lower-sets", "lower-sets-chain", "milp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", nargs="+", type=int, default=[12, 20, 30, 40])
    last = "time at that of lower-sets"
    print(f"{'nodes':>6} {'method':18} {'least budget':>12} {'time there':>10} {last:>27} {'s':>6}")
    for count in parser.parse_args().nodes:
        graph = with_skips(count)
        common = METHODS["lower-sets"].least_budget(graph, Options())
        for name in NAMES:
            if name == "milp" and count > MOST_NODES:
                continue
            started = time.perf_counter()
            least = METHODS[name].least_budget(graph, Options())
            there, at_common = solve(graph, least, name), solve(graph, common, name)
            seconds = time.perf_counter() - started
            reached = f"{at_common.time:g}" if at_common.feasible else "–"
            print(f"{count:6} {name:18} {least:12,} {there.time:10g} {reached:>27} {seconds:6.1f}", flush=True)


def with_skips(count: int) -> Graph:
    """A chain of nodes with some more edges; the same count always gives the same graph."""
    rng = Random(count)
    chain = [(i, i + 1) for i in range(count - 1)]
    skips = [(i, j) for j in range(count) for i in range(max(0, j - 6), j - 1) if rng.random() < 0.15]
    nodes = tuple(Node("", rng.randint(1, 10), rng.randint(10, 60)) for _ in range(count))
    return Graph(nodes, (*chain, *skips))


if __name__ == "__main__":
    main()
