"""A cut never separates an operator that returns a tuple from what is taken out of it: tuples cannot be kept."""

from elbowroom.plan.stages.cuts import cut
from elbowroom.step.graph import Operator, StepGraph


def operator(index: int, kind: str, reads: tuple[int, ...], makes=(), shares=(), storable: bool = True) -> Operator:
    return Operator(
        index, f"v{index}", "op", kind, reads, reads, tuple(makes), tuple(shares), storable=storable, time=1.0
    )


def graph_with_a_tuple_in_the_valley() -> StepGraph:
    """input → wide → tuple of something narrow → taken out → wide again, and a backward that reads the wide ones."""
    ops = (
        operator(0, "input", ()),
        operator(1, "gradient", (), [(1, 1)]),
        operator(2, "forward", (0,), [(2, 100)]),
        operator(3, "forward", (2,), [(3, 10)], storable=False),
        operator(4, "forward", (3,), shares=[3]),
        operator(5, "forward", (4,), [(5, 100)]),
        operator(6, "forward", (5,), [(6, 1)]),
        operator(7, "backward", (1, 5), [(7, 100)]),
        operator(8, "backward", (7, 2), [(8, 100)]),
    )
    sizes = {storage: size for op in ops for storage, size in op.makes}
    return StepGraph(
        ops, (0,), (1,), (2, 3, 4, 5, 6), (7, 8), (6,), (), ((0, 8),), frozenset({0}), storage_bytes=sizes
    )


def test_the_cut_comes_after_what_is_taken_out():
    for divide in (False, True):
        sections = cut(graph_with_a_tuple_in_the_valley(), divide=divide)
        assert len(sections) > 1
        for section in sections:
            assert 3 not in section.enters
            assert 3 not in section.leaves
