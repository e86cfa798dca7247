"""numba and numpy give identical answers; the numpy side runs in a process that cannot see numba."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

from elbowroom.errors import InputError
from elbowroom.problem import Platform, problem_from_json
from elbowroom.solve import METHODS, Options, solve
from elbowroom.solve.kernels.compiling import FOLDER, HAVE_NUMBA, fingerprint
from elbowroom.solve.kernels.persistent import fill_tile
from problems import byte_chain, random_chain, random_join

SCRIPT = """
import json, sys
from elbowroom.problem import Platform, problem_from_json
from elbowroom.solve import solve
from elbowroom.solve.kernels.compiling import HAVE_NUMBA
assert not HAVE_NUMBA and "numba" not in sys.modules
for line in sys.stdin:
    request = json.loads(line)
    problem = problem_from_json(request["problem"])
    platform = Platform(bandwidth=request["bandwidth"])
    result = solve(problem, request["budget"], request["solver"], slots=request["slots"], platform=platform)
    print(json.dumps([result.time, result.peak_bytes, [op.to_json() for op in result.schedule]]))
"""


def requests():
    rng = Random(4)
    chains = [random_chain(rng, n, alternatives=n % 2 == 0) for n in (1, 3, 6, 14)]
    chains += [byte_chain(rng, n) for n in (4, 13, 25)]
    for chain in chains:
        everything = METHODS["store-all"].least_budget(chain, _OPTIONS)
        for name, method in METHODS.items():
            if "chain" in method.kinds:
                if method.needs_link and len(chain) > 6:  # numpy's side of these takes long
                    continue
                bandwidth = link_of(chain) if method.needs_link else None
                try:
                    floor = method.least_budget(chain, Options(platform=Platform(bandwidth=bandwidth)))
                except InputError:  # an integer program takes short chains only
                    continue
                budget = max(floor, (floor + everything) // 2)
                asked = {"budget": budget, "solver": name, "slots": 60, "bandwidth": bandwidth}
                yield {"problem": chain.to_json(), **asked}
    for branches in (1, 2, 3):
        join = random_join(rng, branches, 5)
        for name in ("join", "equiv-chain"):
            floor = METHODS[name].least_budget(join, _OPTIONS)
            yield {"problem": join.to_json(), "budget": floor + 2, "solver": name, "slots": None, "bandwidth": None}


def link_of(chain):
    """A rate at which half of what the chain saves can come and go while it computes."""
    saved = sum(stage.saved_bytes for stage in chain.stages)
    return saved / max(1e-9, sum(stage.forward_time + stage.backward_time for stage in chain.stages)) or 1.0


_OPTIONS = Options()


def test_numpy_and_numba_agree_bit_for_bit():
    assert HAVE_NUMBA
    asked = list(requests())
    environment = {**os.environ, "ELBOWROOM_NUMBA": "0", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    answers = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input="\n".join(map(json.dumps, asked)),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout.splitlines()
    assert len(answers) == len(asked)
    for request, answer in zip(asked, answers, strict=True):
        ours = solve(
            problem_from_json(request["problem"]),
            request["budget"],
            request["solver"],
            slots=request["slots"],
            platform=Platform(bandwidth=request["bandwidth"]),
        )
        assert json.loads(answer) == [ours.time, ours.peak_bytes, [op.to_json() for op in ours.schedule]]


def test_compiled_code_is_kept_under_the_content_of_all_kernels(tmp_path):
    """A changed primitive must not leave its callers' old machine code in use."""
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
    before = fingerprint(tmp_path)
    (tmp_path / "b.py").write_text("x = 2\n")
    assert fingerprint(tmp_path) != before
    assert f"kernels-{fingerprint(FOLDER)}" in fill_tile.stats.cache_path
