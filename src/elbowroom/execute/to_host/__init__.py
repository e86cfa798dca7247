"""Values on their way to the host and back while a program runs."""
