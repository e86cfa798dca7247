"""Every method by name, in the order in which `solve --list` shows them."""

from __future__ import annotations

import difflib

from elbowroom.errors import InputError
from elbowroom.solve.acg import Acg
from elbowroom.solve.checkpoint_sum import CheckpointSum
from elbowroom.solve.chen import Chen
from elbowroom.solve.equiv_chain import EquivChain
from elbowroom.solve.floating import Floating
from elbowroom.solve.join import JoinOptimal
from elbowroom.solve.least_peak import LeastPeak
from elbowroom.solve.least_peak_quadratic import LeastPeakQuadratic
from elbowroom.solve.lower_sets import LowerSets
from elbowroom.solve.lower_sets_approx import LowerSetsApprox
from elbowroom.solve.lower_sets_approx_memory import LowerSetsApproxMemory
from elbowroom.solve.lower_sets_chain import LowerSetsChain
from elbowroom.solve.lower_sets_memory import LowerSetsMemory
from elbowroom.solve.method import Method
from elbowroom.solve.milp import Milp
from elbowroom.solve.offload.autocapper import Autocapper
from elbowroom.solve.offload.autoswap import AutoSwap
from elbowroom.solve.offload.combined import Combined
from elbowroom.solve.offload.offload_best import OffloadBest
from elbowroom.solve.offload.offload_dynprog import OffloadDynprog
from elbowroom.solve.offload.offload_dynprog_simple import OffloadDynprogSimple
from elbowroom.solve.offload.offload_greedy import OffloadGreedy
from elbowroom.solve.offload.offload_milp import OffloadMilp
from elbowroom.solve.offload.opportunist import Opportunist
from elbowroom.solve.offload.pofo import Pofo
from elbowroom.solve.offload.tflms import Tflms
from elbowroom.solve.offload.vdnn import Vdnn
from elbowroom.solve.persistent import Persistent
from elbowroom.solve.revolve import Revolve
from elbowroom.solve.sequential import Sequential
from elbowroom.solve.sqrt import Sqrt
from elbowroom.solve.store_all import StoreAll
from elbowroom.solve.towers import TowersNested

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        StoreAll(),
        Sequential(),
        Sqrt(),
        Revolve(),
        Persistent(),
        Floating(),
        LeastPeak(),
        LeastPeakQuadratic(),
        CheckpointSum(),
        JoinOptimal(),
        EquivChain(),
        TowersNested(),
        LowerSets(),
        LowerSetsApprox(),
        LowerSetsMemory(),
        LowerSetsApproxMemory(),
        LowerSetsChain(),
        Chen(),
        Acg(),
        Milp(),
        OffloadGreedy(),
        OffloadDynprog(),
        OffloadDynprogSimple(),
        Vdnn(),
        Tflms(),
        AutoSwap(),
        OffloadBest(),
        OffloadMilp(),
        Pofo(),
        Autocapper(),
        Opportunist(),
        Combined(),
    )
}


def method_named(name: str) -> Method:
    if name in METHODS:
        return METHODS[name]
    close = difflib.get_close_matches(name, [*METHODS, "auto"], n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: auto, {', '.join(METHODS)}"
    raise InputError("solver", f"there is no {name!r:.40}; {hint}")
