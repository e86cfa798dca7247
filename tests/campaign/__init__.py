"""A campaign against `fit`: random models × budgets × what happens between two steps, judged against plain execution.

`python -m campaign --runs 5000` runs it (with `PYTHONPATH=tests`); `make campaign` does so on the CPU.
"""
