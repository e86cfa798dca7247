"""What allocators take for a request, and the room that they leave in a budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.step.allocator import BLOCK, MARGIN, MIB, allocator_block, budget_for, room_within

SIZES = st.integers(0, 2**40)


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        (0, 0),
        (1, 512),
        (512, 512),
        (513, 1024),
        (MIB + 1, MIB + 512),
        (10 * MIB - 1, 10 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),  # what is left of a segment, 1 MiB, is not split off
        (11 * MIB - 512, 11 * MIB - 512),  # a block more is left, and that is
        (11 * MIB + 1, 12 * MIB),
    ],
)
def test_what_cuda_takes(asked, taken):
    assert allocator_block(cuda=True)(asked) == taken


@given(SIZES)
def test_the_cpu_takes_what_is_asked_and_cuda_a_little_more(size):
    assert allocator_block(cuda=False)(size) == size
    taken = allocator_block(cuda=True)(size)
    assert size <= taken < size + MIB + BLOCK
    assert taken % BLOCK == 0


@given(peak=SIZES, resident=SIZES, cuda=st.booleans())
def test_a_budget_leaves_the_room_that_it_was_made_for_and_hardly_more(peak, resident, cuda):
    budget = budget_for(peak, resident, cuda=cuda)
    assert room_within(budget, resident, cuda=cuda) >= peak
    assert room_within(budget - 2, resident, cuda=cuda) < peak


@given(budget=SIZES, resident=SIZES)
def test_a_peak_that_was_measured_has_the_allocators_share_in_it(budget, resident):
    assert room_within(budget, resident, cuda=False) == budget - resident - MARGIN
    predicted, measured = (room_within(budget, resident, cuda=True, is_measured=each) for each in (False, True))
    assert predicted <= measured < budget - resident - MARGIN
