"""The stages of a network without a device: bytes of tensors on PyTorch's "meta" device, times of a roofline.

A `Tally` sees every operator of a stage's forward and backward. It counts the storages that are alive, so sizes,
saved sets and overheads are those of eager PyTorch, without the workspaces of convolutions. An operator takes as long
as the slower of its arithmetic and its traffic on `V100`.

How much of its 15.7 TFLOP/s and 900 GB/s a V100 reaches (85 and 80 %) is chosen by two figures of 001 ch. 2: with
everything saved, ResNet-1001 with batch 8 at 224² would make 1.18 images a second (here 1.13, in 224.4 of the thesis'
225 GiB), and ResNet-101 with batch 8 at 1000² makes 9.77 with some recomputation (here 9.97 without).
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from chain_files import ESTIMATED, ChainFile, StageRow
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from vision_networks import BUILDERS
from vision_settings import CHAPTER_2, Setting

from elbowroom.devices import Machine

V100 = Machine(0.85 * 15.7e12, 0.8 * 900e9, "V100, estimated", launch_s=3e-6)
BLOCK = 512  # bytes: what CUDA's allocator rounds up to
# A batch normalization reads its input twice, forward and backward: for sums over all of it, and to use them.
PASSES = {"native_batch_norm": 3 / 2, "native_batch_norm_backward": 5 / 3}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=ESTIMATED, metavar="FILE", help=f"default: {ESTIMATED}")
    options = parser.parse_args()
    found = ChainFile("estimated", V100.name, {}, {})
    for setting in CHAPTER_2:
        found.chains[setting.name] = rows = estimated(setting)
        chain = found.chain(setting.name)
        seconds = sum(stage.forward_time + stage.backward_time for stage in chain.stages)
        gib = (chain.input_bytes + sum(stage.saved_bytes for stage in chain.stages)) / 2**30
        print(f"{setting.name}: {len(rows)} stages, {setting.batch / seconds:.2f} images/s, {gib:.2f} GiB saved")
        found.save(options.json)
    return 0


def estimated(setting: Setting) -> list[StageRow]:
    """The stages of a network, the input's bytes in a row of their own before them."""
    with torch.device("meta"):
        stages = BUILDERS[setting.network]()
        x = torch.empty(setting.batch, 3, setting.side, setting.side)
    rows, known = [StageRow.of_input(size_of([x]))], {}
    for number, stage in enumerate(stages):
        stage.train()
        key = str(stage), x.shape, number == 0
        if key not in known:
            known[key] = estimated_stage(stage, x, needs_gradient=number > 0)
        row, shape = known[key]
        rows.append(row)
        x = torch.empty(shape, device="meta")
    return rows


def estimated_stage(stage: nn.Module, x: Tensor, needs_gradient: bool) -> tuple[StageRow, torch.Size]:
    """What a stage costs for such an input, and the shape of its output."""
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with torch.no_grad(), Tally() as alone:
        output = stage(x)
    x = x.detach().requires_grad_(needs_gradient)
    with Tally() as saving:
        output = stage(x)
        saved, shape = saving.alive, output.shape
        output_bytes = size_of([output])
        peak, saving.peak = saving.peak, saving.alive
        forward_s, saving.seconds = saving.seconds, 0.0
        gradient = torch.empty_like(output)  # its bytes are not the stage's
        saving.forget(gradient)
        output.backward(gradient)
        gradient_in = size_of([x.grad]) if needs_gradient else 0
    row = StageRow(
        stages=1,
        name=name_of(stage),
        forward_s=forward_s,
        backward_s=saving.seconds,
        output_bytes=output_bytes,
        saved_bytes=saved,
        gradient_bytes=0 if output.dim() == 0 else output_bytes,
        plain_overhead_bytes=max(0, alone.peak - output_bytes),
        saving_overhead_bytes=max(0, peak - saved),
        backward_overhead_bytes=max(0, saving.peak - saved - gradient_in),
    )
    return row, shape


class Tally(TorchDispatchMode):
    """Seconds of the operators that run, and the bytes of the storages that they make, while these are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.alive = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        new = [tensor for tensor in written if self._add(tensor, read)]
        name = func._schema.name.removeprefix("aten::")
        if new or name.endswith("_"):
            moved = sum(tensor.numel() * tensor.element_size() for tensor in (*read, *written))
            self.seconds += V100.seconds(flops_of(func, args, kwargs, made), int(moved * PASSES.get(name, 1)))
        return made

    def _add(self, tensor: Tensor, read: Sequence[Tensor]) -> bool:
        """Whether it has a storage of its own."""
        storage = tensor.untyped_storage()
        if any(storage._cdata == each.untyped_storage()._cdata for each in read) or storage._cdata in self._known:
            return False
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._known[storage._cdata] = size
        weakref.finalize(storage, self._gone, storage._cdata)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        return size > 0

    def _gone(self, key: int) -> None:
        self.alive -= self._known.pop(key, 0)

    def forget(self, tensor: Tensor) -> None:
        """Count a tensor no longer, nor what making it took."""
        size = self._known[tensor.untyped_storage()._cdata]
        self._known[tensor.untyped_storage()._cdata] = 0
        self.alive -= size
        self.peak, self.seconds = self.alive, 0.0


def flops_of(func: Any, args: Any, kwargs: Any, made: Any) -> int:
    count = flop_registry.get(func._overloadpacket)
    return int(count(*args, **(kwargs or {}), out_val=made)) if count else 0


def size_of(tensors: Sequence[Tensor]) -> int:
    return sum(-(-tensor.untyped_storage().nbytes() // BLOCK) * BLOCK for tensor in tensors)


def name_of(stage: nn.Module) -> str:
    return type(stage[0] if isinstance(stage, nn.Sequential) and len(stage) == 1 else stage).__name__


if __name__ == "__main__":
    sys.exit(main())
