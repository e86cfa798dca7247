"""What Python does in a stage counts once for each step, and not at all while stages are measured."""

from __future__ import annotations

import copy
import random
from collections import Counter, deque

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from torch import nn  # noqa: E402

from elbowroom.execute.by_stages.measuring import fuse_stages, measure_stages  # noqa: E402
from elbowroom.execute.by_stages.python_state import PythonState  # noqa: E402
from elbowroom.execute.by_stages.runner import ChainRunner  # noqa: E402
from elbowroom.solve import solve  # noqa: E402


class Busy(nn.Module):
    """Counts, fills lists and queues, keeps tensors, and draws from every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.count = 0
        self.seen: list[int] = []
        self.queue: deque[int] = deque(maxlen=2)
        self.nested = {"all": Counter(), "sets": [set()]}
        self.rebound = torch.zeros(3)
        self.written = torch.zeros(3)
        self.register_buffer("buffer", torch.zeros(3))

    def forward(self, x):
        self.count += 1
        self.latest = self.count
        self.seen.append(self.count)
        self.queue.append(self.count)
        self.nested["all"][self.count] += 1
        self.nested["sets"][0].add(self.count)
        self.rebound = self.rebound + 1
        self.written += 1
        self.buffer = self.buffer + 1
        scale = 1 + 0.1 * random.random() + 0.1 * numpy.random.rand() + 0.01 * self.count
        return torch.tanh(self.layer(x)) * (scale + self.rebound.sum() + self.written.sum())


def attributes(stages):
    return [
        {name: value.tolist() if isinstance(value, torch.Tensor) else copy.deepcopy(value) for name, value in own}
        for own in (
            [(n, v) for n, v in vars(stage).items() if not n.startswith("_")] + [("buffer", stage.buffer)]
            for stage in stages
        )
    ]


def generators():
    return random.getstate(), numpy.random.get_state()[1].tolist(), numpy.random.get_state()[2]


@pytest.fixture
def stages():
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    return [Busy() for _ in range(6)]


@pytest.fixture
def x():
    return torch.randn(64, 32)


def test_measuring_changes_nothing(stages, x):
    before, drawn, written = attributes(stages), generators(), [stage.written for stage in stages]
    chain = measure_stages(fuse_stages(stages, x), x)
    assert attributes(stages) == before
    assert generators() == drawn
    assert all(stage.written is tensor for stage, tensor in zip(stages, written, strict=True))
    assert len(chain) == len(stages) + 1


def test_a_step_that_runs_stages_again_counts_once_and_draws_the_same(stages, x):
    plain = copy.deepcopy(stages)
    chain = measure_stages(stages, x)
    schedule = solve(chain, solve(chain, 0).least_budget).schedule
    runner = ChainRunner(stages, schedule)
    assert runner.rerun
    for seed in range(3):
        random.seed(seed)
        numpy.random.seed(seed)
        runner(x).sum().backward()
        drawn = generators()
        random.seed(seed)
        numpy.random.seed(seed)
        y = x
        for stage in plain:
            y = stage(y)
        y.sum().backward()
        assert generators() == drawn
        assert attributes(stages) == attributes(plain)
    for stage, other in zip(stages, plain, strict=True):
        assert torch.equal(stage.layer.weight.grad, other.layer.weight.grad)


def test_what_happens_between_forward_and_backward_stays(stages, x):
    chain = measure_stages(stages, x)
    runner = ChainRunner(stages, solve(chain, solve(chain, 0).least_budget).schedule)
    output = runner(x)
    stages[0].count, stages[0].seen = 100, ["mine"]
    stages[0].added = True
    output.sum().backward()
    assert (stages[0].count, stages[0].seen, stages[0].added) == (100, ["mine"], True)


def test_containers_stay_the_objects_that_they_are(stages):
    stage = stages[0]
    seen, queue, inner = stage.seen, stage.queue, stage.nested["sets"][0]
    state = PythonState.of([stage], None)
    stage(torch.randn(2, 32))
    stage.seen = []
    state.put_back()
    assert stage.seen is seen == []
    assert stage.queue is queue == deque(maxlen=2)
    assert stage.nested["sets"][0] is inner == set()
    assert not hasattr(stage, "latest")
