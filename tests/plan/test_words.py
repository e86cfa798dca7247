"""What plans say of themselves, in words that need no glossary."""

from __future__ import annotations

import re

import pytest

from elbowroom.plan.planner import Planner
from elbowroom.plan.words import copying_in_words, link_in_words, method_in_words, reason_in_words, sizes_in_words
from elbowroom.problem import Platform

# Words of the planner's that mean nothing to somebody who reads a table.
JARGON = re.compile(
    "persistent|account|cross|value by value|as a chain|above the least|to cut and count|next best [+-]"
)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("everything is saved", "everything is saved"),
        ("persistent, 12 stages, full account", "computed again stage by stage, 12 stages"),
        ("persistent, 1 stages where one value crosses, full account", "computed again stage by stage, 1 stage"),
        (
            "persistent, 9 stages, once account, parts of gradients apart, then value by value",
            "computed again stage by stage, 9 stages, then adjusted tensor by tensor",
        ),
        (
            "persistent, 9 stages, full account, then value by value, with moves",
            "computed again stage by stage, 9 stages, then adjusted tensor by tensor, and tensors moved to the host "
            "and back",
        ),
        ("stage by stage, persistent", "computed again stage by stage, stages as they are"),
        ("stage by stage, store-all", "everything is saved"),
        (
            "stage by stage, offload-best, with moves",
            "everything is saved, and tensors moved to the host and back",
        ),
        ("of a file that was made elsewhere", "of a file that was made elsewhere"),
    ],
)
def test_methods(method, words):
    assert method_in_words(method) == words


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("it fits, and nothing runs again", "it fits, and nothing runs again"),
        ("the lowest peak found", "of all plans that were found, it takes the least memory"),
        (
            "fastest of 5 ways to cut; next best +6.8%, as a chain +12.0%, at most 8.5% above the least possible",
            "the fastest of 5 ways that were tried; the next best takes 6.8% longer; cut between layers only, it "
            "would take 12.0% longer; this one is at most 8.5% slower than any plan within this budget can be",
        ),
        (
            "fastest of 5 ways to cut; no other fits, as a chain it does not fit, at most 0.0% above the least "
            "possible",
            "the fastest of 5 ways that were tried; no other fits; cut between layers only, it would not fit; this "
            "one is at most 0.0% slower than any plan within this budget can be",
        ),
        (
            "fastest of 2 ways to cut; no other fits, without moves it does not fit",
            "the fastest of 2 ways that were tried; no other fits; with nothing on the host, it would not fit",
        ),
        (
            "fastest of 2 ways to cut; no other fits, without moves +4.1%",
            "the fastest of 2 ways that were tried; no other fits; with nothing on the host, it would take 4.1% "
            "longer",
        ),
        (
            "fastest of 2 ways to cut; next best +0.0%",
            "the fastest of 2 ways that were tried; the next best takes just as long",
        ),
        (
            "the fastest found that fits with the gaps in its memory; without gaps -3.1%",
            "the fastest whose CUDA graphs fit, whose memory has gaps between values; without gaps, one would take "
            "3.1% less",
        ),
    ],
)
def test_reasons(why, words):
    assert reason_in_words(why) == words


def test_nothing_that_a_planner_says_is_left_as_jargon():
    pytest.importorskip("torch")
    from captured import captured

    graph, around = captured("unet")
    planner, chain = Planner(graph, around), Planner(graph, around, as_chain=True)
    most = planner.everything.prediction.peak_bytes
    found = [planner.best(int(share * most)) for share in (1.0, 0.7, 0.4)]
    plans = [plan for plan in (*found, planner.least, chain.least) if plan is not None]
    assert len({plan.method for plan in plans}) > 2
    assert sum(bool(JARGON.search(plan.method + plan.why)) for plan in plans) > 2
    for plan in plans:
        assert not JARGON.search(method_in_words(plan.method) + reason_in_words(plan.why)), (plan.method, plan.why)


@pytest.mark.parametrize(
    ("link", "words"),
    [
        (Platform(to_host=12e9, from_host=10.5e9), "12 GB/s to the host, 10.5 GB/s back"),
        (Platform(bandwidth=5e6), "5 MB/s to the host, 5 MB/s back, one copy at a time"),
        (
            Platform(to_host=55e9, from_host=54e9, duplex=51e9, seconds_per_copy=1e-5),
            "55 GB/s to the host, 54 GB/s back, 51 GB/s each way while both are busy, 10 µs before each copy",
        ),
        (Platform(), "none"),
    ],
)
def test_links(link, words):
    assert link_in_words(link) == words


@pytest.mark.parametrize(
    ("copying_s", "waits_s", "words"),
    [
        (0.004, 0.0, "4 ms, all of it beside computing"),
        (0.004, 0.001, "4 ms, 75% of it beside computing, which waits for 1 ms"),
        (0.004, 0.004, "4 ms, 0% of it beside computing, which waits for 4 ms"),
        (0.0, 0.0, "0 ns, all of it beside computing"),
    ],
)
def test_how_much_copying_hides(copying_s, waits_s, words):
    assert copying_in_words(copying_s, waits_s) == words


def test_what_is_resident():
    assert sizes_in_words([("optimizer", 1024), ("batch", 3)]) == "optimizer state 1 KiB, batch 3 B"
