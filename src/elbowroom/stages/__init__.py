"""A `Joint` as a chain of stages: where to cut it, what a stage may save, and back from schedules to programs."""
