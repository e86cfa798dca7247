"""What `fit` returns: looks at a model, plans its step, installs programs, runs them and plans again."""
