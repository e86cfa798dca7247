"""The inner loops of the dynamic programs: numba where it is installed, numpy where it is not, same answers."""
