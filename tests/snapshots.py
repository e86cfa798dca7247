"""Programs, predictions and emitted sources of networks of the zoo, in a form that can be compared byte for byte.

Times are estimated, so that the machine does not matter. Both kinds of kernels, at two budgets. Digests are
stored in snapshots.json. After a change that is meant to alter plans, write them again:

    python tests/snapshots.py
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import scipy
import torch

from captured import traced
from elbowroom.capture.traced_values import tensor_bytes
from elbowroom.execute.emitter import emit
from elbowroom.execute.fused_graphs import backward_graph, forward_graph
from elbowroom.measure.measured import Measured
from elbowroom.plan.planner import Planned, Planner
from elbowroom.session.planning import surroundings
from zoo import ZOO

SHARES = 0.6, 0.35  # of the peak with everything saved
STORED = Path(__file__).with_name("snapshots.json")
QUICK = "resnet", "gpt2", "unet"  # what `make test` compares; `make test-all` compares the whole zoo


def versions() -> dict[str, str]:
    """What else plans and sources depend on: how PyTorch traces, and which of equal optima a solver returns."""
    return {"torch": torch.__version__.split("+")[0], "scipy": scipy.__version__}


def digests(name: str, *, fused: bool) -> dict[str, str]:
    """A short string for the operators, and for every part of every plan."""
    found = {}
    for key, value in snapshot(name, fused=fused).items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, content in parts:
            text = json.dumps(content, sort_keys=True)
            found[f"{key} {part}".strip()] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def write() -> None:
    cells = {f"{name} {fused}": digests(name, fused=fused) for name in ZOO for fused in (False, True)}
    STORED.write_text(json.dumps({"versions": versions(), "digests": cells}, indent=1) + "\n")


def snapshot(name: str, *, fused: bool) -> dict[str, object]:
    """Everything that a change of the house must leave as it is."""
    torch.set_num_threads(1)
    _, graph = traced(name, fused=fused)
    step = graph.captured.graph
    late = {i: tensor_bytes(graph.captured.nodes[i]) for i in step.parameters}
    planner = Planner(step, replace(surroundings(graph, True, {}), late=late))
    peak = planner.everything.prediction.peak_bytes
    found: dict[str, object] = {"ops": [_operator(op) for op in step.ops]}
    for share in SHARES:
        found[str(share)] = _plan(graph, planner.best(int(share * peak)) or planner.least)
    return found


def _operator(op) -> list[object]:
    return [
        op.name, op.kind, list(op.reads), list(op.rerun_reads), [list(made) for made in op.makes], list(op.shares),
        op.time, op.workspace, list(op.reusable), op.key,
    ]  # fmt: skip


def _plan(graph: Measured, plan: Planned) -> dict[str, object]:
    program, prediction = plan.program, plan.prediction
    return {
        "forward": [_run(run) for run in program.forward],
        "backward": [_run(run) for run in program.backward],
        "saved": list(program.saved),
        "reseeded": list(program.reseeded),
        "prediction": [
            list(prediction.forward_bytes), list(prediction.backward_bytes), prediction.between_bytes,
            prediction.saved_bytes, prediction.time_s,
        ],
        "method": plan.method,
        "why": plan.why,
        "source": _source(graph, plan),
    }  # fmt: skip


def _run(run) -> list[object]:
    return [run.op, run.again, list(run.frees), run.reuses, list(run.accumulates), run.last_draw, run.viewed_in]


def _source(graph: Measured, plan: Planned) -> str:
    captured, program = graph.captured, plan.program
    if not graph.is_fused:
        return emit(captured, program).source
    step = captured.graph
    computed = [i for i in program.saved if i not in step.inputs or i in step.overwritten]
    parameters = tuple(dict.fromkeys(i for run in program.backward_runs for i in run.accumulates))
    graphs = [forward_graph(captured, program, computed, graph.channels_last)]
    for mode in ("return", "write"):
        graphs.append(backward_graph(captured, program, parameters, mode, graph.channels_last)[0])
    return "\n".join(each.python_code("self").src for each in graphs)


if __name__ == "__main__":
    write()
