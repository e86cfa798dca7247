"""Every network of the zoo trains, does the same each time, and has activations worth planning for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zoo import ZOO, Network

every_network = pytest.mark.parametrize("network", ZOO.values(), ids=ZOO)


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for one another lose seconds when tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@every_network
def test_trains_the_same_each_time(network: Network):
    model, loss = step(network)
    assert all(module.training for module in model.modules())
    assert loss.shape == ()
    assert torch.isfinite(loss)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad, name
        assert parameter.grad is not None, f"{name} has no gradient"
        assert torch.isfinite(parameter.grad).all(), f"the gradient of {name} is not finite"

    again, loss_again = step(network)
    assert torch.equal(loss, loss_again)
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), f"the gradient of {name} differs between two equal steps"
    for (name, a), b in zip(model.named_buffers(), again.buffers(), strict=True):
        assert torch.equal(a, b), f"{name} differs after two equal steps"


@every_network
def test_activations_outweigh_parameters(network: Network):
    model, batch = network.build(), network.batch()
    given = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch)}
    saved: dict[int, torch.UntypedStorage] = {}  # holds them, so that no two have the same address

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(*batch)
    saved_bytes = sum(storage.nbytes() for address, storage in saved.items() if address not in given)
    assert 5e6 < saved_bytes < 60e6
    assert saved_bytes > 10 * sum(p.nbytes for p in model.parameters())


def step(network: Network) -> tuple[nn.Module, Tensor]:
    """A forward and a backward of a new model: the model with its gradients, and the loss."""
    model, batch = network.build(), network.batch()
    torch.manual_seed(2)
    loss = model(*batch)
    loss.backward()
    return model, loss.detach()
