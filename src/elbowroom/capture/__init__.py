"""From a PyTorch model to a `Joint`: the training step as a graph of operators."""
