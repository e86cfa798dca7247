"""PyTorch's settings while it traces for us, and what of it is replaced meanwhile.

What is replaced, and in PyTorch 2.11 the settings, too, belong to the whole process. Threads whose calls overlap
share them: the first that comes puts them in force, and the last that goes takes them back. Otherwise one would take
them from another in the middle of its call, and that one would leave them in force for good.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._decomp import decompositions
from torch._dynamo.source import is_from_defaults
from torch._dynamo.utils import TensorStaticReason

from elbowroom.capture.appended_lists import appends_deferred
from elbowroom.capture.assigned_data import assigned_data_untraced
from elbowroom.capture.class_attributes import class_attributes_guarded
from elbowroom.capture.private_random import private_random_untraced
from elbowroom.capture.raising_frames import raising_frames_traced_again
from elbowroom.capture.symbolic_numbers import truths_counted_as_numbers

_config: Any = torch._dynamo.config
_OF_THREADS = isinstance(_config._config["allow_rnn"].user_override, ContextVar)  # what is set, not yet in 2.11


@contextmanager
def capture_settings(graphs: int) -> Iterator[None]:
    """In force in the block: recurrent layers are traced, too, and as many graphs as we ask for."""
    users = _users
    users.enter(graphs)
    try:
        if _OF_THREADS:
            with _config.patch(**_settings(graphs)):
                yield
        else:
            yield
    finally:
        users.leave()


class _Users:
    """Those who need now what belongs to the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._graphs = 0
        self._in_force = ExitStack()

    def enter(self, graphs: int) -> None:
        with self._lock:
            if not self._count:
                self._in_force.enter_context(_replaced())
            if not _OF_THREADS and graphs > self._graphs:
                self._in_force.enter_context(_config.patch(**_settings(graphs)))
                self._graphs = graphs
            self._count += 1

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._in_force.close()
                self._graphs = 0


_users = _Users()


def _forget_threads() -> None:
    """Of the threads of a process that forks, one lives on: others will not take the settings back."""
    global _users
    _users = _Users()


os.register_at_fork(after_in_child=_forget_threads)


def _settings(graphs: int) -> dict[str, Any]:
    """What is set of Dynamo's configuration.

    Numbers that change from call to call become inputs of a graph, also those that modules hold. Hooks are looked at
    before each call. So is whether parameters need gradients, which PyTorch 2.11 passes over where no dictionary of
    the model has changed, and so are lists that are defaults of arguments, which it takes for constants. Random
    numbers of numpy are numpy's. Operators that add a multiple to a tensor stay whole: written out, they round
    otherwise than eager does. And a call is traced while another thread traces something with `torch.fx`: PyTorch
    sees only that somebody does.
    """
    return {
        "allow_rnn": True,
        "optimize_ddp": False,
        "recompile_limit": graphs,
        "accumulated_recompile_limit": 64 * graphs,
        "automatic_dynamic_shapes": True,
        "enable_dynamo_decompositions": False,
        "assume_static_by_default": True,
        "specialize_float": False,
        "allow_unspec_int_on_nn_module": True,
        "skip_nnmodule_hook_guards": False,
        "skip_guards_on_constant_func_defaults": False,
        "skip_tensor_guards_with_matching_dict_tags": False,
        "use_recursive_dict_tags_for_guards": False,
        "use_numpy_random_stream": True,
        "force_compile_during_fx_trace": True,
    }


@contextmanager
def _replaced() -> Iterator[None]:
    builder: Any = torch._dynamo.variables.builder
    lstm, static = decompositions.select_one_layer_lstm_function, builder.tensor_always_has_static_shape
    # An LSTM whose input needs no gradient is taken for inference, though its weights do: what it saves is nothing.
    decompositions.select_one_layer_lstm_function = lambda *_: decompositions.one_layer_lstm
    # A plan is for one size of every tensor: sizes that change make another graph, and never become unknowns.
    builder.tensor_always_has_static_shape = _always_static
    specialized = builder.is_int_specialization_case
    builder.is_int_specialization_case = _is_default
    try:
        with (
            appends_deferred(),
            assigned_data_untraced(),
            class_attributes_guarded(),
            private_random_untraced(),
            raising_frames_traced_again(),
            truths_counted_as_numbers(),
        ):
            yield
    finally:
        decompositions.select_one_layer_lstm_function = lstm
        builder.tensor_always_has_static_shape = static
        builder.is_int_specialization_case = specialized


def _is_default(_: int, source: Any) -> bool:
    """Integers that change become inputs wherever they are, as a counter that is global or a class's."""
    return is_from_defaults(source)


def _always_static(*_: Any, **__: Any) -> tuple[bool, TensorStaticReason]:
    return True, TensorStaticReason.NN_MODULE_PROPERTY
