"""A captured training step as data: its graph, programs, the referee that plays them. Never torch."""
