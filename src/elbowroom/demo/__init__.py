"""The demonstrations behind `elbowroom demo`."""
