"""Kinds of training steps that PyTorch allows, for programs that must serve all of them.

Each takes a model that returns its loss, and a batch of inputs and labels; it may return tensors to compare.
"""

from __future__ import annotations

import torch


def zero(model):
    for parameter in model.parameters():
        parameter.grad = None


def descent(model, batch):
    losses = []
    for _ in range(3):
        zero(model)
        loss = model(*batch)
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    return losses


def other_batches(model, batch):
    losses = []
    for shift in range(3):
        zero(model)
        loss = model(batch[0] + shift, batch[1])
        loss.backward()
        losses.append(loss.detach())
    return losses


def accumulation(model, batch):
    for _ in range(2):
        zero(model)
        for shift in range(3):
            model(batch[0] + shift, batch[1]).backward()


def zeroed_between(model, batch):
    for _ in range(3):
        loss = model(*batch)
        zero(model)
        loss.backward()


def zeroed_in_place(model, batch):
    for _ in range(4):
        model(*batch).backward()
        kept = [p.grad.clone() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad.zero_()
    return kept


def own_gradients(model, batch):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model(*batch).backward()


def gradients_kept(model, batch):
    model(*batch).backward()
    kept = [p.grad for p in model.parameters()]
    zero(model)
    model(batch[0] + 1, batch[1]).backward()
    return kept


def retained(model, batch):
    loss = model(*batch)
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards(model, batch):
    first, second = model(*batch), model(batch[0] + 1, batch[1])
    (first + second).backward()


def dropped_forward(model, batch):
    model(batch[0] + 1, batch[1])
    model(*batch).backward()


def returned(model, batch):
    return list(torch.autograd.grad(model(*batch), list(model.parameters())))


def hooked(model, batch):
    model(*batch).backward()
    hook = model.head.weight.register_hook(lambda gradient: 2 * gradient)
    zero(model)
    model(*batch).backward()
    hook.remove()


def moved_parameters(model, batch):
    model(*batch).backward()
    zero(model)
    with torch.no_grad():
        model.head.weight.data = model.head.weight.data.clone() * 2
    model(*batch).backward()


STEPS = [
    descent,
    other_batches,
    accumulation,
    zeroed_between,
    zeroed_in_place,
    own_gradients,
    gradients_kept,
    retained,
    two_forwards,
    dropped_forward,
    returned,
    hooked,
    moved_parameters,
]
