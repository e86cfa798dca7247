"""Improving a plan value by value."""
