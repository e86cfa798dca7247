"""Costs of the real thing: times and bytes of operators and stages, memory of any block of code."""

import os

os.environ.setdefault(
    "KINETO_LOG_LEVEL", "7"
)  # the profiler, which tells what is allocated, talks to itself otherwise
