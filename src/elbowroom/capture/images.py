"""Which values of a traced graph are images: what convolutions read and make, and what is computed of those.

Four dimensions do not make an image: the heads of an attention have as many, and so has an image that was turned to
have its channels last. Laid out like images, a ViT's gradients of heads cost it 3 % of its step.
"""

from __future__ import annotations

import torch
from torch import fx

from elbowroom.capture.operators import overload_packet
from elbowroom.capture.traced_values import tensors_of

aten = torch.ops.aten


def images(graph: fx.Graph) -> set[fx.Node]:
    """With their gradients, and the weights of convolutions, which are laid out alike."""
    waiting = [node for node in graph.nodes if overload_packet(node) in _CONVOLUTIONS]
    found = set(waiting)
    while waiting:
        node = waiting.pop()
        read = () if overload_packet(node) in _TURNS else node.all_input_nodes
        readers = [user for user in node.users if overload_packet(user) not in _TURNS]
        for other in (*read, *readers):
            if other not in found and any(tensor.dim() == 4 for tensor in tensors_of(other)):
                found.add(other)
                waiting.append(other)
    return found


_CONVOLUTIONS = {aten.convolution, aten.convolution_backward}
# Their dimensions are others than those of what they read.
_TURNS = {
    aten.view, aten._unsafe_view, aten.reshape, aten.permute, aten.transpose, aten.unsqueeze, aten.squeeze,
    aten.select, aten.as_strided,
}  # fmt: skip
