"""From a captured step to its best program within a number of bytes, and plan files. Never torch."""
