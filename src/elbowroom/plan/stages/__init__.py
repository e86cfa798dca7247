"""Cutting a captured step into stages, and what they cost."""
