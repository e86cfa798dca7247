"""A captured training step as data: its graph, the operations of a program, the referee that plays them. Never torch."""
