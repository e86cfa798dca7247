"""From a PyTorch model to a `StepGraph`: the training step as a graph of operators."""
