"""Running a model stage by stage, as the user wrote it, with nothing traced."""
