"""Methods that move values of a chain to host memory while it computes (001 ch. 3 and 4)."""
