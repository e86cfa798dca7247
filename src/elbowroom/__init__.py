"""elbowroom: train in the memory you have.

The planning core: describe a problem, solve it within a budget, let the referee run the schedule.
"""

__version__ = "0.1.0"

from elbowroom.errors import ElbowroomError, InputError, InvalidSchedule
from elbowroom.problem import Chain, Graph, Join, Node, Platform, Saving, Stage, problem_from_json
from elbowroom.schedule import simulate
from elbowroom.solve import solve

__all__ = [
    "Chain",
    "ElbowroomError",
    "Graph",
    "InputError",
    "InvalidSchedule",
    "Join",
    "Node",
    "Platform",
    "Saving",
    "Stage",
    "problem_from_json",
    "simulate",
    "solve",
]
