"""Which gradients are planned to come late: not there when a step begins, made by its backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from elbowroom.execute.plannable import recordable
from elbowroom.execute.region import Region
from elbowroom.session.options import Options
from elbowroom.step.allocator import room_within

# Of the room, for gradients. Scattered over a recording's pool they leave gaps (466 MiB in a ResNet-101's), so that
# little ones are better off in a place of their own; larger ones would take more there than the gaps do.
_LITTLE = 0.05


def late_parameters(
    model: nn.Module, regions: Sequence[Region], options: Options, resident: Mapping[str, int]
) -> dict[int, nn.Parameter]:
    """Those that are planned to have no gradient before the backward makes it, by their number in the only graph.

    Where they are little, and the step may be recorded, they are better off in a place of their own: scattered
    over a recording's pool, they leave gaps too small for large images, and it takes more in the end.
    """
    late = possibly_late(model, regions, options)
    return {} if late and have_own_room(late.values(), regions[0], options, resident) else late


def possibly_late(model: nn.Module, regions: Sequence[Region], options: Options) -> dict[int, nn.Parameter]:
    """All that may be planned so: none of them where some have a gradient, for those are kept from step to step.
    Several graphs might share parameters."""
    several = len(regions) * options.forwards > 1
    if options.accumulates or several or keeps_gradients(model):
        return {}
    trained = {(p.data_ptr(), p.shape): p for p in model.parameters() if p.requires_grad}
    (region,) = regions
    graph = region.traced.graph
    given = dict(zip(graph.inputs, (example() for example in region.example), strict=True))
    accumulated = {i for i, gradient in graph.gradients if graph.ops[gradient].kind == "backward"}
    tensors = {i: given[i] for i in graph.parameters if i in accumulated}
    found = {i: trained.get((t.data_ptr(), t.shape)) for i, t in tensors.items() if t is not None}
    return {i: parameter for i, parameter in found.items() if parameter is not None}


def have_own_room(
    late: Iterable[nn.Parameter], region: Region, options: Options, resident: Mapping[str, int]
) -> bool:
    """Whether gradients are so little that a recording may have them in a place of their own."""
    if not options.records or not recordable(region.traced):
        return False
    cuda = region.traced.device.type == "cuda"
    room = room_within(options.budget_bytes, sum(resident.values()), cuda=cuda, is_measured=True)
    size = sum(parameter.numel() * parameter.element_size() for parameter in late)
    return size <= _LITTLE * room


def keeps_gradients(model: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())
