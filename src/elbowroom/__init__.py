"""elbowroom: train in the memory you have."""

__version__ = "0.1.0"
