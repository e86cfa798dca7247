"""Running plans: programs emitted as source, the chain executor, and proof that nothing changed."""
