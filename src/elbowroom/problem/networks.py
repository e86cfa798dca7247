"""Chains of three well-known networks, computed from the shapes of their layers, without any framework.

Times are estimates from floating-point operations and bytes moved (a roofline), not measurements: a step
takes as long as the slower of its arithmetic and its memory traffic on a `Machine`. Only products and
attention count operations, the rest is limited by memory; on `Machine(1, math.inf, "counter")` times are
operations.

A stage is a list of steps over named values, and its sizes follow from that list:
- `saved_bytes`: the output and every value that autograd keeps for the backward, each once (a product keeps
  what it multiplies, a normalization its input, an in-place ReLU its output), but not the stage's input,
  which the planner keeps by itself;
- `forward_overhead_bytes`: what else is alive at the worst step. A stage has one such number for running
  with and without saving, so it is the larger of the two;
- `backward_overhead_bytes`: the gradients alive at the worst step, less the two that the referee counts
  anyway. The saved set counts in full until the backward ends, though a framework frees it bit by bit.
Parameters, their gradients and the optimizer's state are not part of a chain, nor is a kernel's workspace.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace

from elbowroom.devices import ACCELERATOR, Machine
from elbowroom.errors import InputError
from elbowroom.problem import Chain, Saving, Stage

NOTE = "times are estimates from floating-point operations and bytes moved, not measurements"


def resnet101(
    batch: int = 32,
    image: int = 224,
    bytes_per_value: int = 4,
    *,
    machine: Machine = ACCELERATOR,
) -> Chain:
    """ResNet-101: stem, max-pool, 33 bottleneck blocks, average pool with classifier, loss.

    The stride of a block is in its 3×3 convolution, as in torchvision. Images need no gradient.
    """
    _check_at_least(1, batch=batch, image=image, bytes_per_value=bytes_per_value)
    pixels, side = _Tensor(batch, image * image, 3, bytes_per_value), _halved(image)
    source = pixels.shaped(64, side)
    product, *rest = _convolve(pixels, source, "input", "output", window=49)
    # With no gradient for the images, the way back is one product instead of two.
    product = replace(product, backward_flops=product.flops, backward_moved_bytes=product.moved_bytes)
    stages = [_stage("stem", [product, *rest], 0, machine)]
    side = _halved(side)
    stages.append(_stage("max-pool", [_max_pool(source, source.shaped(64, side))], source.bytes, machine))
    source = source.shaped(64, side)
    for group, (blocks, width) in enumerate(((3, 64), (4, 128), (23, 256), (3, 512)), start=1):
        for block in range(1, blocks + 1):
            before = side
            side = _halved(side) if block == 1 and group > 1 else side
            target = source.shaped(4 * width, side)
            steps = _bottleneck(source, source.shaped(width, before), source.shaped(width, side), target)
            stages.append(_stage(f"block {group}.{block}", steps, source.bytes, machine))
            source = target
    features, scores = source.shaped(2048, 1), source.shaped(1000, 1)
    moved = source.bytes + features.bytes
    average = _Step(("input",), "features", features.bytes, moved, moved)
    steps = [average, _multiply(features, scores, "features", "output")]
    stages += [_stage("classifier", steps, source.bytes, machine), _loss(scores, machine)]
    return Chain(pixels.bytes, 0, tuple(stages))


def gpt(
    batch: int = 8,
    tokens: int = 1024,
    layers: int = 24,
    width: int = 1024,
    heads: int = 16,
    vocabulary: int = 50257,
    bytes_per_value: int = 2,
    *,
    machine: Machine = ACCELERATOR,
) -> Chain:
    """A language model like GPT-2 (by default its medium size): embedding, blocks, norm, logits, loss.

    Attention is fused and causal: it stores no tokens × tokens matrix and skips what is masked. There is no
    dropout. A block offers two leaner ways to save: way 1 computes the activation function of its wide layer
    again in the backward, way 2 the wide layer and both norms too.
    """
    _check_at_least(1, batch=batch, tokens=tokens, layers=layers, width=width, heads=heads)
    _check_at_least(1, vocabulary=vocabulary, bytes_per_value=bytes_per_value)
    state = _Tensor(batch, tokens, width, bytes_per_value)
    scores = replace(state, channels=vocabulary)
    embed = [
        _pass_over(state, "input", "token states", 2, 2),
        replace(_pass_over(state, "token states", "output", 3, 1), shares_gradient=True),  # adds positions
    ]
    leaner = ({"activated"}, {"activated", "wide", "norm 1", "norm 2"})
    block = _stage("block", _transformer_block(state, heads), state.bytes, machine, leaner)
    stages = (
        _stage("embedding", embed, 0, machine),
        *(replace(block, name=f"block {number}") for number in range(1, layers + 1)),
        _stage("final norm", [_layer_norm(state, "input", "output")], state.bytes, machine),
        _stage("logits", [_multiply(state, scores, "input", "output")], state.bytes, machine),
        _loss(scores, machine),
    )
    return Chain(state.rows * _INDEX_BYTES, 0, stages)  # token numbers have no gradient


def vgg19(
    batch: int = 128,
    image: int = 224,
    bytes_per_value: int = 4,
    *,
    machine: Machine = ACCELERATOR,
) -> Chain:
    """VGG-19 as paper 003 numbers it: 16 convolutions with their ReLU, 5 max-pools, 3 fully connected layers.

    Its sizes are the paper's too: a stage saves its output and nothing else, and needs no other room. There
    is no stage for the loss, and the images have a gradient.
    """
    _check_at_least(1, batch=batch, bytes_per_value=bytes_per_value)
    _check_at_least(32, image=image)  # of less, five max-pools leave nothing
    source, side = _Tensor(batch, image * image, 3, bytes_per_value), image
    pixels_bytes, stages = source.bytes, []
    for group, (depth, channels) in enumerate(((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)), start=1):
        for layer in range(1, depth + 1):
            target = source.shaped(channels, side)
            steps = [_multiply(source, target, "input", "output", window=9), _clip(target, "output")]
            stages.append(_stage(f"convolution {group}.{layer}", steps, source.bytes, machine))
            source = target
        side //= 2
        target = source.shaped(channels, side)
        stages.append(_stage(f"max-pool {group}", [_max_pool(source, target)], source.bytes, machine))
        source = target
    source = source.shaped(source.channels * side * side, 1)
    for layer, channels in enumerate((4096, 4096, 1000), start=1):
        target = source.shaped(channels, 1)
        steps = [_multiply(source, target, "input", "output"), _clip(target, "output")]
        steps = steps if layer < 3 else steps[:1]
        stages.append(_stage(f"fully connected {layer}", steps, source.bytes, machine))
        source = target
    outputs_only = (
        replace(stage, saved_bytes=stage.output_bytes, forward_overhead_bytes=0, backward_overhead_bytes=0)
        for stage in stages
    )
    return Chain(pixels_bytes, pixels_bytes, tuple(outputs_only))


def _bottleneck(source: _Tensor, before: _Tensor, after: _Tensor, target: _Tensor) -> list[_Step]:
    """1×1, 3×3 and 1×1 convolutions beside a shortcut, which is a convolution where the shape changes."""
    steps = _convolve(source, before, "input", "narrow 1")
    steps += _convolve(before, after, "narrow 1", "narrow 2", window=9)
    steps += _convolve(after, target, "narrow 2", "output")[:-1]  # clipped only after the addition
    shortcut = "input"
    if source != target:
        shortcut = "shortcut"
        steps += _convolve(source, target, "input", shortcut)[:-1]
    return [*steps, _add(target, "output", shortcut, "output"), _clip(target, "output")]


def _transformer_block(state: _Tensor, heads: int) -> list[_Step]:
    triple, wide = (replace(state, channels=k * state.channels) for k in (3, 4))
    flops = 2 * state.rows * state.positions * state.channels  # two products, half of each masked
    flops_back = 5 * flops // 2  # one of the two again, and two more for each
    moved = triple.bytes + state.bytes
    attend = _Step(("heads",), "attended", state.bytes, moved, 2 * moved, flops, flops_back)
    statistics_bytes = state.rows * heads * _STATISTIC_BYTES
    attend = replace(attend, saves=("heads", "attended"), statistics_bytes=statistics_bytes)
    return [
        _layer_norm(state, "input", "norm 1"),
        _multiply(state, triple, "norm 1", "heads"),  # queries, keys and values
        attend,
        _multiply(state, state, "attended", "projected"),
        _add(state, "input", "projected", "middle"),
        _layer_norm(state, "middle", "norm 2"),
        _multiply(state, wide, "norm 2", "wide"),
        _pass_over(wide, "wide", "activated", 2, 3, saves="wide"),
        _multiply(wide, state, "activated", "narrow"),
        _add(state, "middle", "narrow", "output"),
    ]


def _loss(scores: _Tensor, machine: Machine) -> Stage:
    """Cross-entropy: a log-softmax and the choice of one entry per row. It leaves a single number."""
    normalize = _pass_over(scores, "input", "log-probabilities", 2, 3, saves="log-probabilities")
    moved = scores.rows * (scores.bytes_per_value + _INDEX_BYTES)
    choose = _Step(("log-probabilities",), "output", _STATISTIC_BYTES, moved, scores.bytes)
    return _stage("loss", [normalize, choose], scores.bytes, machine)


_STATISTIC_BYTES = 4  # means, deviations and losses are in single precision, whatever the activations are in
_INDEX_BYTES = 8  # token numbers, classes and the winners of a max-pool


@dataclass(frozen=True, slots=True)
class _Tensor:
    batch: int
    positions: int  # pixels or tokens
    channels: int
    bytes_per_value: int

    @property
    def rows(self) -> int:
        return self.batch * self.positions

    @property
    def bytes(self) -> int:
        return self.rows * self.channels * self.bytes_per_value

    def shaped(self, channels: int, side: int) -> _Tensor:
        return replace(self, positions=side * side, channels=channels)


@dataclass(frozen=True, slots=True)
class _Step:
    """One kernel of a stage: from the values it reads to the one it writes; in place if that is one of them.

    `saves` names what its backward reads, `statistics_bytes` is what its forward writes for that alone. Where
    `shares_gradient`, what it reads has the gradient of what it writes: no new memory.
    """

    reads: tuple[str, ...]
    writes: str
    bytes: int
    moved_bytes: int
    backward_moved_bytes: int
    flops: int = 0
    backward_flops: int = 0
    saves: tuple[str, ...] = ()
    statistics_bytes: int = 0
    shares_gradient: bool = False


def _multiply(source: _Tensor, target: _Tensor, reads: str, writes: str, window: int = 1) -> _Step:
    """A product with weights: fully connected, or a convolution whose window has so many pixels.

    Its backward is two products of the same size, for the gradients of the weights and of the input.
    """
    weights = window * source.channels * target.channels
    flops = 2 * target.rows * weights
    moved = source.bytes + weights * source.bytes_per_value + target.bytes
    return _Step((reads,), writes, target.bytes, moved, 2 * moved, flops, 2 * flops, saves=(reads,))


def _pass_over(tensor: _Tensor, reads: str, writes: str, passes: int, back: int, saves: str = "") -> _Step:
    """A step limited by memory: it goes over such a tensor `passes` times, `back` times on the way back."""
    moved, moved_back = passes * tensor.bytes, back * tensor.bytes
    return _Step((reads,), writes, tensor.bytes, moved, moved_back, saves=(saves,) if saves else ())


def _convolve(source: _Tensor, target: _Tensor, reads: str, writes: str, window: int = 1) -> list[_Step]:
    """Convolution, batch norm and ReLU. The norm reads all twice: for its statistics, then to use them."""
    between = f"{writes} before norm"
    norm = _pass_over(target, between, writes, 3, 5, saves=between)
    norm = replace(norm, statistics_bytes=2 * target.channels * _STATISTIC_BYTES)
    return [_multiply(source, target, reads, between, window), norm, _clip(target, writes)]


def _layer_norm(tensor: _Tensor, reads: str, writes: str) -> _Step:
    """Its statistics are those of one row, which stays on the chip until they are used."""
    step = _pass_over(tensor, reads, writes, 2, 3, saves=reads)
    return replace(step, statistics_bytes=2 * tensor.rows * _STATISTIC_BYTES)


def _clip(tensor: _Tensor, value: str) -> _Step:
    """ReLU in place."""
    return _pass_over(tensor, value, value, 2, 3, saves=value)


def _add(tensor: _Tensor, first: str, second: str, writes: str) -> _Step:
    """Going back, the passes are those that add up two gradients where the addends came from one value."""
    return replace(_pass_over(tensor, first, writes, 3, 3), reads=(first, second), shares_gradient=True)


def _max_pool(source: _Tensor, target: _Tensor) -> _Step:
    indices = target.rows * target.channels * _INDEX_BYTES
    moved = source.bytes + target.bytes + indices
    return _Step(("input",), "output", target.bytes, moved, moved, statistics_bytes=indices)


def _halved(side: int) -> int:
    """The side after a padded window of odd size moves in steps of two."""
    return (side + 1) // 2


def _stage(
    name: str,
    steps: Sequence[_Step],
    input_gradient_bytes: int,
    machine: Machine,
    leaner: Sequence[Collection[str]] = (),
) -> Stage:
    """The stage that these steps make; each of `leaner` is a set of values that an alternative does not save.

    Its backward is charged for all of them at once, as if it computed them first; its forward for no less
    than the stage's own, because a solver may rely on that.
    """
    # A value and its gradient have one size, except the input: it is never counted here, only its gradient.
    size = {step.writes: step.bytes for step in steps} | {"input": input_gradient_bytes}
    saved = {value for step in steps for value in step.saves} - {"input"} | {"output"}
    statistics_bytes = sum(step.statistics_bytes for step in steps)
    forward_time = sum(machine.seconds(step.flops, step.moved_bytes) for step in steps)
    backward_time = sum(machine.seconds(step.backward_flops, step.backward_moved_bytes) for step in steps)
    forward_overhead = max(_forward_overhead(steps, kept) for kept in ({"output"}, saved))
    backward_overhead = max(0, _most_gradients(steps, size) - size["output"] - size["input"])
    ways = []
    for dropped in (set[str](), *map(set, leaner)):
        kept = saved - dropped
        again = [step for step in steps if step.writes in dropped]
        assert {value for step in again for value in step.reads} <= kept | dropped | {"input"}
        time_again = sum(machine.seconds(step.flops, step.moved_bytes) for step in again)
        way = Saving(
            forward_time=forward_time,
            backward_time=backward_time + time_again,
            saved_bytes=sum(size[value] for value in kept) + statistics_bytes,
            forward_overhead_bytes=max(forward_overhead, _forward_overhead(steps, kept)),
            backward_overhead_bytes=backward_overhead + sum(size[value] for value in dropped),
        )
        ways.append(way)
    own, *others = ways
    return Stage(
        name,
        output_bytes=size["output"],
        gradient_bytes=size["output"],
        alternatives=tuple(others),
        **asdict(own),
    )


def _forward_overhead(steps: Sequence[_Step], kept: Collection[str]) -> int:
    """The most bytes alive at once, the input aside, beyond those of the values kept to the end."""
    last_read = {value: i for i, step in enumerate(steps) for value in step.reads}
    alive: dict[str, int] = {}
    most = 0
    for i, step in enumerate(steps):
        alive[step.writes] = step.bytes
        most = max(most, sum(alive.values()) + step.statistics_bytes)
        alive = {value: size for value, size in alive.items() if value in kept or last_read[value] > i}
    return most - sum(alive.values())


def _most_gradients(steps: Sequence[_Step], size: dict[str, int]) -> int:
    """The most bytes of gradients alive at once; the output's stays throughout, as the referee has it."""
    buffers = [size["output"]]
    buffer_of = {"output": 0}
    most = 0
    for step in reversed(steps):
        arrived = buffer_of.pop(step.writes)
        alive = {0, arrived, *buffer_of.values()}
        for value in step.reads:
            if not step.shares_gradient:
                buffers.append(size[value])
            buffer_of[value] = arrived if step.shares_gradient else len(buffers) - 1
        alive.update(buffer_of.values())
        most = max(most, sum(buffers[i] for i in alive))
    return most


def _check_at_least(least: int, **values: int) -> None:
    for field, value in values.items():
        if value < least:
            raise InputError(field, f"must be at least {least}, got {value}")
