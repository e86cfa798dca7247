"""Rewrites of a traced graph that leave its results as they are."""
